"""The tensor that says cuda:0, whose numbers lie in host memory."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from .device import Device, current_device

CUDA = torch.device("cuda", 0)


class DeviceTensor(Tensor):
    """What torch sees of it is empty; `host` has the numbers, and the same shape, strides and kind."""

    host: Tensor
    owner: Device

    @staticmethod
    def __new__(cls, host: Tensor) -> "DeviceTensor":
        tensor = Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=CUDA,
        )
        tensor.host, tensor.owner = host, current_device()
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  as torch's own wrappers do

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        from .operators import run_operator  # which makes such tensors

        return run_operator(func, args, kwargs or {})

    def as_subclass(self, cls: type[Tensor]) -> Tensor:  # type: ignore[override]
        """Of both kinds: it still has no numbers but those of the device."""
        both: Any = type(cls.__name__, (cls, DeviceTensor), {})  # pyright: ignore[reportGeneralTypeIssues]
        return both(self.host)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, s: object) -> None:
        """Nothing gives this memory to another tensor."""

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        return self.cpu().numpy() if force else self._no_array()

    def __array__(self, *_: Any, **__: Any) -> Any:
        self._no_array()

    def _no_array(self) -> NoReturn:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def on_host(value: Any) -> Any:
    """The numbers of a device's tensor; any other value as it is."""
    return value.host if isinstance(value, DeviceTensor) else value
