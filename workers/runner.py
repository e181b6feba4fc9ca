"""One step on one rank: slots and block tables become tensors, logits become tokens."""

from collections.abc import Sequence
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from ..kernels.paged_attention import GroupBatch, upload
from ..kernels.sampling import Tell, select_sampling
from ..kernels.transfer import Arrival
from ..kvcache.plan import MemoryPlan
from ..kvcache.reach import Reach
from ..proto.step import Logprobs, PromptLogprobs, Step
from ..proto.worker import RunnerLimits
from .cpu.threads import Threads
from .grammar.matcher import Grammars
from .graphs import PackedStep, StepGraphs
from .last_tokens import LastTokens
from .launched import Drawn, Launched, Rows
from .layers.attention import step_masks
from .layers.states import Save, saves_in, state_batch
from .models.loaded_model import LoadedModel
from .prompt_logprobs import prompt_logprobs
from .slots import Slot, SlotTables
from .tensor_parallel import TensorParallel


class ModelRunner:
    """Runs steps of a loaded model over its pages. One per worker; every rank runs the same steps."""

    def __init__(
        self,
        model: LoadedModel,
        plan: MemoryPlan,
        limits: RunnerLimits,
        parallel: TensorParallel,
        grammars: Grammars,
        threads: Threads,
    ):
        self.model = model
        self.limits = limits
        self.parallel = parallel
        self.threads = threads
        self.graphs: StepGraphs | None = None  # None: no steps are recorded
        self.last_tokens = LastTokens.of(limits, model.device)  # None: the host has them
        self._latest = Launched(Drawn)
        self.sampling = select_sampling(model.device)
        self._groups = plan.groups
        self.masks = step_masks(plan)
        self._state_groups = model.pages.state_groups
        self.tables = SlotTables(plan, limits, grammars if parallel.rank == 0 else None)

    def clear(self) -> None:
        """Forget all requests, also those whose blocks wait in host memory."""
        self.tables.clear()
        self.model.pages.forget_all()

    @torch.inference_mode()
    def launch(self, step: Step) -> Launched:
        """Have the step's tokens computed. New tokens are told on rank 0; all ranks keep them for the next step."""
        self._apply(step)
        rows = self._rows(step)
        asked = np.flatnonzero(rows.computed < self.tables.asked_before[rows.slots])  # of whose prompts, by row
        logits = self.forward(rows, step.saves, asked)
        # Logits of the prompts that are asked about come first.
        about_prompts = ()
        if len(asked) and self.parallel.rank == 0:
            about_prompts = prompt_logprobs(self.sampling, self.tables, rows, asked, logits)
        self._latest = self._sample(rows, logits[rows.query_lens[asked].sum() :], about_prompts)
        return self._latest

    def _apply(self, step: Step) -> None:
        """All that a step asks for before its tokens are computed, in the order of its fields."""
        tables, model = self.tables, self.model
        for slot in step.retire:
            tables.retire(slot)
        if step.swap_out or step.swap_in or step.forget or step.copies:
            model.pages.swap_out(step.swap_out)
            model.pages.swap_in(step.swap_in)
            model.pages.forget(step.forget)
            model.pages.copy(step.copies)
        for admission in step.admit:
            tables.admit(admission)
            if admission.images:
                assert model.cross is not None, "an image came to a model that takes none"
                model.cross.encode(admission.blocks, admission.images)
        for advance in step.advance:
            if advance.blocks:
                tables.append_blocks(advance)

    def _rows(self, step: Step) -> Rows:
        slots = np.array([*step.decode, *(advance.slot for advance in step.advance)])
        query_lens = np.ones(len(slots), dtype=np.int32)
        if step.advance:
            query_lens[len(step.decode) :] = [advance.tokens for advance in step.advance]
        order = np.argsort(query_lens > 1, kind="stable")
        slots, query_lens = slots[order], query_lens[order]
        computed, known = self.tables.computed[slots], self.tables.known[slots]
        assert (computed + query_lens <= known).all(), self.tables.what_is_lacking(slots)
        return Rows(slots, order, query_lens, computed, computed + query_lens == known)

    # -- from slots to logits ----------------------------------------------------------------------------------------

    def use_threads_for(self, rows: int) -> None:
        """On a CPU short steps leave cores to other processes: see `cpu/threads.py`."""
        torch.set_num_threads(self.threads.few if rows <= self.threads.short_rows else self.threads.most)

    def forward(self, rows: Rows, saves: Sequence[Save] = (), asked: Sequence[int] | np.ndarray = ()) -> Tensor:
        """Logits [tokens, vocabulary]: of all tokens of rows `asked` about, then the last of rows that finish."""
        ends = np.cumsum(rows.query_lens)
        starts = ends - rows.query_lens
        kv_lens = rows.computed + rows.query_lens
        self.use_threads_for(int(ends[-1]))
        tokens = self._tokens(rows, kv_lens)
        positions = np.arange(ends[-1]) + np.repeat(rows.computed - starts, rows.query_lens)
        batches = [self._batch(g, mask, rows, kv_lens) for g, mask in self.masks]
        states = {
            g: state_batch(self.tables.block_tables[g], rows.slots, rows.query_lens, rows.computed, saves_in(g, saves))
            for g in self._state_groups
        }
        sight = self.model.cross.sight(rows, self.tables) if self.model.cross is not None else None
        # Where steps are recorded, a step is replayed if there is one of its shape.
        if self.graphs is not None and not len(asked):
            wanted = rows.slots[rows.finishes], ends[rows.finishes] - 1
            logits = self.graphs.run(PackedStep(rows.slots, tokens, positions, *wanted, batches, states, sight))
            if logits is not None:
                return logits
        # Any other step goes through the module: tell its layers what each row computes, then run it.
        device = self.model.device
        positions_T = upload(positions, device)
        self.model.attention.begin_step(batches, positions_T)
        if states:
            self.model.states.begin_step(states)
        if self.model.cross is not None:
            self.model.cross.begin_step(sight)
        # Logits are computed for the tokens that need them.
        keep = np.concatenate([*(np.arange(starts[row], ends[row]) for row in asked), ends[rows.finishes] - 1])
        keeps_all = not len(asked) and len(keep) == len(tokens)
        keep_T = None if keeps_all else upload(keep, device)
        drawing, last_tokens = rows.slots[rows.finishes], self.last_tokens
        tokens_T = last_tokens.begin_step(tokens, rows.slots, drawing) if last_tokens else upload(tokens, device)
        return self.logits(tokens_T, positions_T, keep_T)

    def logits(self, tokens_T: Tensor, positions_T: Tensor, keep_T: Tensor | None = None) -> Tensor:
        """Of packed tokens, of those in `keep_T` alone if given. [T or K, vocabulary].
        What each row computes over which pages is known from `begin_step` of attention, states and cross-attention."""
        output = self.model.run(
            input_ids=tokens_T.unsqueeze(0),
            position_ids=positions_T.unsqueeze(0),
            use_cache=False,
            logits_to_keep=0 if keep_T is None else keep_T,
            **self.model.extra_inputs,
        )
        return output.logits[0]

    def _tokens(self, rows: Rows, kv_lens: np.ndarray) -> np.ndarray:
        """[T] of all rows. Those that decode, which come first, need no loop."""
        is_last = rows.finishes & (rows.query_lens == 1)
        decoding = len(is_last) if is_last.all() else int(is_last.argmin())
        rest = zip(rows.slots[decoding:], rows.computed[decoding:], kv_lens[decoding:], strict=True)
        return np.concatenate(
            [self.tables.last_token[rows.slots[:decoding]], *(self.tables.tokens(*row) for row in rest)]
        )

    def _batch(self, g: int, mask: Reach, rows: Rows, kv_lens: np.ndarray) -> GroupBatch:
        group, table, held = self._groups[g], self.tables.block_tables[g], self.tables.held
        width = -(-int(kv_lens.max()) // group.block_tokens)
        return GroupBatch(
            block_table=table[rows.slots, :width] if held is None else table,
            query_lens=rows.query_lens,
            kv_lens=kv_lens,
            block_tokens=group.block_tokens,
            window_tokens=mask.window_tokens,
            chunk_tokens=mask.chunk_tokens,
            held=None if held is None else held.of(g, rows.slots),
        )

    # -- from logits to tokens ---------------------------------------------------------------------------------------

    def _sample(self, rows: Rows, logits: Tensor, about_prompts: tuple[PromptLogprobs, ...]) -> Launched:
        tables = self.tables
        tables.computed[rows.slots] += rows.query_lens
        slots = rows.slots[rows.finishes]
        if len(slots) == 0:
            return Launched(partial(Drawn, prompt_logprobs=about_prompts))
        requests = [request for slot in slots.tolist() if (request := tables.slots[slot]) is not None]
        drawn_R, tell = self._draw(requests, logits, tables.known[slots])
        tables.known[slots] += 1
        told = partial(self._told, requests, np.argsort(rows.places[rows.finishes]), tell, about_prompts)
        # Where a device computes beside us, the next step finds the tokens there: nothing waits until they are read.
        if self.last_tokens is None:
            tables.last_token[slots] = drawn_R.numpy()
            return Launched(cache(partial(told, drawn_R)))
        tables.last_token[slots] = self.last_tokens.keep(drawn_R)
        arrival = Arrival(drawn_R)
        return Launched(cache(lambda: told(arrival.read())), arrival.is_there)

    def _told(
        self,
        requests: Sequence[Slot],
        in_step: np.ndarray,
        tell: Tell,
        about_prompts: tuple[PromptLogprobs, ...],
        drawn_R: Tensor,
    ) -> Drawn:
        """in_step: rows are in an order of ours; the answer is in the order of the step."""
        if self.parallel.rank:
            return Drawn()
        tokens, about = drawn_R.numpy(), tell()
        # Penalties and grammars follow the tokens of their requests, by row.
        following = [row for row, request in enumerate(requests) if request.history or request.matcher]
        failures = [(row, why) for row in following if (why := requests[row].follow(int(tokens[row]))) is not None]
        place = {int(row): n for n, row in enumerate(in_step)} if about or failures else {}
        return Drawn(
            tuple(tokens[in_step].tolist()),
            tuple((place[row], Logprobs(*entry)) for row, entry in about),
            about_prompts,
            tuple((place[row], why) for row, why in failures),
        )

    def _draw(self, requests: Sequence[Slot], logits: Tensor, positions: np.ndarray) -> tuple[Tensor, Tell]:
        """A token for each row of logits, the same on all ranks, and what rank 0 has to say about some."""
        tell: Tell = list
        if self.parallel.rank == 0:
            # Penalties and grammars need the tokens of the step before.
            if not all(request.draws_as_is for request in requests):
                self._latest.finish()
            draws, places = [request.draw for request in requests], positions.tolist()
            slots = zip(requests, places, strict=True)
            changes = [None if slot.draws_as_is else slot.changes(place) for slot, place in slots]
            drawn_R, tell = self.sampling.draw(logits, draws, places, changes)
        else:
            drawn_R = torch.empty(len(requests), dtype=torch.int64, device=logits.device)
        if self.parallel.size > 1:
            self.parallel.share_from_first(drawn_R)
        return drawn_R, tell
