"""The C++ and the Triton operations compute what a few lines of torch compute."""

from types import ModuleType

import pytest
import torch

from intarsia.kernels.tokenwise import Activation, Norm, Rotary, cpu, reference, triton


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


@pytest.mark.parametrize("rounds_first", [False, True])
@pytest.mark.parametrize("shape", [(1, 16), (3, 5), (1, 7, 40), (1, 4, 3, 33), (0, 8), (600, 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_the_reference(native: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], rounds_first: bool):
    x = (torch.randn(shape) * 3).to(dtype)
    norm = Norm(torch.randn(shape[-1]), 1e-6, rounds_first)
    close(native.rms_norm(x, norm), reference.rms_norm(x, norm))


def test_a_norm_of_strided_heads_and_of_tiny_numbers_is_the_reference(native: ModuleType):
    heads = torch.randn(1, 5, 3, 16).transpose(1, 2)
    norm = Norm(torch.ones(16), 1e-6)
    close(native.rms_norm(heads, norm), reference.rms_norm(heads, norm))
    close(native.rms_norm(heads * 1e-4, norm), reference.rms_norm(heads * 1e-4, norm))


@pytest.mark.parametrize("scale", [1.0, 0.22])
@pytest.mark.parametrize("norms", ["neither", "after", "before", "both"])
@pytest.mark.parametrize("shape", [(1, 16), (1, 7, 40), (0, 8), (600, 256)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_with_norms_around_them_are_the_reference(
    native: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], norms: str, scale: float
):
    x, added = (torch.randn(shape).to(dtype) for _ in range(2))
    after, before = (
        Norm(torch.randn(shape[-1]), 1e-6, rounds_first) if norms in (name, "both") else None
        for name, rounds_first in (("after", True), ("before", False))
    )
    kept = x.clone(), added.clone()
    ours = native.add_norm(x, added, after, before, scale)
    for found, expected in zip(ours, reference.add_norm(x, added, after, before, scale), strict=True):
        close(found, expected)
    assert torch.equal(x, kept[0])
    assert torch.equal(added, kept[1])


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("shape", [(1, 2), (3, 30), (1, 7, 128), (0, 8), (200, 1024)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_are_the_reference(
    native: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], activation: Activation
):
    gate_up = (torch.randn(shape) * 3).to(dtype)
    close(native.gate(gate_up, activation), reference.gate(gate_up, activation))


@pytest.mark.parametrize("activation", Activation)
def test_gates_far_from_zero_neither_overflow_nor_vanish(native: ModuleType, activation: Activation):
    gate_up = torch.tensor([[-1e4, -200.0, -90.0, 90.0, 200.0, 1e4, 1, 1, 1, 1, 1, 1]])
    close(native.gate(gate_up, activation), reference.gate(gate_up, activation))


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


@pytest.mark.parametrize(
    ("rotary", "own_angles"),
    [(Rotary.NONE, True), (Rotary.PAIRS, True), (Rotary.HALVES, True), (Rotary.HALVES, False)],
    ids=["none", "pairs", "halves", "halves that share angles"],
)
@pytest.mark.parametrize("norm_over", [None, "a head", "all heads"])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (16, 16), (40, 10), (64, 32), (2, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normed_and_rotated_as_the_reference_does(
    native: ModuleType,
    dtype: torch.dtype,
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
        angles.cos().to(dtype),
        angles.sin().to(dtype),
        rotary,
        rotary_dim,
    )
    native.prepare_heads(ours, *arguments)
    reference.prepare_heads(theirs, *arguments)
    error = 2 * ROUNDING[dtype]  # a difference of two products may cancel
    torch.testing.assert_close(ours, theirs, rtol=error, atol=error)
    values = (heads + kv_heads) * head_dim
    assert torch.equal(ours[:, values:], theirs[:, values:])


def test_heads_within_wider_tokens_are_changed_alone(native: ModuleType):
    wide = torch.randn(3, 100)
    before = wide.clone()
    part = wide[:, :64]
    angles = torch.rand(3, 16)
    native.prepare_heads(part, 2, 1, 16, (None, None), angles.cos(), angles.sin(), Rotary.HALVES, 16)
    assert torch.equal(wide[:, 48:], before[:, 48:])
    assert not torch.equal(wide[:, :48], before[:, :48])
