"""What a front end refuses before it reads it, and what it does beside its loop. Over HTTP, with a scripted engine."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.deploy.settings.limits import Limits
from intarsia.errors import InvalidRequest, RequestTooLarge
from intarsia.proto.reply import Delta, Rows, TokenLogprobs
from intarsia.tests.conftest import Loop
from intarsia.tests.deploy.scripted import ScriptedEngine

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ voice }}"

LIMITS = Limits(max_counted_text_bytes=20_000, max_counted_tokens=5000, template_timeout_s=1.0)

TOKENS = 3000


def row(n: int, top: int = 20) -> TokenLogprobs:
    return TokenLogprobs(n % 200, -1.5, tuple(((n + other) % 200, -2.0 - other) for other in range(top)))


ANSWER = Delta(
    token_ids=tuple(n % 200 for n in range(TOKENS)),
    logprobs=Rows.of(row(n) for n in range(TOKENS)),
    finish_reason="length",
    prompt_logprobs=Rows.of(row(n) for n in range(500)),
)


class Threads:
    """In which threads a tokenizer and its texts are asked for."""

    def __init__(self) -> None:
        self.found: dict[str, set[int]] = {}
        self.sizes: dict[str, int] = {}

    def watch(self, of: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        through = getattr(of, name)

        def watched(given: Any, *args: Any, **kwargs: Any) -> Any:
            size = len(given) if hasattr(given, "__len__") else 1
            if size > 512 or name == "text_of":
                self.found.setdefault(name, set()).add(threading.get_ident())
                self.sizes[name] = max(size, self.sizes.get(name, 0))
            return through(given, *args, **kwargs)

        monkeypatch.setattr(of, name, watched)


class Served(NamedTuple):
    front_end: FrontEnd
    post: Callable[[str, Any], tuple[int, Any]]
    threads: Threads
    loop_thread: int


@pytest.fixture
def served(loop: Loop, byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    engine: Any = ScriptedEngine([ANSWER])
    monkeypatch.setattr(byte_tokenizer._fast, "chat_template", TEMPLATE)
    threads = Threads()
    for name in ("encode", "decode", "text_of"):
        threads.watch(byte_tokenizer, name, monkeypatch)

    async def listen() -> tuple[FrontEnd, HttpServer, str, int]:
        front_end = FrontEnd(engine, byte_tokenizer, limits=LIMITS)
        server = HttpServer(make_app(lambda: front_end))
        return front_end, server, await server.start(port=0), threading.get_ident()

    front_end, server, url, loop_thread = loop.run(listen())

    def post(path: str, body: Any) -> tuple[int, Any]:
        request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                text = answer.read().decode()
                return answer.status, text if body.get("stream") else json.loads(text)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())["error"]

    yield Served(front_end, post, threads, loop_thread)
    loop.run(server.stop())


MOST_BYTES = 1000 * 5  # of max_model_len tokens, of which the longest is <eos>


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("/v1/completions", {"prompt": "x" * (MOST_BYTES + 1)}, "prompt", "at most 5000 bytes"),
        ("/v1/completions", {"prompt": ["x", "ä" * (MOST_BYTES // 2 + 1)]}, "prompt", "at most 5000 bytes"),
        ("/tokenize", {"prompt": "x" * 20_001}, "prompt", "20001 bytes of text; at most 20000"),
        ("/detokenize", {"tokens": [5] * 5001}, "tokens", "there are 5001 tokens; at most 5000"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 20_001}]}, "messages", "20005 bytes"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 9000}]}, "messages", "more than 5000 bytes"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}],
         "chat_template_kwargs": {"voice": "x" * 9000}}, "messages", "more than 5000 bytes"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}],
         "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", "may not set chat_template"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}],
         "chat_template_kwargs": {"return_tensors": "pt"}}, "chat_template_kwargs", "may not set return_tensors"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}],
         "chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs", "add_generation_prompt"),
    ],
)  # fmt: skip
def test_what_is_longer_than_can_be_served_is_refused_before_it_is_read(
    served: Served, path: str, body: Any, param: str, says: str
):
    status, error = served.post(path, body)
    assert (status, error["param"]) == (400, param), error
    assert says in error["message"]
    assert not served.threads.found


def test_what_is_as_long_as_can_be_served_is_read_beside_the_loop(served: Served):
    text = "ä🎉b " * 2500
    status, found = served.post("/tokenize", {"prompt": text, "return_token_strs": True})
    assert status == 200 and found["count"] == len(found["tokens"]) == len(found["token_strs"])
    tokens = found["tokens"][: LIMITS.max_counted_tokens - 1]
    status, back = served.post("/detokenize", {"tokens": tokens})
    assert status == 200 and text.startswith(back["prompt"].rstrip("\N{REPLACEMENT CHARACTER}"))
    assert set(served.threads.found) == {"encode", "decode", "text_of"}
    for name, threads in served.threads.found.items():
        assert served.loop_thread not in threads, name


def test_conversations_are_rendered_and_read_beside_the_loop(served: Served):
    body = {"messages": [{"role": "user", "content": "ab " * 900}], "chat_template_kwargs": {"voice": "low"}}
    status, found = served.post("/tokenize", body)
    assert status == 200
    assert served.front_end.decode(found["tokens"]) == "[user]" + "ab " * 900 + "low"
    assert served.loop_thread not in served.threads.found["encode"]


def text_of(served: Served, token: int) -> str:
    return served.front_end.tokenizer.text_of(token)  # type: ignore[union-attr]


def test_long_answers_are_written_beside_the_loop_and_hold_what_short_ones_do(served: Served):
    body = {"prompt": "x", "logprobs": 20, "prompt_logprobs": 20, "return_token_ids": True, "max_tokens": TOKENS}
    status, found = served.post("/v1/completions", body)
    assert status == 200
    assert served.loop_thread not in served.threads.found["text_of"]
    [choice] = found["choices"]
    assert choice["token_ids"] == list(ANSWER.token_ids) and choice["prompt_token_ids"]
    texts = [text_of(served, token) for token in ANSWER.token_ids]
    assert choice["logprobs"]["tokens"] == texts and len(choice["logprobs"]["top_logprobs"]) == TOKENS
    rows = choice["prompt_logprobs"]
    assert rows[0] is None and len(rows) == 501
    own = {"logprob": -1.5, "rank": None, "decoded_token": text_of(served, 30)}
    assert rows[31] == {"30": own} | {
        str(30 + n): {"logprob": -2.0 - n, "rank": n + 1, "decoded_token": text_of(served, 30 + n)} for n in range(20)
    }


def test_a_long_chat_answer_is_written_beside_the_loop(served: Served):
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20, "prompt_logprobs": 20}
    status, found = served.post("/v1/chat/completions", body)
    assert status == 200
    assert served.loop_thread not in served.threads.found["text_of"]
    rows = found["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in rows] == [text_of(served, token) for token in ANSWER.token_ids]
    assert len(rows[0]["top_logprobs"]) == 20 and len(found["prompt_logprobs"]) == 501
    assert found["choices"][0]["message"] == {
        "role": "assistant", "content": found["choices"][0]["message"]["content"], "refusal": None,
    }  # fmt: skip


def test_streamed_and_whole_answers_hold_the_same(served: Served):
    body = {"prompt": "x", "logprobs": 20, "prompt_logprobs": 20, "max_tokens": TOKENS}
    [whole] = served.post("/v1/completions", body)[1]["choices"]
    _, text = served.post("/v1/completions", body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert len(events) > 10
    assert "".join(each["text"] for each in events) == whole["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for each in events for value in each["logprobs"][name]]
        if name != "text_offset":
            assert joined == whole["logprobs"][name], name
    assert events[0]["prompt_logprobs"] == whole["prompt_logprobs"]
    assert all("prompt_logprobs" not in each for each in events[1:])


def test_several_prompts_are_the_same_tokens_as_each_alone(served: Served, loop: Loop):
    texts = ["a" * n for n in (1, 600, 3, 4000, 2)]

    async def both() -> tuple[list[list[int]], list[list[int]]]:
        return await served.front_end.encode_all(texts), [await served.front_end.encode(text) for text in texts]

    together, alone = loop.run(both())
    assert together == alone and [len(each) for each in together] == [1, 600, 3, 4000, 2]


def test_without_a_tokenizer_texts_are_refused_in_words(loop: Loop):
    engine: Any = ScriptedEngine([])

    async def ask(what: str) -> None:
        front_end = FrontEnd(engine, None)
        calls: dict[str, Any] = {
            "text": lambda: front_end.encode("x"),
            "long text": lambda: front_end.encode("x" * 10**6),
            "tokens": lambda: front_end.detokenize([1]),
            "chat": lambda: front_end.encode_chat([{"role": "user", "content": "x"}]),
        }
        await calls[what]()

    for what in ("text", "long text", "tokens", "chat"):
        with pytest.raises(InvalidRequest, match="has no tokenizer") as refused:
            loop.run(ask(what))
        assert not isinstance(refused.value, RequestTooLarge)
