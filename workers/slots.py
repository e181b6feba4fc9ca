"""What a worker keeps of each running request, by slot: its tokens, how far it is, its block tables."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..kernels.paged_attention.held_tables import HeldTables
from ..kernels.sampling import Changes, Draw
from ..kvcache.plan import Group, MemoryPlan
from ..proto.step import Admit, Advance, Sampling, View
from ..proto.worker import RunnerLimits
from .grammar.matcher import Grammars, Matcher
from .history import History

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0, logprobs=-1)


@dataclass(slots=True)
class Slot:
    """A running request, but for the numbers that the step reads of all slots at once."""

    prompt: np.ndarray  # [tokens] int64, as admitted
    sampling: Sampling
    draw: Draw  # the part of it that kernels know
    history: History | None = None  # where it matters which tokens it has
    matcher: Matcher | None = None  # where its answer has a grammar; on the rank that draws
    views: Sequence[View] = ()  # what its tokens see of an encoder's output
    draws_as_is: bool = True  # no token is drawn from other logits than the model's

    @classmethod
    def of(cls, entry: Admit, grammars: Grammars | None) -> "Slot":
        """grammars: where tokens are drawn."""
        sampling = entry.sampling
        matcher = None
        if sampling.form and grammars is not None:
            kind, text = sampling.form
            matcher = grammars.matcher(kind, text, entry.tokens[sampling.prompt_tokens :])
        draw = Draw(
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed, sampling.logprobs
        )
        return cls(
            np.array(entry.tokens, dtype=np.int64),
            sampling,
            draw,
            History(entry.tokens, sampling.prompt_tokens) if sampling.needs_history else None,
            matcher,
            entry.views,
            not (sampling.needs_history or sampling.form or sampling.logit_bias or sampling.min_tokens),
        )

    def changes(self, position: int) -> Changes:
        """Of the logits from which the token at a position is drawn.

        The grammar has the last word: biases and penalties may not bring back what it excludes.
        """
        sampling, history, matcher = self.sampling, self.history, self.matcher
        is_early = position < sampling.prompt_tokens + sampling.min_tokens
        must_end = matcher is not None and matcher.is_complete
        return Changes(
            history.penalties(sampling) if history is not None else None,
            history.forbidden(sampling) if history is not None else (),
            sampling.logit_bias,
            sampling.ends if is_early and not must_end else (),
            matcher.allowed() if matcher is not None else None,
        )

    def follow(self, token: int) -> str | None:
        """A token was drawn: penalties and the grammar count it. Why the answer cannot go on, if it cannot."""
        if self.history is not None:
            self.history.add(token)
        if self.matcher is None:
            return None
        self.matcher.take(token)
        return self.matcher.failure


class SlotTables:
    """All slots of a worker: one `Slot` for each that is taken, and arrays with a number or a row for each.

    Invariant: `computed <= known`, and tokens `computed .. known` are at hand: those of the admission in `prompt`,
    of the sampled ones only the last is ever needed. Arrays say nothing of a slot that is free.
    """

    def __init__(self, plan: MemoryPlan, limits: RunnerLimits, grammars: Grammars | None):
        """grammars: where tokens are drawn."""
        self._grammars = grammars
        slots = limits.max_num_seqs
        self.slots: list[Slot | None] = [None] * slots
        # All tables lie in one array. The row behind the slots has null blocks alone: for rows that fill up a step.
        self._shapes = [(slots + 1, _most_blocks(group, limits.max_model_len)) for group in plan.groups]
        sizes = [rows * width for rows, width in self._shapes]
        self._blocks = np.zeros(sum(sizes), dtype=np.int32)
        parts = np.split(self._blocks, np.cumsum(sizes)[:-1])
        self.block_tables = [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        self.held: HeldTables | None = None  # the same on a device
        self.num_blocks = np.zeros((len(plan.groups), slots), dtype=np.int32)
        self.known = np.zeros(slots, dtype=np.int32)
        self.computed = np.zeros(slots, dtype=np.int32)
        self.last_token = np.zeros(slots, dtype=np.int64)
        self.asked_before = np.zeros(slots, dtype=np.int32)  # tokens computed before this position tell of the prompt

    def hold(self, device: torch.device) -> None:
        """Keep the tables on a device, too."""
        if self.held is None:
            self.held = HeldTables(self._blocks, self._shapes, device)

    def clear(self) -> None:
        """Forget all requests. The arrays stay where they are."""
        self.slots[:] = [None] * len(self.slots)
        for array in (self._blocks, self.num_blocks, self.known, self.computed, self.last_token, self.asked_before):
            array[:] = 0
        if self.held is not None:
            self.held.clear()

    def admit(self, entry: Admit) -> None:
        slot, sampling = entry.slot, entry.sampling
        assert self.slots[slot] is None, f"slot {slot} is taken"
        self.slots[slot] = Slot.of(entry, self._grammars)
        self.known[slot] = len(entry.tokens)
        self.computed[slot] = entry.computed_tokens
        self.last_token[slot] = entry.tokens[-1]
        self.asked_before[slot] = sampling.prompt_tokens - 1 if sampling.prompt_logprobs >= 0 else 0
        self.num_blocks[:, slot] = 0
        self.append_blocks(entry)

    def append_blocks(self, entry: Admit | Advance) -> None:
        slot = entry.slot
        for g, (table, count, blocks) in enumerate(zip(self.block_tables, self.num_blocks, entry.blocks, strict=True)):
            start = count[slot]
            table[slot, start : start + len(blocks)] = blocks
            count[slot] += len(blocks)
            if self.held is not None and blocks:
                self.held.note(g, slot, start, count[slot])

    def what_is_lacking(self, slots: np.ndarray) -> str:
        """Why a step over these cannot run: they know fewer tokens than it computes."""
        empty = next((slot for slot in slots if self.slots[slot] is None), None)
        return f"slot {empty} is empty" if empty is not None else "a step computes tokens that are not known"

    def retire(self, slot: int) -> None:
        self.slots[slot] = None

    def __getitem__(self, slot: int) -> Slot:
        taken = self.slots[slot]
        assert taken is not None, f"slot {slot} is empty"
        return taken

    def tokens(self, slot: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of a slot, which are not computed yet."""
        prompt = self[slot].prompt
        return prompt[start:stop] if stop <= len(prompt) else self.last_token[slot : slot + 1]


def _most_blocks(group: Group, max_model_len: int) -> int:
    return -(-group.reach.slots_for(max_model_len, group.encoder_tokens) // group.block_tokens)
