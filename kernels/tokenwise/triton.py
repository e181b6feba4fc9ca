"""Token-wise operations on a GPU by our own kernels, one launch each. Arguments and results as in `reference.py`."""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tensors import dense
from ..toolchain import triton as gpu
from ..toolchain.triton import power_of_two, row_warps
from .protocol import Activation, Gating, Norm, Places, Rotary

BLOCK = 1024
"""Numbers of a program where rows may be cut: eight for each of its threads, which is one load of 16 bytes."""
WARPS = 4


def is_available() -> bool:
    return gpu.missing() is None


@functools.cache
def _kernels() -> Any:
    from . import triton_kernels  # here and not above: triton may be missing

    return triton_kernels


def _rows(x: Tensor) -> Tensor:
    """[rows,C] with the numbers of a row side by side. Rows may lie apart."""
    return dense(x).reshape(-1, x.shape[-1])


# -- norms and sums --------------------------------------------------------------------------------------------------


def normed(x: Tensor, norm: Norm, dtype: torch.dtype | None = None) -> Tensor:
    assert dtype in (None, x.dtype), "on a GPU all is of one dtype"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = _rows(x)
    _add_norm(rows, None, rows, out, None, norm, 1.0)
    return out


def add_norm(
    x: Tensor, added: Tensor, after: Norm | None = None, before: Norm | None = None, added_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = total if before is None else torch.empty_like(total)
    _add_norm(_rows(x), _rows(added), total, out, after, before, added_scale)
    return total, out


def _add_norm(
    x: Tensor, added: Tensor | None, total: Tensor, out: Tensor, after: Norm | None, before: Norm | None, scale: float
) -> None:
    rows, width = x.shape
    if rows == 0:
        return
    block = power_of_two(width)
    _kernels().add_norm[(rows,)](
        x, x if added is None else added, total, out, *(x if norm is None else norm.scale for norm in (after, before)),
        x.stride(0), 0 if added is None else added.stride(0),
        *(0.0 if norm is None else norm.eps for norm in (after, before)), scale,
        WIDTH=width, BLOCK=block, HAS_ADDED=added is not None, HAS_SCALE=scale != 1.0,
        HAS_AFTER=after is not None, HAS_BEFORE=before is not None,
        AFTER_ROUNDS_FIRST=after is not None and after.rounds_first,
        BEFORE_ROUNDS_FIRST=before is not None and before.rounds_first,
        AFTER_IS_CENTERED=after is not None and after.is_centered,
        BEFORE_IS_CENTERED=before is not None and before.is_centered,
        num_warps=row_warps(block),
    )  # fmt: skip


# -- activations -----------------------------------------------------------------------------------------------------


def activate(x: Tensor, activation: Activation) -> Tensor:
    rows, width = _rows(x), x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(rows):
        _kernels().activate[len(rows), -(-width // BLOCK)](
            rows, out, rows.stride(0), WIDTH=width, ACTIVATION=int(activation), BLOCK=BLOCK, num_warps=WARPS
        )
    return out


def gate(gate_up: Tensor, gating: Gating) -> Tensor:
    rows, width = _rows(gate_up), gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    if len(rows):
        _kernels().gate[len(rows), -(-width // BLOCK)](
            rows, out, rows.stride(0), gating.limit, gating.steepness, gating.added,
            WIDTH=width, BLOCK=BLOCK, **constants_of(gating), num_warps=WARPS,
        )  # fmt: skip
    return out


def constants_of(gating: Gating) -> dict[str, int | bool]:
    """What the kernel is compiled for. Named as in `triton_kernels.py`."""
    return {
        "ACTIVATION": int(gating.activation),
        "IS_STEEP": gating.steepness != 1.0,
        "CUTS": gating.limit < math.inf,
        "IS_CUT_AFTER": gating.is_cut_after,
        "BY_TURNS": gating.by_turns,
    }


# -- queries and keys ------------------------------------------------------------------------------------------------


class Turned(NamedTuple):
    """Which numbers of a head a launch rotates, and where their angles lie. Named as in `triton_kernels.py`."""

    TURNED: int
    TURNED_PADDED: int
    STEP: int
    PARTNER: int
    ANGLE_PARTNER: int
    REST_PADDED: int

    @classmethod
    def of(cls, rotary: Rotary, head_dim: int, rotary_dim: int, angles: int) -> "Turned":
        pairs = rotary_dim // 2 if rotary else 0
        step, partner = (2, 1) if rotary is Rotary.PAIRS else (1, pairs)
        angle_partner = 1 if rotary is Rotary.PAIRS else angles - pairs
        return cls(pairs, power_of_two(pairs), step, partner, angle_partner, power_of_two(head_dim - 2 * pairs))


def prepare_heads(
    qkv_TC: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    norms: tuple[Norm | None, Norm | None],
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    rotary: Rotary,
    rotary_dim: int,
    query_factor_T: Tensor | None = None,
    places: Places | None = None,
) -> None:
    """places: if given, keys are not changed in place but put into their pages, and with them the values."""
    assert qkv_TC.stride(1) == 1, "the numbers of a token lie side by side"
    tokens, width = qkv_TC.shape
    if tokens == 0:
        return
    cos, sin = qkv_TC, qkv_TC  # are not read where nothing is rotated
    if rotary:
        assert cos_TR is not None and sin_TR is not None, "rotary positions need angles"
        cos, sin = dense(cos_TR), dense(sin_TR)
    view, page, offset = places or (qkv_TC,) * 3
    value_dim = (width - (heads + kv_heads) * head_dim) // kv_heads if places else 0
    query_width, key_width = (0 if norm is None else len(norm.scale) for norm in norms)
    query_block, key_block = heads_block(heads, head_dim, query_width), heads_block(kv_heads, head_dim, key_width)
    _kernels().prepare_heads[tokens, -(-heads // query_block) - (-kv_heads // key_block)](
        qkv_TC, view, page, offset, *(qkv_TC if norm is None else norm.scale for norm in norms), cos, sin,
        qkv_TC if query_factor_T is None else query_factor_T,
        qkv_TC.stride(0), *(view.stride()[:3] if places else (0, 0, 0)), cos.stride(0), sin.stride(0),
        *(0.0 if norm is None else norm.eps for norm in norms),
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, QUERY_BLOCK=query_block, KEY_BLOCK=key_block,
        QUERY_NORM_WIDTH=query_width, KEY_NORM_WIDTH=key_width,
        QUERY_ROUNDS_FIRST=norms[0] is not None and norms[0].rounds_first,
        KEY_ROUNDS_FIRST=norms[1] is not None and norms[1].rounds_first,
        **Turned.of(rotary, head_dim, rotary_dim, cos.shape[-1])._asdict(),
        HAS_FACTOR=query_factor_T is not None,
        WRITES=places is not None, VALUE_DIM=value_dim, VALUE_PADDED=power_of_two(value_dim),
        num_warps=heads_warps(head_dim, query_block, key_block),
    )  # fmt: skip


def heads_warps(head_dim: int, query_block: int, key_block: int) -> int:
    return max(WARPS, row_warps(power_of_two(head_dim) * max(query_block, key_block)))


def heads_block(heads: int, head_dim: int, norm_width: int) -> int:
    """Heads of one program: all where they are normed together, else as many as give each thread a few numbers."""
    if norm_width > head_dim:
        return power_of_two(heads)
    return min(power_of_two(heads), max(1, BLOCK // power_of_two(head_dim)))
