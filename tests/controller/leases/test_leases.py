"""Leases over the real scheduler and cache manager, under a clock of the test's."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from intarsia.controller.leases.leases import Leases, leases_of
from intarsia.controller.leases.settings import LeaseSettings
from intarsia.controller.request import Request
from intarsia.controller.scheduling.preparation import Wanted
from intarsia.controller.scheduling.scheduler import Scheduler
from intarsia.controller.scheduling.settings import SchedulerSettings
from intarsia.errors import InvalidSetting, OverQuota
from intarsia.kvcache.check import recount
from intarsia.kvcache.eviction import policy_named
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.plan import MemoryPlan
from intarsia.kvcache.reach import Full, Sliding, State
from intarsia.proto.leases import NO_ROOM, NOTHING, OVER_SHARE, TOO_LONG, LeaseReceipt
from intarsia.proto.request import RequestOptions, SamplingParams
from intarsia.tests.kvcache.plans import plan_of
from intarsia.tests.simulated import SimulatedWorker
from intarsia.tests.simulated_leases import with_leasable

ANSWER = 6
KEPT = RequestOptions(keep_s=60.0)
PROMPT = list(range(10, 20))


class Place:
    """A scheduler, its leases, and a worker that computes at once."""

    def __init__(self, plan: MemoryPlan, settings: LeaseSettings | None = None, policy: str = "worth"):
        self.now_s = 100.0
        self.plan = plan
        self.manager = CacheManager(plan, policy=policy_named(policy), clock=self._clock)
        self.leases = Leases(self.manager, settings, self._clock, lambda: self.now_s + 1e9)
        self.scheduler = Scheduler(SchedulerSettings(max_num_seqs=4), self.manager, self._clock)
        self.worker = SimulatedWorker(plan)
        self._count = 0

    def _clock(self) -> float:
        return self.now_s

    def submit(self, prompt: Sequence[int], options: RequestOptions = KEPT) -> Request:
        request = self._request(prompt, options)
        self.scheduler.add(request)
        return request

    def _request(self, prompt: Sequence[int], options: RequestOptions, *, is_prepared: bool = False) -> Request:
        self._count += 1
        return Request(
            id=RequestId(self._count),
            tokens=list(prompt),
            prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=ANSWER),
            seed=0,
            stop_token_ids=frozenset(),
            max_total_tokens=len(prompt) + ANSWER,
            options=options,
            is_prepared=is_prepared,
        )

    def run(self) -> None:
        """All that was submitted, to its end."""
        while (step := self.scheduler.plan_step()) is not None:
            self.scheduler.commit(self.worker.run(step))
        recount(self.manager)
        assert not list(self.leases.faults())

    def ask(self, prompt: Sequence[int], options: RequestOptions = KEPT) -> Request:
        request = self.submit(prompt, options)
        self.run()
        return request

    def prepare(self, tokens: Sequence[int], options: RequestOptions | None = None) -> None:
        """What a next turn begins with, and one token more."""
        request = self._request(tokens, options or RequestOptions(), is_prepared=True)
        self.scheduler.preparation.add(Wanted(request, 0, (), lambda _: None))
        self.run()

    def crowd(self) -> None:
        """Prompts of others, which fill all memory that they can have."""
        for n in range(60):
            self.ask([21 + n % 7] + [(n * k) % 11 + 30 for k in range(24)], RequestOptions(tenant="crowd"))

    @property
    def ids(self) -> list[str]:
        return [lease.receipt.id for lease in self.leases.held()]


def place(
    *reaches, leasable: int = 12, blocks: int = 40, per_large: Sequence[int] = (), policy: str = "worth", **settings
) -> Place:
    plan = with_leasable(plan_of(*reaches, blocks=blocks, block_tokens=4, per_large=per_large), leasable)
    return Place(plan, LeaseSettings(**settings), policy)


def receipt_of(request: Request) -> LeaseReceipt:
    assert request.lease is not None
    return request.lease


@pytest.mark.parametrize("kinds", [(Full(),), (Full(), Sliding(6)), (Full(), State()), (Sliding(6), State())])
def test_a_leased_conversation_is_found_whole_after_a_crowd(kinds):
    at = place(*kinds, leasable=16, policy="lru")
    first = at.ask(PROMPT)
    assert receipt_of(first).id and receipt_of(first).tokens == len(first.tokens) - 1
    at.crowd()
    second = at.ask([*first.tokens, 1, 2, 3], RequestOptions())
    assert second.cached_tokens == receipt_of(first).tokens
    other = place(*kinds, leasable=16, policy="lru")
    first = other.ask(PROMPT, RequestOptions())
    other.crowd()
    assert other.ask([*first.tokens, 1, 2, 3], RequestOptions()).cached_tokens < second.cached_tokens


def test_a_receipt_tells_what_is_held_until_when_and_what_it_costs():
    at = place(Full(), Sliding(6), per_large=[4, 2], share_per_tenant=0.2)
    told = receipt_of(at.ask(PROMPT))
    assert told.until_s == 100.0 + 1e9 + 60.0 and told.tokens == 15
    assert [(each.kind, each.blocks) for each in told.layers] == [("full", 4), ("sliding-6", 4)]
    assert told.pages == told.used_pages == sum(at.leases._pages.used) and told.bytes == told.pages * 256
    assert told.limit_pages == int(at.plan.usable_blocks * 0.2) and told.left_pages == told.limit_pages - told.pages


def test_large_pages_are_counted_once_however_many_leases_lie_in_them():
    at = place(Full(), per_large=[2])
    one = receipt_of(at.ask(PROMPT))
    two = receipt_of(at.ask([*PROMPT[:8], 41, 42]))
    assert two.used_pages == at.leases.counts.held_pages < one.pages + two.pages and len(at.ids) == 2


def test_the_end_of_the_prompt_is_held_too_since_templates_rewrite_answers():
    at = place(Full(), State(), leasable=16)
    first = at.ask(PROMPT)
    at.crowd()
    rewritten = at.ask([*PROMPT, 48, 47, 46, 45, 44], RequestOptions(lease=receipt_of(first).id))
    assert rewritten.cached_tokens == 8  # the last border of blocks in the prompt, where a state was saved
    assert not at.ids


@pytest.mark.parametrize("kinds", [(Full(),), (Full(), Sliding(6)), (Full(), State()), (Sliding(6), State())])
def test_what_was_prepared_for_the_next_turn_is_held_too(kinds):
    at = place(*kinds, leasable=24, policy="lru")
    first = at.ask(PROMPT)
    history = [*PROMPT, 48, 47, 46, 45, 44, 43, 42, 41, 40, 39, 38]
    before = at.leases.held()[0].receipt
    at.prepare([*history, 1])
    held = at.leases.held()[0].receipt
    assert (held.id, held.until_s, held.tokens) == (before.id, before.until_s, len(history))
    assert held.pages > before.pages and held.used_pages == held.pages == at.leases.counts.held_pages
    at.crowd()
    assert at.manager.lookup([*first.tokens, 7, 8]).tokens == before.tokens  # what was promised is
    assert at.ask([*history, 7, 8], RequestOptions()).cached_tokens == len(history)
    assert not at.ids and at.leases.counts.taken_over == 1


def test_a_prepared_turn_takes_over_the_lease_of_a_prompt_that_was_rewritten():
    at = place(Full(), State(), leasable=24)
    lease = receipt_of(at.ask(PROMPT)).id
    history = [*PROMPT[:9], 48, 47, 46, 45, 44, 43, 42, 41, 40, 39]
    at.prepare([*history, 1])
    assert at.leases.held()[0].receipt.tokens == 15  # it does not begin as the leased turn
    history[9:] = range(60, 70)
    at.prepare([*history, 1], RequestOptions(lease=lease))
    assert at.leases.held()[0].receipt.tokens == len(history)
    assert at.ask([*history, 7, 8], RequestOptions()).cached_tokens == len(history) and not at.ids


def test_what_was_prepared_is_not_held_where_the_share_has_no_room():
    at = place(Full(), leasable=4)
    first = at.ask(PROMPT)
    before = at.leases.held()
    history = [*PROMPT, *range(40, 54)]
    at.prepare([*history, 1])
    assert at.leases.held() == before
    second = at.ask([*history, 7])
    assert receipt_of(second).refused and at.ids == [receipt_of(first).id]


def test_what_another_tenant_prepares_is_not_held():
    at = place(Full(), leasable=24)
    at.ask(PROMPT)
    before = at.leases.held()
    for options in (RequestOptions(tenant="other"), RequestOptions(salt="other", lease=at.ids[0])):
        at.prepare([*PROMPT, *range(40, 50)], options)
    assert at.leases.held() == before


def test_the_next_turn_takes_the_lease_over_when_it_has_its_answer():
    at = place(Full())
    first = at.ask(PROMPT)
    second = at.submit([*first.tokens, 5])
    assert at.leases.held()[0].is_awaited
    at.now_s += 1000
    at.leases.expire()
    assert at.ids == [receipt_of(first).id]  # its time is over, but its turn has come
    at.run()
    assert at.ids == [receipt_of(second).id] and at.leases.counts.taken_over == 1


def test_a_turn_that_is_given_up_leaves_the_lease_to_its_time():
    at = place(Full())
    first = at.ask(PROMPT)
    second = at.submit([*first.tokens, 5])
    at.scheduler.abort(second.id)
    at.run()
    assert at.ids == [receipt_of(first).id] and not at.leases.held()[0].is_awaited
    at.now_s += 61
    assert at.ids == [] and at.leases.counts.expired == 1


def test_a_prompt_asked_again_takes_no_lease_over():
    at = place(Full())
    first = at.ask(PROMPT)
    at.ask(PROMPT, RequestOptions())
    at.ask([*PROMPT[:-1], 3, 4, 5], RequestOptions())
    at.ask([*first.tokens, 5], RequestOptions(tenant="another"))
    at.ask([*first.tokens, 5], RequestOptions(salt="another"))
    assert at.ids == [receipt_of(first).id]


def test_leases_of_a_tenant_stay_within_its_share_and_all_within_theirs():
    at = place(Full(), leasable=10, blocks=40, share_per_tenant=0.1)
    mine, yours = replace(KEPT, tenant="me"), replace(KEPT, tenant="you")
    assert receipt_of(at.ask(PROMPT, mine)).id
    refused = receipt_of(at.ask([*PROMPT[:2], 9, 9, 9, 9, 9, 9], mine))
    assert (refused.refused, refused.id, refused.until_s) == (OVER_SHARE, "", 0.0)
    assert (refused.pages, refused.left_pages, refused.limit_pages) == (4, 0, 4)
    assert receipt_of(at.ask([1] * 8, yours)).id
    none = receipt_of(at.ask([2] * 8, replace(KEPT, tenant="third")))
    assert (none.refused, none.pages, none.left_pages) == (NO_ROOM, 4, 2)
    assert at.leases.counts._asdict().items() >= {"granted": 2, "refused": 2, "held_pages": 8}.items()


@pytest.mark.parametrize(
    ("prompt", "options", "why"),
    [([1], replace(KEPT, keep_s=3601.0), TOO_LONG), ([1] * 10, replace(KEPT, keep_s=7200.0), TOO_LONG)],
)
def test_a_lease_that_is_longer_than_allowed_is_refused(prompt, options, why):
    told = receipt_of(place(Full()).ask(prompt, options))
    assert (told.refused, told.longest_s) == (why, 3600.0)


def test_a_refused_turn_leaves_the_earlier_lease_in_place():
    at = place(Full(), leasable=4)
    first = at.ask(PROMPT)
    second = at.ask([*first.tokens, *range(8)])
    assert receipt_of(second).refused == NO_ROOM
    assert at.ids == [receipt_of(first).id]


def test_with_required_a_request_is_refused_before_it_is_computed():
    at = place(Full(), leasable=5)
    at.ask(PROMPT)
    with pytest.raises(OverQuota, match="takes about 4 large pages, and the tenant's share has 1 of 5 left") as refused:
        at.leases.check(replace(KEPT, keep_required=True), 16)
    assert refused.value.details["asked"] == 4 and refused.value.details["limit"] == 1
    assert refused.value.retry_after_s == 60.0
    at.leases.check(KEPT, 16)  # it may do without


def test_by_hand_and_only_one_s_own():
    at = place(Full())
    lease = receipt_of(at.ask(PROMPT, replace(KEPT, tenant="oak", salt="oak"))).id
    assert at.leases.held("ash") == () and not at.leases.release(lease, "ash")
    assert [each.receipt.id for each in at.leases.held("oak")] == [lease]
    assert at.leases.release(lease, "oak") and not at.leases.release(lease, "oak")
    assert recount(at.manager).all_free and at.leases.counts.released == 1


def test_lost_workers_lose_the_leases_and_that_is_told():
    at = place(Full())
    first = at.ask(PROMPT)
    at.scheduler.start_anew()
    at.worker = SimulatedWorker(at.plan)
    assert at.ids == [] and at.leases.counts.lost == 1
    assert not at.leases.release(receipt_of(first).id)
    second = at.ask([*first.tokens, 5])
    assert second.cached_tokens == 0 and ("reset", 12) in [(miss.cause, miss.tokens) for miss in second.misses]
    assert receipt_of(second).id  # it goes on as before


def test_no_request_waits_for_leases_however_much_is_leased():
    at = place(Full(), leasable=12, blocks=12)  # 11 large pages are left beside leases, which the longest request takes
    for n in range(4):
        at.ask([n + 20] * 7)
    assert at.leases.counts.held_pages == 12
    longest = at.submit([1] * 38, RequestOptions())
    assert at.plan.fits(longest.max_total_tokens) and not at.plan.fits(longest.max_total_tokens + 1)
    at.run()
    assert len(longest.tokens) == 44 and at.leases.counts.held_pages == 12


def test_without_a_share_there_are_none():
    manager = CacheManager(plan_of(Full()))
    assert leases_of(manager) is None and not manager.plan.leasable_blocks


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_shares_that_cannot_be(share: float):
    with pytest.raises(InvalidSetting, match="lease_share_per_tenant"):
        LeaseSettings(share_per_tenant=share)


def test_less_than_a_block_cannot_be_kept():
    at = place(Full())
    request = at.submit([1])
    request.max_total_tokens = 3
    at.run()
    assert receipt_of(request).refused == NOTHING
