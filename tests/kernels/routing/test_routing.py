"""The C++ and the Triton kernels choose the experts that a few lines of torch choose, and weigh them alike."""

from types import ModuleType

import pytest
import torch

from intarsia.kernels.routing import Routing, Scoring, cpu, operations_of, reference, triton
from intarsia.tests.kernels.natives import natives

pytestmark = [  # NaN in Triton's interpreter
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


native = natives(cpu, triton)


WAYS = {  # experts, how
    "gpt-oss": (32, Routing(4, Scoring.SOFTMAX, is_of_chosen=True)),
    "mixtral": (8, Routing(2, Scoring.SOFTMAX, least=0.0, dtype=torch.float32)),
    "jamba": (16, Routing(2, Scoring.SOFTMAX)),
    "qwen3-next": (512, Routing(10, Scoring.SOFTMAX, least=0.0)),
    "llama 4": (16, Routing(1, Scoring.SIGMOID, is_of_chosen=True)),
    "deepseek-v3": (256, Routing(8, Scoring.SIGMOID, False, False, 8, 4, 1e-20, 2.5, torch.float32, torch.ones(256))),
    "kimi-k2": (384, Routing(8, Scoring.SIGMOID, False, False, 1, 1, 1e-20, 2.827, torch.float32, torch.ones(384))),
    "mistral 4": (60, Routing(3, Scoring.SOFTMAX, False, True, 5, 2, 1e-20, 1.5)),
    "lfm2": (24, Routing(4, Scoring.SIGMOID, rounds=True, least=1e-6, bias_E=torch.ones(24))),
    "deepseek-v4": (48, Routing(6, Scoring.SQRT_SOFTPLUS, least=1e-20, scale=1.5, bias_E=torch.ones(48))),
    "gemma 4": (33, Routing(8, Scoring.SOFTMAX, least=0.0, dtype=torch.float32, scale_E=torch.ones(33))),
    "all of few": (3, Routing(3, Scoring.SIGMOID)),
}


def scene(way: str, tokens: int = 7) -> tuple[torch.Tensor, Routing]:
    """Logits, and how they are read; with biases and scales that say something."""
    experts, routing = WAYS[way]
    numbers = {name: torch.rand(experts) for name in ("bias_E", "scale_E") if getattr(routing, name) is not None}
    return torch.randn(tokens, experts) * 3, routing._replace(**numbers)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(seed := torch.seed() % 2**32)
    print("seed:", seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_experts_and_their_shares_are_those_of_the_reference(native: ModuleType, way: str, dtype: torch.dtype):
    logits, routing = scene(way)
    logits = logits.to(dtype)
    ours, theirs = native.route(logits, routing), reference.route(logits, routing)
    assert ours[0].dtype == theirs[0].dtype
    torch.testing.assert_close(ours[0], theirs[0], rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
    assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("way", ["gpt-oss", "deepseek-v3", "mistral 4", "all of few"])
def test_of_equal_experts_and_groups_the_first_are_chosen(native: ModuleType, way: str):
    logits, routing = scene(way)
    logits = torch.zeros_like(logits)
    routing = routing if routing.bias_E is None else routing._replace(bias_E=torch.ones_like(routing.bias_E))
    assert native.route(logits, routing)[1].tolist() == [list(range(routing.most))] * len(logits)


@pytest.mark.parametrize("way", WAYS)
def test_a_token_has_the_same_bits_in_any_company(native: ModuleType, way: str):
    logits, routing = scene(way, tokens=60)
    shares, experts = native.route(logits, routing)
    for few in (slice(0, 1), slice(3, 20), slice(59, 60), slice(0, 0)):
        alone = native.route(logits[few], routing)
        assert torch.equal(alone[0], shares[few])
        assert torch.equal(alone[1], experts[few])


@pytest.mark.parametrize("way", WAYS)
def test_logits_that_are_no_numbers_or_without_end_choose_experts_that_there_are_each_once(
    native: ModuleType, way: str
):
    logits, routing = scene(way, tokens=5)
    logits[0, 1], logits[1, :], logits[2, :], logits[3, 2] = float("nan"), float("nan"), -torch.inf, torch.inf
    shares, experts = native.route(logits, routing)
    assert all(sorted(set(row)) == sorted(row) for row in experts.tolist())
    assert 0 <= int(experts.min()) <= int(experts.max()) < logits.shape[1]
    assert shares[:2].isnan().any(1).all(), "an answer of what is no number is none"
    assert shares[4].isfinite().all()


def test_rows_that_lie_apart_are_read_as_rows_side_by_side(native: ModuleType):
    logits, routing = scene("qwen3-next")
    wide = torch.randn(7, 1000)
    wide[:, 100:612] = logits
    for ours, theirs in zip(native.route(wide[:, 100:612], routing), native.route(logits, routing), strict=True):
        assert torch.equal(ours, theirs)


def test_there_is_one_for_each_kind_of_device():
    assert operations_of("cpu") is (cpu if cpu.is_available() else None)
    assert operations_of("meta") is None
