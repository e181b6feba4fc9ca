"""The C++ and the Triton operations compute what a few lines of torch compute."""

from types import ModuleType

import pytest
import torch

from intarsia.kernels.paged_attention import GroupMeta, TorchBackend
from intarsia.kernels.tokenwise import Activation, Gating, Norm, Places, Rotary, cpu, operations_of, reference, triton

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # which Triton's interpreter says


@pytest.fixture(params=[cpu, triton], ids=["C++", "Triton"])
def native(request: pytest.FixtureRequest) -> ModuleType:
    """Triton's interpreter takes a few milliseconds for each program, so that many rows are for C++ alone."""
    operations = request.param
    if not operations.is_available():
        pytest.skip("there is no compiler for it")
    shape = request.node.callspec.params.get("shape", ())
    if operations is triton and 600 in shape:
        pytest.skip("many rows differ from few for C++ alone, which wakes other threads")
    return operations


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Relative: two roundings, each of which may fall to the other side. In float32 sums run in another order."""


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    error = ROUNDING[theirs.dtype]
    torch.testing.assert_close(ours, theirs, rtol=error, atol=error)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("ways", [(False, False), (True, False), (False, True)], ids=["", "rounds first", "centered"])
@pytest.mark.parametrize("shape", [(1, 16), (3, 5), (1, 7, 40), (1, 4, 3, 33), (0, 8), (600, 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_the_reference(
    native: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], ways: tuple[bool, bool]
):
    _, is_centered = ways
    x = (torch.randn(shape) * 3 + 2 * is_centered).to(dtype)
    norm = Norm(torch.randn(shape[-1]), 1e-6, *ways)
    close(native.normed(x, norm), reference.normed(x, norm))


def test_a_norm_of_strided_heads_and_of_tiny_numbers_is_the_reference(native: ModuleType):
    heads = torch.randn(1, 5, 3, 16).transpose(1, 2)
    norm = Norm(torch.ones(16), 1e-6)
    close(native.normed(heads, norm), reference.normed(heads, norm))
    close(native.normed(heads * 1e-4, norm), reference.normed(heads * 1e-4, norm))


@pytest.mark.parametrize("is_centered", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize("norms", ["neither", "after", "before", "both"])
@pytest.mark.parametrize("shape", [(1, 16), (1, 7, 40), (0, 8), (600, 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_with_norms_around_them_are_the_reference(
    native: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], norms: str, scale: float, is_centered: bool
):
    x, added = (torch.randn(shape).to(dtype) for _ in range(2))
    after, before = (
        Norm(torch.randn(shape[-1]), 1e-6, rounds_first, is_centered) if norms in (name, "both") else None
        for name, rounds_first in (("after", True), ("before", False))
    )
    kept = x.clone(), added.clone()
    ours = native.add_norm(x, added, after, before, scale)
    for found, expected in zip(ours, reference.add_norm(x, added, after, before, scale), strict=True):
        close(found, expected)
    assert torch.equal(x, kept[0])
    assert torch.equal(added, kept[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norms", ["neither", "after", "before", "both"])
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_a_sum_may_be_wider_than_what_is_added_to_it(dtype: torch.dtype, norms: str, scale: float):
    if not cpu.is_available():
        pytest.skip("there is no C++ compiler")
    x, added = torch.randn(7, 40), torch.randn(7, 40).to(dtype)
    after, before = (
        Norm(torch.randn(40), 1e-6, True) if norms in (name, "both") else None for name in ("after", "before")
    )
    total, normed = cpu.add_norm(x, added, after, before, scale)
    their_total, their_normed = reference.add_norm(x, added, after, before, scale)
    close(total, their_total)
    close(normed, their_normed)
    assert total.dtype is torch.float32
    assert normed.dtype is (torch.float32 if before is None else dtype)
    norm = Norm(torch.randn(40), 1e-6, True)
    close(cpu.normed(x, norm, dtype), reference.normed(x, norm, dtype))


GATINGS = [
    *map(Gating, Activation),
    Gating(Activation.SILU, 2.0, by_turns=True, steepness=1.702, added=1.0),
    Gating(Activation.SILU, 2.0, steepness=1.702, added=1.0),
    Gating(Activation.SILU, 2.0),
    Gating(Activation.SILU, 2.0, is_cut_after=True),
    Gating(Activation.GELU_TANH, 1.5, is_cut_after=True, by_turns=True),
]


@pytest.mark.parametrize("gating", GATINGS, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 30), (3, 70), (1, 7, 128), (0, 8), (200, 1024), (2, 5, 2100)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_are_the_reference(native: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], gating: Gating):
    gate_up = (torch.randn(shape) * 3).to(dtype)
    close(native.gate(gate_up, gating), reference.gate(gate_up, gating))


@pytest.mark.parametrize("gating", GATINGS, ids=str)
def test_gates_far_from_zero_neither_overflow_nor_vanish(native: ModuleType, gating: Gating):
    gate_up = torch.tensor([[-1e4, -200.0, -90.0, 90.0, 200.0, 1e4, 1, 1, 1, 1, 1, 1]])
    close(native.gate(gate_up, gating), reference.gate(gate_up, gating))


@pytest.mark.parametrize("gating", GATINGS, ids=str)
def test_a_gate_or_another_number_that_is_none_is_not_cut_to_one(native: ModuleType, gating: Gating):
    gate_up = torch.ones(4, 64)
    gate_up[1, 0] = gate_up[2, 63] = float("nan")
    assert native.gate(gate_up, gating).isnan().any(dim=1).tolist() == [False, True, True, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(Activation))
def test_activations_are_the_reference_and_each_number_has_the_same_bits_anywhere(
    native: ModuleType, dtype: torch.dtype, activation: Activation
):
    x = (torch.randn(7, 9001) * 4).to(dtype)
    found = native.activate(x, activation)
    close(found, reference.activate(x, activation))
    for first, count in ((3, 1), (40, 17), (8990, 11)):
        part = x[3, first : first + count]
        assert torch.equal(native.activate(part, activation), found[3, first : first + count])


WIDE_ANGLES = [(dtype, torch.float32) for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(
    ("rotary", "own_angles"),
    [(Rotary.NONE, True), (Rotary.PAIRS, True), (Rotary.HALVES, True), (Rotary.HALVES, False)],
    ids=["none", "pairs", "halves", "halves that share angles"],
)
@pytest.mark.parametrize("norm_over", [None, "a head", "all heads"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (16, 16), (40, 10), (64, 32), (2, 2)])
@pytest.mark.parametrize(("dtype", "angle_dtype"), [*((each, each) for each in DTYPES), *WIDE_ANGLES])
def test_heads_are_normed_and_rotated_as_the_reference_does(
    native: ModuleType,
    dtype: torch.dtype,
    angle_dtype: torch.dtype,
    head_dim: int,
    rotary_dim: int,
    own_angles: bool,
    norm_over: str | None,
    rotary: Rotary,
):
    tokens, heads, kv_heads = 5, 4, 2
    ours = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    theirs = ours.clone()
    angles = torch.rand(tokens, rotary_dim if own_angles else rotary_dim // 2) * 6
    widths = {None: (0, 0), "a head": (head_dim, head_dim), "all heads": (heads * head_dim, kv_heads * head_dim)}
    queries, keys = (Norm(torch.randn(width), 1e-6) if width else None for width in widths[norm_over])
    arguments = (
        heads,
        kv_heads,
        head_dim,
        (queries, keys),
        angles.cos().to(angle_dtype),
        angles.sin().to(angle_dtype),
        rotary,
        rotary_dim,
    )
    native.prepare_heads(ours, *arguments)
    reference.prepare_heads(theirs, *arguments)
    error = 2 * ROUNDING[dtype]  # a difference of two products may cancel
    torch.testing.assert_close(ours, theirs, rtol=error, atol=error)
    values = (heads + kv_heads) * head_dim
    assert torch.equal(ours[:, values:], theirs[:, values:])


@pytest.mark.parametrize("norm", [None, Norm(torch.linspace(0.5, 1.5, 16), 1e-6)], ids=["", "normed"])
@pytest.mark.parametrize("rotary", Rotary)
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_are_multiplied_by_the_factor_of_their_token_in_the_end(
    native: ModuleType, dtype: torch.dtype, rotary: Rotary, norm: Norm | None
):
    ours = torch.randn(5, 80).to(dtype)
    theirs, plain = ours.clone(), ours.clone()
    angles = torch.rand(5, 8) * 6
    arguments = 2, 2, 16, (norm, norm), angles.cos(), angles.sin(), rotary, 8
    factor_T = torch.tensor([1.0, 0.5, 0.75, 1.0, 0.125])
    native.prepare_heads(ours, *arguments, factor_T)
    reference.prepare_heads(theirs, *arguments, factor_T)
    native.prepare_heads(plain, *arguments)
    error = 2 * ROUNDING[dtype]
    torch.testing.assert_close(ours, theirs, rtol=error, atol=error)
    assert torch.equal(ours[:, 32:], plain[:, 32:])
    assert torch.equal(ours[factor_T == 1], plain[factor_T == 1])


def test_heads_within_wider_tokens_are_changed_alone(native: ModuleType):
    wide = torch.randn(3, 100)
    before = wide.clone()
    part = wide[:, :64]
    angles = torch.rand(3, 16)
    native.prepare_heads(part, 2, 1, 16, (None, None), angles.cos(), angles.sin(), Rotary.HALVES, 16)
    assert torch.equal(wide[:, 48:], before[:, 48:])
    assert not torch.equal(wide[:, :48], before[:, :48])


def test_rows_may_lie_apart(native: ModuleType):
    wide = torch.randn(2, 3, 5, 100)
    x, added = wide[..., :33], wide[..., 50:83]
    norm = Norm(torch.randn(33), 1e-6)
    close(native.normed(x, norm), reference.normed(x, norm))
    for found, expected in zip(
        native.add_norm(x, added, norm, norm), reference.add_norm(x, added, norm, norm), strict=True
    ):
        close(found, expected)
    close(native.gate(wide[..., :30], GATINGS[0]), reference.gate(wide[..., :30], GATINGS[0]))
    close(native.activate(x, Activation.GELU), reference.activate(x, Activation.GELU))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_whatever_lies_beside_it(native: ModuleType, dtype: torch.dtype):
    x, added = (torch.randn(4, 200).to(dtype) for _ in range(2))
    norm = Norm(torch.randn(200), 1e-6)
    for every, alone in zip(
        native.add_norm(x, added, norm, norm), native.add_norm(x[2:3], added[2:3], norm, norm), strict=True
    ):
        assert torch.equal(every[2:3], alone)
    assert torch.equal(native.gate(x, GATINGS[0])[2:3], native.gate(x[2:3], GATINGS[0]))
    angles = torch.rand(4, 16).to(dtype)
    every, alone = x.clone(), x[2:3].clone()
    for tokens, turned in ((every, angles), (alone, angles[2:3])):
        native.prepare_heads(tokens, 8, 2, 16, (None, None), turned.cos(), turned.sin(), Rotary.HALVES, 16)
    assert torch.equal(every[2:3], alone)


# -- what only a GPU does --------------------------------------------------------------------------------------------

needs_triton = pytest.mark.skipif(not triton.is_available(), reason="there is no Triton")


@needs_triton
@pytest.mark.parametrize("norm_over", [None, "a head", "all heads"])
@pytest.mark.parametrize("rotary", Rotary)
@pytest.mark.parametrize("value_dim", [16, 12])
@pytest.mark.parametrize("has_factor", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_are_in_their_pages_as_if_written_after_they_were_prepared(
    dtype: torch.dtype, value_dim: int, rotary: Rotary, norm_over: str | None, has_factor: bool
):
    tokens, heads, kv_heads, head_dim = 5, 6, 3, 16
    keys_at, values_at = heads * head_dim, (heads + kv_heads) * head_dim
    ours = torch.randn(tokens, values_at + kv_heads * value_dim).to(dtype)
    theirs, before = ours.clone(), ours.clone()
    pages = torch.full((4, 8, kv_heads + 1, head_dim + value_dim), float("nan"), dtype=dtype)
    expected = pages.clone()
    meta = GroupMeta(torch.tensor([2, 2, 0, 3, 1]), torch.tensor([7, 0, 3, 3, 1]), None)
    angles = torch.rand(tokens, head_dim) * 6
    over = {None: (0, 0), "a head": (head_dim, head_dim), "all heads": (keys_at, kv_heads * head_dim)}[norm_over]
    queries, keys = (Norm(torch.randn(width), 1e-6, rounds_first=True) if width else None for width in over)
    angles_TR = angles.cos().to(dtype), angles.sin().to(dtype)
    arguments = heads, kv_heads, head_dim, (queries, keys), *angles_TR, rotary, 16
    factor_T = torch.rand(tokens) if has_factor else None
    # A layer may own a part of each page only.
    places = Places(pages[:, :, :kv_heads], meta.token_page, meta.token_offset)
    triton.prepare_heads(ours, *arguments, factor_T, places)
    reference.prepare_heads(theirs, *arguments, factor_T)
    k_TKD, v_TKD = (
        part.unflatten(1, (kv_heads, -1)) for part in theirs[:, keys_at:].tensor_split((kv_heads * head_dim,), dim=1)
    )
    TorchBackend().write(expected[:, :, :kv_heads], k_TKD, v_TKD, meta)
    error = 2 * ROUNDING[dtype]
    torch.testing.assert_close(pages, expected, rtol=error, atol=error, equal_nan=True)
    torch.testing.assert_close(ours[:, :keys_at], theirs[:, :keys_at], rtol=error, atol=error)
    assert torch.equal(ours[:, keys_at:], before[:, keys_at:])


@needs_triton
def test_angles_may_be_of_more_bits_than_heads():
    ours = torch.randn(5, 4 * 16).to(torch.bfloat16)
    theirs = ours.clone()
    angles = torch.rand(5, 16) * 6
    for operations, tokens in ((triton, ours), (reference, theirs)):
        operations.prepare_heads(tokens, 2, 1, 16, (None, None), angles.cos(), angles.sin(), Rotary.HALVES, 16)
    close(ours, theirs)


def test_a_device_has_what_can_read_its_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu, "is_available", lambda: True)
    monkeypatch.setattr(triton, "is_available", lambda: True)
    assert [operations_of(kind) for kind in ("cpu", "cuda", "meta")] == [cpu, triton, None]
    monkeypatch.setattr(triton, "is_available", lambda: False)
    assert [operations_of(kind) for kind in ("cpu", "cuda")] == [cpu, None]
