"""One step, as it travels from the controller to the workers and back. Deltas only: nothing known is repeated.

Both sides advance the same arithmetic. A worker keeps, per slot, the tokens known so far and how many of them are
computed. `Advance` computes the next few; when that reaches the last known token, a new one is sampled and becomes
known to worker and controller alike, so a plain decode step names only its slots.
"""

from typing import NamedTuple

from .packing import pack, unpack


class Sampling(NamedTuple):
    """How a worker draws tokens for one slot. Temperature 0: the most probable one."""

    temperature: float
    top_k: int  # 0: all
    top_p: float
    seed: int
    logprobs: int  # -1: none; n: of the chosen token and the n most probable ones
    min_p: float = 0.0  # as a share of the most probable token's
    prompt_tokens: int = 0  # what comes behind them was generated
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    ends: tuple[int, ...] = ()  # tokens that are not drawn before `min_tokens` are generated
    min_tokens: int = 0

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


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
    max_tokens: int  # most the sequence can grow to, prompt included
    sampling: Sampling
    views: tuple[View, ...] = ()  # by position; tokens before the first see nothing of the encoder's
    images: tuple[EncoderInput, ...] = ()  # to encode; none when the cache has them


class Advance(NamedTuple):
    """Compute the next `tokens` of a slot. `blocks` are appended to its tables first."""

    slot: int
    tokens: int  # 1 in plain decode
    blocks: tuple[tuple[int, ...], ...]  # [group][new block]; empty when no group gets any


PLAIN_DECODE = (1, ())
"""One token, and no blocks."""


class Step(NamedTuple):
    """The work of one forward pass. Retired slots are free for the admissions of the same step."""

    epoch: int  # of the worker group; workers refuse another
    number: int  # counts up from 1; the answer repeats it
    retire: tuple[int, ...]  # slots
    copies: tuple[tuple[int, int, int], ...]  # (group, source block, target block), made before anything is written
    saves: tuple[tuple[int, int, int, int], ...]  # (slot, group, tokens, block): the state after so many tokens, kept
    admit: tuple[Admit, ...]
    advance: tuple[Advance, ...]

    def pack(self) -> bytes:
        """A plain decode, which is what steps are mostly made of, travels as the number of its slot."""
        return pack(self._replace(advance=tuple(a.slot if a[1:] == PLAIN_DECODE else a for a in self.advance)))  # type: ignore[arg-type]

    @classmethod
    def unpack(cls, data: bytes) -> "Step":
        epoch, number, retire, copies, saves, admit, advance = unpack(data)
        return cls(
            epoch,
            number,
            retire,
            copies,
            saves,
            tuple(_admit(*fields) for fields in admit),
            tuple(Advance(a, *PLAIN_DECODE) if isinstance(a, int) else Advance(*a) for a in advance),
        )


def _admit(slot, tokens, computed, blocks, max_tokens, sampling, views, images) -> Admit:
    return Admit(
        slot,
        tokens,
        computed,
        blocks,
        max_tokens,
        Sampling(*sampling),
        tuple(View(*view) for view in views),
        tuple(EncoderInput(*image) for image in images),
    )


class Sampled(NamedTuple):
    """A new token of a slot."""

    slot: int
    token: int
    logprob: float | None  # of `token`, when asked for
    top: tuple[tuple[int, float], ...]  # (token, logprob) of the most probable ones, when asked for


class StepResult(NamedTuple):
    """What rank 0 answers; other ranks answer with no `sampled`. `error` tells why a rank could not run the step."""

    epoch: int
    number: int
    sampled: tuple[Sampled, ...]
    run_us: int  # time the worker spent on the step
    error: str | None = None

    def pack(self) -> bytes:
        return pack(self)

    @classmethod
    def unpack(cls, data: bytes) -> "StepResult":
        epoch, number, sampled, run_us, error = unpack(data)
        return cls(epoch, number, tuple(Sampled(*fields) for fields in sampled), run_us, error)
