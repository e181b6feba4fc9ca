"""What happens in the prefix cache, in the words of vLLM's events, for routers that know those.

    ours: names of blocks of a group ──► theirs: BlockStored(hashes, the one before, tokens, size, group)

A batch is a MessagePack array of the time, the events and a rank; an event is a map with its type, as vLLM 0.33 sends
them. Fields that have nothing to say are left out. Every group of layers has events of its own, with its number and
kind: only a router knows whether it wants the layers that see all, or each. A snapshot of states is told as the block
that ends where it was saved.

What has no tokens of its own to tell is left out, and so is its removal: ends inside a block, what stands beside a
picture, a drafter's blocks, and blocks whose tokens were noted too long ago. A router then expects less than there is.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack

from ..kvcache.events import Cleared, Event, Removed, Stored
from ..kvcache.name_tokens import NameTokens
from ..kvcache.prefix import MARK_BYTES
from ..proto.status import EngineInfo

KINDS = {
    "full": "full_attention",
    "sliding": "sliding_window",
    "chunked": "chunked_local_attention",
    "state": "mamba",
    "encoder": "cross_attention",
}
"""Their names of kinds of layers, by the first word of ours."""

RANK = 0
"""Theirs of data parallelism, which an engine here has none of."""


class Translator:
    """Knows which names were told, so that nothing is removed that a subscriber never heard of."""

    def __init__(self, info: EngineInfo, notes: NameTokens, usual_mark: bytes):
        """usual_mark: how names end that belong to no tenant"""
        self._notes = notes
        self._usual_mark = usual_mark
        self._medium = "GPU" if info.device.startswith("cuda") else "CPU"
        self._told: dict[int, set[bytes]] = {}  # by group
        self.untold = 0  # blocks that were left out, since the start

    def batch(self, events: Sequence[Event]) -> bytes | None:
        """The message for these events; None if there is nothing to say."""
        told = [made for event in events for made in self._event(event)]
        return msgpack.packb([time.time(), told, RANK]) if told else None

    def _event(self, event: Event) -> Iterator[dict[str, Any]]:
        match event:
            case Stored():
                yield from self._stored(event)
            case Removed(group, _, hashes):
                known = self._told.get(group, set())
                if gone := [name for name in hashes if name in known]:
                    known.difference_update(gone)
                    yield {"type": "BlockRemoved", "block_hashes": gone, "medium": self._medium, "group_idx": group}
            case Cleared():
                self._told.clear()
                yield {"type": "AllBlocksCleared"}

    def _stored(self, event: Stored) -> Iterator[dict[str, Any]]:
        """An event for each run of blocks that follow one another."""
        run: list[bytes] = []
        for name in event.hashes:
            noted = self._notes.of(name)
            if noted is None:
                self.untold += 1
                continue
            if run and noted.before != run[-1]:
                yield self._run(event, run)
                run = []
            run.append(name)
        if run:
            yield self._run(event, run)

    def _run(self, event: Stored, names: list[bytes]) -> dict[str, Any]:
        noted = [found for name in names if (found := self._notes.of(name)) is not None]
        self._told.setdefault(event.group, set()).update(names)
        kind, _, size = event.kind.partition("-")
        told: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": noted[0].before,
            "token_ids": [token for each in noted for token in each.tokens],
            "block_size": event.block_tokens,
            "lora_id": None,
            "medium": self._medium,
            "lora_name": None,
            "group_idx": event.group,
            "kv_cache_spec_kind": KINDS.get(kind, "unknown"),
        }
        if kind == "sliding" and size.isdigit():
            told["kv_cache_spec_sliding_window"] = int(size)
        mark = names[0][-MARK_BYTES:]
        if noted[0].before is None and mark != self._usual_mark:  # as vLLM tells a salt: with the first block
            told["extra_keys"] = [[mark.hex()], *[None] * (len(names) - 1)]
        return told
