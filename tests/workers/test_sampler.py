import pytest
import torch

from intarsia.proto.step import Sampling
from intarsia.workers.sampler import History, logprobs, sample

GREEDY = Sampling(0.0, 0, 1.0, 0, -1)


def draw(logits: torch.Tensor, sampling: Sampling, count: int) -> list[int]:
    """Tokens at `count` positions of one sequence."""
    return sample(logits.expand(count, -1), [sampling] * count, range(count))[0].tolist()


def test_temperature_zero_takes_the_most_probable_token():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 4.9, 0.0]])
    assert sample(logits, [GREEDY] * 2, [0, 0])[0].tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [1e-5, 1e-38, 1e-181, 5e-324])
def test_a_temperature_of_almost_zero_takes_the_most_probable_token(temperature: float):
    logits = torch.tensor([float("-inf"), 3.0, 90.0, -20.0])
    assert set(draw(logits, Sampling(temperature, 0, 1.0, 5, -1), 50)) == {2}


@pytest.mark.parametrize("weight", [1e-300, 1e300])
def test_the_most_extreme_settings_still_draw_a_token_that_is_allowed(weight: float):
    logits = torch.tensor([float("-inf"), 3.0, -2.0, 1.0, 0.0])
    for temperature in (1e-300, 1.0, 1e300):
        sampling = Sampling(temperature, 0, 1.0, 5, -1, repetition_penalty=weight)
        history = History([1, 2, 3], prompt_tokens=3)
        tokens = sample(logits.expand(40, -1), [sampling] * 40, range(40), [history] * 40)[0]
        assert 0 not in tokens.tolist()


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
    together = sample(logits, samplings, [9] * 6)[0].tolist()
    alone = [sample(logits[n : n + 1], [samplings[n]], [9])[0].item() for n in range(6)]
    assert together == alone
    assert len({tuple(draw(logits[:1], s, 20)) for s in samplings}) == 6


def test_draw_does_not_depend_on_what_others_beside_it_want():
    generator = torch.Generator().manual_seed(1)
    kinds = [
        {}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}, {"temperature": 3.0},
        {"repetition_penalty": 1.5}, {"logit_bias": ((3, 50.0),)}, {"ends": (1, 2), "min_tokens": 99}, {"logprobs": 5},
    ]  # fmt: skip
    usual = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "logprobs": -1}
    samplings = [Sampling(**(usual | {"seed": n} | kinds[n % len(kinds)])) for n in range(200)]
    logits = torch.randn(len(samplings), 50, generator=generator)
    histories = [History([1, 2, 3], 1) if sampling.needs_history else None for sampling in samplings]
    together = sample(logits, samplings, [9] * len(samplings), histories)[0].tolist()
    alone = [sample(logits[n : n + 1], [s], [9], [histories[n]])[0].item() for n, s in enumerate(samplings)]
    assert together == alone


def test_draw_does_not_depend_on_the_last_bits_of_logits():
    """As other batches, and prompts computed anew, change them."""
    generator = torch.Generator().manual_seed(1)
    cuts = [{}, {"top_p": 0.7}, {"top_k": 40}, {"min_p": 0.01}]
    usual = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "logprobs": -1}
    samplings = [Sampling(**(usual | {"seed": n} | cuts[n % 4])) for n in range(2000)]
    logits = torch.randn(len(samplings), 10_000, generator=generator)
    noise = 1e-5 * torch.randn(logits.shape, generator=generator)
    tokens, others = (sample(each, samplings, range(len(samplings)))[0] for each in (logits, logits + noise))
    assert (tokens != others).sum() == 0


def test_what_a_cut_leaves_in_is_drawn_as_without_it():
    logits = torch.randn(2000, 50, generator=torch.Generator().manual_seed(1))
    free = [Sampling(1.0, 0, 1.0, n, -1) for n in range(2000)]
    some = [Sampling(1.0, 10, 1.0, n, -1) for n in range(2000)]
    (whole, _), (cut, _) = sample(logits, free, range(2000)), sample(logits, some, range(2000))
    kept = (logits > logits.gather(1, whole.unsqueeze(1))).sum(dim=1) < 10
    assert 1000 < kept.sum() < 2000
    assert torch.equal(whole[kept], cut[kept])


def test_logprobs_are_of_the_model_whatever_the_temperature():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    expected = torch.log_softmax(logits[0], -1)
    tokens, [(row, about)] = sample(logits, [Sampling(3.0, 0, 1.0, 1, 2)], [0])
    assert row == 0
    assert about.logprob == pytest.approx(float(expected[int(tokens[0])]))
    assert [token for token, _ in about.top] == [2, 1]
    assert [value for _, value in about.top] == pytest.approx([float(expected[2]), float(expected[1])])


def test_min_p_leaves_out_what_is_far_less_probable_than_the_best():
    """Shares of the best one: 0.135, 0.368, 1, 0.05."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    for min_p, allowed in ((0.04, {0, 1, 2, 3}), (0.1, {0, 1, 2}), (0.3, {1, 2}), (1.0, {2})):
        assert set(draw(logits, Sampling(1.0, 0, 1.0, 5, -1, min_p=min_p), 3000)) == allowed


@pytest.mark.parametrize(
    ("penalty", "expected"),
    [
        # prompt 0 1, answer 1 1 2, logits 2 2 2 2 -2
        ({"presence_penalty": 0.5}, [2.0, 1.5, 1.5, 2.0, -2.0]),
        ({"frequency_penalty": 0.5}, [2.0, 1.0, 1.5, 2.0, -2.0]),
        ({"presence_penalty": -1.0, "frequency_penalty": 0.25}, [2.0, 2.5, 2.75, 2.0, -2.0]),
        ({"repetition_penalty": 2.0}, [1.0, 1.0, 1.0, 2.0, -2.0]),
    ],
)
def test_penalties_weigh_on_what_was_said(penalty: dict, expected: list[float]):
    logits = torch.tensor([2.0, 2.0, 2.0, 2.0, -2.0])
    History([0, 1, 1, 1, 2], prompt_tokens=2).penalize(logits, Sampling(0.0, 0, 1.0, 0, -1, **penalty))
    assert logits.tolist() == expected


def test_repetition_penalty_pushes_negative_logits_down():
    logits = torch.tensor([-2.0, 1.0])
    History([0, 0, 99], prompt_tokens=3).penalize(logits, Sampling(0.0, 0, 1.0, 0, -1, repetition_penalty=2.0))
    assert logits.tolist() == [-4.0, 1.0]  # and token 99, which stands for an image, has no logit


def test_a_row_of_tokens_that_must_not_come_lacks_its_last():
    wanted = Sampling(0.0, 0, 1.0, 0, -1, bad_token_ids=((3,), (1, 2), (4, 1), (9, 99)))
    logits = torch.zeros(1, 5)
    history = History([1, 1], prompt_tokens=1)  # a 1 was said
    history.forbid(logits[0], wanted)
    assert (logits[0] < -1e29).tolist() == [False, False, True, True, False]
    history = History([1], prompt_tokens=1)  # a 1 was asked
    logits = torch.zeros(1, 5)
    history.forbid(logits[0], wanted)
    assert (logits[0] < -1e29).tolist() == [False, False, False, True, False]


def test_ranks_count_the_more_probable_tokens():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 4.9, 0.0, -1.0]])
    for count in (0, 2):
        assert [row.rank for row in logprobs(logits, torch.tensor([2, 0]), count)] == [3, 1]


def test_a_history_of_parts_is_that_of_the_whole():
    """A preempted request comes back with all its tokens in one."""
    whole = History([5, 6, 7, 7, 8], prompt_tokens=2)
    grown = History([5, 6], prompt_tokens=2)
    for token in (7, 7, 8):
        grown.add(token)
    sampling = Sampling(0.0, 0, 1.0, 0, -1, presence_penalty=0.3, frequency_penalty=0.2, repetition_penalty=1.5)
    results = [torch.arange(10.0) for _ in range(2)]
    for history, logits in zip((whole, grown), results, strict=True):
        history.penalize(logits, sampling)
    assert torch.equal(*results)


def test_bias_moves_the_choice_and_leaves_other_rows_and_logprobs_alone():
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    biased = Sampling(0.0, 0, 1.0, 0, 0, logit_bias=((2, 5.0),))
    tokens, [(row, about)] = sample(logits, [biased, GREEDY], [0, 0])
    assert (row, tokens.tolist()) == (0, [2, 1])
    assert about.logprob == pytest.approx(float(torch.log_softmax(logits[0], -1)[2]))


def test_ends_are_not_drawn_before_min_tokens_are_there():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    sampling = Sampling(0.0, 0, 1.0, 0, -1, prompt_tokens=4, ends=(1,), min_tokens=2)
    tokens = [sample(logits, [sampling], [position])[0].item() for position in (4, 5, 6)]
    assert tokens == [2, 2, 1]
