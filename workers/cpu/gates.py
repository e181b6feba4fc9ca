"""Gates that modules of transformers compute with torch, each number by itself.

torch computes the last numbers of a tensor in another way than the others, and so a token's may depend on how many
tokens there are. That is told by the last bit alone, and only where a tensor's size is no multiple of a register's: as
of gates with one number for each head.
"""

import inspect
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...kernels.tokenwise import Activation
from ...kernels.tokenwise import cpu as native
from ...kernels.toolchain.cpp import KINDS

WHOLE_REGISTERS = 64
"""Numbers that any processor's registers divide, unrolled as torch does."""
ONE_THREADS = 16_384
"""Numbers that torch does not share among threads."""


def _softplus(x: Tensor) -> Tensor:
    """torch's, of so many numbers that there is no end."""
    flat = F.pad(x.flatten(), (0, -x.numel() % WHOLE_REGISTERS))
    return torch.cat([F.softplus(piece) for piece in flat.split(ONE_THREADS)])[: x.numel()].view(x.shape)


FUNCTIONS: dict[Callable[..., Any], Callable[[Tensor], Tensor]] = {
    torch.sigmoid: partial(native.activate, activation=Activation.SIGMOID),
    Tensor.sigmoid: partial(native.activate, activation=Activation.SIGMOID),
    F.silu: partial(native.activate, activation=Activation.SILU),
    F.softplus: _softplus,
}
MENTIONED = re.compile(r"\b(sigmoid|silu|softplus)\(")


class _EachByItself(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_itself, kwargs = FUNCTIONS.get(function), kwargs or {}
        if by_itself is not None and len(args) == 1 and not any(kwargs.values()) and args[0].dtype in KINDS:
            return by_itself(args[0])
        return function(*args, **kwargs)


def take_gates(model: nn.Module) -> None:
    """Of all modules on a CPU whose forward pass is still their own and mentions such a function."""
    for module in model.modules():
        if "forward" not in vars(module) and _mentions_any(type(module)):
            module.forward = _by_themselves(module.forward)


@cache
def _mentions_any(kind: type[nn.Module]) -> bool:
    """Whether transformers wrote it so. A model has hundreds of modules, of some twenty classes."""
    if not kind.__module__.startswith("transformers."):
        return False
    return MENTIONED.search(inspect.getsource(inspect.unwrap(kind.forward))) is not None


def _by_themselves(forward: Callable[..., Any]) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        with _EachByItself():
            return forward(*args, **kwargs)

    return compute
