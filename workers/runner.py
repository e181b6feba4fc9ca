"""One step on one rank: slots and block tables become tensors, logits become tokens."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from ..errors import UnsupportedModel
from ..kernels.paged_attention import GroupBatch
from ..kernels.state import SaveAt, StateBatch
from ..kvcache.plan import Group, MemoryPlan
from ..kvcache.reach import Keeps, Reach
from ..proto.step import Admit, Advance, Logprobs, PromptLogprobs, Sampling, Step, View
from ..proto.worker import ModelSettings, RunnerLimits
from .cpu.fused import fuse
from .cpu.linear import compile_products
from .cpu.threads import Threads
from .grammar.matcher import Grammars, Matcher
from .graphs import DecodeGraphs, DecodeStep, recorder
from .layers.attention import step_masks
from .models.loaded_model import LoadedModel
from .sampler import History, logprobs, sample
from .tensor_parallel import TensorParallel

WARM_UP_TOKENS = 4


class Drawn(NamedTuple):
    """What a step drew: see `StepResult`."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[tuple[int, Logprobs], ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    failures: tuple[tuple[int, str], ...] = ()


class _Rows(NamedTuple):
    """The requests of one step, those of one token first. Index arrays over slots; R rows."""

    slots: np.ndarray  # [R]
    places: np.ndarray  # [R] in the order of the step
    query_lens: np.ndarray  # [R] int32: tokens to compute
    computed: np.ndarray  # [R] int32: tokens computed before this step
    finishes: np.ndarray  # [R] bool: the last known token is computed, so a new one is sampled


class SlotTables:
    """What a worker knows of each running request: its tokens, how far it is, its block tables.

    Invariant: `computed <= known`, and tokens `computed .. known` are at hand: those of the admission in `prompt`,
    of the sampled ones only the last is ever needed.
    """

    def __init__(self, plan: MemoryPlan, limits: RunnerLimits, grammars: Grammars | None):
        """grammars: where tokens are drawn."""
        self._grammars = grammars
        slots = limits.max_num_seqs
        self.block_tables = [
            np.zeros((slots, _most_blocks(group, limits.max_model_len)), dtype=np.int32) for group in plan.groups
        ]
        self.num_blocks = np.zeros((len(plan.groups), slots), dtype=np.int32)
        self.known = np.zeros(slots, dtype=np.int32)
        self.computed = np.zeros(slots, dtype=np.int32)
        self.last_token = np.zeros(slots, dtype=np.int64)
        self.prompt: list[np.ndarray | None] = [None] * slots
        self.sampling: list[Sampling | None] = [None] * slots
        self.histories: list[History | None] = [None] * slots
        self.matchers: list[Matcher | None] = [None] * slots
        self.views: list[Sequence[View]] = [()] * slots
        self.asking: set[int] = set()  # slots of whose prompt log-probabilities are wanted

    def admit(self, entry: Admit) -> None:
        slot = entry.slot
        self.prompt[slot] = np.array(entry.tokens, dtype=np.int64)
        self.sampling[slot] = entry.sampling
        needs_history = entry.sampling.needs_history
        self.histories[slot] = History(entry.tokens, entry.sampling.prompt_tokens) if needs_history else None
        if entry.sampling.form and self._grammars is not None:
            kind, text = entry.sampling.form
            said = entry.tokens[entry.sampling.prompt_tokens :]
            self.matchers[slot] = self._grammars.matcher(kind, text, said)
        self.views[slot] = entry.views
        if entry.sampling.prompt_logprobs >= 0:
            self.asking.add(slot)
        self.known[slot] = len(entry.tokens)
        self.computed[slot] = entry.computed_tokens
        self.last_token[slot] = entry.tokens[-1]
        for table, count, blocks in zip(self.block_tables, self.num_blocks, entry.blocks, strict=True):
            table[slot, : len(blocks)] = blocks
            count[slot] = len(blocks)

    def append_blocks(self, entry: Advance) -> None:
        slot = entry.slot
        for table, count, blocks in zip(self.block_tables, self.num_blocks, entry.blocks, strict=True):
            start = count[slot]
            table[slot, start : start + len(blocks)] = blocks
            count[slot] += len(blocks)

    def retire(self, slot: int) -> None:
        self.prompt[slot] = None
        self.sampling[slot] = None
        self.histories[slot] = None
        self.matchers[slot] = None
        self.views[slot] = ()
        self.asking.discard(slot)

    def tokens(self, slot: int, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of a slot, which are not computed yet."""
        prompt = self.prompt[slot]
        assert prompt is not None, f"slot {slot} is empty"
        return prompt[start:stop] if stop <= len(prompt) else self.last_token[slot : slot + 1]


def _most_blocks(group: Group, max_model_len: int) -> int:
    match group.reach.keeps:
        case Keeps.STATE:
            return 1
        case Keeps.ENCODER:
            return -(-group.encoder_tokens // group.block_tokens)
    return -(-max_model_len // group.block_tokens)


def _is_plain_decode(rows: _Rows) -> bool:
    return bool((rows.query_lens == 1).all() and rows.finishes.all() and (rows.computed > 0).all())


def _warm_up_rows(rows: int = 1, tokens: int = WARM_UP_TOKENS) -> _Rows:
    """Rows of a few tokens, the first of their sequences."""
    return _Rows(
        slots=np.zeros(rows, dtype=np.int64),
        places=np.arange(rows),
        query_lens=np.full(rows, tokens, dtype=np.int32),
        computed=np.zeros(rows, dtype=np.int32),
        finishes=np.ones(rows, dtype=bool),
    )


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
        self._model = model
        self._groups = plan.groups
        self._masks = step_masks(plan)
        self._state_groups = [g for g, group in enumerate(plan.groups) if group.reach.keeps is Keeps.STATE]
        self._parallel = parallel
        self._limits = limits
        self._threads = threads
        self._graphs: DecodeGraphs | None = None
        self._new_tables = partial(SlotTables, plan, limits, grammars if parallel.rank == 0 else None)
        self._tables = self._new_tables()

    def clear(self) -> None:
        """Forget all requests, also those whose blocks wait in host memory."""
        self._tables = self._new_tables()
        self._model.pages.forget_all()

    @torch.inference_mode()
    def run(self, step: Step) -> Drawn:
        """Compute the step's tokens. New tokens are returned on rank 0; all ranks keep them for the next step."""
        tables = self._tables
        pages = self._model.pages
        pages.swap_out(step.swap_out)
        pages.swap_in(step.swap_in)
        pages.forget(step.forget)
        pages.copy(step.copies)
        for slot in step.retire:
            tables.retire(slot)
        for admission in step.admit:
            tables.admit(admission)
            if admission.images:
                assert self._model.cross is not None, "an image came to a model that takes none"
                self._model.cross.encode(admission.blocks, admission.images)
        for advance in step.advance:
            if advance.blocks:
                tables.append_blocks(advance)
        rows = self._rows(step)
        asked = self._asked_prompts(rows)
        logits = self._forward(rows, step.saves, asked)
        about_prompts = self._prompt_logprobs(rows, logits, asked)
        return self._sample(rows, logits[sum(rows.query_lens[row] for row in asked) :], about_prompts)

    @torch.inference_mode()
    def warm_up(self, settings: ModelSettings) -> None:
        """Forward passes over the null block: the layers find their backend, or fail, before anyone waits."""
        longest = min(self._limits.max_num_batched_tokens, self._limits.max_model_len)
        self._tables.prompt[0] = np.arange(max(longest, WARM_UP_TOKENS)) % WARM_UP_TOKENS
        self._model.attention.learn(lambda: self._forward(_warm_up_rows()), settings.attention_backend)
        if settings.torch_compile:
            self._compile()
        elif not settings.enforce_eager and self._model.is_tested:
            fuse(self._model.module, self._model.attention, self._model.device)
        self._threads.learn(
            lambda tokens: self._forward(_warm_up_rows(tokens=tokens)), longest, self._parallel.share_from_first
        )
        compile_products(self._model.module, self._limits.max_num_batched_tokens, self._threads.use_for)
        self._forward(_warm_up_rows())
        self._tables.retire(0)
        record = recorder(self._model.device)
        if record is not None and not settings.enforce_eager and self._model.cross is None:
            self._graphs = DecodeGraphs(self._model, record)

    @torch.inference_mode()
    def run_largest_steps(self, backend: str | None) -> None:
        """Steps of as many tokens as there may be, of one prompt and of many rows, over the null block."""
        limits = self._limits
        longest = min(limits.max_num_batched_tokens, limits.max_model_len)
        rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        each = min(limits.max_num_batched_tokens // rows, longest)
        self._tables.prompt[0] = np.zeros(max(longest, WARM_UP_TOKENS), dtype=np.int64)
        self._model.attention.learn(lambda: self._forward(_warm_up_rows()), backend)
        self._forward(_warm_up_rows(tokens=longest))
        self._forward(_warm_up_rows(rows=rows, tokens=each))
        self._tables.retire(0)

    def _compile(self) -> None:
        """Now, not when requests come: no, one and several tokens are different things to a compiler, and so are
        logits."""
        from torch._dynamo.exc import TorchDynamoException

        self._model.compile()
        one = _warm_up_rows()._replace(query_lens=np.ones(1, dtype=np.int32))
        unfinished = _warm_up_rows()._replace(finishes=np.zeros(1, dtype=bool))
        try:
            for rows in (_warm_up_rows(), _warm_up_rows(rows=2), unfinished, one):
                self._forward(rows)
        except TorchDynamoException as error:
            raise UnsupportedModel(
                f"torch.compile can not compile this model: {error}. Start without torch_compile.",
                field="torch_compile",
            ) from error

    def _rows(self, step: Step) -> _Rows:
        slots = np.array([*step.decode, *(advance.slot for advance in step.advance)])
        query_lens = np.ones(len(slots), dtype=np.int32)
        if step.advance:
            query_lens[len(step.decode) :] = [advance.tokens for advance in step.advance]
        order = np.argsort(query_lens > 1, kind="stable")
        slots, query_lens = slots[order], query_lens[order]
        computed = self._tables.computed[slots]
        return _Rows(slots, order, query_lens, computed, computed + query_lens == self._tables.known[slots])

    def _asked_prompts(self, rows: _Rows) -> list[int]:
        """Rows of whose prompt the log-probabilities are wanted."""
        asked = []
        for row, slot in enumerate(rows.slots.tolist()) if self._tables.asking else ():
            sampling = self._tables.sampling[slot]
            if slot in self._tables.asking and sampling and rows.computed[row] < sampling.prompt_tokens - 1:
                asked.append(row)
        return asked

    def _forward(
        self, rows: _Rows, saves: Sequence[tuple[int, int, int, int]] = (), asked: Sequence[int] = ()
    ) -> torch.Tensor:
        """Logits [tokens, vocabulary]: of all tokens of rows `asked` about, then the last of rows that finish."""
        ends = np.cumsum(rows.query_lens)
        starts = ends - rows.query_lens
        kv_lens = rows.computed + rows.query_lens
        self._threads.use_for(int(ends[-1]))
        positions = np.arange(ends[-1]) + np.repeat(rows.computed - starts, rows.query_lens)
        tokens = self._tokens(rows, kv_lens)
        batches = [self._batch(g, mask, rows, kv_lens) for g, mask in self._masks]
        states = {g: self._state_batch(g, rows, saves) for g in self._state_groups}
        if self._graphs is not None and not saves and not asked and _is_plain_decode(rows):
            logits = self._graphs.run(DecodeStep(tokens, positions, batches, states))
            if logits is not None:
                return logits
        device = self._model.device
        positions_T = torch.from_numpy(positions).to(device)
        self._model.attention.begin_step(batches, positions_T)
        self._model.states.begin_step(states)
        if self._model.cross is not None:
            tables = [table[rows.slots] for table in self._tables.block_tables]
            views = [self._tables.views[slot] for slot in rows.slots]
            self._model.cross.begin_step(tables, rows.query_lens, rows.computed, views)
        keep = np.concatenate([*(np.arange(starts[row], ends[row]) for row in asked), ends[rows.finishes] - 1])
        keeps_all = not asked and len(keep) == len(tokens)
        keep_T = None if keeps_all else torch.from_numpy(keep).to(device)
        return self._model.forward(torch.from_numpy(tokens).to(device), positions_T, keep_T)

    def _tokens(self, rows: _Rows, kv_lens: np.ndarray) -> np.ndarray:
        """[T] of all rows. Those that decode, which come first, need no loop."""
        is_last = rows.finishes & (rows.query_lens == 1)
        decoding = len(is_last) if is_last.all() else int(is_last.argmin())
        rest = zip(rows.slots[decoding:], rows.computed[decoding:], kv_lens[decoding:], strict=True)
        return np.concatenate(
            [self._tables.last_token[rows.slots[:decoding]], *(self._tables.tokens(*row) for row in rest)]
        )

    def _batch(self, g: int, mask: Reach, rows: _Rows, kv_lens: np.ndarray) -> GroupBatch:
        group = self._groups[g]
        width = -(-int(kv_lens.max()) // group.block_tokens)
        return GroupBatch(
            block_table=self._tables.block_tables[g][rows.slots, :width],
            query_lens=rows.query_lens,
            kv_lens=kv_lens,
            block_tokens=group.block_tokens,
            window_tokens=mask.window_tokens,
            chunk_tokens=mask.chunk_tokens,
        )

    def _state_batch(self, g: int, rows: _Rows, saves: Sequence[tuple[int, int, int, int]]) -> StateBatch:
        row_of = {slot: row for row, slot in enumerate(rows.slots.tolist())} if saves else {}
        return StateBatch(
            pages=self._tables.block_tables[g][rows.slots, 0],
            query_lens=rows.query_lens,
            is_new=rows.computed == 0,
            saves=[
                SaveAt(row := row_of[slot], length - int(rows.computed[row]), block)
                for slot, group, length, block in saves
                if group == g
            ],
        )

    def _prompt_logprobs(self, rows: _Rows, logits: torch.Tensor, asked: Sequence[int]) -> tuple[PromptLogprobs, ...]:
        """Of the tokens of prompts that follow those computed, as far as they are of the prompt."""
        if self._parallel.rank:
            return ()
        found = []
        for row in asked:
            slot, start, count = int(rows.slots[row]), int(rows.computed[row]), int(rows.query_lens[row])
            sampling, prompt = self._tables.sampling[slot], self._tables.prompt[slot]
            assert sampling is not None and prompt is not None
            follow = torch.from_numpy(prompt[start + 1 : min(start + count + 1, sampling.prompt_tokens)])
            own, logits = logits[: len(follow)], logits[count:]
            about = logprobs(own, follow.to(own.device), sampling.prompt_logprobs)
            found.append(PromptLogprobs(slot, start + 1, tuple(about)))
        return tuple(found)

    def _sample(self, rows: _Rows, logits: torch.Tensor, about_prompts: tuple[PromptLogprobs, ...]) -> Drawn:
        tables = self._tables
        tables.computed[rows.slots] += rows.query_lens
        slots = rows.slots[rows.finishes]
        if len(slots) == 0:
            return Drawn(prompt_logprobs=about_prompts)
        drawn = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
        about: list[tuple[int, Logprobs]] = []
        histories = [tables.histories[slot] for slot in slots]
        matchers = [tables.matchers[slot] for slot in slots]
        if self._parallel.rank == 0:
            samplings = [s for slot in slots if (s := tables.sampling[slot]) is not None]
            tokens, about = sample(logits, samplings, tables.known[slots].tolist(), histories, matchers)
            drawn.copy_(tokens)
        self._parallel.share_from_first(drawn)
        tokens = drawn.cpu().numpy()
        tables.last_token[slots] = tokens
        tables.known[slots] += 1
        if self._parallel.rank:
            return Drawn()
        failures = []
        for row, (history, matcher, token) in enumerate(zip(histories, matchers, tokens.tolist(), strict=True)):
            if history is not None:
                history.add(token)
            if matcher is not None:
                matcher.take(token)
                if (why := matcher.failure) is not None:
                    failures.append((row, why))
        in_step = np.argsort(rows.places[rows.finishes])  # places of rows, in the order of the step
        place = {int(row): n for n, row in enumerate(in_step)}
        return Drawn(
            tuple(tokens[in_step].tolist()),
            tuple((place[row], entry) for row, entry in about),
            about_prompts,
            tuple((place[row], why) for row, why in failures),
        )
