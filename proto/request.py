"""What a caller asks for, from the edge to the scheduler: `GenerateRequest` and the values that it is made of."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from ..errors import InvalidRequest
from .step import MAX_BAD_TOKENS

MAX_BIASES = 1024

MAX_ANSWERS = 128
"""To one prompt."""

MAX_FORM_CHARS = 65_536
"""Of a schema, a regular expression, or all choices together."""

MAX_PRIORITY = 1000

MAX_TENANT_CHARS = 256

MAX_STOPS, MAX_STOP_CHARS = 16, 256

MAX_LOGPROBS = 20
"""Most alternatives per token a caller may ask for, as OpenAI's API has it; or all of them, by -1."""

MAX_ALL_LOGPROBS = 1_000_000
"""Most log-probabilities of a request that asks for all: tokens of the vocabulary times tokens told of."""

MAX_BORDERS = 16
"""Most lengths at which a prompt is said to part from others."""

MAX_KEEP_S = 7 * 86400.0
"""Most seconds for which a lease may be asked; the operator allows fewer."""

MAX_LEASE_CHARS = 64
"""Of the id of a lease."""

MAX_BAD = 256
"""Most rows of tokens that are never to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. Names and defaults are the field's usual ones.

    temperature     0 is greedy; otherwise logits are divided by it
    top_k           keep the k most probable tokens; 0 or -1 keeps all
    top_p           keep the fewest tokens whose probabilities sum to at least this
    seed            same seed, prompt and model: same tokens, whatever else runs beside. None: drawn per request
    max_tokens      most tokens to generate
    min_p           keep tokens at least this share as probable as the most probable one
    presence_penalty, frequency_penalty
                    taken from the logits of tokens the answer has; once, and once for each time
    repetition_penalty
                    logits of tokens in prompt and answer are divided by it, or multiplied if negative
    logit_bias      {token: what is added to its logit}
    stop            texts that end generation; the answer ends before them
    include_stop_str_in_output
                    the answer ends behind them instead
    min_tokens      tokens before which neither the model's end nor a stop ends generation
    stop_token_ids  tokens that end generation; the one that did is the last token returned, as with the model's own
    ignore_eos      go on after the model's own end token
    logprobs        None: none; n: log-probability of each chosen token and of the n most probable ones; -1: of all
    n               answers to the same prompt, which is computed once; the seed of answer i is seed + i
    prompt_logprobs  as logprobs, for the tokens of the prompt, which is computed anew then, not taken from the cache
    bad_token_ids   rows of tokens; none of them comes as a whole in the answer, unless its form leaves nothing else
    json_schema     the answer is JSON of this schema, as text or as a dict; {} is any JSON
    regex           the answer matches this regular expression as a whole
    choice          the answer is one of these texts
    lark            the answer follows this grammar, in the Lark that llguidance reads

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
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    stop: str | tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    n: int = 1
    prompt_logprobs: int | None = None
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()
    lark: str | None = None
    bad_token_ids: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self):
        # How tokens are drawn, and how many.
        _check_number("temperature", self.temperature, low=0.0, high=math.inf, low_open=False, high_open=True)
        _check_number("top_p", self.top_p, low=0.0, high=1.0, low_open=True, high_open=False)
        _check_int("top_k", self.top_k, low=-1)
        _check_int("max_tokens", self.max_tokens, low=1)
        if self.seed is not None:
            _check_int("seed", self.seed, low=0, high=2**63 - 1)
        _check_int("n", self.n, low=1, high=MAX_ANSWERS)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low=-1, high=MAX_LOGPROBS)
        # Where an answer ends.
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest(f"ignore_eos must be true or false, got {self.ignore_eos!r}", field="ignore_eos")
        if not isinstance(self.stop_token_ids, tuple | list):
            raise InvalidRequest(
                f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}", field="stop_token_ids"
            )
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, low=0)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        # Which tokens are made likelier or less likely.
        _check_number("min_p", self.min_p, low=0.0, high=1.0, low_open=False, high_open=False)
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name), low=-2.0, high=2.0, low_open=False, high_open=False)
        _check_number(
            "repetition_penalty", self.repetition_penalty, low=0.0, high=math.inf, low_open=True, high_open=True
        )
        # No answer has to be longer than it may be.
        _check_int("min_tokens", self.min_tokens, low=0)
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens} and max_tokens {self.max_tokens}; it cannot be more",
                field="min_tokens",
                asked=self.min_tokens,
                limit=self.max_tokens,
            )
        # Values of several forms become one.
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "bad_token_ids", _rows_of_tokens("bad_token_ids", self.bad_token_ids))
        if not isinstance(self.include_stop_str_in_output, bool):
            raise InvalidRequest(
                f"include_stop_str_in_output must be true or false, got {self.include_stop_str_in_output!r}",
                field="include_stop_str_in_output",
            )
        self._check_form()

    def _check_form(self) -> None:
        given = [name for name in ("json_schema", "regex", "choice", "lark") if getattr(self, name) not in (None, ())]
        if len(given) > 1:
            raise InvalidRequest(f"an answer has one form; {' and '.join(given)} are given", field=given[1])
        if isinstance(self.json_schema, Mapping):
            try:
                object.__setattr__(self, "json_schema", json.dumps(self.json_schema))
            except (TypeError, ValueError) as error:
                raise InvalidRequest(f"json_schema is no JSON: {error}", field="json_schema") from None
        for name in ("json_schema", "regex", "lark"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not 0 < len(text) <= MAX_FORM_CHARS):
                raise InvalidRequest(
                    f"{name} must be a text of 1 to {MAX_FORM_CHARS} characters, got {str(text)[:80]!r}", field=name
                )
        if not isinstance(self.choice, tuple | list) or not all(isinstance(t, str) and t for t in self.choice):
            raise InvalidRequest(
                f"choice must be a list of texts, none empty, got {self.choice!r}"[:300], field="choice"
            )
        object.__setattr__(self, "choice", tuple(self.choice))
        if sum(map(len, self.choice)) > MAX_FORM_CHARS:
            raise InvalidRequest(f"choice may have {MAX_FORM_CHARS} characters in all", field="choice")

    def check_all_logprobs(self, prompt_tokens: int, vocab_size: int) -> None:
        """Raises `InvalidRequest` where the log-probabilities of all tokens are asked for, and are too many."""
        for name, tokens in (("logprobs", self.n * self.max_tokens), ("prompt_logprobs", prompt_tokens)):
            if getattr(self, name) == -1 and tokens * vocab_size > MAX_ALL_LOGPROBS:
                raise InvalidRequest(
                    f"-1 asks for all {vocab_size} log-probabilities of each of {tokens} tokens; at most "
                    f"{MAX_ALL_LOGPROBS} are told, which is {MAX_ALL_LOGPROBS // vocab_size} tokens. Ask for fewer "
                    f"tokens, or for at most {MAX_LOGPROBS} of each",
                    field=name,
                    asked=tokens * vocab_size,
                    limit=MAX_ALL_LOGPROBS,
                )

    @property
    def form(self) -> tuple[str, str] | None:
        """The kind and the text of the form that the answer must have, if any."""
        if self.choice:
            return "choice", json.dumps(self.choice)
        if self.regex is not None:
            return "regex", self.regex
        if self.lark is not None:
            return "lark", self.lark
        return ("json_schema", str(self.json_schema)) if self.json_schema is not None else None

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs, in the order of tokens."""
        return self.logit_bias  # type: ignore[return-value]  pairs since __post_init__

    @property
    def stops(self) -> tuple[str, ...]:
        """`stop` as texts."""
        return self.stop  # type: ignore[return-value]  a tuple since __post_init__


def _bias_pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    """{token: bias}, or pairs of them, as pairs in the order of tokens."""
    try:
        pairs = dict(bias)
    except (TypeError, ValueError):
        raise InvalidRequest(f"logit_bias must map token ids to numbers, got {bias!r}", field="logit_bias") from None
    if len(pairs) > MAX_BIASES:
        raise InvalidRequest(
            f"logit_bias has {len(pairs)} tokens; the limit is {MAX_BIASES}",
            field="logit_bias",
            asked=len(pairs),
            limit=MAX_BIASES,
        )
    for token, value in pairs.items():
        _check_int("logit_bias", token, low=0)
        _check_number("logit_bias", value, low=-100.0, high=100.0, low_open=False, high_open=False)
    return tuple(sorted((token, float(value)) for token, value in pairs.items()))


def _rows_of_tokens(field: str, rows: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(rows, tuple | list) or not all(isinstance(row, tuple | list) for row in rows):
        raise InvalidRequest(f"{field} must be a list of lists of token ids, got {rows!r}"[:300], field=field)
    if len(rows) > MAX_BAD or any(not 0 < len(row) <= MAX_BAD_TOKENS for row in rows):
        raise InvalidRequest(
            f"{field} may have up to {MAX_BAD} rows of 1 to {MAX_BAD_TOKENS} tokens; it has {len(rows)}, the longest "
            f"of {max(map(len, rows))} and the shortest of {min(map(len, rows))}",
            field=field,
        )
    for row in rows:
        for token in row:
            _check_int(field, token, low=0)
    return tuple(map(tuple, rows))


def _stop_strings(stop: Any) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, tuple | list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"stop must be a text or a list of texts, got {stop!r}", field="stop")
    if len(texts) > MAX_STOPS or any(not 0 < len(text) <= MAX_STOP_CHARS for text in texts):
        raise InvalidRequest(
            f"stop may have up to {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters; it has {len(texts)}, the "
            f"longest of {max(map(len, texts))} and the shortest of {min(map(len, texts))}",
            field="stop",
        )
    return tuple(texts)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How urgent a request is, on whose behalf it comes, and what is known of its prompt.

    priority   smaller comes first; waiting makes up for it (see `scheduling/fair_queue.py`)
    tenant     who shares the machine fairly with others; all requests without one are one tenant's
    timeout_s  seconds from now after which the answer is worth nothing; None: it may take as long as it takes
    trace      the `traceparent` of a traced request; empty: it is not traced
    salt       prefixes are reused among requests of the same salt only
    borders    lengths of the prompt, in tokens, at which others are likely to part from it: states are saved there
    keep_s     seconds for which the conversation's cache is to be kept after the answer; None: no lease is asked for
    keep_required  the request is worth nothing without that: it is refused when there is no room for a lease
    lease      the id of one that this request takes over; one that holds the beginning of its prompt needs no id

    Raises `InvalidRequest`, naming the field, when a value has the wrong type or range.
    """

    priority: int = 0
    tenant: str = ""
    timeout_s: float | None = None
    trace: str = ""
    salt: str = ""
    borders: tuple[int, ...] = ()
    keep_s: float | None = None
    keep_required: bool = False
    lease: str = ""

    def __post_init__(self):
        _check_int("priority", self.priority, low=-MAX_PRIORITY, high=MAX_PRIORITY)
        for name, value in (("tenant", self.tenant), ("salt", self.salt)):
            if not isinstance(value, str) or len(value) > MAX_TENANT_CHARS:
                raise InvalidRequest(
                    f"{name} must be a text of up to {MAX_TENANT_CHARS} characters, got {str(value)[:80]!r}",
                    field=name,
                )
        if self.timeout_s is not None:
            _check_number("timeout_s", self.timeout_s, low=0.0, high=math.inf, low_open=True, high_open=True)
        if not isinstance(self.borders, tuple | list) or len(self.borders) > MAX_BORDERS:
            raise InvalidRequest(
                f"borders must be a list of at most {MAX_BORDERS} lengths in tokens, got {str(self.borders)[:80]}",
                field="borders",
            )
        for border in self.borders:
            _check_int("borders", border, low=1)
        object.__setattr__(self, "borders", tuple(self.borders))
        self._check_lease()

    def _check_lease(self) -> None:
        if self.keep_s is not None:
            _check_number("keep_s", self.keep_s, low=0.0, high=MAX_KEEP_S, low_open=True, high_open=False)
        if not isinstance(self.keep_required, bool) or (self.keep_required and self.keep_s is None):
            raise InvalidRequest(
                f"keep_required must be true or false, and goes with keep_s; got {self.keep_required!r}",
                field="keep_required",
            )
        if not isinstance(self.lease, str) or len(self.lease) > MAX_LEASE_CHARS:
            raise InvalidRequest(
                f"lease must be the id of a lease, of up to {MAX_LEASE_CHARS} characters, got {str(self.lease)[:80]!r}",
                field="lease",
            )


USUAL_OPTIONS = RequestOptions()


class Image(NamedTuple):
    """An image as it came, and the tokens it becomes for layers that attend to it."""

    data: bytes
    tokens: int


class GenerateRequest(NamedTuple):
    """One prompt and what is wanted of it, as it travels from a front end to an engine."""

    tokens: Sequence[
        Any
    ]  # the prompt and, of an answer that began elsewhere, what is known of it; the engine judges them
    sampling: SamplingParams
    images: Sequence[Image]
    options: RequestOptions
    stream_interval_s: float  # from one delta of an answer to its next; 0: each token at once; infinite: one for all
    prompt_tokens: int  # of `tokens`
    is_known: bool  # it was taken before, by an engine that is lost
