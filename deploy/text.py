"""What text the tokens of a request bring, and where it ends: at a stop string, which no worker knows."""

from collections.abc import AsyncGenerator, Sequence

from ..controller.engine import TokenDelta
from ..controller.request import SamplingParams
from ..errors import InvalidRequest
from .tokenizer import Tokenizer


async def with_text(
    deltas: AsyncGenerator[TokenDelta, None], tokenizer: Tokenizer | None, sampling: SamplingParams
) -> AsyncGenerator[tuple[TokenDelta, str], None]:
    """Each delta with the text that may be told by now; the last one has a finish reason. Text is empty without a
    tokenizer. The caller closes `deltas`: after a stop string they would go on.

    Raises `InvalidRequest` for stop strings without a tokenizer.
    """
    if tokenizer is None:
        if sampling.stops:
            raise InvalidRequest("this model has no tokenizer, so it can not stop at a text", field="stop")
        async for delta in deltas:
            yield delta, ""
        return
    stream = tokenizer.stream()
    gate = StopGate(sampling.stops, sampling.include_stop_str_in_output)
    tokens = 0
    async for delta in deltas:
        tokens += len(delta.token_ids)
        piece = stream.push(delta.token_ids)
        if delta.finish_reason is not None:
            piece += stream.finish()
        told, stopped = gate.push(piece, may_stop=tokens >= sampling.min_tokens)
        if stopped:
            yield delta._replace(finish_reason="stop"), told
            return
        yield delta, told + (gate.rest() if delta.finish_reason is not None else "")


class StopGate:
    """Lets text pass up to the first stop string, and keeps back what may become one.

    stops "</s>":   "a < b"  ->  "a < b"      "end </"  ->  "end ", and "</" waits      "s> more"  ->  stop
    """

    def __init__(self, stops: Sequence[str], include: bool):
        self._stops = stops
        self._include = include
        self._waiting = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """The text that may be told now, and whether a stop string has come. may_stop: else it is text like any."""
        if not self._stops:
            return text, False
        text = self._waiting + text
        self._waiting = ""
        if not may_stop:
            return text, False
        found = [(text.find(stop), len(stop)) for stop in self._stops if stop in text]
        if found:
            start, length = min(found)
            return text[: start + length * self._include], True
        keep = max(self._beginning(text, stop) for stop in self._stops)
        text, self._waiting = text[: len(text) - keep], text[len(text) - keep :]
        return text, False

    def rest(self) -> str:
        """What was kept back and became nothing."""
        waiting, self._waiting = self._waiting, ""
        return waiting

    @staticmethod
    def _beginning(text: str, stop: str) -> int:
        """Characters at the end of `text` that could begin `stop`."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if stop.startswith(text[-n:])), 0)
