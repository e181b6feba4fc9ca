"""Sums over GPUs of one machine in which each reads the others' memory itself.

NCCL passes a small message on from rank to rank, which takes longer than to read it. Torch's symmetric memory maps a
buffer of each rank into all others; its kernel reads all of them and adds in rank order, so the bits are the same on
every rank. What is large goes through NCCL, which moves less.
"""

import logging
import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

logger = logging.getLogger(__name__)

MOST_BYTES = 256 << 10
"""Of a tensor: above this each rank reads more from the others than NCCL would move. Estimated, not measured."""

KINDS = (torch.bfloat16, torch.float32)
"""Of numbers that torch's kernel adds."""

ALIGNMENT_BYTES = 16
"""It reads so many at once."""


class OneShot:
    """A buffer that all ranks read."""

    def __init__(self, device: torch.device):
        """Raises `RuntimeError` where GPUs cannot read each other's memory. All ranks at once."""
        world = dist.group.WORLD
        assert world is not None, "the ranks meet first"
        self._group: str = world.group_name
        self._buffer = symmetric_memory.empty(MOST_BYTES, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(self._buffer, world)

    @classmethod
    def where_it_works(cls, rank: int, size: int, device: torch.device) -> "OneShot | None":
        """On all ranks or on none: it is tried once. All ranks at once."""
        # Each rank sees its own GPU alone, and calls it number 0. Torch would take them for one and the same.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        found = None
        try:
            one_shot = cls(device)
            once = torch.arange(MOST_BYTES // 4, dtype=torch.float32, device=device) % 251
            one_shot.add_up(sums := once * (rank + 1))
            if torch.equal(sums, once * (size * (size + 1) // 2)):
                found = one_shot
        except RuntimeError as error:
            logger.info("GPUs do not read each other's memory, so NCCL adds up small tensors too: %s", error)
        working = torch.tensor([found is not None], dtype=torch.int32, device=device)
        dist.all_reduce(working)
        return found if working.item() == size else None

    def takes(self, tensor: Tensor) -> bool:
        size_bytes = tensor.numel() * tensor.element_size()
        return tensor.dtype in KINDS and size_bytes <= MOST_BYTES and size_bytes % ALIGNMENT_BYTES == 0

    def add_up(self, tensor: Tensor) -> None:
        """Replace a dense tensor by the sum over the ranks, in one launch.

        Each thread of torch's kernel copies its numbers into the buffer before it waits for the others, and writes sums
        of just these after it. So the result may take the place of what is added.
        """
        buffer = self._buffer[: tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(buffer, tensor, "sum", self._group, tensor)
