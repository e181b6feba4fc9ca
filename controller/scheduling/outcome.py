"""What the scheduler remembers of a step, and what it tells the engine when its result comes."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...proto.request import FinishReason
from ...proto.step import Logprobs
from ..request import Request


class StepUnderWay(NamedTuple):
    """What the scheduler remembers of a step until its result comes."""

    drawing: Sequence[Request]  # those that get a token by it, in the order of the result
    prompts: Sequence[tuple[Request, int]]  # those of which it computes a prompt, and the slot they had
    decoding: int  # requests that decode
    prompt_tokens: int


class Progress(NamedTuple):
    """What a step brought to one request."""

    request: Request
    token: int
    finish_reason: FinishReason | None
    logprobs: Logprobs | None = None


class Outcome(NamedTuple):
    """What a step brought. Mostly that is a token for each of many, with nothing more to say: those are columns."""

    requests: list[Request]
    tokens: list[int]
    notable: list[Progress]  # first and last tokens, and those with log-probabilities
    failed: Sequence[tuple[Request, str]] = ()  # and why; what the step drew for them is dropped

    def each(self) -> Iterator[Progress]:
        for request, token in zip(self.requests, self.tokens, strict=True):
            yield Progress(request, token, None)
        yield from self.notable
