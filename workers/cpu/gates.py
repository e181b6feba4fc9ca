"""Gates that modules of transformers compute with torch, each number by itself.

torch computes the last numbers of a tensor in another way than the others, and so a token's may depend on how many
tokens there are. That is told by the last bit alone, and only where a tensor's size is no multiple of a register's: as
of gates with one number for each head.
"""

import inspect
import re
from collections.abc import Callable
from functools import cache, partial
from types import CellType, FunctionType, MethodType
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
MENTIONED = re.compile(r"([\w.]*)\b(?:sigmoid|silu|softplus)\(")


def _by_itself(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    ours = FUNCTIONS.get(function)
    if ours is not None and len(args) == 1 and not any(kwargs.values()) and args[0].dtype in KINDS:
        return ours(args[0])
    return function(*args, **kwargs)


class _Instead:
    """A module of torch's, in which some names have other meanings."""

    def __init__(self, module: Any, **meanings: Any):
        self._module = module
        vars(self).update(meanings)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


SIGMOID = partial(_by_itself, torch.sigmoid)
OUR_F = _Instead(F, sigmoid=SIGMOID, silu=partial(_by_itself, F.silu), softplus=partial(_by_itself, F.softplus))
OUR_NN = _Instead(nn, functional=OUR_F)
OUR_TORCH = _Instead(torch, sigmoid=SIGMOID, nn=OUR_NN)
MODULES = {"torch": (torch, OUR_TORCH), "nn": (nn, OUR_NN), "F": (F, OUR_F)}
"""Names under which transformers imports torch's modules: theirs, and ours."""

CALLS = {"torch.", "F.", "nn.functional.", "torch.nn.functional."}
"""What stands before a function that is found in one of these."""


class _EachByItself(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _by_itself(function, *args, **(kwargs or {}))


def take_gates(model: nn.Module) -> None:
    """Of all modules on a CPU whose forward pass is still their own and mentions such a function."""
    for module in model.modules():
        if "forward" in vars(module) or not _mentioned(type(module)):
            continue
        forward = _with_our_names(type(module))
        module.forward = _watched(module.forward) if forward is None else MethodType(forward, module)


@cache
def _mentioned(kind: type[nn.Module]) -> frozenset[str]:
    """What stands before each such function, if transformers wrote it so. A model has hundreds of modules, of some
    twenty classes."""
    if not kind.__module__.startswith("transformers."):
        return frozenset()
    return frozenset(MENTIONED.findall(inspect.getsource(inspect.unwrap(kind.forward))))


@cache
def _with_our_names(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """Its forward pass with our functions under torch's names. None: it asks tensors themselves."""
    names = getattr(inspect.unwrap(kind.forward), "__globals__", {})
    ours = {name: instead for name, (module, instead) in MODULES.items() if names.get(name) is module}
    if not _mentioned(kind) <= {call for call in CALLS if call.partition(".")[0] in ours}:
        return None
    return _copy(kind.forward, ours)


def _copy(function: Any, names: dict[str, Any]) -> Callable[..., Any] | None:
    """Of a function, and of what wraps it, in which some names mean something else. None: it is wrapped otherwise."""
    if not isinstance(function, FunctionType):
        return None
    wrapped, known, closure = getattr(function, "__wrapped__", None), function.__globals__, function.__closure__
    if wrapped is None:
        known = known | names
    else:
        inner = _copy(wrapped, names)
        if inner is None or [cell.cell_contents for cell in closure or ()].count(wrapped) != 1:
            return None
        closure = tuple(CellType(inner) if cell.cell_contents is wrapped else cell for cell in closure or ())
    copy = FunctionType(function.__code__, known, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _watched(forward: Callable[..., Any]) -> Callable[..., Any]:
    """With a look at every function of torch that is called, which takes a while."""

    def compute(*args: Any, **kwargs: Any) -> Any:
        with _EachByItself():
            return forward(*args, **kwargs)

    return compute
