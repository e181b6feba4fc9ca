"""A worker without a model: it writes which token stands where into its pages, and reads back what attention would.

Every read is checked against the token that must stand there, so a wrong block, a block given back too early or a
false prefix hit fails at the token that would have been computed from it.
"""

from collections.abc import Sequence
from hashlib import blake2b

from intarsia.kvcache.plan import MemoryPlan
from intarsia.kvcache.reach import Keeps
from intarsia.proto.step import Advance, Step, StepResult

VOCAB = 50


def next_token(tokens: Sequence[int]) -> int:
    """The "model": any function of the whole sequence."""
    return blake2b(bytes(tokens), digest_size=1).digest()[0] % VOCAB


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """What an undisturbed request must generate."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class SimulatedWorker:
    """Runs steps over pages that hold, per token, the hash of the sequence up to it."""

    def __init__(self, plan: MemoryPlan):
        self._plan = plan
        # [arena, large page][block, offset]: the hash of the sequence up to the token that stands there
        self._pages: dict[tuple[int, int], dict[tuple[int, int], bytes]] = {}
        self._owner: dict[tuple[int, int], int] = {}  # large page -> the group that wrote it last
        self._slots: dict[int, dict] = {}
        self._saves: dict[tuple[int, int], list[tuple[int, int]]] = {}  # slot, group -> lengths, and where to
        self.largest_step_tokens = 0
        self.computed_tokens = 0
        self.swapped: dict[int, list[bytes | None]] = {}

    def run(self, step: Step) -> StepResult:
        for slot in step.retire:
            del self._slots[slot]
        for g, block, ticket in step.swap_out:
            content = [self._read(block, offset, g) for offset in range(self._plan.groups[g].block_tokens)]
            assert ticket not in self.swapped, "a ticket was given twice"
            self.swapped[ticket] = content
        for g, ticket, block in step.swap_in:
            for offset, content in enumerate(self.swapped.pop(ticket)):
                if content is not None:
                    self._write(block, offset, g, content)
        for ticket in step.forget:
            del self.swapped[ticket]
        for g, source, target in step.copies:
            for offset in range(self._plan.groups[g].block_tokens):
                content = self._read(source, offset, g)
                if content is not None:
                    self._write(target, offset, g, content)
        for entry in step.admit:
            assert entry.slot not in self._slots, "a slot was given to two requests"
            self._slots[entry.slot] = {
                "tokens": list(entry.tokens),
                "computed": entry.computed_tokens,
                "tables": [list(row) for row in entry.blocks],
            }
        self._saves = {}
        for slot, g, length, block in step.saves:
            self._saves.setdefault((slot, g), []).append((length, block))
        work = [*(Advance(slot, 1, ()) for slot in step.decode), *step.advance]
        self.largest_step_tokens = max(self.largest_step_tokens, sum(a.tokens for a in work))
        self.computed_tokens += sum(a.tokens for a in work)
        tokens = [token for entry in work if (token := self._advance(entry)) is not None]
        return StepResult(step.epoch, step.number, tuple(tokens))

    def _advance(self, entry: Advance) -> int | None:
        state = self._slots[entry.slot]
        tokens, start = state["tokens"], state["computed"]
        stop = start + entry.tokens
        assert start < stop <= len(tokens)
        for row, blocks in zip(state["tables"], entry.blocks, strict=bool(entry.blocks)):
            row.extend(blocks)
        for g, (group, row) in enumerate(zip(self._plan.groups, state["tables"], strict=True)):
            if group.reach.keeps is Keeps.STATE:
                if start > 0:
                    assert self._read(row[0], 0, g) == bytes(tokens[:start]), f"group {g}: a state of another prefix"
                for length, block in self._saves.get((entry.slot, g), ()):
                    assert start < length <= stop, "a state is to be saved at a length that is not passed"
                    self._write(block, 0, g, bytes(tokens[:length]))
                self._write(row[0], 0, g, bytes(tokens[:stop]))
                continue
            for position in range(start, stop):
                block = row[position // group.block_tokens]
                assert block != 0, "a token would be written to the null block"
                self._write(block, position % group.block_tokens, g, bytes(tokens[: position + 1]))
            for position in range(start, stop):
                for key in range(group.reach.oldest_needed(position), position + 1):
                    block = row[key // group.block_tokens]
                    found = self._read(block, key % group.block_tokens, g)
                    assert found == bytes(tokens[: key + 1]), (
                        f"group {g}: position {position} reads a wrong token {key}"
                    )
        state["computed"] = stop
        if stop < len(tokens):
            return None
        tokens.append(next_token(tokens))
        return tokens[-1]

    def _large(self, block: int, g: int) -> tuple[int, int]:
        group = self._plan.groups[g]
        return group.arena, block // group.pages_per_large

    def _read(self, block: int, offset: int, g: int) -> bytes | None:
        large = self._large(block, g)
        return self._pages[large].get((block, offset)) if self._owner.get(large) == g else None

    def _write(self, block: int, offset: int, g: int, content: bytes) -> None:
        """A large page belongs to one group: what other groups left in it is overwritten."""
        large = self._large(block, g)
        if self._owner.get(large) != g:
            self._owner[large], self._pages[large] = g, {}
        self._pages[large][block, offset] = content
