from intarsia.controller.request import Request
from intarsia.controller.scheduling.step_draft import StepDraft
from intarsia.kvcache.reach import Full
from intarsia.tests.controller.scheduling.by_hand import PROMPT, Bench, request_of


def seated(slot: int) -> Request:
    request = request_of(PROMPT)
    request.slot = slot
    return request


def test_a_request_that_leaves_its_slot_before_the_workers_hear_of_it_is_never_told():
    draft = StepDraft()
    draft.admit(seated(3), [[1, 2]], has_encoded=False)
    assert draft.is_admitting(3)
    draft.retire(3)
    assert (draft.admits, draft.retired) == ([], [])


def test_a_slot_that_is_left_and_taken_again_is_told_as_both():
    draft = StepDraft()
    draft.retire(3)
    draft.admit(seated(3), [[1, 2]], has_encoded=False)
    assert draft.retired == [3]
    assert [admit.slot for admit in draft.admits] == [3]


def test_a_slot_that_is_left_taken_and_left_again_is_retired_once():
    draft = StepDraft()
    draft.retire(3)
    draft.admit(seated(3), [[1, 2]], has_encoded=False)
    draft.retire(3)
    assert (draft.admits, draft.retired) == ([], [3])


def test_what_a_step_computes_and_draws_is_counted_when_it_is_sealed():
    bench = Bench(Full())
    decoding = bench.add(PROMPT, max_tokens=9)
    bench.step()
    step = bench.scheduler.plan_step()
    assert step and (step.epoch, step.number, step.decode) == (1, 2, (0,))
    assert (decoding.computed_tokens, decoding.pending) == (len(PROMPT) + 1, 1)


# What happens between two plans


def test_a_slot_that_is_free_after_a_commit_is_retired_with_the_next_step():
    bench = Bench(Full())
    bench.add(PROMPT, max_tokens=1)
    bench.step()
    bench.add(PROMPT, max_tokens=1)
    step = bench.scheduler.plan_step()
    assert step and step.retire == (0,)


def test_a_plan_that_computes_nothing_leaves_its_draft_to_the_next_one():
    bench = Bench(Full())
    victim = bench.add(PROMPT, max_tokens=9)
    bench.step()
    bench.scheduler.abort(victim.id)
    assert bench.scheduler.plan_step() is None
    bench.add(PROMPT, max_tokens=1)
    step = bench.scheduler.plan_step()
    assert step and step.retire == (0,)


def test_new_workers_hear_of_no_slot_of_the_old_ones():
    bench = Bench(Full())
    bench.add(PROMPT, max_tokens=1)
    other = bench.add([9, 8, 7], max_tokens=9)
    bench.step()
    assert bench.scheduler.start_anew() == [other]
    step = bench.scheduler.plan_step()
    assert step and (step.epoch, step.retire, len(step.admit)) == (2, (), 1)
