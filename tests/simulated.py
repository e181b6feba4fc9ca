"""A worker without a model: it writes which token stands where into its pages, and reads back what attention would.

Every read is checked against the token that must stand there, so a wrong block, a block given back too early or a
false prefix hit fails at the token that would have been computed from it.
"""

from collections.abc import Sequence
from hashlib import blake2b

from intarsia.kvcache.plan import MemoryPlan
from intarsia.proto.step import Sampled, Step, StepResult

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
        self._pages: dict[tuple[int, int, int], bytes] = {}  # (buffer-sharing block, offset, group) -> content
        self._slots: dict[int, dict] = {}
        self.largest_step_tokens = 0

    def run(self, step: Step) -> StepResult:
        for slot in step.retire:
            del self._slots[slot]
        for entry in step.admit:
            assert entry.slot not in self._slots, "a slot was given to two requests"
            self._slots[entry.slot] = {
                "tokens": list(entry.tokens),
                "computed": entry.computed_tokens,
                "tables": [list(row) for row in entry.blocks],
                "max": entry.max_tokens,
            }
        self.largest_step_tokens = max(self.largest_step_tokens, sum(a.tokens for a in step.advance))
        sampled = [token for entry in step.advance if (token := self._advance(entry))]
        return StepResult(step.epoch, step.number, tuple(sampled), 0)

    def _advance(self, entry) -> Sampled | None:
        state = self._slots[entry.slot]
        tokens, start = state["tokens"], state["computed"]
        stop = start + entry.tokens
        assert start < stop <= len(tokens)
        for row, blocks in zip(state["tables"], entry.blocks, strict=bool(entry.blocks)):
            row.extend(blocks)
        for g, (group, row) in enumerate(zip(self._plan.groups, state["tables"], strict=True)):
            for position in range(start, stop):
                block = row[position // group.block_tokens]
                assert block != 0, "a token would be written to the null block"
                self._write(block, position % group.block_tokens, g, tokens[: position + 1])
            for position in range(start, stop):
                for key in range(group.reach.oldest_needed(position), position + 1):
                    block = row[key // group.block_tokens]
                    found = self._pages.get((block, key % group.block_tokens, g))
                    assert found == bytes(tokens[: key + 1]), (
                        f"group {g}: position {position} reads a wrong token {key}"
                    )
        state["computed"] = stop
        if stop < len(tokens):
            return None
        assert len(tokens) < state["max"]
        tokens.append(next_token(tokens))
        return Sampled(entry.slot, tokens[-1], None, ())

    def _write(self, block: int, offset: int, group: int, tokens: Sequence[int]) -> None:
        """A block belongs to one group: what other groups left in it is overwritten."""
        for other in range(len(self._plan.groups)):
            self._pages.pop((block, offset, other), None)
        self._pages[block, offset, group] = bytes(tokens)
