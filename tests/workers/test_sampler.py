import pytest
import torch

from intarsia.proto.step import Sampling
from intarsia.workers.sampler import sample

GREEDY = Sampling(0.0, 0, 1.0, 0, -1)


def draw(logits: torch.Tensor, sampling: Sampling, count: int) -> list[int]:
    """Tokens at `count` positions of one sequence."""
    rows = sample(logits.expand(count, -1), [sampling] * count, range(count), range(count))
    return [row.token for row in rows]


def test_temperature_zero_takes_the_most_probable_token():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 4.9, 0.0]])
    assert [s.token for s in sample(logits, [GREEDY] * 2, [0, 0], [7, 3])] == [1, 0]
    assert [s.slot for s in sample(logits, [GREEDY] * 2, [0, 0], [7, 3])] == [7, 3]


def test_frequencies_follow_the_softmax():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    tokens = torch.tensor(draw(logits, Sampling(0.8, 0, 1.0, 5, -1), 20_000))
    shares = torch.bincount(tokens, minlength=4) / 20_000
    torch.testing.assert_close(shares, torch.softmax(logits[0] / 0.8, -1), atol=0.015, rtol=0)


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(5.0, 2, 1.0, 5, -1), {1, 2}),
        (Sampling(5.0, 1, 1.0, 5, -1), {2}),
        (Sampling(1.0, 0, 0.6, 5, -1), {2}),  # the best alone has 0.64
        (Sampling(1.0, 0, 0.7, 5, -1), {1, 2}),
        (Sampling(1.0, 0, 1e-9, 5, -1), {2}),
        (Sampling(5.0, 100, 1.0, 5, -1), {0, 1, 2, 3}),
    ],
)
def test_top_k_and_top_p_leave_only_the_probable_tokens(sampling: Sampling, allowed: set[int]):
    assert set(draw(torch.tensor([[0.0, 1.0, 2.0, -1.0]]), sampling, 3000)) == allowed


def test_draw_depends_on_seed_and_position_only():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    samplings = [Sampling(1.0, 0, 1.0, seed, -1) for seed in range(6)]
    together = [s.token for s in sample(logits, samplings, [9] * 6, range(6))]
    alone = [sample(logits[n : n + 1], [samplings[n]], [9], [0])[0].token for n in range(6)]
    assert together == alone
    assert len({tuple(draw(logits[:1], s, 20)) for s in samplings}) == 6


def test_logprobs_are_of_the_model_whatever_the_temperature():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    expected = torch.log_softmax(logits[0], -1)
    (result,) = sample(logits, [Sampling(3.0, 0, 1.0, 1, 2)], [0], [0])
    assert result.logprob == pytest.approx(float(expected[result.token]))
    assert [token for token, _ in result.top] == [2, 1]
    assert [value for _, value in result.top] == pytest.approx([float(expected[2]), float(expected[1])])
