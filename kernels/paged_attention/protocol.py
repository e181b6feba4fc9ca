"""What every paged-attention backend is given, and what it must do.

Shapes  T tokens of the step (packed, all rows), R rows (requests), H query heads, K kv heads, D head size of keys,
        Dv head size of values, P pages, B tokens per page
        kv_view [P, B, K, D+Dv]: strided over a raw buffer, last stride 1; the page stride may exceed the content
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerParams:
    """Constants of one layer."""

    scale: float
    softcap: float | None = None  # scores become c * tanh(s / c), before the mask
    sinks: Tensor | None = None  # [H]: a learned logit per head that only enlarges the softmax denominator


@dataclass(frozen=True, slots=True, eq=False)
class GroupBatch:
    """The rows of one step as one group of layers sees them. Host arrays.

    Rows with one query come first. A row's queries stand at positions kv_len - query_len .. kv_len - 1. Entries of the
    block table before a row's window may name any page: nothing there is read.
    """

    block_table: np.ndarray  # [R, pages] int32
    query_lens: np.ndarray  # [R] int32; 0 is allowed
    kv_lens: np.ndarray  # [R] int32: tokens of the sequence, this step's included
    block_tokens: int
    window_tokens: int | None  # visible tokens, the query included; None: all


@dataclass(frozen=True, slots=True)
class Needs:
    """What the layers of a model ask of a backend."""

    dtype: torch.dtype
    key_dim: int
    value_dim: int
    window: bool = False
    softcap: bool = False
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do."""

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int | None = None
    window: bool = True
    softcap: bool = True
    sinks: bool = True

    def refusal(self, needs: Needs, device: torch.device) -> str | None:
        """Why these needs are not covered; None: they are."""
        if device.type not in self.devices:
            return f"runs on {', '.join(self.devices)}, not on {device.type}"
        if needs.dtype not in self.dtypes:
            return f"takes {', '.join(map(str, self.dtypes))}, not {needs.dtype}"
        largest = max(needs.key_dim, needs.value_dim)
        if self.max_head_dim is not None and largest > self.max_head_dim:
            return f"takes heads of up to {self.max_head_dim} numbers, not {largest}"
        for feature in ("window", "softcap", "sinks"):
            if getattr(needs, feature) and not getattr(self, feature):
                return f"has no {feature}"
        return None


class Backend(Protocol):
    """One way to write to pages and to attend over them."""

    name: str
    capabilities: Capabilities

    def prepare(self, batch: GroupBatch, device: torch.device) -> Any:
        """Everything that is the same for all layers of the group, once per step. Waits for no device."""
        ...

    def write(self, kv_view: Tensor, k_TKD: Tensor, v_TKD: Tensor, meta: Any) -> None:
        """Store the step's keys and values in the slots of their tokens; nothing else is touched."""
        ...

    def attend(self, q_THD: Tensor, kv_view: Tensor, params: LayerParams, meta: Any, out_THD: Tensor) -> None:
        """Attention of every query over its visible keys, into `out_THD` [T, H, Dv].

        Softmax and sums in float32 at least. Bytes of tokens a query does not see may be NaN and must not matter.
        """
        ...
