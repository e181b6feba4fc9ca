"""Every backend runs every recurrence over pages as float64 does token by token, whatever the cut."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from intarsia.errors import InvalidSetting
from intarsia.kernels.state import (
    CONVOLUTION,
    DECAYING_SUM,
    GATED_DELTA,
    KEYED_DELTA,
    LINEAR_ATTENTION,
    SELECTIVE_SCAN,
    STATE_BACKENDS,
    ChunkedStates,
    NativeStates,
    Recurrence,
    SaveAt,
    StateBackend,
    StateBatch,
    TritonStates,
    select_state_backend,
)
from intarsia.kernels.transfer import Transfer

CPU = torch.device("cpu")
H, K, V, C, S, W = 3, 4, 6, 10, 5, 3

RECURRENCES = {
    r.name: r for r in (CONVOLUTION, LINEAR_ATTENTION, GATED_DELTA, KEYED_DELTA, SELECTIVE_SCAN, DECAYING_SUM)
}
STATE_SHAPES = {
    "convolution": (C, W),
    "linear_attention": (H, K, V),
    "gated_delta": (H, K, V),
    "keyed_delta": (H, K, V),
    "selective_scan": (C, S),
    "decaying_sum": (C,),
}


def make_inputs(name: str, tokens: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Constants and inputs of `tokens` tokens, float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(draw(tokens, H, K), dim=-1) for _ in range(2))
    decay = -draw(tokens, H).abs()
    match name:
        case "convolution":
            return [draw(C, W + 1), draw(C)], [draw(tokens, C)]
        case "linear_attention":
            return [], [q, k, draw(tokens, H, V), decay]
        case "gated_delta":
            return [], [q, k, draw(tokens, H, V), decay, draw(tokens, H).sigmoid()]
        case "keyed_delta":
            return [], [q, k, draw(tokens, H, V), -draw(tokens, H, K).abs(), draw(tokens, H).sigmoid()]
        case "decaying_sum":
            return [], [draw(tokens, C), -draw(tokens, C).abs()]
        case _:
            return [-draw(C, S).abs()], [draw(tokens, C), draw(tokens, C).abs(), draw(tokens, S), draw(tokens, S)]


def truth(recurrence: Recurrence, constants: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Outputs [T,..] of one row from its beginning, and its state after each token."""
    state = torch.zeros(1, *STATE_SHAPES[recurrence.name], dtype=torch.float64)
    outputs, states = [], [state[0]]
    for token in range(len(inputs[0])):
        out, state = recurrence.step(state, constants, [x[token : token + 1] for x in inputs])
        outputs.append(out[0])
        states.append(state[0])
    return torch.stack(outputs), states


class Rows:
    """Rows of random length, each with the truth, and pages that are NaN where nothing was written."""

    def __init__(self, recurrence: Recurrence, lengths: Sequence[int], backend: StateBackend, seed: int = 0):
        self.recurrence, self.backend = recurrence, backend
        constants, _ = make_inputs(recurrence.name, 1, seed)
        self.constants = [value.float() for value in constants]
        self.inputs = [make_inputs(recurrence.name, length, seed + 1 + n)[1] for n, length in enumerate(lengths)]
        self.truths = [truth(recurrence, constants, inputs) for inputs in self.inputs]
        shape = STATE_SHAPES[recurrence.name]
        padded = torch.full((64, int(np.prod(shape)) + 7), float("nan"))  # pages have a stride of their own
        self.pages = padded[:, : int(np.prod(shape))].unflatten(1, shape)
        self.done = [0] * len(lengths)

    def step(self, counts: Sequence[int], saves: Sequence[SaveAt] = ()) -> None:
        """Compute the next `counts[n]` tokens of row n, on page n + 1, and compare."""
        spans = [(done, done + count) for done, count in zip(self.done, counts, strict=True)]
        batch = StateBatch(
            np.arange(1, len(counts) + 1), np.array(counts), np.array([done == 0 for done in self.done]), saves
        )
        packed = [
            torch.cat([inputs[n][a:b] for inputs, (a, b) in zip(self.inputs, spans, strict=True)]).float()
            for n in range(len(self.inputs[0]))
        ]
        out = self.backend.scan(self.recurrence, self.pages, self.constants, packed, self.backend.prepare(batch, CPU))
        expected = torch.cat([outputs[a:b] for (outputs, _), (a, b) in zip(self.truths, spans, strict=True)])
        torch.testing.assert_close(out, expected.float(), rtol=2e-4, atol=2e-5)
        self.done = [b for _, b in spans]
        for n, (_, states) in enumerate(self.truths):
            self.check_page(n + 1, states[self.done[n]], self.done[n])
        for save in saves:
            start = spans[save.row][0]
            self.check_page(save.page, self.truths[save.row][1][start + save.tokens], 1)

    def check_page(self, page: int, state: Tensor, written: int) -> None:
        if written:
            torch.testing.assert_close(self.pages[page], state.float(), rtol=2e-4, atol=2e-5)


@pytest.fixture(params=STATE_BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> StateBackend:
    if lacks := request.param.lacks():
        pytest.skip(lacks)
    return request.param()


@pytest.mark.parametrize("name", RECURRENCES)
def test_prompt_then_decode_equals_token_by_token(name: str, backend: StateBackend):
    rows = Rows(RECURRENCES[name], [200, 1, 70, 130], backend)
    rows.step([190, 0, 64, 65])
    rows.step([1, 0, 1, 65])
    rows.step([1, 1, 1, 0])
    rows.step([8, 0, 4, 0])


@pytest.mark.parametrize("name", RECURRENCES)
def test_chunks_of_any_size_equal_one_chunk(name: str, backend: StateBackend):
    random = np.random.default_rng(seed := 7)
    print("seed", seed)
    rows = Rows(RECURRENCES[name], [90, 40, 3], backend, seed)
    while rows.done != [90, 40, 3]:
        left = [len(inputs[0]) - done for inputs, done in zip(rows.inputs, rows.done, strict=True)]
        counts = [int(min(n, random.choice([0, 1, 2, 5, 33]))) for n in left]
        if any(counts):
            rows.step(counts)


@pytest.mark.parametrize("name", RECURRENCES)
def test_saves_on_the_way_hold_the_state_of_their_length(name: str, backend: StateBackend):
    rows = Rows(RECURRENCES[name], [100, 30, 8], backend)
    rows.step([70, 1, 8], [SaveAt(0, 64, 20), SaveAt(0, 16, 21), SaveAt(1, 1, 22), SaveAt(2, 8, 23)])
    rows.step([1, 20, 0], [SaveAt(0, 1, 24), SaveAt(1, 1, 25), SaveAt(1, 2, 26), SaveAt(1, 20, 27)])


@pytest.mark.parametrize("name", RECURRENCES)
def test_strong_decay_over_a_long_prompt_stays_finite(name: str, backend: StateBackend):
    constants, inputs = make_inputs(name, 300, seed=3)
    if len(inputs) > 3:
        inputs[3 if name != "selective_scan" else 1] *= 60
    _, states = truth(RECURRENCES[name], constants, inputs)
    pages = torch.full((3, *STATE_SHAPES[name]), float("nan"))
    batch = StateBatch(np.array([1]), np.array([300]), np.array([True]))
    out = backend.scan(
        RECURRENCES[name],
        pages,
        [c.float() for c in constants],
        [x.float() for x in inputs],
        backend.prepare(batch, CPU),
    )
    assert out.isfinite().all()
    torch.testing.assert_close(pages[1], states[-1].float(), rtol=1e-3, atol=1e-4)


def test_reference_gives_the_same_bits_however_a_prompt_is_cut():
    reference = select_state_backend(CPU, "reference")
    for name, recurrence in RECURRENCES.items():
        pages = []
        for cuts in ([50], [20, 30], [1] * 50):
            rows = Rows(recurrence, [50], reference)
            for count in cuts:
                rows.step([count])
            pages.append(rows.pages[1].clone())
        assert all(torch.equal(page, pages[0]) for page in pages), name


def test_unknown_backend_is_refused_by_name():
    with pytest.raises(InvalidSetting, match="no state backend 'cuda'; choose one of: native, triton, torch, refer"):
        select_state_backend(CPU, "cuda")


def test_a_backend_for_another_device_is_refused_with_the_reason():
    with pytest.raises(InvalidSetting, match="'triton' runs on cuda, not on cpu"):
        select_state_backend(CPU, "triton")


def test_the_default_on_a_cpu_is_native_where_there_is_a_compiler():
    assert select_state_backend(CPU).name == ("torch" if NativeStates.lacks() else "native")


@pytest.mark.parametrize("name", RECURRENCES)
@pytest.mark.parametrize("kind", [ChunkedStates, TritonStates])
def test_a_frame_runs_steps_of_one_token_from_whatever_pages_it_is_told(name: str, kind: type[StateBackend]):
    if lacks := kind.lacks():
        pytest.skip(lacks)
    rows = Rows(RECURRENCES[name], [9, 9, 9], kind())
    rows.step([8, 8, 8])
    frame = rows.backend.frame(4, 4, CPU)
    for pages in ([1], [3, 1, 2]):
        batch = StateBatch(np.array(pages), np.ones(len(pages)), np.zeros(len(pages), dtype=bool))
        transfer = Transfer(CPU)
        assert rows.backend.refill(frame, batch, transfer)
        transfer.run()
    order = [2, 0, 1, 0]
    inputs = [torch.stack([rows.inputs[n][i][8] for n in order]).float() for i in range(len(rows.inputs[0]))]
    out = rows.backend.scan(rows.recurrence, rows.pages, rows.constants, inputs, frame)
    for at, n in enumerate(order[:3]):
        torch.testing.assert_close(out[at], rows.truths[n][0][8].float(), rtol=2e-4, atol=2e-5)
        rows.check_page(n + 1, rows.truths[n][1][9], 9)


@pytest.mark.parametrize("name", RECURRENCES)
def test_a_frame_runs_mixed_steps_with_the_bits_of_unrecorded_ones(name: str):
    """Rows of one token and of several, new ones and others, states that are saved on the way and at the end."""
    if lacks := TritonStates.lacks():
        pytest.skip(lacks)
    random = np.random.default_rng(seed := 23)
    print("seed", seed)
    backend = TritonStates()
    most_rows, most_tokens = 5, 64
    frame = backend.frame(most_rows, most_tokens, CPU)
    for _ in range(3):
        lens = random.choice([0, 1, 1, 2, 16, 30], int(random.integers(1, most_rows + 1)))
        lens[0] = max(1, 40 - lens[1:].sum())
        saves = [
            SaveAt(row, at, 20 + row) for row, length in enumerate(lens) if (at := int(random.integers(length + 1)))
        ]
        batch = StateBatch(random.permutation(10)[: len(lens)], lens, random.random(len(lens)) < 0.5, saves)
        constants, inputs = make_inputs(name, most_tokens, seed)
        constants, inputs = [value.float() for value in constants], [values.float() for values in inputs]
        transfer = Transfer(CPU)
        assert backend.refill(frame, batch, transfer)
        transfer.run()
        start = torch.randn((32, *STATE_SHAPES[name]), generator=torch.Generator().manual_seed(seed))
        results = []
        for meta in (frame, backend.prepare(batch, CPU)):
            pages = start.clone()
            out = backend.scan(RECURRENCES[name], pages, constants, inputs, meta)
            results.append((out[: lens.sum()], pages))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


def test_a_step_with_more_rows_than_a_frame_holds_does_not_fit():
    if lacks := TritonStates.lacks():
        pytest.skip(lacks)
    backend = TritonStates()
    frame = backend.frame(3, 3, CPU)
    for lens in ([1, 1, 1, 1], [2]):
        batch = StateBatch(np.arange(len(lens)), np.array(lens), np.zeros(len(lens), dtype=bool))
        assert not backend.refill(frame, batch, Transfer(CPU))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_state_kept_in_fewer_bits_is_rounded_and_nothing_else(backend: StateBackend, dtype: torch.dtype):
    for name, recurrence in RECURRENCES.items():
        constants, inputs = make_inputs(name, 5, seed=11)
        few = [x.to(dtype) if name == "convolution" else x.float() for x in inputs]
        weights = [x.to(dtype) if name == "convolution" else x.float() for x in constants]
        pages = torch.zeros((3, *STATE_SHAPES[name]), dtype=dtype)
        start = torch.randn(STATE_SHAPES[name], generator=torch.Generator().manual_seed(2))
        pages[1] = start
        batch = StateBatch(np.array([1]), np.array([5]), np.array([False]))
        backend.scan(recurrence, pages, weights, few, backend.prepare(batch, CPU))
        state = start.to(dtype).double().unsqueeze(0)
        for token in range(5):
            row = [x.double()[token : token + 1] for x in few]
            _, state = recurrence.step(state, [x.double() for x in weights], row)
        tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
        torch.testing.assert_close(pages[1].double(), state[0], rtol=tolerance, atol=tolerance)
