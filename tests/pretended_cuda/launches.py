"""Launches of Triton kernels: judged as a GPU would, then run by Triton's interpreter."""

import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

from intarsia.tests import quick_interpreter

from .device import current_device
from .faults import MixedDevices, MixedDtypes, OutsideMemory
from .ledger import Kind
from .places import place
from .tensors import DeviceTensor, on_host

OF_ONE_DTYPE = {"q_ptr", "key_ptr", "value_ptr", "pages_ptr", "out_ptr", "sinks_ptr"}
"""Arguments of attention's kernels that are multiplied with each other, or lie in the same pages. Sinks may be in
float32 as well, as DeepSeek-V4 has them."""

_one_at_a_time = threading.Lock()  # the interpreter keeps the place of a program in a global variable

_taken_over: set[Any] = set()
"""Functions for which Triton's language was taken over by the interpreter in this launch."""

_memory: list[tuple[int, int]] = []
"""Of the tensors of this launch, from and to: all that it may read and write."""

_interpret = InterpretedFunction.run
_load, _store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store


def _launch(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
    at = place()
    named = {**dict(zip(kernel.arg_names, args)), **kwargs}
    _judge(kernel, named, at)

    def run() -> None:
        host_args = [on_host(value) for value in args]
        host_kwargs = {name: on_host(value) for name, value in kwargs.items()}
        with _one_at_a_time, _disable_current_modes():
            _taken_over.clear()
            _memory[:] = _memory_of(host_args, host_kwargs)
            try:
                _interpret(kernel, *host_args, grid=grid, warmup=warmup, **host_kwargs)
            except OutsideMemory as fault:
                raise OutsideMemory(f"the launch of '{kernel.__name__}' at {at} {fault}") from None

    tensors = [value.host for value in named.values() if isinstance(value, DeviceTensor)]
    current_device().compute(Kind.LAUNCH, run, tensors, at)


def _judge(kernel: Any, named: dict[str, Any], at: str) -> None:
    for number, (name, value) in enumerate(named.items()):
        if isinstance(value, Tensor) and not isinstance(value, DeviceTensor):
            raise MixedDevices(
                f"argument {number} of the launch of '{kernel.__name__}' at {at}, {name}, lies in host memory"
            )
        if isinstance(value, DeviceTensor) and value.owner is not current_device():
            raise MixedDevices(f"{name} of the launch of '{kernel.__name__}' at {at} is of another rank")
    if kernel.fn.__module__.endswith("paged_attention.triton_kernels"):
        kinds = {name: value.dtype for name, value in named.items() if name in OF_ONE_DTYPE}
        if kinds.get("sinks_ptr") == torch.float32:
            del kinds["sinks_ptr"]
        if len(set(kinds.values())) > 1:
            found = ", ".join(f"{name} {dtype}" for name, dtype in kinds.items())
            raise MixedDtypes(f"the launch of '{kernel.__name__}' at {at} mixes kinds of numbers: {found}")


def _memory_of(args: list[Any], kwargs: dict[str, Any]) -> list[tuple[int, int]]:
    storages = [value.untyped_storage() for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]


def _checked(pointers: Any, mask: Any, how: str) -> None:
    """What lanes that are not masked touch lies in one of the tensors, wherever values come from that are not used."""
    touched = pointers.data if mask.data.all() else pointers.data[mask.data]
    if touched.size == 0:
        return
    size = pointers.get_element_ty().primitive_bitwidth // 8
    low, high = int(touched.min()), int(touched.max()) + size
    if not any(start <= low and high <= end for start, end in _memory):
        raise OutsideMemory(f"{how} memory outside of its tensors")


def _checked_load(builder: Any, pointers: Any, mask: Any, *others: Any) -> Any:
    _checked(pointers, mask, "reads")
    return _load(builder, pointers, mask, *others)


def _checked_store(builder: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
    _checked(pointers, mask, "writes")
    return _store(builder, pointers, value, mask, *others)


def _call_within(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that a kernel calls. Triton would take over its language anew for each call, a fifth of the time."""
    if kernel.fn not in _taken_over:
        _taken_over.add(kernel.fn)
        interpreter._patch_lang(kernel.fn)
    return kernel.rewrite()(*args, **kwargs)


def install() -> None:
    quick_interpreter.install()
    for name, function in (("run", _launch), ("__call__", _call_within)):
        setattr(InterpretedFunction, name, function)
    for name, function in (("create_masked_load", _checked_load), ("create_masked_store", _checked_store)):
        setattr(InterpreterBuilder, name, function)
