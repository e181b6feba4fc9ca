"""What text the tokens of a request bring, and where it ends: at a stop string, which no worker knows."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from ...errors import InvalidRequest
from ...proto.leases import LeaseReceipt
from ...proto.request import SamplingParams
from .engine_client import Delta
from .marked_stream import MarkedStream
from .tokenizer import Tokenizer

AT_ONCE_VALUES = 512
"""Tokens and log-probabilities that are handed on before others have their turn: it takes about a millisecond."""


MOST_AFTER_STOP = 16
"""Deltas that may come behind a stop string, until the engine has heard of it."""


class Deltas(Protocol):
    """The part of a `Generation` that is used here."""

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def end(self, index: int) -> None: ...

    def enough(self, index: int) -> None: ...


async def with_text(
    generation: Deltas,
    tokenizer: Tokenizer | None,
    sampling: SamplingParams,
    markers: Mapping[int, str] | None = None,
    *,
    is_kept: bool = False,
) -> AsyncGenerator[tuple[Delta, str], None]:
    """Each delta with the text that is certain by now; the last one of each answer has a finish reason. Text is empty
    without a tokenizer. An answer that comes to a stop string is ended; the caller closes `generation`.

    markers: special tokens that are wanted in the text, by id, as `MarkedStream` has them. is_kept: a lease was asked
    for, of which the engine's last delta tells.

    Raises `InvalidRequest` for stop strings without a tokenizer.
    """
    # Without a tokenizer there are tokens only, and no text to stop at.
    if tokenizer is None:
        if sampling.stops:
            raise InvalidRequest("this model has no tokenizer, so it cannot stop at a text", field="stop")
        async for delta in generation:
            for part in _parts(delta):
                yield part, ""
                if part is not delta:
                    await asyncio.sleep(0)
        return
    # Each answer has its own text and its own stop.
    answers = [_Answer(tokenizer, sampling, markers) for _ in range(sampling.n)]
    ended: set[int] = set()
    async for delta in generation:
        for part in _parts(delta):
            if part.answer in ended:
                break  # what came with the stop string and behind it
            text, stop = answers[part.answer].push(part)
            if stop is not None:
                ended.add(part.answer)
                part = part._replace(finish_reason="stop", stop=stop, lease=await _lease(generation, part, is_kept))
                generation.end(part.answer)
            yield part, text
            if part is not delta:
                await asyncio.sleep(0)


async def _lease(generation: Deltas, last: Delta, is_kept: bool) -> LeaseReceipt | None:
    """What becomes of the lease of an answer whose text has ended with `last`."""
    if not is_kept or last.finish_reason is not None:
        return last.lease
    generation.enough(last.answer)
    # It ends with a token or two; an engine that is lost just then has no lease to tell of.
    for _ in range(MOST_AFTER_STOP):
        async for delta in generation:
            if delta.finish_reason is not None:
                return delta.lease
            break
    return None


def _parts(delta: Delta) -> Iterable[Delta]:
    """A long delta in parts, between which others have their turn; a short one as it is."""
    tokens = AT_ONCE_VALUES
    if delta.logprobs:
        tokens = max(1, tokens // (1 + len(delta.logprobs[-1].top)))
    return (delta,) if len(delta.token_ids) <= tokens else parts_of(delta, tokens)


def parts_of(delta: Delta, tokens: int) -> Iterator[Delta]:
    """Cut a delta into parts of so many tokens. The first brings what is said of the prompt, the last how it ends."""
    for start in range(0, len(delta.token_ids), tokens):
        end = start + tokens
        yield delta._replace(
            token_ids=delta.token_ids[start:end],
            logprobs=None if delta.logprobs is None else delta.logprobs[start:end],
            prompt_logprobs=delta.prompt_logprobs if start == 0 else None,
            finish_reason=delta.finish_reason if end >= len(delta.token_ids) else None,
        )


async def whole_answers(
    pieces: AsyncIterator[tuple[Delta, str]],
) -> AsyncGenerator[tuple[Delta, str], None]:
    """The same pieces, joined: each answer comes as one piece, when it has ended."""
    begun: dict[int, list[tuple[Delta, str]]] = {}  # by answer
    async for delta, text in pieces:
        begun.setdefault(delta.answer, []).append((delta, text))
        if delta.finish_reason is not None:
            deltas, texts = zip(*begun.pop(delta.answer), strict=True)
            yield Delta.join(deltas), "".join(texts)


class _Answer:
    """The text of one answer as it grows."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, markers: Mapping[int, str] | None):
        self._stream = MarkedStream(tokenizer, markers) if markers else tokenizer.stream()
        self._gate = StopGate(sampling.stops, sampling.include_stop_str_in_output)
        self._min_tokens = sampling.min_tokens
        self._tokens = 0

    def push(self, delta: Delta) -> tuple[str, str | None]:
        """The text that is certain now, and the stop string that has come."""
        self._tokens += len(delta.token_ids)
        piece = self._stream.push(delta.token_ids)
        if delta.finish_reason is not None:
            piece += self._stream.finish()
        text, stop = self._gate.push(piece, may_stop=self._tokens >= self._min_tokens)
        if stop is not None or delta.finish_reason is None:
            return text, stop
        return text + self._gate.rest(), None


class StopGate:
    """Lets text pass up to the first stop string, and keeps back what may become one.

    stops "</s>":   "a < b"  ->  "a < b"      "end </"  ->  "end ", and "</" waits      "s> more"  ->  stop
    """

    def __init__(self, stops: Sequence[str], include: bool):
        self._stops = stops
        self._include = include
        self._waiting = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """The text that is certain now, and the stop string that has come. may_stop: else it is text like any."""
        if not self._stops:
            return text, None
        text = self._waiting + text
        self._waiting = ""
        if not may_stop:
            return text, None
        found = [(text.find(stop), len(stop)) for stop in self._stops if stop in text]
        if found:
            start, length = min(found)
            return text[: start + length * self._include], text[start : start + length]
        keep = could_begin(text, self._stops)
        text, self._waiting = text[: len(text) - keep], text[len(text) - keep :]
        return text, None

    def rest(self) -> str:
        """The text that was kept back and did not become a stop string."""
        waiting, self._waiting = self._waiting, ""
        return waiting


def could_begin(text: str, marks: Sequence[str]) -> int:
    """Characters at the end of `text` with which one of `marks` could begin."""

    def beginning(mark: str) -> int:
        return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)

    return max(map(beginning, marks))
