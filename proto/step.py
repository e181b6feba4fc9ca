"""One step, as it travels from the controller to the workers and back. Deltas only: nothing known is repeated.

Both sides advance the same arithmetic. A worker keeps, per slot, the tokens known so far and how many of them are
computed. `Advance` computes the next few; when that reaches the last known token, a new one is sampled and becomes
known to worker and controller alike, so a plain decode step names only its slots.
"""

from enum import IntEnum
from typing import NamedTuple

from .codec import decode, pack

ALL = 2**31 - 1
"""More than any vocabulary has."""

MAX_BAD_TOKENS = 1024
"""Of a row of tokens that must not come: a text of 256 characters has no more bytes."""


class Sampling(NamedTuple):
    """How a worker draws tokens for one slot. Temperature 0: the most probable one."""

    temperature: float
    top_k: int  # 0: all
    top_p: float
    seed: int
    logprobs: int  # -1: none; n: of the chosen token and the n most probable ones, or of all if n is `ALL`
    min_p: float = 0.0  # as a share of the most probable token's
    prompt_tokens: int = 0  # what comes behind them was generated
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    ends: tuple[int, ...] = ()  # tokens that are not drawn before `min_tokens` are generated
    min_tokens: int = 0
    prompt_logprobs: int = -1  # as `logprobs`, for the tokens of the prompt
    form: tuple[str, ...] = ()  # of the answer: its kind and its text
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # rows of tokens that are not drawn one after another

    @property
    def needs_history(self) -> bool:
        """Does it matter which tokens the request has?"""
        has_penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return bool(has_penalties or self.bad_token_ids)


class View(NamedTuple):
    """From a position on, until the next view's, tokens see `tokens` of the encoder's output from block `first` on."""

    position: int
    first_block: int  # of the sequence's table
    tokens: int


class EncoderInput(NamedTuple):
    """An image to encode: its output goes behind the first `start` tokens of the encoder's."""

    start: int
    data: bytes


class Admit(NamedTuple):
    """A request takes a slot: everything known of it so far."""

    slot: int
    tokens: tuple[int, ...]
    computed_tokens: int  # in the prefix cache already
    blocks: tuple[tuple[int, ...], ...]  # [group][block of the sequence]: its whole tables, null blocks included
    sampling: Sampling
    views: tuple[View, ...] = ()  # by position; tokens before the first see nothing of the encoder's
    images: tuple[EncoderInput, ...] = ()  # to encode; none when the cache has them


class Advance(NamedTuple):
    """Compute the next `tokens` of a slot. `blocks` are appended to its tables first."""

    slot: int
    tokens: int
    blocks: tuple[tuple[int, ...], ...]  # [group][new block]; empty when no group gets any


class Step(NamedTuple):
    """One forward pass over `decode` and `advance`. What comes before them is applied first, in the order of fields."""

    epoch: int  # of the worker group; answers of an older one are void
    number: int
    retire: tuple[int, ...]  # slots
    swap_out: tuple[tuple[int, int, int], ...]  # (group, block, ticket): to host memory, before anything is written
    swap_in: tuple[tuple[int, int, int], ...]  # (group, ticket, block): from there, which ends the ticket
    forget: tuple[int, ...]  # tickets of what is not needed any more
    copies: tuple[tuple[int, int, int], ...]  # (group, source block, target block), made before anything is written
    saves: tuple[tuple[int, int, int, int], ...]  # (slot, group, tokens, block): the state after so many tokens, kept
    admit: tuple[Admit, ...]
    advance: tuple[Advance, ...]
    decode: tuple[int, ...] = ()  # slots that compute one token and get no blocks: what steps are mostly made of
    traces: tuple[str, ...] = ()  # the `traceparent` of each traced request whose prompt it computes

    def pack(self) -> bytes:
        return pack(self)

    @classmethod
    def unpack(cls, data: bytes) -> "Step":
        return decode(data, cls)


class Logprobs(NamedTuple):
    """Natural-log probabilities of a token that is known, and of the most probable ones in its place."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), best first
    rank: int = 0  # 1: no token is more probable; 0: not known


class PromptLogprobs(NamedTuple):
    """Of the tokens of a prompt from position `start` on, as far as the step computed what comes before them."""

    slot: int
    start: int
    rows: tuple[Logprobs, ...]


class Fault(IntEnum):
    """Why a rank could not run a step."""

    PEER = 1  # another rank is gone; this one is well
    MEMORY = 2  # the step did not fit; this one is well
    OTHER = 3


class StepResult(NamedTuple):
    """What rank 0 answers; other ranks answer with no tokens. `error` tells why a rank could not run the step."""

    epoch: int
    number: int
    tokens: tuple[int, ...]  # a new one for each slot whose last known token was computed: `decode`, then `advance`
    logprobs: tuple[tuple[int, Logprobs], ...] = ()  # (place in `tokens`, ...) of those who asked
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    failures: tuple[tuple[int, str], ...] = ()  # (place in `tokens`, why) of those whose answer cannot go on
    run_us: int = 0  # time the worker spent on the step
    error: str | None = None
    fault: Fault | None = None  # of what kind the error is

    def pack(self) -> bytes:
        return pack(self)

    @classmethod
    def unpack(cls, data: bytes) -> "StepResult":
        return decode(data, cls)
