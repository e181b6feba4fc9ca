"""What computes an operation natively, in C++ and in Triton, as a fixture for its tests."""

from types import ModuleType

import pytest


def natives(cpu: ModuleType, triton: ModuleType) -> object:
    """A fixture: each of the two, where this machine can compile it."""

    @pytest.fixture(params=[cpu, triton], ids=["C++", "Triton"])
    def native(request: pytest.FixtureRequest) -> ModuleType:
        if not request.param.is_available():
            pytest.skip("there is no compiler for it")
        return request.param

    return native
