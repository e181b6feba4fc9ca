"""What a draw means, for each backend."""

import numpy as np
import pytest
import torch

from intarsia.kernels.sampling import SAMPLING_BACKENDS, Changes, Draw, Penalties, SamplingBackend

NONE = float("-inf")

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NaN in Triton's interpreter


@pytest.fixture(params=SAMPLING_BACKENDS, ids=lambda kind: kind.name)
def backend(request: pytest.FixtureRequest) -> SamplingBackend:
    if reason := request.param.lacks():
        pytest.skip(reason)
    return request.param()


def turns(backend: SamplingBackend, count: int) -> int:
    """So many draws, or a few by Triton's interpreter, which takes 50 ms for one."""
    return min(count, 24) if backend.name == "triton" else count


def tokens_of(backend: SamplingBackend, logits: torch.Tensor, draw: Draw, count: int, changes: Changes | None = None):
    """At `count` positions of one sequence."""
    return backend.draw(logits.expand(count, -1), [draw] * count, range(count), [changes] * count)[0].tolist()


def greedy(backend: SamplingBackend, logits: list[float], changes: Changes | None = None) -> int:
    return tokens_of(backend, torch.tensor(logits), Draw(), 1, changes)[0]


def changed(backend: SamplingBackend, logits: list[float], changes: Changes) -> list[float]:
    """What logits become: the least bias of a token that makes it the most probable one tells."""
    top = torch.tensor([[*logits, 100.0]])
    found = []
    for token in range(len(logits)):
        low, high = -200.0, 400.0
        for _ in range(24):  # to 0.00004
            middle = (low + high) / 2
            biased = changes._replace(biases=((token, middle), *((t, NONE) for t in range(len(logits)) if t != token)))
            is_less = backend.draw(top, [Draw()], [0], [biased])[0].item() == len(logits)
            low, high = (middle, high) if is_less else (low, middle)
        found.append(100 - high)
    return found


def said(*counts: int, **penalties: float) -> Changes:
    """How often the answer has each token; all are of the sequence but those of a negative number."""
    tokens = [token for token, count in enumerate(counts) if count >= 0]
    return Changes(Penalties(np.array(tokens), np.array([counts[token] for token in tokens]), **penalties))


def test_temperature_zero_takes_the_most_probable_token(backend: SamplingBackend):
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 4.9, 0.0]])
    assert backend.draw(logits, [Draw()] * 2, [0, 0])[0].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("logits", "token"),
    [
        ([1.0, 2.0, 2.0], 1),
        ([-0.0, 0.0], 0),
        ([1.0, float("nan"), float("inf"), float("nan")], 1),
        ([1.0, float("inf"), float("inf")], 1),
        ([NONE, NONE], 0),
        ([NONE, -1e38], 1),
        ([7.0], 0),
    ],
)
def test_the_first_of_equals_is_taken_and_nan_before_all(backend: SamplingBackend, logits: list[float], token: int):
    assert greedy(backend, logits) == token
    far = torch.full((1, 300), NONE)
    far[0, 200 : 200 + len(logits)] = torch.tensor(logits)
    assert backend.draw(far, [Draw()], [0])[0].item() == (200 + token if max(logits) > NONE else 0)


@pytest.mark.parametrize("logits", [[1.0, float("nan"), 3.0], [1.0, 2.0, float("inf")], [NONE] * 3])
def test_a_draw_from_what_has_no_chances_is_some_token(backend: SamplingBackend, logits: list[float]):
    for draw in (Draw(1.0), Draw(1.0, 2), Draw(1.0, 0, 0.5)):
        assert tokens_of(backend, torch.tensor(logits), draw, 1) == [0]


@pytest.mark.parametrize("temperature", [1e-5, 1e-38, 1e-181, 5e-324])
def test_a_temperature_of_almost_zero_takes_the_most_probable_token(backend: SamplingBackend, temperature: float):
    logits = torch.tensor([NONE, 3.0, 90.0, -20.0])
    assert set(tokens_of(backend, logits, Draw(temperature, seed=5), 50)) == {2}


@pytest.mark.parametrize("weight", [1e-30, 1e30])
def test_the_most_extreme_settings_still_draw_a_token_that_is_allowed(backend: SamplingBackend, weight: float):
    logits = torch.tensor([NONE, 3.0, -2.0, 1.0, 0.0])
    for temperature in (1e-300, 1.0, 1e300):
        tokens = tokens_of(backend, logits, Draw(temperature, seed=5), 40, said(-1, 0, 0, 0, -1, repetition=weight))
        assert 0 not in tokens


def test_frequencies_follow_the_softmax(backend: SamplingBackend):
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    count = turns(backend, 20_000)
    tokens = torch.tensor(tokens_of(backend, logits, Draw(0.8, seed=5), count))
    shares = torch.bincount(tokens, minlength=4) / count
    torch.testing.assert_close(shares, torch.softmax(logits[0] / 0.8, -1), atol=2 / count**0.5, rtol=0)


@pytest.mark.parametrize(
    ("draw", "allowed"),
    [
        (Draw(5.0, 2), {1, 2}),
        (Draw(5.0, 1), {2}),
        (Draw(1.0, 0, 0.6), {2}),  # the best alone has 0.64
        (Draw(1.0, 0, 0.7), {1, 2}),
        (Draw(1.0, 0, 1e-9), {2}),
        (Draw(5.0, 100), {0, 1, 2, 3}),
        # Shares of the best one: 0.135, 0.368, 1, 0.05.
        (Draw(1.0, min_p=0.04), {0, 1, 2, 3}),
        (Draw(1.0, min_p=0.1), {0, 1, 2}),
        (Draw(1.0, min_p=0.3), {1, 2}),
        (Draw(1.0, min_p=1.0), {2}),
        (Draw(5.0, 3, 0.999, 0.01), {0, 1, 2}),
    ],
)
def test_cuts_leave_only_the_probable_tokens(backend: SamplingBackend, draw: Draw, allowed: set[int]):
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    tokens = set(tokens_of(backend, logits, draw._replace(seed=5), turns(backend, 3000)))
    assert tokens == allowed or (backend.name == "triton" and tokens < allowed)


@pytest.mark.parametrize("draw", [Draw(1.0, 3), Draw(1.0, 0, 0.3), Draw(1.0, 3, 0.9)])
def test_of_equal_tokens_a_cut_keeps_the_first(backend: SamplingBackend, draw: Draw):
    """Ten of a chance of 0.1."""
    assert set(tokens_of(backend, torch.zeros(10), draw, turns(backend, 500))) == {0, 1, 2}


def test_draw_depends_on_seed_and_position_only(backend: SamplingBackend):
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    draws = [Draw(1.0, seed=seed) for seed in range(6)]
    together = backend.draw(logits, draws, [9] * 6)[0].tolist()
    alone = [backend.draw(logits[n : n + 1], [draws[n]], [9])[0].item() for n in range(6)]
    assert together == alone
    assert len({tuple(tokens_of(backend, logits[:1], draw, 20)) for draw in draws}) == 6


def test_draw_does_not_depend_on_what_others_beside_it_want(backend: SamplingBackend):
    generator = torch.Generator().manual_seed(1)
    kinds: list[tuple[dict, Changes | None]] = [
        ({}, None), ({"top_k": 3}, None), ({"top_p": 0.5}, None), ({"min_p": 0.1}, None), ({"temperature": 0.0}, None),
        ({"temperature": 3.0}, None), ({}, said(0, 2, repetition=1.5)), ({}, Changes(biases=((3, 50.0),))),
        ({}, Changes(excluded=(1, 2))), ({"logprobs": 5}, None), ({}, Changes(allowed=b"\7")),
    ]  # fmt: skip
    rows = [kinds[n % len(kinds)] for n in range(turns(backend, 200))]
    draws = [Draw(**({"temperature": 1.0, "seed": n} | kind)) for n, (kind, _) in enumerate(rows)]
    changes = [change for _, change in rows]
    logits = torch.randn(len(draws), 50, generator=generator)
    together = backend.draw(logits, draws, [9] * len(draws), changes)[0].tolist()
    alone = [backend.draw(logits[n : n + 1], [draws[n]], [9], [changes[n]])[0].item() for n in range(len(draws))]
    assert together == alone


def test_draw_does_not_depend_on_the_last_bits_of_logits(backend: SamplingBackend):
    """As other batches, and prompts computed anew, change them."""
    generator = torch.Generator().manual_seed(1)
    cuts = [{}, {"top_p": 0.7}, {"top_k": 40}, {"min_p": 0.01}]
    draws = [Draw(1.0, seed=n, **cuts[n % 4]) for n in range(turns(backend, 2000))]
    logits = torch.randn(len(draws), 10_000, generator=generator)
    noise = 1e-5 * torch.randn(logits.shape, generator=generator)
    tokens, others = (backend.draw(each, draws, range(len(draws)))[0] for each in (logits, logits + noise))
    assert (tokens != others).sum() == 0


def test_what_a_cut_leaves_in_is_drawn_as_without_it(backend: SamplingBackend):
    count = turns(backend, 2000)
    logits = torch.randn(count, 50, generator=torch.Generator().manual_seed(1))
    free, some = ([Draw(1.0, top_k, seed=n) for n in range(count)] for top_k in (0, 10))
    (whole, _), (cut, _) = (backend.draw(logits, draws, range(count)) for draws in (free, some))
    kept = (logits > logits.gather(1, whole.unsqueeze(1))).sum(dim=1) < 10
    assert count / 2 < kept.sum() < count
    assert torch.equal(whole[kept], cut[kept])


def test_logprobs_are_of_the_model_whatever_the_temperature(backend: SamplingBackend):
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    expected = torch.log_softmax(logits[0], -1)
    tokens, tell = backend.draw(logits, [Draw(3.0, seed=1, logprobs=2)], [0])
    [(row, about)] = tell()
    assert row == 0
    assert about.logprob == pytest.approx(float(expected[int(tokens[0])]))
    assert [token for token, _ in about.top] == [2, 1]
    assert [value for _, value in about.top] == pytest.approx([float(expected[2]), float(expected[1])])


def test_ranks_count_the_more_probable_tokens(backend: SamplingBackend):
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 4.9, 0.0, -1.0]])
    for count in (0, 2, 2**31 - 1):
        about = backend.logprobs(logits, torch.tensor([2, 0]), count)
        assert [row.rank for row in about] == [3, 1]
        assert [len(row.top) for row in about] == [min(count, 4)] * 2


@pytest.mark.parametrize(
    ("penalties", "expected"),
    [
        # prompt 0 1, answer 1 1 2, logits 2 2 2 2 -2
        ({"presence": 0.5}, [2.0, 1.5, 1.5, 2.0, -2.0]),
        ({"frequency": 0.5}, [2.0, 1.0, 1.5, 2.0, -2.0]),
        ({"presence": -1.0, "frequency": 0.25}, [2.0, 2.5, 2.75, 2.0, -2.0]),
        ({"repetition": 2.0}, [1.0, 1.0, 1.0, 2.0, -2.0]),
    ],
)
def test_penalties_weigh_on_what_was_said(backend: SamplingBackend, penalties: dict, expected: list[float]):
    found = changed(backend, [2.0, 2.0, 2.0, 2.0, -2.0], said(0, 2, 1, -1, -1, **penalties))
    assert found == pytest.approx(expected, abs=1e-4)


def test_repetition_pushes_negative_logits_down(backend: SamplingBackend):
    penalties = Penalties(np.array([0, 99]), np.array([0, 0]), repetition=2.0)
    found = changed(backend, [-2.0, 1.0], Changes(penalties))
    assert found == pytest.approx([-4.0, 1.0], abs=1e-4)  # and token 99, which stands for an image, has no logit


def test_a_forbidden_token_comes_only_where_no_other_may(backend: SamplingBackend):
    logits = [3.0, 2.0, 1.0]
    assert greedy(backend, logits, Changes(forbidden=(0, 1, 99))) == 2
    assert greedy(backend, logits, Changes(forbidden=(1,), excluded=(0, 2))) == 1
    assert greedy(backend, logits, Changes(forbidden=(1,), allowed=b"\2")) == 1


def test_changes_come_in_their_order(backend: SamplingBackend):
    """Biases bring back neither what is excluded nor what the grammar does not allow."""
    logits = [3.0, 2.0, 1.0, 0.0]
    assert greedy(backend, logits, Changes(biases=((3, 5.0), (99, 1.0)))) == 3
    assert greedy(backend, logits, Changes(biases=((3, 5.0),), excluded=(3, 99))) == 0
    assert greedy(backend, logits, Changes(biases=((3, 5.0),), allowed=b"\6")) == 1
    assert greedy(backend, [0.0] * 20, Changes(allowed=b"\0\0\4")) == 18
    assert greedy(backend, [0.0] * 20, Changes(biases=((19, 1.0),), allowed=b"\0\4")) == 10  # bits that are missing


def test_changes_leave_other_rows_and_logprobs_alone(backend: SamplingBackend):
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    before = logits.clone()
    changes = Changes(biases=((2, 5.0),))
    tokens, tell = backend.draw(logits, [Draw(logprobs=0), Draw()], [0, 0], [changes, None])
    [(row, about)] = tell()
    assert (row, tokens.tolist()) == (0, [2, 1])
    assert about.logprob == pytest.approx(float(torch.log_softmax(logits[0], -1)[2]))
    assert torch.equal(logits, before)
