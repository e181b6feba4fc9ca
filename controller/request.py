"""What the scheduler knows of a running request."""

import math
from dataclasses import dataclass, field
from typing import Any

from ..kvcache.ids import RequestId
from ..kvcache.lookup import Hit
from ..kvcache.misses import Miss
from ..kvcache.prefix import TokenChain
from ..proto.leases import LeaseReceipt
from ..proto.request import USUAL_OPTIONS, FinishReason, RequestOptions, SamplingParams
from ..proto.step import Logprobs, PromptLogprobs
from .images import Gallery


@dataclass(frozen=True, slots=True)
class Swapped:
    """What a preempted request has in host memory."""

    tokens: int  # that it had computed
    places: tuple[tuple[int, int], ...]  # (group, place in its table) of each block
    tickets: tuple[int, ...]  # of each block
    bytes: int  # on each worker


@dataclass(slots=True, eq=False)
class Request:
    """One answer to one prompt inside the engine. The scheduler alone changes it.

    `tokens` holds the prompt and what was generated. Keys and values of the first `computed_tokens` of them are in the
    cache, or will be when the steps under way have run. One more token may be `pending`: a step under way draws it, the
    workers have it for the next step, and we learn it later. In plain decode exactly one token is not computed yet. It
    is known or pending.

    Further answers to the same prompt are its `forks`: they wait until the prompt is computed but for its last token,
    and go on from there with the same blocks.
    """

    id: RequestId
    tokens: list[int]
    prompt_tokens: int
    sampling: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    max_total_tokens: int  # the sequence ends here at the latest
    options: RequestOptions = USUAL_OPTIONS
    subscriber: Any = None  # is sent its tokens; see `delivery.py`
    arrival_s: float = 0.0
    admitted_s: float = 0.0  # for the first time
    first_token_s: float = 0.0
    deadline_s: float = math.inf
    seniority: tuple[float, int] | None = None  # from its first admission on: the smaller, the later it is preempted
    is_live: bool = True  # neither finished nor given up
    computed_tokens: int = 0
    pending: int = 0  # tokens that a step under way draws
    quiet_until: int = 0  # below this length it needs nothing of the cache manager
    cached_tokens: int = 0  # of the prompt, found in the prefix cache at the first admission
    misses: tuple[Miss, ...] = ()  # its other tokens, by cause
    slot: int | None = None  # on the workers, while running
    preemptions: int = 0
    losses: int = 0  # times in a row that the workers were lost while it ran, without a token of it in between
    tokens_at_loss: int = 0  # that it had at the last of them
    first_loss_s: float = 0.0  # when the first of them was
    is_prepared: bool = False  # no client has asked for it yet: see `scheduling/preparation.py`
    is_cautious: bool = False  # it is computed a block at a time: larger chunks did not fit
    chain: TokenChain | None = None  # the names of its prefixes, computed once
    hit: Hit | None = None  # what its latest lookup found
    gallery: Gallery | None = None  # the images it was asked about
    forks: list["Request"] = field(default_factory=list)
    parent: "Request | None" = None  # whose prompt it waits for
    swapped: Swapped | None = None  # its blocks, in host memory
    lease: LeaseReceipt | None = None  # what became of the wish to keep its cache
    prompt_logprobs: list[Logprobs] | None = None  # from the second token on; None: not asked for

    @property
    def queue_s(self) -> float:
        """How long it waited for its turn; 0.0 while it waits."""
        return max(0.0, self.admitted_s - self.arrival_s)

    @property
    def remaining_tokens(self) -> int:
        """Tokens that are there and not computed yet: 1 in plain decode, more in prefill."""
        return len(self.tokens) + self.pending - self.computed_tokens

    @property
    def is_decoding(self) -> bool:
        return self.remaining_tokens == 1 and len(self.tokens) + self.pending > self.prompt_tokens

    @property
    def has_just_begun(self) -> bool:
        """Its latest token is the first of its answer."""
        return len(self.tokens) == self.prompt_tokens + 1

    @property
    def is_at_fork(self) -> bool:
        """All of its prompt is computed but the last token, and it has forks that go on from there."""
        return bool(self.forks) and self.computed_tokens == self.prompt_tokens - 1

    @property
    def lacks_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_tokens - 1

    def end_soon(self) -> None:
        """It ends with the token under way, or else with the next one: its text is complete."""
        self.max_total_tokens = min(self.max_total_tokens, len(self.tokens) + max(1, self.pending))

    def enter_prompt_logprobs(self, entry: PromptLogprobs) -> None:
        """Enter the rows that are new. A request that was preempted computes the beginning of its prompt again."""
        known = self.prompt_logprobs
        if known is not None and entry.start <= len(known) + 1:
            known += entry.rows[len(known) + 1 - entry.start :]

    def finish_reason(self, last_token: int) -> FinishReason | None:
        """Does the sequence end with `last_token`, the one just appended?"""
        if last_token in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= self.max_total_tokens else None
