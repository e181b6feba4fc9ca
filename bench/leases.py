"""Leases under agents that pause: what leased conversations find after a pause, and what the others lose by it.

    python bench/leases.py --traces DIR [--models gpt-oss-20b qwen3.5-27b ...] [--sessions 120]

DIR has `agentic_coding.jsonl.gz`: sessions of coding agents with the times of their requests, between which tools run
and people think. Prompts are scaled to a quarter of their tokens, pauses to five times their seconds, and a session
starts every two minutes. One session in five belongs to one of two tenants, each of whose turns asks that its cache be
kept for half an hour; all others ask for nothing. The same requests run with leases and without, through the real cache
manager and the real leases, one at a time, under the trace's clock.

Prints a JSON object for each model: of turns that came while their conversation was leased, how many found all that the
receipt names; the share of prompts' tokens that the others found, with leases and without, in points; and the largest
sums of large pages that tenants had leased, beside their shares.
"""

import argparse
import gzip
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from intarsia.controller.leases.leases import Leases
from intarsia.controller.leases.settings import LeaseSettings
from intarsia.controller.request import Request
from intarsia.deploy.replay.prefill import extend_by_chunk
from intarsia.deploy.tools.model_layers import ModelLayers, model_layers
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.plan import PlanSettings
from intarsia.kvcache.strategies import plan_memory
from intarsia.proto.request import RequestOptions, SamplingParams

TRACE_BLOCK, SCALE = 64, 4
BLOCK_TOKENS = TRACE_BLOCK // SCALE
CHUNK_TOKENS = 8192
LONGEST_PROMPT = 65_536
APART_S = 120.0
PAUSES = 5.0
"""The trace's pauses are so many times as long here."""

KEEP_S = 1800.0
LEASING = 5
"""One session of so many asks for leases."""

SHARE, SHARE_EACH = 0.2, 0.12


class Turn(NamedTuple):
    at_s: float
    conversation: tuple[int, int]  # session and agent
    prompt: list[int]
    answer: list[int]


class Outcome(NamedTuple):
    """Of one run."""

    tokens: int  # of prompts of those who lease nothing
    found: int
    leased_turns: int  # that came while their conversation was leased
    whole: int  # of these, that found all the receipt names
    rewritten: int  # of these, whose history is not what the leased turn said: they found its prompt's end
    turns: int  # of the tenants that lease, after an earlier one of their conversation
    turns_whole: int  # of these, that found all of it, leased or not
    pauses_s: list[float]  # before leased turns
    counts: dict[str, int]
    most_pages: dict[str, int]  # by tenant, and of all
    limits: dict[str, int]


def main() -> None:
    args = _arguments()
    turns = sorted(_turns(args.traces / "agentic_coding.jsonl.gz", args.sessions), key=lambda turn: turn.at_s)
    for name in args.models:
        started = time.perf_counter()
        model = model_layers(name)
        memory = args.memory_tokens * sum(layer.token_bytes for layer in model.layers if layer.shares is None)
        memory += sum(layer.state_bytes for layer in model.layers) * args.memory_states
        leased, without = _run(turns, model, memory, SHARE), _run(turns, model, memory, 0.0)
        row = _row(name, memory, leased, without) | {"seconds": round(time.perf_counter() - started, 1)}
        json.dump(row, sys.stdout, indent=2)
        print(flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["llama-3.1-8b", "gpt-oss-20b", "qwen3.5-27b"])
    parser.add_argument("--sessions", type=int, default=120)
    parser.add_argument(
        "--memory-tokens", type=int, default=250_000, help="Tokens of all layers that the memory holds."
    )
    parser.add_argument("--memory-states", type=int, default=300, help="States beside them, where there are such.")
    return parser.parse_args()


def _row(name: str, memory: int, leased: Outcome, without: Outcome) -> dict[str, Any]:
    rate, bare = leased.found / leased.tokens, without.found / without.tokens
    pauses = sorted(leased.pauses_s)
    return {
        "benchmark": "leases",
        "model": name,
        "memory_gib": round(memory / 2**30, 2),
        "leased_turns": leased.leased_turns,
        "found_all_that_is_leased": leased.whole,
        "of_rewritten_history": leased.rewritten,
        "the_same_tenants_turns": leased.turns,
        "of_them_found_all": {"with_leases": leased.turns_whole, "without": without.turns_whole},
        "pause_s": {"median": round(pauses[len(pauses) // 2], 1), "longest": round(pauses[-1], 1)},
        "others_hit_rate": {"with_leases": round(rate, 4), "without": round(bare, 4)},
        "others_lose_points": round((bare - rate) * 100, 2),
        "leases": leased.counts,
        "most_pages": leased.most_pages,
        "limits": leased.limits,
    }


# -- the trace -------------------------------------------------------------------------------------------------------


def _turns(path: Path, sessions: int) -> Iterator[Turn]:
    """Each request with its prompt and its answer, as far as the conversation's next request tells it."""
    taken = 0
    with gzip.open(path, "rt") as lines:
        for line in lines:
            requests = json.loads(line)["requests"]
            if taken == sessions or any(request[2] > LONGEST_PROMPT for request in requests):
                continue
            taken += 1
            for agent in {request[1] for request in requests}:
                own = sorted((request for request in requests if request[1] == agent), key=lambda request: request[0])
                yield from _of_agent(taken, agent, own)


def _of_agent(session: int, agent: int, requests: Sequence[Sequence[Any]]) -> Iterator[Turn]:
    texts = [_tokens(session, agent, number, request) for number, request in enumerate(requests)]
    for number, (request, text) in enumerate(zip(requests, texts, strict=True)):
        said = max(1, request[3] // SCALE)
        whole = len(text) // BLOCK_TOKENS * BLOCK_TOKENS
        after = texts[number + 1] if number + 1 < len(texts) else []
        if len(after) > len(text) and after[:whole] == text[:whole]:
            text = after[: len(text)]
            answer = after[len(text) : len(text) + said]
        else:
            answer = [_token(session, agent, number, place) for place in range(10**6, 10**6 + said)]
        texts[number] = text
        yield Turn(session * APART_S + request[0] * PAUSES, (session, agent), text, answer)


def _tokens(session: int, agent: int, number: int, request: Sequence[Any]) -> list[int]:
    """A quarter of the prompt's: a block of the trace is one of ours."""
    blocks = [first + n for first, count in request[6] for n in range(count)]
    tokens = [_token(session, 0, block, place) for block in blocks for place in range(BLOCK_TOKENS)]
    rest = max(1, request[2] // SCALE - len(tokens))
    return tokens + [_token(session, agent + 1, number, place) for place in range(rest)]


def _token(session: int, agent: int, block: int, place: int) -> int:
    return (session * 1_000_003 + agent * 50_021 + block * 7_919 + place * 104_729) & 0x3FFFFFFF


# -- one run ---------------------------------------------------------------------------------------------------------


def _run(turns: Sequence[Turn], model: ModelLayers, memory: int, share: float) -> Outcome:
    now = [0.0]
    plan = plan_memory(model.layers, PlanSettings(memory, BLOCK_TOKENS, lease_share=share), LONGEST_PROMPT // SCALE)
    manager = CacheManager(plan, clock=lambda: now[0])
    settings = LeaseSettings(share_per_tenant=SHARE_EACH)
    leases = Leases(manager, settings, lambda: now[0], lambda: now[0]) if share else None
    latest: dict[tuple[int, int], Request] = {}  # turn of each conversation of those that lease
    ended_s: dict[tuple[int, int], float] = {}
    tokens = found = leased_turns = whole = rewritten = again = again_whole = 0
    pauses, most = list[float](), dict[str, int]()
    for number, turn in enumerate(turns):
        now[0] = turn.at_s
        tenant = f"leasing-{turn.conversation[0] % 2}" if turn.conversation[0] % LEASING == 0 else ""
        options = RequestOptions(tenant=tenant, keep_s=KEEP_S if tenant and leases is not None else None)
        request = _request(RequestId(number + 1), turn, options)
        before = latest.get(turn.conversation)
        is_held = leases is not None and before is not None and _is_held(leases, before)
        _serve(manager, leases, request, turn)
        if not tenant:
            tokens, found = tokens + len(turn.prompt), found + request.cached_tokens
            continue
        if before is not None:
            said = before.tokens[: before.computed_tokens]
            goes_on = turn.prompt[: len(said)] == said
            is_whole = request.cached_tokens >= (len(said) if goes_on else _in_common(turn.prompt, before))
            again, again_whole = again + 1, again_whole + is_whole
            if is_held:
                leased_turns, whole, rewritten = leased_turns + 1, whole + is_whole, rewritten + (not goes_on)
                pauses.append(turn.at_s - ended_s[turn.conversation])
        latest[turn.conversation], ended_s[turn.conversation] = request, turn.at_s
        if leases is not None and request.lease is not None:
            most[tenant] = max(most.get(tenant, 0), request.lease.used_pages)
            most["all"] = max(most.get("all", 0), leases.counts.held_pages)
            if number % 100 == 0:
                assert not list(leases.faults())
    counts = leases.counts._asdict() if leases is not None else {}
    limits = {"each": int(plan.usable_blocks * SHARE_EACH), "all": plan.leasable_blocks}
    return Outcome(tokens, found, leased_turns, whole, rewritten, again, again_whole, pauses, counts, most, limits)


def _in_common(prompt: Sequence[int], before: Request) -> int:
    """Of a history that was rewritten: the last border of blocks in the leased prompt, where that is still the same."""
    end = (before.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    return end if list(prompt[:end]) == before.tokens[:end] and len(prompt) > end else 0


def _is_held(leases: Leases, before: Request) -> bool:
    return before.lease is not None and any(lease.receipt.id == before.lease.id for lease in leases.held())


def _request(number: RequestId, turn: Turn, options: RequestOptions) -> Request:
    most = len(turn.prompt) + len(turn.answer)
    return Request(number, list(turn.prompt), len(turn.prompt), SamplingParams(), 0, frozenset(), most, options)


def _serve(manager: CacheManager, leases: Leases | None, request: Request, turn: Turn) -> None:
    """One request, from its lookup to its lease."""
    chain = manager.chain(request.tokens)
    if leases is not None:
        leases.arrived(request, chain)
    hit = manager.lookup(chain)
    request.cached_tokens = hit.tokens
    manager.open(request.id, hit)
    length = _extended(manager, request, hit.tokens, len(turn.prompt))
    request.tokens += turn.answer
    length = _extended(manager, request, length, len(request.tokens) - 1)
    manager.release(request.id, length)
    request.computed_tokens = length
    if leases is not None:
        leases.left(request, chain, None, has_ended=True)


def _extended(manager: CacheManager, request: Request, length: int, stop: int) -> int:
    while length < stop:
        length = extend_by_chunk(manager, request.id, min(stop, length + CHUNK_TOKENS), length)
        manager.commit(request.id)
    return length


if __name__ == "__main__":
    main()
