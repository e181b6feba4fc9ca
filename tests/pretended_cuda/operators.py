"""What torch's operators do on a pretended device.

Each operator is computed on host memory. Before that it is judged: by the devices and the kinds of its operands, by
whether the host has to wait for it, and by whether a graph is being recorded.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .device import Device, current_device, pinned
from .faults import MixedDevices, MixedDtypes
from .ledger import Kind
from .places import place
from .tape import fresh_tensors
from .tensors import DeviceTensor, on_host

aten = torch.ops.aten

ALLOCATIONS = {
    aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip
"""They run no kernel."""

VIEWS = {aten._unsafe_view.default}
"""Views whose schema does not say so."""

WAITS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten.bincount.default, aten._unique2.default, aten.unique_consecutive.default, aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
}  # fmt: skip
"""Their results, or the shapes of these, depend on numbers that the host has to read."""

INDEXING = {
    aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default,
}  # fmt: skip
"""They take indices from the host, too, and copy them to the device. The host waits for that."""

PRODUCTS = {
    aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.mv.default, aten.dot.default,
    aten.convolution.default, aten._grouped_mm.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
}  # fmt: skip
"""Their operands are all of one kind. A grouped product counts as one kernel, as it is one in bfloat16. In other kinds
torch reads the groups' borders on the host, which cannot be recorded: models with experts are served in bfloat16."""


class _Nature(NamedTuple):
    """What can be told of an operator by its schema."""

    is_view: bool
    is_pointwise: bool  # so a number may lie in host memory
    changes_shape: bool  # of a tensor that is there
    writes: tuple[tuple[int, str], ...]  # place and name of each argument that it writes


@cache
def _nature(func: Any) -> _Nature:
    schema = func._schema
    aliases = [result.alias_info for result in schema.returns]
    return _Nature(
        func in VIEWS or (bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)),
        torch.Tag.pointwise in func.tags or func is aten.fill_.Tensor,
        torch.Tag.inplace_view in func.tags or func in {aten.resize_.default, aten.set_.source_Storage},
        tuple(
            (n, a.name) for n, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
        ),
    )


class OnPretendedDevice(TorchDispatchMode):
    """Sees every operator of a thread, also those that make a tensor out of nothing."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each operator enters torch's compiler, which looks whether there is anything to compile

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run_operator(func, args, kwargs or {})


def run_operator(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    special = _SPECIAL.get(func)
    if special is not None and (answer := special(*args, **kwargs)) is not NotImplemented:
        return answer
    asked = kwargs.get("device")
    has_device = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
    makes_device = has_device if asked is None else torch.device(asked).type == "cuda"
    if not has_device and not makes_device:
        return _run_on_host(func, args, kwargs, tensors)
    return _run_on_device(func, args, kwargs, tensors, makes_device)


def _run_on_host(func: Any, args: tuple, kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
    """An operator among host tensors, which may not touch those that are being copied."""
    transfers = current_device().transfers
    if not transfers.is_idle and not _nature(func).is_view:
        written = _written(func, args, kwargs)
        for tensor in tensors:
            is_written = any(tensor is target for target in written)
            (transfers.check_write if is_written else transfers.check_read)(tensor, place())
    result = func(*args, **_without_pinning(kwargs))
    if kwargs.get("pin_memory"):
        pinned.add(result)
    return result


def _run_on_device(
    func: Any, args: tuple, kwargs: dict[str, Any], tensors: Sequence[Tensor], makes_device: bool
) -> Any:
    device, nature, at = current_device(), _nature(func), place()
    if nature.changes_shape:
        raise NotImplementedError(f"{func} at {at}: a pretended tensor keeps its shape")
    _judge(device, func, args, tensors, at)
    host_args, host_kwargs = tree_map(on_host, (args, _to_host(kwargs)))
    tape, written = device.tape, _written(func, host_args, host_kwargs)
    if tape is not None:
        tape.will_write(written)
    if not nature.is_view and func not in ALLOCATIONS:
        device.use([each for each in tree_leaves((host_args, host_kwargs)) if isinstance(each, Tensor)], written, at)
    compute: Callable[..., Any] = _SHIMS.get(func) or func
    results = compute(*host_args, **host_kwargs)
    # Views, allocations and empty tensors need no kernel.
    if func in ALLOCATIONS:
        if tape is not None:
            tape.allocation(fresh_tensors(results, host_args, host_kwargs))
    elif not nature.is_view and any(leaf.numel() for leaf in tree_leaves(results) if isinstance(leaf, Tensor)):
        if tape is not None:
            tape.operator(compute, host_args, host_kwargs, results, at)
        else:
            device.ledger.add(Kind.TORCH_KERNEL, at)
        device.use((), [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)], at)
    return _wrapped(results, tensors) if makes_device else results


def _judge(device: Device, func: Any, args: tuple, tensors: Sequence[Tensor], at: str) -> None:
    """Whether a GPU would do this, and whether the host waits for it."""
    ours = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    strangers = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)]
    if any(tensor.owner is not device for tensor in ours):
        raise MixedDevices(f"{func} at {at} is given a tensor of another rank")
    if func in INDEXING and isinstance(args[0], DeviceTensor):
        _judge_indices(device, args, strangers, at)
    elif ours and any(each.dim() or not _nature(func).is_pointwise for each in strangers):
        raise MixedDevices(f"{func} at {at}: expected all tensors to be on the same device, but found cuda:0 and cpu")
    if func in WAITS:
        device.ledger.add(Kind.DOWNLOAD, at)
        device.wait(at)
    kinds = {tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point}
    if func in PRODUCTS and len(kinds) > 1:
        raise MixedDtypes(f"{func} at {at}: operands are of {' and '.join(sorted(map(str, kinds)))}")


def _judge_indices(device: Device, args: tuple, strangers: Sequence[Tensor], at: str) -> None:
    """args: a tensor, its indices, and the values that are put there, if any are"""
    masks = [each for each in args[1] if isinstance(each, DeviceTensor) and each.dtype in (torch.bool, torch.uint8)]
    if masks and len(args) > 2 and args[2].numel() == 1 and len(strangers) == 1 and strangers[0] is args[2]:
        return  # one number wherever a mask says so: torch calls `masked_fill_`
    for given in strangers:
        device.upload(torch.empty_like(given), given, is_pinned=False, is_blocking=True, at=at)
    if masks:  # the host has to know how many there are
        device.wait(at)


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    found = (args[n] if n < len(args) else kwargs.get(name) for n, name in _nature(func).writes)
    return [tensor for tensor in tree_leaves(list(found)) if isinstance(tensor, Tensor)]


def _wrapped(results: Any, tensors: Sequence[Tensor]) -> Any:
    """The results say that they are on the device; what was written in place is the very tensor that was given."""
    given = {id(tensor.host): tensor for tensor in tensors if isinstance(tensor, DeviceTensor)}

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return given[id(value)] if id(value) in given else DeviceTensor(value)

    return tree_map(wrap, results)


def _to_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    changed = _without_pinning(kwargs)
    if changed.get("device") is not None:
        changed["device"] = torch.device("cpu")
    return changed


def _without_pinning(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "pin_memory"}


# -- copies between host and device ------------------------------------------------------------------------------------


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    """`copy_`, where the two are not on one device."""
    if isinstance(target, DeviceTensor) == isinstance(source, DeviceTensor):
        return NotImplemented
    if source.numel() == 0:
        return target
    device, at = current_device(), place()
    if isinstance(target, DeviceTensor):
        # What has another kind or other strides is brought into a buffer of torch's own first.
        is_direct = source.dtype == target.dtype and source.is_contiguous() and target.host.is_contiguous()
        device.transfers.check_read(source, at)
        device.upload(target.host, source, is_direct and pinned.has(source), not non_blocking, at)
    else:
        is_blocking = not (non_blocking and pinned.has(target))
        device.download(target, on_host(source).to(target.dtype).expand_as(target), is_blocking, at)
    return target


def _to_copy(source: Tensor, **wanted: Any) -> Any:
    """`to`, where it leads to another device."""
    from_device = isinstance(source, DeviceTensor)
    asked = wanted.get("device")
    to_device = from_device if asked is None else torch.device(asked).type == "cuda"
    if to_device == from_device:
        return NotImplemented
    non_blocking = wanted.get("non_blocking", False)
    host = torch.empty_like(on_host(source), dtype=wanted.get("dtype") or source.dtype)
    if to_device:
        return _copy(DeviceTensor(host), source, non_blocking)
    if non_blocking:
        pinned.add(host)  # as torch does
    return _copy(host, source, non_blocking)


def _pin(source: Tensor, device: Any = None) -> Tensor:
    if isinstance(source, DeviceTensor):
        raise RuntimeError(f"cannot pin a tensor of the device, at {place()}: only host memory can be pinned")
    copy = source.clone()
    pinned.add(copy)
    return copy


def _is_pinned(source: Tensor, device: Any = None) -> bool:
    return not isinstance(source, DeviceTensor) and pinned.has(source)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.copy_.default: _copy,
    aten._to_copy.default: _to_copy,
    aten._pin_memory.default: _pin,
    aten.is_pinned.default: _is_pinned,
}


def _histogram(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """On a GPU `histc` counts integers, too."""
    return torch.ops.aten.histc.default(values.float(), *args, **kwargs).to(values.dtype)


_SHIMS: dict[Any, Callable[..., Any]] = {aten.histc.default: _histogram}
