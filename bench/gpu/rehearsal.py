"""A rehearsal: all that the bench does, on the pretended device of our tests. What it has not is played here.

Played are the times between events, FlashAttention (it fills its output with zeros, so it is not judged), and that the
host's operators are a device's kernels in profiles.
"""

from typing import Any

import torch

PLAYED_MS = 1.0


def install() -> None:
    """Before anything of ours that uses torch. `run.py`'s environment comes too late for Triton's interpreter, so here
    it is asked for before Triton is imported."""
    import os

    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Products are tiny, and threads that wait for each other on a busy machine take longer than they.
    torch.set_num_threads(1)
    torch.set_num_threads = lambda count: None  # type: ignore[assignment]
    from intarsia.tests.pretended_cuda import runtime

    runtime.install()
    torch.cuda.Event.elapsed_time = lambda self, end: PLAYED_MS  # type: ignore[method-assign]


def flash() -> Any:
    """In place of FlashAttention 3."""
    from intarsia.kernels.paged_attention.flash import Flash

    def attend(q: Any, k: Any, v: Any, *, out: Any, **asked: Any) -> None:
        out.zero_()

    def schedule(*, cache_seqlens: Any, **asked: Any) -> Any:
        return cache_seqlens.clone()

    return Flash(attend, schedule)
