from intarsia.controller.scheduling.step_times import Line, StepTimes


def test_nothing_is_known_before_a_step_was_seen():
    times = StepTimes()
    assert (times.decode_us(3), times.prompts_us(), times.prefill_us(1000)) == (None, None, 0.0)


def test_a_step_whose_time_was_not_measured_teaches_nothing():
    times = StepTimes()
    times.ran.append((10, 0, 0))
    assert times.decode_us(10) is None


def test_the_nearest_number_of_requests_that_was_seen_answers_for_others():
    times = StepTimes()
    times.ran.append((2, 0, 1_000))
    times.ran.append((200, 0, 9_000))
    assert (times.decode_us(1), times.decode_us(500)) == (1_000, 9_000)


def test_what_prompts_cost_at_all_is_told_from_what_they_cost_by_the_token():
    """Ten requests decode in 10 ms; prompts add 6 ms and 0.1 ms for each token."""
    times = StepTimes()
    for tokens in (2000, 60, 60, 60, 200, 60, 60):
        times.ran.append((10, 0, 10_000))
        times.ran.append((10, tokens, 16_000 + 100 * tokens))
    known = times.prompts_us()
    assert known is not None
    assert [round(each) for each in known] == [6_000, 100]
    assert round(times.prefill_us(1000)) == 100_000


def test_one_hiccup_counts_as_four_times_the_usual_at_most():
    line = Line()
    for _ in range(50):
        line.add(100, 1_000)
    line.add(100, 1_000_000)
    assert 1_000 < 100 * line.fixed_and_slope()[1] < 1_000 + 3_000 * 0.1
