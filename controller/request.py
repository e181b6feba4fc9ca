"""What a caller asks for (`SamplingParams`), and what the scheduler knows of a running request (`Request`)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from ..errors import InvalidRequest
from ..kvcache.manager import RequestId
from ..kvcache.prefix import TokenChain
from .images import Gallery

MAX_LOGPROBS = 20
"""Most alternatives per token a caller may ask for, as OpenAI's API has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. Names and defaults are the field's usual ones.

    temperature     0 is greedy; otherwise logits are divided by it
    top_k           keep the k most probable tokens; 0 or -1 keeps all
    top_p           keep the fewest tokens whose probabilities sum to at least this
    seed            same seed, prompt and model: same tokens, whatever else runs beside. None: drawn per request
    max_tokens      most tokens to generate
    stop_token_ids  tokens that end generation; the one that did is the last token returned, as with the model's own
    ignore_eos      go on after the model's own end token
    logprobs        None: none; n: log-probability of each chosen token and of the n most probable ones

    Raises `InvalidRequest`, naming the field, when a value has the wrong type or range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        _check_number("temperature", self.temperature, low=0.0, high=math.inf, low_open=False, high_open=True)
        _check_number("top_p", self.top_p, low=0.0, high=1.0, low_open=True, high_open=False)
        _check_int("top_k", self.top_k, low=-1)
        _check_int("max_tokens", self.max_tokens, low=1)
        if self.seed is not None:
            _check_int("seed", self.seed, low=0, high=2**63 - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest(f"ignore_eos must be true or false, got {self.ignore_eos!r}", field="ignore_eos")
        if not isinstance(self.stop_token_ids, tuple | list):
            raise InvalidRequest(
                f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}", field="stop_token_ids"
            )
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, low=0)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    def to_wire(self) -> dict[str, Any]:
        """As plain values, for MessagePack."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def _check_number(field: str, value: object, *, low: float, high: float, low_open: bool, high_open: bool) -> None:
    """Refuse `value` unless it is a number within the interval; NaN lies in none."""
    interval = f"{'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{field} must be a number in {interval}, got {value!r}", field=field)
    above = value > low if low_open else value >= low
    below = value < high if high_open else value <= high
    if not (above and below):
        raise InvalidRequest(f"{field} must lie in {interval}, got {value}", field=field, asked=value)


def _check_int(field: str, value: object, *, low: int, high: int = 2**31 - 1) -> None:
    """Refuse `value` unless it is a whole number within [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{field} must be a whole number, got {value!r}", field=field)
    if not low <= value <= high:
        raise InvalidRequest(f"{field} must lie in [{low}, {high}], got {value}", field=field, asked=value)


class FinishReason(StrEnum):
    STOP = "stop"  # the model's end token, or one of the caller's stop tokens
    LENGTH = "length"  # max_tokens, or the engine's max_model_len


@dataclass(slots=True)
class Request:
    """One request inside the engine. The scheduler alone changes it.

    `tokens` holds the prompt and what was generated; keys and values of the first `computed_tokens` of them are in the
    cache. In plain decode exactly one token is known and not computed yet.
    """

    id: RequestId
    tokens: list[int]
    prompt_tokens: int
    sampling: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    max_total_tokens: int  # the sequence ends here at the latest
    computed_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache at the first admission
    lost_tokens: Mapping[str, int] = field(default_factory=dict)  # cached once and computed again, by cause
    slot: int | None = None  # on the workers, while running
    preemptions: int = 0
    is_cautious: bool = False  # prefill goes a block at a time: there is no memory for more
    chain: TokenChain | None = None  # the names of its prefixes, computed once
    gallery: Gallery | None = None  # the images it was asked about

    @property
    def remaining_tokens(self) -> int:
        """Known and not computed yet: 1 in plain decode, more in prefill."""
        return len(self.tokens) - self.computed_tokens

    @property
    def is_decoding(self) -> bool:
        return self.remaining_tokens == 1 and len(self.tokens) > self.prompt_tokens

    def finish_reason(self, last_token: int) -> FinishReason | None:
        """Does the sequence end with `last_token`, the one just appended?"""
        if last_token in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.max_total_tokens else None
