"""Every route and every RPC of a real `intarsia serve` with keys, asked wrongly by the thousand.

    python -m intarsia.tests.faults.fuzz_door --http 20000 --rpcs 2000
    python -m intarsia.tests.faults.fuzz_door --http 5000 --rpcs 0 --routes /v1/messages,/v1/responses

Requests are made from right ones (`fuzz_http.py`, `fuzz_rpcs.py`): types, sizes, nesting, letters, numbers, unknown
and doubled fields, cut and turned bytes, methods, headers, kinds of content, lengths, chunks, keys of all kinds; some
clients leave at random. What is looked for: an internal error, an answer without type, a path or a traceback in an
answer or in the log, a door that opens without its key, a hang, a wrong token of the stream beside, pages that are
still held and memory that is still taken at the end. Prints JSON with the seed; exits with 1 after any of these.
`fuzz.py` asks a server within its own process, and the channel behind it, too.
"""

import asyncio
import collections
import contextlib
import json
import random
import sys
import time
from typing import Any

import grpc

from intarsia.deploy.client import AsyncClient
from intarsia.deploy.front_end.access import RPCS

from .attack_tools import LEAKS
from .fuzz import Canary
from .fuzz_http import Case, http_case
from .fuzz_rpcs import Rpc, rpc_case
from .program import program
from .served import TRACEBACK, Served, Target, served
from .service import answered, draw

AT_ONCE = 8

HANG_S = 30.0
"""Without a byte."""

MAX_MODEL_LEN = 512
"""So that no right request takes long."""

MOST_MEMORY_MORE_BYTES = 64 * 10**6

REST_S = 5.0

OWN_ENDS = {"CANCELLED", "DEADLINE_EXCEEDED"}
"""What a client may bring about by itself."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

TYPED = "grpc-status-details-bin"


class Findings:
    """What came back, counted, and what should not have."""

    def __init__(self) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.faults: collections.Counter[str] = collections.Counter()
        self.examples: list[str] = []
        self.slowest_s = 0.0

    def note(self, way: str, outcome: str, took_s: float) -> None:
        self.outcomes[f"{way} {outcome}"] += 1
        self.slowest_s = max(self.slowest_s, took_s)

    def fault(self, kind: str, about: Any, said: Any) -> None:
        self.faults[kind] += 1
        if self.faults[kind] <= 5:
            self.examples.append(f"{kind}: asked {str(about)[:700]}; said {str(said)[:4000]}")


# -- HTTP ------------------------------------------------------------------------------------------------------------


async def ask_http(target: Target, case: Case, findings: Findings) -> None:
    started_s = time.monotonic()
    try:
        said = await _exchange(target, case)
    except TimeoutError:
        findings.fault("hang", case.about, f"not a byte in {HANG_S:g} s")
        return
    except OSError as error:
        findings.fault("no connection", case.about, error)
        return
    said = said.removeprefix(CONTINUE)
    status = said[9:12].decode("latin-1") if said.startswith(b"HTTP/1.1 ") else ("closed" if not said else "words")
    findings.note("HTTP", status, time.monotonic() - started_s)
    if case.read_bytes is None:
        _judge_http(case, status, said, findings)


async def _exchange(target: Target, case: Case) -> bytes:
    """All that is said. Raises `TimeoutError` after so long without a byte."""
    reader, writer = await asyncio.open_connection(*target.http)
    received = bytearray()
    try:
        with contextlib.suppress(ConnectionError):
            for piece in case.pieces:
                writer.write(piece)
                await asyncio.wait_for(writer.drain(), HANG_S)
                if len(case.pieces) > 1:
                    await asyncio.sleep(0.002)
            if not case.is_whole:
                _end(writer)
            while case.read_bytes is None or len(received) < case.read_bytes:
                piece = await asyncio.wait_for(reader.read(65536), HANG_S)
                if not piece:
                    break
                received += piece
    finally:
        writer.close()
    return bytes(received)


def _end(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # the server may have closed already
        writer.write_eof()


def _judge_http(case: Case, status: str, said: bytes, findings: Findings) -> None:
    head, _, body = said.partition(b"\r\n\r\n")
    text = said.decode(errors="replace")
    if status.startswith("5") and status not in ("503", "504"):
        findings.fault(f"HTTP {status}", case.about, text)
    if "server_error" in text:
        findings.fault("HTTP server_error in an answer", case.about, text[-500:])
    if leak := LEAKS.search(text):
        findings.fault("a path or a traceback in an answer", case.about, text[max(0, leak.start() - 200) :])
    if case.may_enter is False and status == "200":
        findings.fault("let in without a key", case.about, text)
    if status == "closed" and case.is_http and case.is_whole and case.is_at_once:
        findings.fault("closed without an answer", case.about, "")
    if status.startswith("4") and case.is_http and case.is_whole and not case.is_head and not _is_typed(head, body):
        findings.fault("an error without type", case.about, text)


def _is_typed(head: bytes, body: bytes) -> bool:
    """In OpenAI's shape, or in Anthropic's."""
    try:
        told = json.loads(body)
        error = told["error"]
    except (ValueError, KeyError, TypeError):
        return False
    is_anthropics = told.get("type") == "error" and {"message", "type"} <= error.keys() and told["request_id"]
    return b"application/json" in head and (is_anthropics or {"message", "type", "param", "code"} <= error.keys())


# -- gRPC ------------------------------------------------------------------------------------------------------------


async def ask_rpc(channel: grpc.aio.Channel, case: Rpc, findings: Findings) -> None:
    started_s = time.monotonic()
    call: Any = _ask(channel, case)
    came = 0
    text = ""
    with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
        while case.leaves_after is None or came < case.leaves_after:
            answer = await asyncio.wait_for(call.read(), HANG_S + 5)
            if not isinstance(answer, bytes):
                break
            came += 1
            text += answer[:2000].decode(errors="replace")
            if case.method.endswith("/Watch") or "WatchCache" in case.method:
                break  # which has no end
        else:
            call.cancel()
    if case.method.endswith("/Watch") or "WatchCache" in case.method:
        call.cancel()
    code = (await call.code()).name
    details = await call.details() or ""
    trailing = {name for name, _ in (await call.trailing_metadata() or ())}
    findings.note("gRPC", code, time.monotonic() - started_s)
    _judge_rpc(case, code, details, text + details, TYPED in trailing, findings)


def _ask(channel: Any, case: Rpc) -> Any:
    """Any call. Those of one message are sent as such: grpc's own client stumbles over a call of streams that is
    refused before its message was written, and calls that an internal error."""
    about = {"timeout": case.timeout_s, "metadata": case.metadata}
    if len(case.messages) == 1:
        return channel.unary_stream(case.method)(case.messages[0], **about)
    return channel.stream_stream(case.method)(_each(case.messages), **about)


async def _each(messages: list[bytes]) -> Any:
    for message in messages:
        yield message


def _judge_rpc(case: Rpc, code: str, details: str, said: str, is_typed: bool, findings: Findings) -> None:
    if leak := LEAKS.search(said):
        findings.fault("a path or a traceback in an answer", case, said[max(0, leak.start() - 200) :])
    if code == "DEADLINE_EXCEEDED" and case.timeout_s >= HANG_S and not is_typed:  # else the request itself wanted it
        findings.fault("hang", case, details)
    is_clients_own = len(case.messages) != 1 and details == "Internal error from Core"  # see `_ask`
    if case.may_enter is False and code not in (*OWN_ENDS, "UNAUTHENTICATED") and not is_clients_own:
        findings.fault("let in without a key", case, f"{code} {details}")
    if len(case.messages) != 1:
        return  # gRPC's own matter
    is_no_message = not case.is_proto and "deserializ" in details
    if code in ("UNKNOWN", "INTERNAL", "DATA_LOSS") and not is_no_message:
        findings.fault(f"gRPC {code}", case, details)
    own = case.method in RPCS and case.method.startswith("/intarsia.")
    if own and code not in ("OK", *OWN_ENDS) and not is_typed and not is_no_message:
        findings.fault("an error without type", case, f"{code} {details}")


# -- the program -----------------------------------------------------------------------------------------------------


async def run(http: int, rpcs: int, routes: str, seed: int, python: str) -> dict[str, Any]:
    """routes: beginnings of those that are asked, by commas"""
    with served(python, max_model_len=MAX_MODEL_LEN) as server:
        found = await _fuzzed(server, http, rpcs, tuple(routes.split(",")), random.Random(seed))
        return {"seed": seed, "http": http, "rpcs": rpcs, "routes": routes} | found


async def _fuzzed(
    server: Served, http: int, rpcs: int, beginnings: tuple[str, ...], rng: random.Random
) -> dict[str, Any]:
    target, findings = server.target, Findings()
    async with AsyncClient(target.grpc, api_key=target.keys["carol"]) as client:
        [known] = await answered(client, draw(rng, 1, 200, 200))
        canary = Canary(client, known)
        await asyncio.sleep(REST_S)
        before_bytes, started_s = server.rss_bytes(), time.monotonic()
        await _send(target, http, rpcs, beginnings, rng, findings)
        took_s = time.monotonic() - started_s
        try:
            await canary.stop()
        except RuntimeError as error:
            findings.fault("the stream beside was lost", known, error.__cause__)
        held = await _held_at_rest(server, client)
    for wrong in canary.wrong:
        findings.fault("a wrong token beside", known, wrong)
    for traceback in server.log().split(TRACEBACK)[1:]:
        findings.fault("a traceback in the log", "", traceback)
    if not server.is_running():
        findings.fault("the server has ended", "", server.log()[-1500:])
    more_bytes = server.rss_bytes() - before_bytes
    if more_bytes > MOST_MEMORY_MORE_BYTES:
        findings.fault("memory", "", f"{more_bytes / 1e6:.0f} MB more at the end")
    if any(held.values()):
        findings.fault("held at the end", "", held)
    return {
        "took_s": round(took_s),
        "faults": dict(findings.faults),
        "slowest_s": round(findings.slowest_s, 2),
        "answers_beside": canary.answers,
        "held_at_the_end": held,
        "memory_more_mb": round(more_bytes / 1e6),
        "outcomes": dict(sorted(findings.outcomes.items())),
        "examples": findings.examples,
    }


async def _send(
    target: Target, http: int, rpcs: int, beginnings: tuple[str, ...], rng: random.Random, findings: Findings
) -> None:
    """Both kinds mixed, so many at once."""
    kinds = ["http"] * http + ["rpc"] * rpcs
    rng.shuffle(kinds)
    todo = iter(enumerate(kinds, 1))

    async def client() -> None:
        async with grpc.aio.insecure_channel(target.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            for number, kind in todo:
                if number % 1000 == 0:
                    print(f"{number} of {len(kinds)}: {dict(findings.faults)}", file=sys.stderr, flush=True)
                if kind == "http":
                    case = http_case(rng, target.keys, target.admin_key, beginnings)
                    await ask_http(target, case, findings)
                else:
                    await ask_rpc(channel, rpc_case(rng, target.keys, target.admin_key), findings)

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))


async def _held_at_rest(server: Served, client: AsyncClient) -> dict[str, int]:
    """What requests hold when all have ended: to be nothing, by gRPC and by the console."""
    until_s = time.monotonic() + 60
    while (load := await client.load()).running + load.waiting and time.monotonic() < until_s:
        await asyncio.sleep(0.1)
    await asyncio.sleep(REST_S)
    cache = await client.cache_state()
    view = await asyncio.to_thread(server.view)
    return {
        "running": load.running,
        "waiting": load.waiting,
        "pages": cache.held_pages,
        "requests with pages": cache.requests,
        "blocks": sum(group.held_blocks for group in cache.groups),
        "requests in the console": len(view["requests"]),
    }


def is_fine(found: dict[str, Any]) -> bool:
    return not found["faults"]


if __name__ == "__main__":
    program(__doc__, run, is_fine, http=20_000, rpcs=2000, routes="/", python=sys.executable)
