from intarsia.controller.scheduling.prefill_budget import Pace


def paced(least_share: float = 0.5) -> Pace:
    """Ten requests decode in 10 ms; a token of a prompt takes 0.1 ms more."""
    pace = Pace(least_share)
    for _ in range(50):
        pace.learn(10, 0, 10_000)
        pace.learn(10, 100, 20_000)
    return pace


def test_nothing_is_limited_before_both_costs_are_known():
    pace = Pace(0.5)
    assert pace.prompt_tokens(10, 1) == float("inf")
    pace.learn(10, 0, 10_000)
    assert pace.prompt_tokens(10, 1) == float("inf")
    pace.learn(10, 100, 20_000)
    assert pace.prompt_tokens(10, 1) < 200


def test_one_prompt_beside_many_who_decode_gets_half_of_the_step():
    assert round(paced().prompt_tokens(10, 1)) == 100


def test_many_prompts_get_as_much_as_they_are_many():
    assert round(paced().prompt_tokens(10, 90)) == 900


def test_nobody_decoding_limits_nothing():
    assert paced().prompt_tokens(0, 5) == float("inf")


def test_a_share_of_one_limits_nothing():
    assert paced(1.0).prompt_tokens(10, 1) == float("inf")


def test_one_hiccup_does_not_starve_prompts():
    pace = paced()
    pace.learn(10, 100, 10_000_000)
    assert pace.prompt_tokens(10, 1) > 50


def test_what_prompts_cost_at_all_is_told_from_what_they_cost_by_the_token():
    """Ten requests decode in 10 ms; prompts add 6 ms and 0.1 ms for each token. Half of a step is then 40 tokens, but
    to begin is worth no less than 60."""
    pace = Pace(0.5)
    for tokens in (2000, 60, 60, 60, 200, 60, 60):
        pace.learn(10, 0, 10_000)
        pace.learn(10, tokens, 16_000 + 100 * tokens)
    assert round(pace.prompt_tokens(10, 1)) == 60
    assert round(pace.prompt_tokens(10, 90)) == 840
    assert round(pace.prefill_us(1000)) == 100_000


def test_small_chunks_do_not_make_the_next_ones_smaller_still():
    """Chunks as the pace itself wants them, for a long time."""
    pace = Pace(0.5)
    pace.learn(0, 2000, 206_000)
    for _ in range(200):
        pace.learn(10, 0, 10_000)
        tokens = max(1, round(min(pace.prompt_tokens(10, 1), 2000)))
        pace.learn(10, tokens, 16_000 + 100 * tokens)
    assert pace.prompt_tokens(10, 1) > 30
