"""What tests of workers share: a CPU that has what a GPU would have."""

from dataclasses import replace

import pytest
import torch

from intarsia.kernels.toolchain import triton as gpu

GPU = torch.device("cuda")


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> None:
    """Triton's interpreter takes less time for the same."""
    if gpu.missing() is None:
        from intarsia.tests import quick_interpreter

        quick_interpreter.install()


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would have is chosen, and Triton's interpreter runs it; products stay torch's."""
    from intarsia.kernels import routing, tokenwise
    from intarsia.kernels.paged_attention import TritonBackend
    from intarsia.kernels.sampling import NativeSampling, TritonSampling
    from intarsia.kernels.state import TritonStates
    from intarsia.workers.cpu import linear
    from intarsia.workers.cpu.experts import pack_experts
    from intarsia.workers.cpu.threads import Threads
    from intarsia.workers.layers import states
    from intarsia.workers.models import load

    monkeypatch.setattr(TritonBackend, "capabilities", replace(TritonBackend.capabilities, devices=frozenset({"cpu"})))
    monkeypatch.setattr(TritonStates, "devices", frozenset({"cpu"}))
    monkeypatch.setattr(TritonSampling, "devices", frozenset({"cpu"}))
    monkeypatch.setattr(NativeSampling, "devices", frozenset())
    for operations in (tokenwise, routing):
        monkeypatch.setitem(operations._OPERATIONS, "cpu", operations.triton)
    monkeypatch.setitem(states.AROUND, "cpu", states.AROUND["cuda"])
    monkeypatch.setattr(linear, "linear_kind", lambda *_: None)
    monkeypatch.setattr(load, "pack_experts", lambda module, _, *others: pack_experts(module, GPU, *others))
    monkeypatch.setattr(Threads, "learn", lambda *_: None)  # of a CPU, by steps that take long in an interpreter
