"""What the runner says to an attention backend, and what a backend must do.

Suffixes name the axes of a tensor:
    T packed tokens    R rows (one per request)    H query heads    K kv heads    D head size    P pages of a row

    once per group and step    meta = backend.prepare(batch, device)
    once per layer             backend.write(kv_view, k, v, meta), then backend.attend(q, kv_view, params, meta, out)

`kv_view` is always [pages, tokens, K, Dk+Dv], token-major with key and value fused on the last axis, strided over the
raw buffer: its page stride may exceed its content, because a page is padded or because several layers live in it.
A latent is all key: [pages, tokens, 1, Dk], and its first numbers are the value too (`values_of`).
Pages change owner and dtype, so bytes that are no live token of this very row may be NaN, also in page 0 (the null
page). A mask does not hide NaN (0 * NaN is NaN): a backend must not let such bytes into its arithmetic.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from ..transfer import Transfer
from .biases import Biases
from .capabilities import Capabilities
from .held_tables import Held


@dataclass(frozen=True, slots=True)
class LayerParams:
    """Constant facts of one layer.

    scale    multiplies q·k
    softcap  if given, logits become softcap * tanh(logits / softcap)
    sinks    if given, [H]: one learned logit per query head that joins the softmax's denominator and has no value
    slopes   if given, [H] float32: a logit falls by so much for each token between the key and the query (ALiBi)
    biases   if given, what is added to the logits of the nearest keys: see `Biases`
    latent_values  if given, pages hold one latent per token, whose first so many numbers are its value
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    latent_values: int | None = None
    slopes: Tensor | None = None
    biases: Biases | None = None


def values_of(kv: Tensor, key_dim: int, params: LayerParams) -> Tensor:
    """The values among the last axis of what pages hold: behind the keys, or the beginning of a latent."""
    return kv[..., key_dim:] if params.latent_values is None else kv[..., : params.latent_values]


@dataclass(frozen=True, slots=True, eq=False)
class GroupBatch:
    """What each row computes in this step, for all layers of one group. Host memory: reading it waits for no GPU.

    Shapes  block_table [R,P]  query_lens [R]  kv_lens [R], all int32
    Units   lengths in tokens; row r asks for positions kv_lens[r] - query_lens[r] .. kv_lens[r] - 1, so its new tokens
            are part of kv_lens. window_tokens counts visible tokens, the query itself included; None sees all.
            No query looks across a multiple of chunk_tokens.
            Without is_causal the keys are those of an encoder: every query sees all kv_lens of them, new tokens are no
            part of them, and nothing is written.
    The packed tokens lie in row order. Blocks no query can see may be 0, and so may the tail of a table row.
    With `held`, block_table is the host's whole table, and row r has row slots[r] of it: where a backend can take that.
    """

    block_table: np.ndarray
    query_lens: np.ndarray
    kv_lens: np.ndarray
    block_tokens: int
    window_tokens: int | None = None
    chunk_tokens: int | None = None
    is_causal: bool = True
    held: Held | None = None

    def __post_init__(self) -> None:
        pages, rows = self.block_table.shape[1], self.block_table if self.held is None else self.held.slots
        assert self.query_lens.shape == self.kv_lens.shape == (len(rows),), "one length per row of the block table"
        assert not self.is_causal or (self.query_lens <= self.kv_lens).all(), "kv_lens counts the new tokens too"
        assert self.is_causal or self.window_tokens is self.chunk_tokens is None, "an encoder's keys have no order"
        assert self.kv_lens.max(initial=0) <= pages * self.block_tokens, "a row is longer than its block table"

    def first_token(self) -> np.ndarray:
        """[R] index of each row's first packed token."""
        return np.cumsum(self.query_lens, dtype=np.int64) - self.query_lens

    def token_places(self) -> tuple[np.ndarray, np.ndarray]:
        """[T] page of each new token, and [T] its offset in that page. int64: page * stride overflows int32."""
        if not self.is_causal:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        row = np.repeat(np.arange(len(self.query_lens)), self.query_lens)
        position = np.arange(len(row)) + (self.kv_lens - self.query_lens - self.first_token())[row]
        block, offset = np.divmod(position, self.block_tokens)
        own = row if self.held is None else self.held.slots[row]
        return self.block_table[own, block].astype(np.int64), offset.astype(np.int64)

    def oldest_visible(self, position: Any) -> Any:
        """First position that the query at `position` (an int or an array) sees."""
        if self.chunk_tokens is not None:
            return position - position % self.chunk_tokens
        return position * 0 if self.window_tokens is None else np.maximum(0, position - self.window_tokens + 1)


@dataclass(frozen=True, slots=True, eq=False)
class GroupMeta:
    """What `prepare` worked out. `plan` is the backend's own; no other code looks inside."""

    token_page: Tensor  # [T] int64
    token_offset: Tensor  # [T] int64
    plan: Any


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """An array on the device, in the order of its stream. It does not wait, so the array must not change any more."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class Backend(Protocol):
    """Paged attention on one kind of machine. Holds scratch memory at most: one instance per thread."""

    name: ClassVar[str]
    by_name_only: ClassVar[bool]  # never chosen unasked
    capabilities: ClassVar[Capabilities]

    @classmethod
    def lacks(cls) -> str | None:
        """What this machine lacks for it, in words; None if nothing. May compile, and is asked before it is chosen."""

    def prepare(self, batch: GroupBatch, device: torch.device) -> GroupMeta:
        """Work out all that layers of the group share: where tokens go, what is gathered, what each query sees."""
        ...

    def frame(self, batch: GroupBatch, device: torch.device) -> GroupMeta | None:
        """Metadata for steps of the shape of `batch`, whose tensors stay where they are: `write` and `attend` neither
        wait for the device nor look at what they hold, and can be recorded. Undefined before `refill`. None: there is
        no such thing. Each row has one query, unless there are `mixed_frames`."""

    def narrow(self, frame: GroupMeta, rows: int, tokens: int | None = None) -> GroupMeta:
        """A frame of fewer rows and tokens in the same memory, of a backend with `wide_frames`."""
        ...

    def refill(self, frame: GroupMeta, batch: GroupBatch, transfer: Transfer) -> bool:
        """Have another step of as many rows put into a frame; of `wide_frames`, the table may be narrower, and rows and
        tokens fewer: others go into the null page, and get no result; nor do rows without keys, of an encoder.
        False: the step does not fit, nothing is put."""
        ...

    def write(self, kv_view: Tensor, k_TKD: Tensor, v_TKD: Tensor, meta: GroupMeta) -> None:
        """Put this step's keys [T,K,Dk] and values [T,K,Dv], of latents [T,K,0], into their pages; touch no other."""

    def attend(self, q_THD: Tensor, kv_view: Tensor, params: LayerParams, meta: GroupMeta, out_THD: Tensor) -> None:
        """Causal attention of the new tokens over their pages, which already hold the new tokens themselves.

        Shapes  q [T,H,Dk]  kv_view [pages,tokens,K,Dk+Dv]  out [T,H,Dv], H a multiple of K, all of one dtype
        Result  fills out, which may hold anything; softmax and sums in float32 or wider
        """
