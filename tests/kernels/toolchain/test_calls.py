"""Calls written down once do what they would do one by one."""

import pytest
import torch

from intarsia.kernels.tokenwise import Activation, Gating
from intarsia.kernels.tokenwise import cpu as native
from intarsia.kernels.toolchain.calls import CallList

SILU = Gating(Activation.SILU)

pytestmark = pytest.mark.skipif(not native.is_available(), reason="there is no C++ compiler")


def test_calls_run_in_order_and_read_what_was_changed_between_runs():
    wide, middle, narrow = torch.randn(3, 64), torch.zeros(3, 32), torch.zeros(3, 16)
    first, second = (native.gate_call(width, torch.float32, SILU) for width in (32, 16))
    first.arguments.gate_up, first.arguments.out = wide.data_ptr(), middle.data_ptr()
    second.arguments.gate_up, second.arguments.out = middle.data_ptr(), narrow.data_ptr()
    calls = CallList([first, second])
    expected = native.gate(native.gate(wide, SILU), SILU)

    first.arguments.rows = second.arguments.rows = 2
    calls.run()
    assert torch.equal(narrow[:2], expected[:2])
    assert not narrow[2].any()

    first.arguments.rows = second.arguments.rows = 3
    calls.run()
    assert torch.equal(narrow, expected)
