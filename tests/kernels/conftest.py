"""What tests of kernels share."""

from typing import Any

import pytest

from intarsia.kernels.toolchain import triton as gpu


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    """Triton's interpreter takes less time for the same."""
    if gpu.missing() is None:
        from intarsia.tests import quick_interpreter

        quick_interpreter.install()


@pytest.fixture
def rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter multiplies each row of a tile by itself.

    It multiplies tiles with numpy. On some processors numpy's library sums the last rows of a tile in another order
    than the others. A GPU sums all of them alike, and tests of the same bits must see it so.
    """
    if gpu.missing() is not None:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def multiply_each_row(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        row = TensorHandle(a.data[..., :, None, :], a.dtype)
        tile = TensorHandle(b.data[..., None, :, :], b.dtype)
        sums = TensorHandle(d.data[..., :, None, :], d.dtype)
        products = multiply(self, row, tile, sums, *how)
        return TensorHandle(products.data[..., 0, :], products.dtype)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", multiply_each_row)
