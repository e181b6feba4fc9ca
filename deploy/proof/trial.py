"""An engine answers with the small copy, and every token is held against what transformers computes."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ...controller.engine import Engine
from ...controller.startup import build_engine
from ...errors import UnsupportedModel
from ...kvcache.reach import NEVER
from ...kvcache.spec import LayerSpec
from ...proto.request import SamplingParams
from .engines import POOL, Answer, Case, answers_of, least_memory, settings_of
from .local_workers import LocalWorkers
from .oracle import NEAR, Oracle
from .scaled import POSITIONS, VOCABULARY

LENGTHS = 5, 26, 48, 58
"""In tokens, of the prompts: shorter than a window, and several of them. A chunk ends with one, a block with others."""

NEW_TOKENS, LATER_TOKENS, LAST_TOKENS = 24, 14, 8
"""Of each answer to what is asked first, then, and last. The first ones alone pass every window."""

PARTINGS = 24, 32, 40
"""Lengths at which prompts part: the ends of a window of 12, of a block of 16, and of a block of 5."""

TIE = 1e-3
"""Log-probabilities of the oracle that lie closer together than this may trade places."""

DOUBT = 3
"""Times what it wavers by in some tries, which it may differ by."""

CASES = (
    Case("blocks of 5, chunks of 13", 5, 13),
    Case("blocks of 16, whole prompts", 16, POSITIONS),
    Case("a pool for one", 5, 64, is_tight=True),
)


class Difference(NamedTuple):
    """Where an answer first leaves what transformers computes."""

    case: str
    ranks: int
    text: Sequence[int]  # prompt and answer
    prompt_tokens: int
    position: int
    off: float  # of a log-probability; infinite where another token was chosen
    what: str

    @property
    def told(self) -> str:
        place = f"{self.case}, {self.ranks} ranks: {self.what}"
        by = "another token is said" if self.off == float("inf") else f"a log-probability is {self.off:.2g} off"
        return f"{place}: with a prompt of {self.prompt_tokens} tokens, at position {self.position} {by}"


class Trial:
    """Of one copy, on so many ranks. What it counts is there when it has run."""

    def __init__(self, folder: Path, oracle: Oracle, ranks: int, seed: int):
        self.answers = 0
        self.doubtful = 0  # answers that differ, but by no more than the oracle wavers
        self._folder = folder
        self._oracle = oracle
        self._ranks = ranks
        self._seed = seed

    async def first_difference(self) -> Difference | None:
        """None: whatever the engine does with the copy, it answers as the oracle does.

        Raises what an engine raises, and `UnsupportedModel` if what is to be shown does not come to pass."""
        workers = LocalWorkers(self._ranks)
        try:
            await workers.meet()
            for case in CASES:
                settings = settings_of(self._folder, case, self._ranks, POOL)
                facts = await workers.load(settings.model)
                _check_reach(facts.layers)
                if case.is_tight:
                    longest = max(LENGTHS) + LATER_TOKENS
                    memory = least_memory(facts.layers, case.block_tokens, longest, POSITIONS)
                    settings = settings_of(self._folder, case, self._ranks, str(memory))
                engine = await build_engine(settings, workers)
                found = await (self._crowded if case.is_tight else self._conversed)(engine, case)
                if found is not None:
                    return found
                if case.is_tight and any(each.reach.keeps_tokens for each in facts.layers):
                    _check_shown(engine.stats.preemptions, "no request had to give way to another")
        finally:
            workers.close()
        return None

    async def _conversed(self, engine: Engine, case: Case) -> Difference | None:
        """Prompts, computed; then again, out of the cache, with the next turn of one, and others that part from one."""
        asked = prompts(self._seed)
        first = await answers_of(engine, asked, _greedy(NEW_TOKENS, with_prompt=True))
        found = self._differs(asked, first, case)
        if found is not None:
            return found
        more = drawn(self._seed + 1, 7)
        turn = [*asked[1], *first[1].tokens, *more]
        parted = [[*asked[-1][:length], *drawn(self._seed + length, 9)] for length in PARTINGS]
        then = [*asked, turn, *parted]
        second = await answers_of(engine, then, _greedy(LATER_TOKENS))
        found = self._differs(then, second, case)
        if found is not None:
            return found
        _check_shown(second[len(asked) - 1].cached_tokens, "a prompt that was asked again was not found in the cache")
        # States of the places where prompts part are there from the second such prompt on.
        parted = [[*asked[-1][:length], *drawn(self._seed - length, 6)] for length in PARTINGS]
        last = [[*turn, *second[len(asked)].tokens, *more], *parted]
        return self._differs(last, await answers_of(engine, last, _greedy(LAST_TOKENS)), case)

    async def _crowded(self, engine: Engine, case: Case) -> Difference | None:
        """More than fits, all of whose prompts but the last two are computed in one step. The last makes others give
        way, and what they had is computed again."""
        short, *_, long, longest = prompts(self._seed)
        asked = [short, *(drawn(self._seed + n, len(short)) for n in range(3)), long, longest]
        answers = await answers_of(engine, asked, _greedy(LATER_TOKENS, with_prompt=True), last_is_urgent=True)
        return self._differs(asked, answers, case)

    def _differs(self, asked: Sequence[Sequence[int]], answers: Sequence[Answer], case: Case) -> Difference | None:
        self.answers += len(answers)
        for prompt, answer in zip(asked, answers, strict=True):
            found = against(self._oracle, prompt, answer)
            if found is None:
                continue
            found = against(self._oracle, prompt, answer, wavers=True)
            if found is None:
                self.doubtful += 1
                continue
            text = [*prompt, *answer.tokens]
            what = f"{answer.cached_tokens} tokens found in the cache" if answer.cached_tokens else "computed"
            return Difference(case.name, self._ranks, text, len(prompt), *found, what)
        return None


def _greedy(new_tokens: int, *, with_prompt: bool = False) -> SamplingParams:
    """with_prompt: the prompt's tokens are judged, too, and none of it comes out of the cache"""
    return SamplingParams(
        temperature=0.0,
        max_tokens=new_tokens,
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=0 if with_prompt else None,
    )


def drawn(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()


def prompts(seed: int) -> list[list[int]]:
    return [drawn(1000 * seed + length, length) for length in LENGTHS]


def against(oracle: Oracle, prompt: Sequence[int], answer: Answer, *, wavers: bool = False) -> tuple[int, float] | None:
    """The first position that differs, and by how much. A token that was said must be the likeliest, or all but so.

    wavers: what the oracle wavers by does not count"""
    if answer.error is not None:
        raise answer.error
    text = [*prompt, *answer.tokens]
    tokens = torch.tensor(text)
    logprobs = oracle.logprobs(text)
    slack = DOUBT * oracle.wavering(text) if wavers else torch.zeros(len(text) - 1, dtype=torch.float64)
    meant = logprobs.gather(1, tokens[1:].unsqueeze(1)).squeeze(1)
    ours = torch.tensor([*answer.prompt_logprobs, *answer.logprobs], dtype=torch.float64)
    start, said = len(meant) - len(ours), len(prompt) - 1
    off = torch.zeros_like(meant)
    off[start:] = (ours - meant[start:]).abs()
    off = torch.where(off.isnan(), torch.inf, off)
    behind = logprobs.amax(-1) - meant
    behind[:said] = 0.0
    off = torch.where(behind > TIE + slack, torch.inf, off)
    wrong = (off > NEAR + slack).nonzero()
    if not len(wrong):
        return None
    place = int(wrong[0])
    return place + 1, float(off[place])


# -- is shown what is to be shown? -------------------------------------------------------------------------------------


def _check_reach(layers: Sequence[LayerSpec]) -> None:
    """Texts must be longer than whatever a layer looks back."""
    longest = max(LENGTHS) + NEW_TOKENS
    for layer in layers:
        passed = layer.reach.passed_at(0)
        if longest < passed < NEVER:
            raise UnsupportedModel(
                f"layer {layer.index} of the small copy ({layer.reach.name}) looks back {passed} tokens, which no text "
                f"of the proof passes: the longest has {longest}",
                field="model",
            )


def _check_shown(count: int, otherwise: str) -> None:
    if not count:
        raise UnsupportedModel(f"the proof shows too little: {otherwise}", field="model")
