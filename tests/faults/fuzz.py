"""Malformed requests by the thousand, over HTTP, gRPC and the channel between front end and controller.

    python -m intarsia.tests.faults.fuzz --requests 20000 --forms 200

Requests are made from good ones: a field is dropped, doubled, renamed, given another type, an extreme or a monstrous
value; or the bytes themselves are cut, turned and padded; beside a corpus of what has hurt other servers. All are to be
answered, soon, with an error that says what is wrong, or with an answer where they turn out to be right. One stream of
known tokens runs beside all the time. Prints JSON; exits with 1 after any internal error, hang, or wrong token.
"""

import asyncio
import collections
import contextlib
import json
import logging
import random
import string
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import grpc
import httpx

from intarsia.deploy.anthropic.app import add_messages
from intarsia.deploy.client import AsyncClient
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.deploy.start.launch import find_engines
from intarsia.proto import inference_pb2 as pb
from intarsia.proto.channel import Address, ChannelClosed, Stream
from intarsia.proto.codec import pack

from .forms import hostile_forms
from .program import program
from .service import Known, Service, answered, draw, read, service

NAME = "fuzz"

SLOW_S = 2.0
"""Without any answer, that is a hang."""

GIVE_UP_S = 30.0

AT_ONCE = 8

PROMPT = [72, 101, 108, 108, 111]

GOOD_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "model": "demo", "prompt": "Hello", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "n": 1, "seed": 3,
        "stop": ["x"], "logprobs": 2, "logit_bias": {"5": 1.0}, "stream": False, "user": "me", "echo": False,
        "presence_penalty": 0.1, "frequency_penalty": 0.1,
    },
    "/v1/probe": {"model": "demo", "prompt": [1, 2, 3], "cache_salt": "me"},
    "/v1/chat/completions": {
        "model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0.5,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "response_format": {"type": "json_object"}, "stream": True, "stream_options": {"include_usage": True},
        "keep_s": 5.0, "lease": "lease-1", "priority": 3,
    },
    "/v1/responses": {
        "model": "demo", "input": "Hello", "max_output_tokens": 4, "instructions": "Be short.", "request_id": "fixed",
        "store": True, "previous_response_id": "resp_fixed", "background": True, "stream": True, "keep_s": 5.0,
        "tools": [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {"type": "object"}}],
    },
    "/v1/conversations": {
        "metadata": {"for": "me"}, "items": [{"type": "message", "role": "user", "content": "Hello"}],
    },
    "/v1/messages": {
        "model": "demo", "max_tokens": 4, "system": [{"type": "text", "text": "Be short."}], "temperature": 0.5,
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}},
        ]}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}, "defer_loading": False}],
        "tool_choice": {"type": "auto"}, "top_k": 5,
        "stop_sequences": ["x"], "metadata": {"user_id": "me"}, "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"}, "stream": True, "keep_s": 5.0, "lease": "lease-1",
    },
    "/v1/messages/count_tokens": {
        "model": "demo", "system": "Be short.",
        "messages": [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [
                {"type": "tool_reference", "tool_name": "f"},
            ]}]},
            {"role": "system", "content": [
                {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "f"}},
                {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {
                    "name": "g", "input_schema": {"type": "object"},
                }}},
                {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}},
            ]},
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}, "defer_loading": True}],
    },
    "/tokenize": {"model": "demo", "prompt": "Hello", "add_special_tokens": True},
    "/detokenize": {"model": "demo", "tokens": PROMPT},
}  # fmt: skip

MONSTERS: tuple[Callable[[random.Random], Any], ...] = (
    lambda rng: None,
    lambda rng: rng.choice([True, False]),
    lambda rng: rng.choice([-1, 0, 2**31, 2**63, -(2**63), 10**30, 3.5, -0.0, 1e308, 5e-324]),
    lambda rng: float("nan"),
    lambda rng: float("inf"),
    lambda rng: "",
    lambda rng: "\x00\ud800\udfff\uffff",
    lambda rng: "A" * rng.choice([300, 10_000, 300_000]),
    lambda rng: "".join(chr(rng.randrange(0x20, 0x3000)) for _ in range(50)),
    lambda rng: "{{ ''.__class__.__mro__ }}{% for a in range(10**9) %}x{% endfor %}",
    lambda rng: "../../../etc/passwd",
    lambda rng: [],
    lambda rng: {},
    lambda rng: [rng.randrange(-5, 10**6) for _ in range(rng.choice([3, 3000]))],
    lambda rng: {"$ref": "#"},
    lambda rng: nested(rng.choice([20, 400]), rng.random() < 0.5),
    lambda rng: [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}],
    lambda rng: [{"role": "system", "content": None}, {"role": 3}],
)

NASTY_BYTES = (
    b"", b"{", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b"null", b"0", b'"x"', b"{}{}", b"\x00" * 1000,
    b'{"prompt": "\\ud800"}', b'{"prompt": 1e999999}', b'{"prompt":"a","prompt":"b"}', b'{"max_tokens": -1e-400}',
)  # fmt: skip

NASTY_HTTP = (
    b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"A" * 70_000,
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 5000 + b"\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
)  # fmt: skip


def nested(depth: int, as_list: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if as_list else {"a": value}
    return value


def mutated(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """One to three changes somewhere in a copy of it."""
    changed = json.loads(json.dumps(body))
    for _ in range(rng.randint(1, 3)):
        place = changed
        while True:
            key = rng.choice(list(place)) if place else "x"
            inner = place.get(key)
            if isinstance(inner, list) and inner and isinstance(inner[0], dict):
                inner = inner[0]
            if not isinstance(inner, dict) or not inner or rng.random() < 0.4:
                break
            place = inner
        match rng.randrange(5):
            case 0:
                place.pop(key, None)
            case 1:
                place["".join(rng.choices(string.ascii_lowercase, k=5))] = place.get(key)
            case 2:
                place[key] = [place.get(key)] * rng.choice([2, 50])
            case _:
                place[key] = rng.choice(MONSTERS)(rng)
    return changed


class Tally(logging.Handler):
    """What came back, and what the servers of this process said to their log of it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.internal: list[str] = []
        self.hangs: list[str] = []
        self.slowest_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        self.internal.append(f"log: {logging.Formatter().format(record)[-600:]}")

    def note(self, where: str, outcome: str, took_s: float, what: Any, *, is_internal: bool = False) -> None:
        """outcome: a status, or how it ended."""
        self.outcomes[f"{where} {outcome}"] += 1
        self.slowest_s = max(self.slowest_s, took_s)
        shown = f"{where} {outcome} after {took_s:.2f} s: {str(what)[:300]}"
        if is_internal:
            self.internal.append(shown)
        if took_s > SLOW_S:
            self.hangs.append(shown)


class Fuzz:
    """One method for each way in. Each sends one malformed request, and notes what came of it."""

    def __init__(self, served: Service, url: str, door: Address, rng: random.Random, tally: Tally):
        self._url = url
        self._door = door
        self._rng = rng
        self._tally = tally
        self._http = httpx.AsyncClient(base_url=url, timeout=GIVE_UP_S, limits=httpx.Limits(max_connections=AT_ONCE))
        self._channel = grpc.aio.insecure_channel(served.address)

    async def close(self) -> None:
        await self._http.aclose()
        await self._channel.close()

    async def http(self) -> None:
        rng = self._rng
        path = rng.choice(list(GOOD_BODIES))
        if rng.random() < 0.85:
            text = json.dumps(mutated(rng, GOOD_BODIES[path]))
            body = text.encode("utf-8", "surrogatepass")
            if rng.random() < 0.1:
                body = garbled(rng, body)
        else:
            body = rng.choice(NASTY_BYTES)
        headers = {"content-type": rng.choice(["application/json"] * 8 + ["text/plain", "application/xml", ""])}
        verb = rng.choice(["POST"] * 9 + ["GET", "PUT", "DELETE", "PATCH"])
        await self._send(verb, path, body, headers)

    async def form(self, number: int) -> None:
        """An answer of a hostile form."""
        kind, text = hostile_forms()[number % len(hostile_forms())]
        body = {"model": "demo", "prompt": "Hello", "max_tokens": 8, "structured_outputs": {kind: text}}
        headers = {"content-type": "application/json"}
        await self._send("POST", "/v1/completions", json.dumps(body).encode(), headers, where="form")

    async def _send(self, verb: str, path: str, body: bytes, headers: dict[str, str], where: str = "http") -> None:
        started = time.monotonic()
        try:
            async with self._http.stream(verb, path, content=body, headers=headers) as response:
                took_s = time.monotonic() - started
                status = response.status_code
                said = await response.aread()
        except httpx.HTTPError as error:
            self._tally.note(where, type(error).__name__, time.monotonic() - started, body, is_internal=True)
            return
        is_internal = status >= 500 and status != 503
        is_internal |= status >= 400 and b'"error"' not in said
        is_internal |= b"server_error" in said
        if status == 200 and where == "http":
            took_s = 0.0  # it was right after all, and answered, however much it asked for
        self._tally.note(where, str(status), took_s, (path, body[:200], said[:200]), is_internal=is_internal)

    async def raw_http(self) -> None:
        """Bytes that are hardly HTTP. The server may answer, or close."""
        host, _, port = self._url.rpartition("/")[2].partition(":")
        started = time.monotonic()
        payload = self._rng.choice(NASTY_HTTP)
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(OSError):
            writer.write(payload)
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(4096), GIVE_UP_S)
            status = answer[9:12].decode("latin-1") if answer else "closed"
            self._tally.note("raw http", status, time.monotonic() - started, payload, is_internal=status == "500")
        writer.close()

    async def rpc(self) -> None:
        rng = self._rng
        method, make = rng.choice(RPCS)
        payload = make(rng)
        if rng.random() < 0.3:
            payload = garbled(rng, payload)
        started = time.monotonic()
        call: Any = self._channel.unary_stream(f"/intarsia.v1.Inference/{method}")(payload, timeout=GIVE_UP_S)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            if isinstance(await call.read(), bytes):  # the first answer is enough; else: the end
                took_s = time.monotonic() - started
                call.cancel()
                self._tally.note("grpc", "answered", took_s, payload[:100])
                return
        code = await call.code()
        details = await call.details()
        bad = code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED)
        # gRPC itself says INTERNAL of bytes that are no message.
        bad &= "deserializ" not in (details or "")
        self._tally.note(
            "grpc", code.name, time.monotonic() - started, (method, payload[:100], details), is_internal=bad
        )

    async def door(self) -> None:
        """The controller's own door: as a stranger, and as a front end that has lost its mind."""
        rng = self._rng
        started = time.monotonic()
        if rng.random() < 0.5:
            reader, writer = await asyncio.open_connection(self._door.host, self._door.port)
            with contextlib.suppress(OSError):
                length = rng.choice([0, 31, 32, 33, 2**31, 2**32 - 1])
                writer.write(struct.pack("<I", length) + rng.randbytes(rng.choice([0, 32, 500])))
                writer.write_eof()
                said = await asyncio.wait_for(reader.read(), GIVE_UP_S)
                self._tally.note("stranger", "closed", time.monotonic() - started, said, is_internal=bool(said))
            writer.close()
            return
        stream = await Stream.connect(self._door)
        message = rng.choice(
            [
                [0, 0, [PROMPT, {"max_tokens": "many"}, [], {}, 0.0, 5, False]],
                [0, 0, ["Hello", {}, [], {}, 0.0, 5, False]],
                [0, 0, [PROMPT]],
                [0, {}, [[[]], 3, None, "x", "y", -1, 0]],
                [0, 0, [PROMPT, {"max_tokens": 4}, [["x", "y"]], {}, 0.0, 99, True]],
                [1, [1, 2]], [5, 0, {"a": 1}, 5], [7, 0, []], [9, 77], [99, 0],
                "submit", 5, None, [], [[]], {"a": 1},
            ]
        )  # fmt: skip
        with contextlib.suppress(ChannelClosed, OSError):
            await stream.receive_message()
            stream.send(rng.choice([pack(message), pack(message)[:-1], rng.randbytes(60), b""]))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stream.receive(), 0.05)
        await stream.close()
        self._tally.note("front end", "left", time.monotonic() - started, message)


def garbled(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(changed) + 1)
        match rng.randrange(3):
            case 0:
                del changed[place:]
            case 1:
                changed[place:place] = rng.randbytes(rng.randint(1, 8))
            case _:
                if place < len(changed):
                    changed[place] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _generate(rng: random.Random) -> bytes:
    extreme = rng.choice([0, -1, 1, 2**31 - 1, -(2**31)])
    number = rng.choice([0.0, -1.0, 1e30, float("nan"), float("inf"), 1e-30])
    request = pb.GenerateRequest(request_id=rng.choice(["", "x" * 5000, "\x00", "same"]))
    if rng.random() < 0.6:
        request.text = rng.choice(["Hello", "", "\x00", "A" * 100_000])
    elif rng.random() < 0.7:
        request.token_ids.ids.extend(rng.choices([0, 5, 255, 2**31, 2**32 - 1], k=rng.choice([0, 1, 5, 5000])))
    sampling = request.sampling
    for field in rng.sample(list(pb.SamplingParams.DESCRIPTOR.fields), 4):
        with contextlib.suppress(TypeError, ValueError, AttributeError):
            if field.is_repeated:
                getattr(sampling, field.name).extend(rng.choice([[extreme] * 3, ["", "x" * 500], [number]]))
            elif field.cpp_type in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
                setattr(sampling, field.name, number)
            elif field.cpp_type == field.CPPTYPE_STRING:
                setattr(sampling, field.name, rng.choice(["", "(", "[", '{"type": 5}', "x" * 5000]))
            else:
                setattr(sampling, field.name, extreme)
    request.priority = rng.choice([0, 2000, -(2**31)])
    request.keep_s, request.lease = rng.choice([0.0, -1.0, 5.0, 1e300, float("nan")]), rng.choice(["", "x" * 99])
    request.keep_required = rng.random() < 0.3
    request.tenant = rng.choice(["", "t" * 5000])
    if rng.random() < 0.3:
        request.timeout_s = number
    if rng.random() < 0.1:
        request.images.append(rng.randbytes(200))
    return request.SerializeToString()


RPCS: tuple[tuple[str, Callable[[random.Random], bytes]], ...] = (
    ("Generate", _generate),
    ("Generate", _generate),
    ("GenerateBatch", lambda rng: _batch(rng)),
    ("Abort", lambda rng: pb.AbortRequest(request_id=rng.choice(["", "x" * 9999, "\x00"])).SerializeToString()),
    ("Tokenize", lambda rng: pb.TokenizeRequest(text=rng.choice(["", "\x00", "A" * 99_999])).SerializeToString()),
    ("Detokenize", lambda rng: pb.TokenIds(ids=rng.choices([0, 300, 2**32 - 1], k=9)).SerializeToString()),
    ("Probe", lambda rng: _probe(rng)),
    ("GetLoad", lambda rng: rng.randbytes(5)),
    ("GetCacheState", lambda rng: rng.randbytes(5)),
    ("GetModelInfo", lambda rng: rng.randbytes(5)),
    ("ListLeases", lambda rng: rng.randbytes(5)),
    (
        "ReleaseLease",
        lambda rng: pb.ReleaseLeaseRequest(lease=rng.choice(["", "x" * 9999, "\x00", "lease-1"])).SerializeToString(),
    ),
    ("Nothing", lambda rng: b""),
)


def _batch(rng: random.Random) -> bytes:
    one = [pb.GenerateRequest.FromString(_generate(rng)) for _ in range(rng.choice([0, 1, 3]))]
    return pb.GenerateBatchRequest(requests=one).SerializeToString()


def _probe(rng: random.Random) -> bytes:
    request = pb.ProbeRequest(cache_salt="x" * rng.choice([0, 9, 999]))
    if rng.random() < 0.5:
        request.text = rng.choice(["", "\x00", "A" * 99_999])
    else:
        request.token_ids.ids.extend(rng.choices([0, 5, 300, 2**32 - 1], k=rng.choice([0, 1, 9])))
    return request.SerializeToString()


class Canary:
    """One stream after another of a known answer."""

    def __init__(self, client: AsyncClient, known: Known):
        self.answers = 0
        self.wrong: list[str] = []
        self.longest_gap_s = 0.0
        self._last_s = 0.0
        self._client, self._known = client, known
        self._task = asyncio.create_task(self._sing())

    async def _sing(self) -> None:
        while True:
            self._last_s = time.monotonic()
            fault = await read(self._client, self._known, self._note_gap)
            self.answers += 1
            if fault is not None:
                self.wrong.append(fault)

    def _note_gap(self) -> None:
        now_s = time.monotonic()
        self.longest_gap_s, self._last_s = max(self.longest_gap_s, now_s - self._last_s), now_s

    async def stop(self) -> None:
        self._task.cancel()
        failed = await asyncio.gather(self._task, return_exceptions=True)
        if not isinstance(failed[0], asyncio.CancelledError):
            raise RuntimeError("the canary is dead") from failed[0]


async def run(requests: int, forms: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    tally = Tally()
    async with service(name=NAME, served_model_name="demo") as served, AsyncClient(served.address) as client:
        http = HttpServer(make_app(lambda: served.front_end, interfaces=(add_messages,)))
        url = await http.start(port=0)
        for name in (None, "uvicorn"):  # which has handlers of its own
            logging.getLogger(name).addHandler(tally)
        [known] = await answered(client, draw(rng, 1, 200, 200))
        canary = Canary(client, known)
        door = next(iter((await find_engines(NAME)).values()))
        fuzz = Fuzz(served, url, door, rng, tally)
        ways = [fuzz.http] * 9 + [fuzz.rpc] * 7 + [fuzz.door] * 3 + [fuzz.raw_http]
        started_s = time.monotonic()
        sent = 0

        async def send() -> None:
            nonlocal sent
            while sent < requests:
                sent += 1
                if sent % 1000 == 0:
                    print(f"{sent} of {requests}", file=sys.stderr, flush=True)
                await rng.choice(ways)()

        await asyncio.gather(*(send() for _ in range(AT_ONCE)))
        for number in range(forms):
            await fuzz.form(number)
        took_s = time.monotonic() - started_s
        await canary.stop()
        await fuzz.close()
        await http.stop()
        while (load := await served.engine.client.questions.load()).running + load.waiting:
            await asyncio.sleep(0.01)
        count = await served.engine.recount()
        return {
            "seed": seed,
            "requests": requests,
            "forms": forms,
            "took_s": round(took_s),
            "internal_errors": len(tally.internal),
            "hangs": len(tally.hangs),
            "slowest_s": round(tally.slowest_s, 3),
            "canary": {
                "answers": canary.answers,
                "wrong": len(canary.wrong),
                "asked": str(known._replace(tokens=())),
                "examples": canary.wrong[:10],
                "longest_gap_s": round(canary.longest_gap_s, 3),
            },
            "all_blocks_free": count.all_free,
            "outcomes": dict(sorted(tally.outcomes.items())),
            "examples": (tally.internal + tally.hangs)[:20],
        }


def is_fine(found: dict[str, Any]) -> bool:
    return not (found["internal_errors"] or found["hangs"] or found["canary"]["wrong"])


if __name__ == "__main__":
    program(__doc__, run, is_fine, requests=20_000, forms=200)
