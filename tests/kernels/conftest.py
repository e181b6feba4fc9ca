"""What tests of kernels share."""

import pytest

from intarsia.kernels.toolchain import triton as gpu


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    """Triton's interpreter takes less time for the same."""
    if gpu.missing() is None:
        from intarsia.tests import quick_interpreter

        quick_interpreter.install()
