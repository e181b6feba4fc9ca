"""The native backend gives the same bits however a row's tokens are cut, whatever is beside, on any threads."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from intarsia.kernels.state import (
    CONVOLUTION,
    DECAYING_SUM,
    GATED_DELTA,
    KEYED_DELTA,
    LINEAR_ATTENTION,
    SELECTIVE_SCAN,
    NativeStates,
    Recurrence,
    SaveAt,
    StateBatch,
)

CPU = torch.device("cpu")
TOKENS, PAGES = 150, 40

pytestmark = pytest.mark.skipif(bool(NativeStates.lacks()), reason="there is no C++ compiler")

CASES: dict[str, tuple[Recurrence, tuple[int, ...]]] = {
    "convolution": (CONVOLUTION, (64, 3)),
    "convolution over 4 of 37 channels": (CONVOLUTION, (37, 4)),
    "convolution over 2 of 70 channels": (CONVOLUTION, (70, 2)),
    "linear attention": (LINEAR_ATTENTION, (2, 128, 64)),
    "linear attention of odd sizes": (LINEAR_ATTENTION, (3, 13, 39)),
    "linear attention of 5 values": (LINEAR_ATTENTION, (2, 7, 5)),
    "gated delta": (GATED_DELTA, (2, 128, 128)),
    "gated delta of odd sizes": (GATED_DELTA, (3, 19, 217)),
    "gated delta of 17 values": (GATED_DELTA, (2, 8, 17)),
    "keyed delta": (KEYED_DELTA, (2, 128, 128)),
    "keyed delta of odd sizes": (KEYED_DELTA, (3, 19, 217)),
    "selective scan": (SELECTIVE_SCAN, (96, 16)),
    "selective scan of odd sizes": (SELECTIVE_SCAN, (53, 5)),
    "decaying sum": (DECAYING_SUM, (96,)),
    "decaying sum of 37 channels": (DECAYING_SUM, (37,)),
}

Cut = Callable[[np.random.Generator], Iterator[int]]


def always(tokens: int) -> Cut:
    def cut(_: np.random.Generator) -> Iterator[int]:
        while True:
            yield tokens

    return cut


def at_random(random: np.random.Generator) -> Iterator[int]:
    while True:
        yield int(random.choice([0, 1, 2, 3, 7, 16, 33, 80]))


CUTS: dict[str, Cut] = {"1": always(1), "7": always(7), "64": always(64), "random": at_random}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def drawn(recurrence: Recurrence, shape: tuple[int, ...], seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Constants, which are the same for all seeds, and the inputs of one row."""
    fixed, generator = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(TOKENS, *size, generator=generator)

    match recurrence:
        case _ if recurrence is CONVOLUTION:
            channels, window = shape
            weight = torch.randn(channels, window + 1, generator=fixed)
            return [weight, torch.randn(channels, generator=fixed)], [draw(channels)]
        case _ if recurrence is DECAYING_SUM:
            return [], [draw(*shape), -draw(*shape).abs()]
        case _ if recurrence is SELECTIVE_SCAN:
            channels, states = shape
            A = -torch.rand(shape, generator=fixed)
            return [A], [draw(channels), draw(channels).abs(), draw(states), draw(states)]
        case _:
            heads, keys, values = shape
            q, k = (torch.nn.functional.normalize(draw(heads, keys), dim=-1) for _ in range(2))
            decays = (heads, keys) if recurrence is KEYED_DELTA else (heads,)
            inputs = [q, k, draw(heads, values), -draw(*decays).abs()]
            return [], inputs if recurrence is LINEAR_ATTENTION else [*inputs, draw(heads).sigmoid()]


class Row:
    """One row's tokens, and what comes of them on one thread when nothing is cut and nothing is beside."""

    def __init__(self, case: str, dtype: torch.dtype, seed: int):
        recurrence, shape = CASES[case]
        self.recurrence = recurrence
        self.constants, self.inputs = drawn(recurrence, shape, seed)
        self.pages = torch.full((PAGES, *shape), float("nan"), dtype=dtype)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self.outputs = step(recurrence, self.pages, self.constants, [(self, 0, TOKENS)])[0]
        torch.set_num_threads(threads)
        self.state = self.pages[1].clone()


def step(
    recurrence: Recurrence, pages: Tensor, constants: list[Tensor], rows: Sequence[tuple[Row, int, int]],
    saves: Sequence[SaveAt] = (),
) -> list[Tensor]:  # fmt: skip
    """Compute tokens [start, end) of rows on pages 1, 2, .. Returns the outputs of each."""
    backend = NativeStates()
    counts = np.array([end - start for _, start, end in rows])
    is_new = np.array([start == 0 for _, start, _ in rows])
    batch = StateBatch(np.arange(1, len(rows) + 1), counts, is_new, saves)
    inputs = [torch.cat([row.inputs[n][start:end] for row, start, end in rows]) for n in range(len(rows[0][0].inputs))]
    out = backend.scan(recurrence, pages, constants, inputs, backend.prepare(batch, CPU))
    return list(out.split(counts.tolist()))


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_rows_that_are_cut_saved_and_beside_others_have_the_bits_of_a_row_alone(
    case: str, dtype: torch.dtype, cut: str, threads: int
):
    random = np.random.default_rng(seed := int(np.random.default_rng().integers(1 << 30)))
    print("seed", seed)
    rows = [Row(case, dtype, seed + n) for n in range(3)]
    pages = torch.full_like(rows[0].pages, float("nan"))
    cuts = [CUTS[cut](random), at_random(random), at_random(random)]
    done, outputs = [0, 0, 0], [[], [], []]
    while done[0] < TOKENS:
        # Each row goes on by some tokens; within them its state is saved on the way.
        ends = [min(TOKENS, at + next(lengths)) for at, lengths in zip(done, cuts, strict=True)]
        if ends == done:
            continue
        saves = []
        for n, (start, end) in enumerate(zip(done, ends, strict=True)):
            if end > start and random.random() < 0.5:
                saves.append(SaveAt(n, int(random.integers(1, end - start + 1)), 10 + n))
        spans = list(zip(rows, done, ends, strict=True))
        for n, out in enumerate(step(rows[0].recurrence, pages, rows[0].constants, spans, saves)):
            outputs[n].append(out)
        # What was saved is the state of that many tokens.
        for save in saves[:1]:
            row, length = rows[save.row], done[save.row] + save.tokens
            alone = torch.full_like(pages, float("nan"))
            step(row.recurrence, alone, row.constants, [(row, 0, length)])
            assert torch.equal(pages[save.page], alone[1])
        done = ends
    for n, row in enumerate(rows):
        assert torch.equal(torch.cat(outputs[n]), row.outputs[: done[n]])
        if done[n] == TOKENS:
            assert torch.equal(pages[n + 1], row.state)
