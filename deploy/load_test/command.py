"""The command: settings in, a table, JSON and a picture out."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import InvalidSetting
from ..start.local_servers import running
from .client import Outcome, Target
from .drive import DriveSettings, Measured, drive
from .picture import draw
from .report import as_text, parse_limits, report
from .shapes import SHAPES, Prompts, Session, ShapeSettings, random_lengths


class Asked(NamedTuple):
    """All that the command line says."""

    url: str | None
    endpoint: str | None  # None: what the shape needs
    api_key: str | None
    model: str | None
    shape: str
    shaped: ShapeSettings
    vocabulary: int | None
    driven: DriveSettings
    goodput: tuple[str, ...]
    warm_up: int
    as_json: bool
    out: Path | None
    svg: Path | None


def run(asked: Asked) -> bool:
    """Whether every request ended well. Raises `InvalidSetting` or `EngineUnavailable` before anything is sent."""
    limits_ms = parse_limits(asked.goodput)
    if asked.shape not in SHAPES:
        raise InvalidSetting(f"shape must be one of {', '.join(SHAPES)}, got {asked.shape!r}", field="shape")
    endpoint = asked.endpoint or ("chat" if asked.shape == "agents" else "completions")
    if asked.shape == "agents" and endpoint != "chat":
        raise InvalidSetting("agents have conversations: --endpoint chat", field="endpoint")
    vocabulary = _vocabulary(asked.vocabulary, endpoint)
    sessions = list(SHAPES[asked.shape](asked.shaped))
    if not sessions:
        raise InvalidSetting(f"{asked.shaped.path} has no requests", field="path")
    url = asked.url or _started_here()
    target = Target(url, endpoint, asked.api_key)
    model, measured = asyncio.run(_measured(target, asked, sessions, Prompts(asked.shaped, vocabulary)))
    rate = asked.driven.rate if asked.driven.rate != float("inf") else None
    about: dict[str, Any] = {
        "url": url, "model": model, "endpoint": endpoint, "shape": asked.shape, "sessions": len(sessions),
        "request_rate": rate, "burstiness": asked.driven.burstiness, "max_concurrency": asked.driven.concurrency,
        "seed": asked.shaped.seed,
    }  # fmt: skip
    found = report(measured, limits_ms, about)
    print(json.dumps(found) if asked.as_json else as_text(found))
    if asked.out is not None:
        asked.out.write_text(json.dumps(found | {"requests": [_entry(one, measured) for one in measured.outcomes]}))
    if asked.svg is not None:
        asked.svg.write_text(draw(measured, found, f"{model}: {asked.shape}, {len(sessions)} sessions"))
        print(f"drawn: {asked.svg}", file=sys.stderr)
    return not found["failed"]


def fields_of(extra: str | None) -> tuple[tuple[str, Any], ...]:
    """Of a JSON object. Raises `InvalidSetting`."""
    try:
        fields = json.loads(extra or "{}")
    except ValueError as error:
        raise InvalidSetting(f"extra_body is no JSON: {error}", field="extra_body") from None
    if not isinstance(fields, dict):
        raise InvalidSetting(f"extra_body must be a JSON object, got {extra!r}", field="extra_body")
    return tuple(fields.items())


def _vocabulary(size: int | None, endpoint: str) -> range | None:
    if size is None:
        return None
    if endpoint != "completions":
        raise InvalidSetting("prompts of token ids are for completions: --endpoint completions", field="token_ids")
    if size < 16:
        raise InvalidSetting(f"token_ids must be the size of a vocabulary, at least 16; got {size}", field="token_ids")
    return range(size // 8, size)  # special tokens are mostly among the first


def _started_here() -> str:
    found = running()
    if not found:
        raise InvalidSetting("no server runs here; say which one: --url http://HOST:PORT", field="url")
    return found[0].url


async def _measured(target: Target, asked: Asked, sessions: list[Session], prompts: Prompts) -> tuple[str, Measured]:
    async with target:
        model = asked.model or await target.model()
        if asked.warm_up:  # with words that no other session has
            shaped = ShapeSettings(asked.warm_up, asked.shaped.input_length, 2, seed=~asked.shaped.seed)
            first = list(random_lengths(shaped))
            await drive(target, model, first, Prompts(shaped, prompts.vocabulary), DriveSettings())
        done = 0

        def heard(outcome: Outcome) -> None:
            nonlocal done
            done += 1
            if sys.stderr.isatty():
                print(f"\r{done:,} answers", end="", file=sys.stderr, flush=True)

        measured = await drive(target, model, sessions, prompts, asked.driven, heard)
        if sys.stderr.isatty():
            print("\r", end="", file=sys.stderr)
        return model, measured


def _entry(outcome: Outcome, measured: Measured) -> dict[str, Any]:
    """One request, times in seconds after the start."""
    return {
        "sent_s": outcome.sent_s - measured.began_s,
        "came_s": [came_s - measured.began_s for came_s in outcome.came_s],
        "input_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "output_tokens": outcome.output_tokens,
        "error": outcome.error,
    }
