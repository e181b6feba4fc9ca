"""Where Triton's kernels cannot run, the reason is told before a layer asks for one."""

import importlib.util

import pytest
import torch

from intarsia.kernels.toolchain import triton

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def test_a_gpu_for_which_no_kernel_can_be_built_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch):
    triton._cannot_launch.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # there is none, so a launch fails
    monkeypatch.setattr(triton, "is_interpreted", lambda: False)
    try:
        reason = triton.missing()
    finally:
        triton._cannot_launch.cache_clear()
    if torch.cuda.device_count():
        pytest.skip("there is a GPU")
    assert reason is not None and "apt-get install gcc python3-dev" in reason


def test_without_a_gpu_nothing_is_launched():
    assert triton.missing() is None
