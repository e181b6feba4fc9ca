"""What goes on around a recurrence equals plain torch, in C++ and in Triton; bits of a token depend on it alone."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from intarsia.kernels.mixers import DeltaSizes, Function, GatedNorm, Mamba2Sizes, Order, cpu, reference, triton

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason="there is no C++ compiler")

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}

Way = Callable[..., tuple[Tensor, ...]]
"""(cpu or reference, rows [..]) -> results of the tokens `rows`."""


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape) * scale


def delta(dtype: torch.dtype, sizes: DeltaSizes, of_each: int = 1) -> Way:
    """of_each: decays of a head"""
    key_heads, keys, heads, values, _ = sizes
    decays = heads * of_each
    qkv = draw(70, 2 * key_heads * keys + heads * values).to(dtype)
    gates = draw(70, heads + decays + 3, scale=8).to(dtype)  # of a stride of their own
    A, bias = -draw(decays).exp(), draw(decays)

    def run(kind, rows):
        a, b = gates[rows, :decays], gates[rows, decays : decays + heads]
        return kind.delta_inputs(qkv[rows], a, b, A, bias, sizes)

    return run


def mamba2(dtype: torch.dtype, sizes: Mamba2Sizes) -> Way:
    heads, values, groups, keys, _ = sizes
    inner, shared = heads * values, groups * keys
    projected = draw(70, inner + 2 * shared + heads, scale=4).to(dtype)
    A, bias = -draw(heads).exp(), draw(heads)

    def run(kind, rows):
        xBC, dt = projected[rows].split([inner + 2 * shared, heads], dim=-1)
        return kind.mamba2_inputs(xBC, dt, A, bias, sizes)

    return run


def lru(dtype: torch.dtype, channels: int) -> Way:
    gates = draw(70, 3 * channels + 2, scale=2).to(dtype)
    rate, positions = -draw(channels).exp(), torch.arange(70) % 9

    def run(kind, rows):
        x, let_in, forget = gates[rows, : 3 * channels].chunk(3, dim=-1)
        return kind.lru_inputs(x, let_in, forget, rate, positions[rows])

    return run


def norm(dtype: torch.dtype, norm: GatedNorm, channels: int, skips: bool) -> Way:
    y, gate, x, D = (
        draw(70, channels),
        draw(70, channels + 5).to(dtype),
        draw(70, channels + 1).to(dtype),
        draw(channels),
    )

    def run(kind, rows):
        skip = (D, x[rows, :channels]) if skips else None
        return (kind.gated_norm(y[rows], gate[rows, :channels], norm, skip),)

    return run


def functions(dtype: torch.dtype, channels: int) -> Way:
    x, factor = draw(70, channels, scale=20).to(dtype), draw(70, channels).to(dtype)

    def run(kind, rows):
        products = (
            kind.times_mapped(x[rows], function, factor[rows]) for function in (Function.SILU, Function.SIGMOID)
        )
        return (*(kind.mapped(x[rows], function) for function in Function), *products)

    return run


LIMITS = 0.0, float("inf")
CASES: dict[str, Callable[[torch.dtype], Way]] = {
    "delta": lambda dtype: delta(dtype, DeltaSizes(4, 128, 8, 128)),
    "delta of odd sizes": lambda dtype: delta(dtype, DeltaSizes(3, 13, 6, 7)),
    "keyed delta": lambda dtype: delta(dtype, DeltaSizes(4, 128, 4, 128), 128),
    "keyed delta with a bound": lambda dtype: delta(dtype, DeltaSizes(3, 13, 3, 7, -5.0), 13),
    "mamba-2": lambda dtype: mamba2(dtype, Mamba2Sizes(24, 64, 1, 128, LIMITS)),
    "mamba-2 of odd sizes": lambda dtype: mamba2(dtype, Mamba2Sizes(6, 5, 2, 11, (0.1, 0.9))),
    "RG-LRU": lambda dtype: lru(dtype, 256),
    "RG-LRU of odd sizes": lambda dtype: lru(dtype, 101),
    "norm of gated delta": lambda dtype: norm(dtype, norm_of(dtype, 16, 128, Order.NORM_FIRST, True), 2048, False),
    "norm of mamba-2": lambda dtype: norm(dtype, norm_of(dtype, 1, 1536, Order.GATE_FIRST), 1536, True),
    "norm of odd groups": lambda dtype: norm(dtype, norm_of(dtype, 3, 21, Order.GATE_FIRST), 63, True),
    "norm before the gate": lambda dtype: norm(dtype, norm_of(dtype, 2, 37, Order.NORM_FIRST), 74, True),
    "norm under a sigmoid": lambda dtype: norm(
        dtype, norm_of(dtype, 2, 37, Order.NORM_FIRST)._replace(gate=Function.SIGMOID), 74, False
    ),
    "no norm": lambda dtype: norm(dtype, GatedNorm(Order.NO_NORM, None, 0.0, 75), 75, True),
    "functions": lambda dtype: functions(dtype, 101),
}


def norm_of(dtype: torch.dtype, groups: int, width: int, order: Order, rounds: bool = False) -> GatedNorm:
    return GatedNorm(order, draw(groups * width).to(dtype).float(), 1e-6, width, rounds)


@pytest.mark.parametrize("kind", [cpu, triton], ids=["C++", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_operation_in_one_call_equals_plain_torch(case: str, dtype: torch.dtype, kind: ModuleType):
    """On a GPU queries and keys of Mamba-2 are left as they are."""
    if not kind.is_available():
        pytest.skip("there is no Triton")
    torch.manual_seed(1)
    run = CASES[case](dtype)
    for ours, theirs in zip(run(kind, slice(None)), run(reference, slice(None)), strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype or (case.startswith("mamba-2") and kind is triton)
        theirs = theirs.to(ours.dtype)
        tolerance = TOLERANCE[ours.dtype] if ours.dtype == dtype else TOLERANCE[dtype]
        torch.testing.assert_close(ours, theirs, rtol=tolerance * 4, atol=tolerance)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_bits_of_a_token_are_the_same_alone_and_beside_others(case: str, dtype: torch.dtype, threads: int):
    torch.manual_seed(2)
    run, before = CASES[case](dtype), torch.get_num_threads()
    alone = [run(cpu, slice(n, n + 1)) for n in range(70)]
    torch.set_num_threads(threads)
    for rows in (slice(0, 70), slice(3, 36), slice(69, 70)):
        for n, together in enumerate(run(cpu, rows)):
            assert torch.equal(together, torch.cat([alone[row][n] for row in range(70)[rows]]))
    torch.set_num_threads(before)
