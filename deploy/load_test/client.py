"""One request to a server, with the times at which its tokens came."""

import json
import time
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import aiohttp

from ...errors import EngineUnavailable, InvalidSetting

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

LONGEST_COMPLAINT_CHARS = 200


class Outcome(NamedTuple):
    """What came of one request. Times are seconds of the monotonic clock."""

    sent_s: float
    came_s: tuple[float, ...] = ()  # of each event that brought something
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    error: str | None = None

    @property
    def first_token_s(self) -> float:
        return self.came_s[0] - self.sent_s

    @property
    def total_s(self) -> float:
        return self.came_s[-1] - self.sent_s

    @property
    def per_token_s(self) -> float | None:
        """Mean time from one token to the next; None of a single one."""
        if self.output_tokens < 2:
            return None
        return (self.total_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """From one event to the next."""
        return [later - earlier for earlier, later in zip(self.came_s, self.came_s[1:], strict=False)]


class Target:
    """A server of OpenAI's API. Use as an asynchronous context."""

    def __init__(self, url: str, endpoint: str = "completions", api_key: str | None = None, timeout_s: float = 3600.0):
        """endpoint: `completions` or `chat`. timeout_s: of one request."""
        if not url.startswith(("http://", "https://")):
            raise InvalidSetting(f"{url!r} is no URL of a server: http://HOST:PORT", field="url", asked=url)
        if endpoint not in PATHS:
            raise InvalidSetting(f"endpoint must be one of {', '.join(PATHS)}, got {endpoint!r}", field="endpoint")
        self.endpoint = endpoint
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Target":
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.close()

    @property
    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used outside of its context"
        return self._session

    async def model(self) -> str:
        """The first that the server lists. Raises `EngineUnavailable`."""
        try:
            async with self._open.get(f"{self._url}/v1/models") as answer:
                if answer.status != 200:
                    raise EngineUnavailable(f"{self._url} answers {answer.status}: {await _complaint(answer)}")
                return (await answer.json())["data"][0]["id"]
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            raise EngineUnavailable(f"{self._url} does not answer as a server of OpenAI's API: {error}") from None

    async def ask(self, body: dict[str, Any]) -> Outcome:
        """Send one request and follow its answer. What fails is in the outcome."""
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        sent_s = time.monotonic()
        try:
            async with self._open.post(f"{self._url}{PATHS[self.endpoint]}", json=body) as answer:
                if answer.status != 200:
                    return Outcome(sent_s, error=f"{answer.status}: {await _complaint(answer)}")
                return await _followed(answer, sent_s)
        except TimeoutError:
            return Outcome(sent_s, error="no whole answer in time")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Outcome(sent_s, error=f"{type(error).__name__}: {error}"[:LONGEST_COMPLAINT_CHARS])


async def _followed(answer: aiohttp.ClientResponse, sent_s: float) -> Outcome:
    came_s: list[float] = []
    texts: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    async for event in _events(answer):
        now_s = time.monotonic()
        if error := event.get("error"):
            complaint = error.get("message", error) if isinstance(error, dict) else error
            return Outcome(sent_s, tuple(came_s), error=str(complaint)[:LONGEST_COMPLAINT_CHARS])
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
            if text or thought or delta.get("tool_calls") or choice.get("token_ids"):
                came_s.append(now_s)
            texts.append(text)
            for part in delta.get("tool_calls") or ():
                _add_to_call(calls.setdefault(part.get("index", 0), {}), part)
    tokens = usage.get("completion_tokens")
    if not came_s and not tokens:
        return Outcome(sent_s, error="the stream ended without a token")
    details = usage.get("prompt_tokens_details") or {}
    return Outcome(
        sent_s,
        tuple(came_s) or (time.monotonic(),),
        usage.get("prompt_tokens") or 0,
        details.get("cached_tokens") or 0,
        len(came_s) if tokens is None else tokens,
        "".join(texts),
        tuple(calls.values()),
    )


def _add_to_call(call: dict[str, Any], part: dict[str, Any]) -> None:
    """The pieces of a call come one by one, as OpenAI streams them."""
    function = part.get("function") or {}
    said = call.setdefault("function", {"name": "", "arguments": ""})
    call.setdefault("type", "function")
    call["id"] = part.get("id") or call.get("id", "call")
    said["name"] += function.get("name") or ""
    said["arguments"] += function.get("arguments") or ""


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The data of server-sent events, up to `[DONE]`."""
    async for line in answer.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if isinstance(event, dict):
            yield event


async def _complaint(answer: aiohttp.ClientResponse) -> str:
    text = await answer.text(errors="replace")
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, LookupError, TypeError):
        pass
    return text.strip()[:LONGEST_COMPLAINT_CHARS]
