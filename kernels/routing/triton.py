"""On a GPU: one launch, a program for each token."""

import functools
from typing import Any

import torch
from torch import Tensor

from ..tensors import dense
from ..toolchain import triton as gpu
from ..toolchain.triton import power_of_two
from .protocol import Routing, check

WARPS = 1
"""Of a program: what its threads find out together passes no shared memory."""


def is_available() -> bool:
    return gpu.missing() is None


@functools.cache
def _kernels() -> Any:
    from . import triton_kernels  # here and not above: triton may be missing

    return triton_kernels


def route(logits_TE: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """As `Operations.route`."""
    check(logits_TE, routing)
    logits_TE = dense(logits_TE)
    tokens, experts = logits_TE.shape
    made = functools.partial(torch.empty, (tokens, routing.most), device=logits_TE.device)
    shares_TK, experts_TK = made(dtype=routing.dtype or logits_TE.dtype), made(dtype=torch.int64)
    if tokens:
        _kernels().route[(tokens,)](
            logits_TE, *(logits_TE if x is None else x for x in (routing.bias_E, routing.scale_E)),
            experts_TK, shares_TK, logits_TE.stride(0), routing.least or 0.0, routing.scale,
            **constants_of(routing, experts), num_warps=WARPS,
        )  # fmt: skip
    return shares_TK, experts_TK


def constants_of(routing: Routing, experts: int) -> dict[str, int | bool]:
    """What the kernel is compiled for. Named as in `triton_kernels.py`."""
    group = experts // routing.groups
    return {
        "GROUPS": routing.groups,
        "GROUPS_PADDED": power_of_two(routing.groups),
        "GROUP": group,
        "GROUP_PADDED": power_of_two(group),
        "MOST_GROUPS": routing.most_groups,
        "MOST": routing.most,
        "MOST_PADDED": power_of_two(routing.most),
        "SCORING": int(routing.scoring),
        "IS_OF_CHOSEN": routing.is_of_chosen,
        "ROUNDS": routing.rounds,
        "NORMALIZES": routing.least is not None,
        "HAS_BIAS": routing.bias_E is not None,
        "HAS_EXPERT_SCALE": routing.scale_E is not None,
    }
