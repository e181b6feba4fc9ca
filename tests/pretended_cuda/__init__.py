"""A CUDA device that is pretended: tensors say cuda:0 and their numbers lie in host memory.

Whole engines run on it without a GPU, by the very branches that a GPU takes: Triton kernels, pinned uploads, recorded
decode steps. What a GPU forbids is refused here, with the file and the line that did it: tensors of two devices in one
operator, a host tensor in a launch, operands of two kinds, a host buffer that is written while it is copied or read
before it is there, and anything that waits for the host while a graph is recorded. What costs time on a GPU is counted:
waits, copies, kernels.

    guard.cpp, guard.py   tells torch's CPU build that there is a device of this kind
    tensors.py            the tensor that says cuda:0
    operators.py          what torch's operators do to it, and what they may not do
    transfers.py          copies between host and device that are under way
    streams.py            memory that two streams use, and whether they wait for each other
    graphs.py             recorded graphs, and the rules of recording
    launches.py           launches of Triton kernels, which Triton's interpreter runs
    nccl.py               what several ranks do together, each in a thread of this process
    runtime.py            the functions of `torch.cuda`
    device.py             one device: its graph, its copies, its ledger
    ledger.py, places.py  what was counted, and where
    engines.py, run.py    an engine over it, in a process of its own
    child.py              what asks for such runs: each is a fork of one process
    planted.py            mistakes that it must find

It shows no speed, no memory, no sum in another order, and nothing of Triton's compiler.

All this changes torch for the whole process, for good. So only `run.py` installs it, in a process of its own.
"""
