"""The memory of all layers on one rank: raw buffers as the plan lays them out, and a view of them per layer."""

import math
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from ..kernels.pages import copy_pages, put_pages, take_pages
from ..kernels.toolchain.huge_pages import zeros
from ..kernels.transfer import Arrival
from ..kvcache.plan import Group, MemoryPlan, Place
from ..kvcache.reach import Keeps
from ..kvcache.spec import LayerSpec


class Pages:
    """Block b of a layer starts at byte offset + b * page_bytes of its buffer.

    A layer that keeps tokens has one view [blocks, block_tokens, kv_heads, key_dim + value_dim], or one with as many
    entries as a block has room for where several tokens have one together; a layer that keeps a
    state has one view [blocks + 1, ...] per tensor of it: every block of a state belongs to a request, so there is a
    spare one behind them, outside the plan, for rows that only fill up a step. A layer that shares another's pages has
    the other's view. What a layer keeps of a token beside keys and values lies behind those of the whole block.
    """

    def __init__(self, plan: MemoryPlan, layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device):
        self._dtype = dtype
        buffers = [zeros(size + _spare_bytes(plan, n), device) for n, size in enumerate(plan.buffers)]
        specs = {(layer.index, layer.reach.keeps): layer for layer in layers}
        self.tokens: dict[int, Tensor] = {}  # layer -> view
        self.beside_tokens: dict[int, Tensor] = {}  # layer -> view [blocks, block_tokens, numbers], of some
        self.states: dict[int, tuple[Tensor, ...]] = {}
        self._places: dict[tuple[int, Keeps], tuple[int, int]] = {}  # layer -> its group, and its place there
        self._swapped: dict[int, tuple[int, list[Arrival]]] = {}  # ticket -> its row of what each buffer gave
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None  # copies to and from the host
        self._whole: list[list[Tensor]] = []  # [group][buffer]: [blocks, page_bytes]
        for g, group in enumerate(plan.groups):
            blocks = plan.blocks_of(group)
            for n, (index, place) in enumerate(zip(group.layers, group.places, strict=True)):
                layer = specs[index, group.reach.keeps]
                self._places[index, group.reach.keeps] = g, n
                if group.reach.keeps is Keeps.STATE:
                    self.states[index] = self._state_views(buffers[place.buffer], layer, group, place, blocks)
                else:
                    self.tokens[index] = self._token_view(buffers[place.buffer], layer, group, place, blocks)
                    if layer.extra_token_bytes:
                        self.beside_tokens[index] = self._view_beside(
                            buffers[place.buffer], layer, group, place, blocks
                        )
            used = sorted({place.buffer for place in group.places})
            self._whole.append([buffers[n].as_strided((blocks, group.page_bytes), (group.page_bytes, 1)) for n in used])
        self._share(layers)
        self.state_groups = sorted({g for (_, keeps), (g, _) in self._places.items() if keeps is Keeps.STATE})

    def place_of(self, layer: int) -> tuple[int, int]:
        """Of a layer that keeps tokens: its group, and its place there."""
        return self._places[layer, Keeps.TOKENS]

    def state_group_of(self, layer: int) -> int:
        return self._places[layer, Keeps.STATE][0]

    def encoder_group_of(self, layer: int) -> int:
        return self._places[layer, Keeps.ENCODER][0]

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy whole blocks: (group, source, target) each, in this order."""
        for g, moves in groupby(copies, key=itemgetter(0)):
            of_group = [(source, target) for _, source, target in moves]
            for pages in self._whole[g]:
                copy_pages(pages, of_group)

    def swap_out(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Keep whole blocks in host memory: (group, block, ticket) each."""
        for g, of_group in groupby(sorted(moves), key=itemgetter(0)):
            _, blocks, tickets = zip(*of_group, strict=True)
            kept = [take_pages(pages, blocks, self._beside) for pages in self._whole[g]]
            self._swapped |= {ticket: (n, kept) for n, ticket in enumerate(tickets)}

    def swap_in(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Put them back, into any block: (group, ticket, block) each."""
        for g, of_group in groupby(sorted(moves), key=itemgetter(0)):
            _, tickets, blocks = zip(*of_group, strict=True)
            kept = [self._swapped.pop(ticket) for ticket in tickets]
            for buffer, pages in enumerate(self._whole[g]):
                put_pages(pages, blocks, [of_buffer[buffer].read()[n] for n, of_buffer in kept], self._beside)

    def forget(self, tickets: Sequence[int]) -> None:
        for ticket in tickets:
            del self._swapped[ticket]

    def forget_all(self) -> None:
        """What waits in host memory."""
        self._swapped.clear()

    def _share(self, layers: Sequence[LayerSpec]) -> None:
        for layer in layers:
            if layer.shares is not None:
                self.tokens[layer.index] = self.tokens[layer.shares]
                self._places[layer.index, layer.reach.keeps] = self._places[layer.shares, layer.reach.keeps]

    def _token_view(self, buffer: Tensor, layer: LayerSpec, group: Group, place: Place, blocks: int) -> Tensor:
        width = layer.key_dim + layer.value_dim
        shape = (layer.entries_in(group.block_tokens), layer.kv_heads, width)
        return _view(buffer, self._dtype, place.offset_bytes, group.page_bytes, (blocks, *shape))

    def _view_beside(self, buffer: Tensor, layer: LayerSpec, group: Group, place: Place, blocks: int) -> Tensor:
        entries = layer.entries_in(group.block_tokens)
        shape = (blocks, entries, layer.extra_token_bytes // self._dtype.itemsize)
        before = (layer.entry_bytes - layer.extra_token_bytes) * entries
        return _view(buffer, self._dtype, place.offset_bytes + before, group.page_bytes, shape)

    def _state_views(
        self, buffer: Tensor, layer: LayerSpec, group: Group, place: Place, blocks: int
    ) -> tuple[Tensor, ...]:
        return tuple(
            _view(
                buffer,
                self._dtype if tensor.item_bytes == self._dtype.itemsize else torch.float32,
                place.offset_bytes + offset,
                group.page_bytes,
                (blocks + 1, *tensor.shape),
            )
            for tensor, offset in zip(layer.state, layer.state_offsets, strict=True)
        )


def _spare_bytes(plan: MemoryPlan, buffer: int) -> int:
    """Behind a buffer: room for one more page of any state in it."""
    states = (group for group in plan.groups if group.reach.keeps is Keeps.STATE)
    return max(
        (group.page_bytes for group in states if any(place.buffer == buffer for place in group.places)), default=0
    )


def _view(buffer: Tensor, dtype: torch.dtype, offset_bytes: int, page_bytes: int, shape: Sequence[int]) -> Tensor:
    """A view [blocks, ...] of a buffer of bytes: contiguous within a block, `page_bytes` from one to the next."""
    item = dtype.itemsize
    strides = [math.prod(shape[n + 1 :]) for n in range(1, len(shape))]
    usable = buffer[: buffer.numel() // item * item].view(dtype)
    return usable.as_strided(tuple(shape), (page_bytes // item, *strides), offset_bytes // item)
