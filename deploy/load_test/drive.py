"""When requests are sent. Closed loop: so many sessions at once, the next when one ends. Open loop: sessions begin at
their times, however long the others take."""

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidSetting
from .client import Outcome, Target
from .shapes import TOOLS, History, Prompts, Session


@dataclass(frozen=True, slots=True)
class DriveSettings:
    """How sessions are sent."""

    rate: float = math.inf  # sessions per second; infinite: all at once, as far as `concurrency` allows
    burstiness: float = 1.0  # 1: Poisson's process; smaller: in bursts; larger: more evenly
    concurrency: int | None = None  # most sessions at once; None: any number
    seed: int = 0
    ignore_eos: bool = True  # answers are as long as is asked
    temperature: float | None = 0.0
    tools: bool = True  # agents tell of theirs
    extra: tuple[tuple[str, Any], ...] = ()  # further fields of each request

    def __post_init__(self):
        if not self.rate > 0:
            raise InvalidSetting(f"rate must be above 0, got {self.rate}", field="rate")
        if not self.burstiness > 0:
            raise InvalidSetting(f"burstiness must be above 0, got {self.burstiness}", field="burstiness")
        if self.concurrency is not None and self.concurrency < 1:
            raise InvalidSetting(f"concurrency must be at least 1, got {self.concurrency}", field="concurrency")


@dataclass(frozen=True, slots=True)
class Measured:
    """All outcomes of a run. Times are seconds of the monotonic clock."""

    began_s: float
    ended_s: float
    outcomes: tuple[Outcome, ...]


def beginnings(sessions: Sequence[Session], settings: DriveSettings) -> list[float]:
    """When each session begins, in seconds after the start: at its own time, or as the rate has it."""
    rng, at_s, found = random.Random(settings.seed), 0.0, []
    for session in sessions:
        found.append(at_s if session.begins_s is None else session.begins_s)
        if settings.rate != math.inf:  # times between arrivals are drawn from a gamma distribution
            at_s += rng.gammavariate(settings.burstiness, 1 / (settings.rate * settings.burstiness))
    return found


async def drive(
    target: Target,
    model: str,
    sessions: Sequence[Session],
    prompts: Prompts,
    settings: DriveSettings,
    heard: Callable[[Outcome], None] = lambda outcome: None,
) -> Measured:
    """Send all of them. heard: is told of each outcome as it comes."""
    outcomes: list[Outcome] = []
    places = asyncio.Semaphore(settings.concurrency or len(sessions) or 1)
    began_s = time.monotonic()

    async def one(session: Session, at_s: float) -> None:
        await asyncio.sleep(began_s + at_s - time.monotonic())
        async with places:
            history = History(prompts, session)
            for place, turn in enumerate(session.turns):
                await asyncio.sleep(turn.pause_s)
                history.ask(place)
                outcome = await target.ask(_body(target, model, history, turn.most_tokens, settings))
                outcomes.append(outcome)
                heard(outcome)
                if outcome.error is not None:
                    return  # what would follow it was never asked
                history.answered(outcome.text, outcome.calls)

    await asyncio.gather(*map(one, sessions, beginnings(sessions, settings)))
    return Measured(began_s, time.monotonic(), tuple(outcomes))


def _body(target: Target, model: str, history: History, most_tokens: int, settings: DriveSettings) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "max_tokens": most_tokens}
    if settings.temperature is not None:
        body["temperature"] = settings.temperature
    if settings.ignore_eos:
        body["ignore_eos"] = True
    if target.endpoint == "completions":
        body["prompt"] = history.prompt
    else:
        body["messages"] = history.messages
        if settings.tools and len(history.session.turns) > 1:
            body["tools"] = list(TOOLS)
    return body | dict(settings.extra)
