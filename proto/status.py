"""What a running engine says about itself: the banner, `GetModelInfo` and the reports are all made of it."""

from enum import StrEnum
from typing import Any, NamedTuple

from ..proto.request import SamplingParams


class GroupInfo(NamedTuple):
    """One group of layers that share block ids."""

    kind: str  # "full", "sliding-1024", ...: the name of the layers' reach
    layers: tuple[int, ...]  # layer indices in the model
    block_tokens: int
    page_bytes: int  # from one block to the next in a buffer, on one rank


class EngineLoad(NamedTuple):
    """How busy an engine is at this moment, and what it has done since its start."""

    running: int  # requests
    waiting: int
    free_blocks: int  # large pages that any group could have, those of known prefixes included
    kept_blocks: int  # of them, those that hold known prefixes
    num_blocks: int
    steps: int
    prompt_tokens: int
    cached_tokens: int  # of them, found in the prefix cache
    generated_tokens: int
    finished_requests: int
    aborted_requests: int
    expired_requests: int
    preemptions: int
    rebuilds: int = 0  # times that the workers were lost and came back
    refused_requests: int = 0  # because more came than can be served

    @property
    def pool_use(self) -> float:
        """Share of the pool that requests hold, from 0 to 1."""
        return 1 - self.free_blocks / self.num_blocks


class Probe(NamedTuple):
    """What a request with a certain prompt would meet, asked without sending it."""

    cached_tokens: int  # of the prompt, in the prefix cache
    queued_tokens: int  # of requests that wait
    running: int  # requests
    is_leaving: bool  # the engine ends when its requests have; send no others
    waiting: int = 0  # requests
    pool_use: float = 0.0  # share of the pool that requests hold, from 0 to 1
    tokens_per_s: float | None = None  # drawn of late; None: the asker may not know, or nothing was


class PreparedEnd(StrEnum):
    """What became of a prompt that was to be prepared."""

    COMPUTED = "computed"
    FOUND = "found"  # it was cached already, but for a few tokens
    NO_ROOM = "no_room"  # without the eviction of what is worth more
    REFUSED = "refused"  # it could never be asked for
    FORGOTTEN = "forgotten"  # others came that were wanted, too, or the workers were lost


class PreparedPrompt(NamedTuple):
    """What became of one."""

    end: str  # a `PreparedEnd`
    found_tokens: int  # that were cached before
    computed_tokens: int


class PreparedMetrics(NamedTuple):
    """Of prompts that no client had asked for yet, since the start."""

    ends: dict[str, int]  # by a `PreparedEnd`
    tokens: int  # that were computed
    stops: int  # times that one gave way to a request


class GroupState(NamedTuple):
    """Blocks of one group at this moment."""

    kind: str  # as in `GroupInfo`
    block_tokens: int
    held_blocks: int  # by requests, or by other owners
    known_blocks: int  # that carry a known prefix, held or not


class CacheState(NamedTuple):
    """Where the pool's large pages are. `held_pages + kept_pages + blank_pages` are all there are."""

    held_pages: int
    kept_pages: int  # free, and still good for prefixes
    blank_pages: int
    requests: int  # that hold blocks
    groups: tuple[GroupState, ...]


class SnapshotQuery(NamedTuple):
    """What is to be in a snapshot."""

    since_step: int = 0  # steps after this one
    with_pool: bool = True
    with_tokens: bool = False  # of prompts and answers
    with_recount: bool = False  # every block counted anew from the tables, which takes a while


class EngineInfo(NamedTuple):
    """Fixed facts of a started engine. Packs as a MessagePack array."""

    model: str  # the checkpoint directory's name
    model_dir: str
    architecture: str
    dtype: str
    device: str
    tensor_parallel_size: int
    weight_bytes: int  # on one rank
    vocab_size: int
    max_model_len: int  # prompt and generated tokens of one request together
    max_num_seqs: int
    max_num_batched_tokens: int
    eos_token_ids: tuple[int, ...]
    strategy: str  # of the memory plan
    groups: tuple[GroupInfo, ...]
    num_blocks: int  # large pages that requests can have: the null page is not counted
    num_buffers: int
    kv_cache_bytes: int  # on one rank
    max_len_concurrency: float  # requests of max_model_len tokens that fit at once
    enable_prefix_caching: bool
    image_token_id: int | None = None  # stands for an image in a prompt; None: the model takes none
    max_images_per_request: int = 0
    notes: tuple[str, ...] = ()  # what was decided otherwise than asked or written, for people
    pool_request_len: int | None = None  # tokens of the longest request that the pool can hold; None: max_model_len
    sampling_defaults: tuple[tuple[str, float], ...] = ()  # for what a request does not say, by parameter
    lease_blocks: int = 0  # large pages that leases may hold, of `num_blocks`; no request counts on them

    def sampling(self, **asked: Any) -> SamplingParams:
        """What is asked, and for the rest what the checkpoint asks for. Raises `InvalidRequest`, naming the field."""
        return SamplingParams(**dict[str, Any](self.sampling_defaults) | asked)

    @property
    def longest_request(self) -> int:
        """Tokens, prompt and answer, of the longest request that is served."""
        return self.max_model_len if self.pool_request_len is None else self.pool_request_len

    @property
    def capacity_tokens(self) -> int:
        """Tokens held when the pool is full of requests of `max_model_len`."""
        return int(self.max_len_concurrency * self.max_model_len)
