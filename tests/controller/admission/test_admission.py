"""Which requests are taken, and what becomes of them."""

from typing import Any

import pytest

from intarsia.controller.admission.admission import Admission
from intarsia.controller.admission.overload import OverloadGuard, OverloadSettings
from intarsia.errors import InvalidRequest, Overloaded
from intarsia.kvcache.manager import CacheManager
from intarsia.proto.request import GenerateRequest, SamplingParams
from intarsia.tests.controller.admission.test_overload import Bench
from intarsia.tests.controller.admission.test_validation import INFO, PLAN
from intarsia.tests.local import asking

ENDING = INFO._replace(eos_token_ids=(48, 49))


def admission(**settings: Any) -> Admission:
    return Admission(ENDING, CacheManager(PLAN), OverloadGuard(OverloadSettings(**settings), Bench(seats=4)))


def asked(prompt: int = 3, **params: Any) -> GenerateRequest:
    return asking([1] * prompt, SamplingParams(**dict[str, Any]({"max_tokens": 8}) | params))


def test_each_answer_is_a_request_with_an_id_and_a_seed_of_its_own():
    taking = admission()
    first = taking.admit(asked(n=3, seed=2**63 - 2, prompt_logprobs=0))
    [second] = taking.admit(asked())
    assert [each.id for each in (*first, second)] == [1, 2, 3, 4]
    assert [each.seed for each in first] == [2**63 - 2, 2**63 - 1, 0]
    assert [each.prompt_logprobs for each in first] == [[], None, None]
    assert all(each.tokens == [1, 1, 1] and each.max_total_tokens == 11 for each in first)
    assert first[0].tokens is not first[1].tokens


@pytest.mark.parametrize(("ignore_eos", "ends"), [(False, {7, 48, 49}), (True, {7})])
def test_an_answer_ends_with_the_models_end_tokens_unless_they_are_ignored(ignore_eos: bool, ends: set[int]):
    [request] = admission().admit(asked(stop_token_ids=(7,), ignore_eos=ignore_eos))
    assert request.stop_token_ids == ends


def test_a_seed_is_drawn_where_none_is_given():
    seeds = {admission().admit(asked())[0].seed for _ in range(8)}
    assert len(seeds) == 8 and all(0 <= seed < 2**63 for seed in seeds)


def test_what_can_never_be_served_is_refused_before_the_overload_guard_is_asked():
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        admission(max_requests_per_tenant=1).admit(asked(0, n=2))


def test_new_requests_are_refused_when_there_are_too_many_and_known_ones_are_not():
    taking = admission(max_requests_per_tenant=1)
    with pytest.raises(Overloaded, match="max_requests_per_tenant is 1"):
        taking.admit(asked(n=2))
    assert len(taking.admit(asked(n=2)._replace(is_known=True))) == 2
