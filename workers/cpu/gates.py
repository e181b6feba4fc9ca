"""Gates that modules of transformers compute with torch, each number by itself.

torch computes the last numbers of a tensor in another way than the others, and so a token's may depend on how many
tokens there are. That is told by the last bit alone, and only where a tensor's size is no multiple of a register's: as
of gates with one number for each head.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...kernels.tokenwise import Activation
from ...kernels.tokenwise import cpu as native
from ...kernels.toolchain.cpp import KINDS

FUNCTIONS: dict[Callable[..., Any], Activation] = {
    torch.sigmoid: Activation.SIGMOID,
    Tensor.sigmoid: Activation.SIGMOID,
    F.silu: Activation.SILU,
}
MENTIONED = re.compile(r"\bsigmoid\(|\bsilu\(")


class _EachByItself(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        activation, kwargs = FUNCTIONS.get(function), kwargs or {}
        if activation is not None and len(args) == 1 and not any(kwargs.values()) and args[0].dtype in KINDS:
            return native.activate(args[0], activation)
        return function(*args, **kwargs)


def take_gates(model: nn.Module) -> None:
    """Of all modules on a CPU whose forward pass is still their own and mentions such a function."""
    for module in model.modules():
        if type(module).__module__.startswith("transformers.") and "forward" not in vars(module):
            forward = inspect.unwrap(type(module).forward)
            if MENTIONED.search(inspect.getsource(forward)):
                module.forward = _by_themselves(module.forward)


def _by_themselves(forward: Callable[..., Any]) -> Callable[..., Any]:
    def compute(*args: Any, **kwargs: Any) -> Any:
        with _EachByItself():
            return forward(*args, **kwargs)

    return compute
