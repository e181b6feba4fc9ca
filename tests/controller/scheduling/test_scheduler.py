import random
import sys
from pathlib import Path
from types import FrameType

import pytest

from intarsia.controller.scheduling import scheduler as scheduler_module
from intarsia.kvcache.check import recount
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.plan import Group
from intarsia.kvcache.reach import Chunked, Full, Sliding, State
from intarsia.proto.request import FinishReason
from intarsia.tests.controller.scheduling.by_hand import PROMPT, Bench
from intarsia.tests.simulated import VOCAB, continuation


def test_a_request_generates_what_the_model_says_and_frees_everything():
    bench = Bench(Full(), Sliding(5))
    request = bench.add(PROMPT, max_tokens=20)
    bench.run()
    assert bench.generated[request.id] == continuation(PROMPT, 20)
    assert bench.reasons[request.id] is FinishReason.LENGTH
    assert recount(bench.manager).all_free


def test_stop_token_ends_a_request_and_is_its_last_token():
    expected = continuation(PROMPT, 20)
    stop = expected[5]
    bench = Bench(Full())
    request = bench.add(PROMPT, max_tokens=20, stop=(stop,))
    bench.run()
    assert bench.generated[request.id] == expected[: expected.index(stop) + 1]
    assert bench.reasons[request.id] is FinishReason.STOP


def test_prompt_longer_than_a_step_is_computed_in_chunks():
    bench = Bench(Full(), Sliding(5), max_num_batched_tokens=7)
    request = bench.add(list(range(40)), max_tokens=2)
    assert bench.run() == 6 + 1  # 7+7+7+7+7+5 tokens, whose last gives the first new one, then the second
    assert bench.generated[request.id] == continuation(list(range(40)), 2)


def test_chunk_limit_leaves_room_for_other_prompts_in_the_same_step():
    bench = Bench(Full(), max_num_batched_tokens=32, max_prefill_chunk_tokens=7)
    bench.add(list(range(14)), max_tokens=1)
    bench.add(list(range(20, 34)), max_tokens=1)
    assert bench.run() == 2


def test_decoding_requests_never_wait_for_a_long_prompt():
    bench = Bench(Full(), blocks=128, max_num_batched_tokens=8)
    first = bench.add(PROMPT, max_tokens=10)
    bench.step()
    bench.add(list(range(40)), max_tokens=1)
    for _ in range(6):
        assert first in [entry.request for entry in bench.step().each()]


def test_no_step_exceeds_its_token_limit():
    bench = Bench(Full(), Sliding(5), max_num_batched_tokens=9)
    for n in range(8):
        bench.add([n] * (3 + 4 * n), max_tokens=5)
    bench.run()
    assert bench.worker.largest_step_tokens <= 9


def test_prompt_that_only_fits_in_small_chunks_is_taken_alone():
    bench = Bench(Sliding(4), blocks=4, max_num_batched_tokens=32)  # 12 tokens of memory for a prompt of 40
    request = bench.add(list(range(40)), max_tokens=3)
    bench.run()
    assert bench.generated[request.id] == continuation(list(range(40)), 3)


def test_repeated_prompt_skips_what_is_cached():
    bench = Bench(Full(), Sliding(5))
    prompt = list(range(16))
    bench.add(prompt, max_tokens=4)
    bench.run()
    again = bench.add(prompt, max_tokens=4)
    bench.run()
    assert again.cached_tokens == 15  # all but the last token, whose logits are wanted
    assert bench.generated[again.id] == continuation(prompt, 4)


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_aborted_request_frees_its_blocks_and_disturbs_no_other(steps_before: int):
    bench = Bench(Full(), Sliding(5), max_num_batched_tokens=8)
    other, victim = bench.add(PROMPT, max_tokens=9), bench.add(list(range(20)), max_tokens=9)
    for _ in range(steps_before):
        bench.step()
    assert bench.scheduler.abort(victim.id)
    assert not bench.scheduler.abort(victim.id)
    bench.run()
    assert bench.generated[other.id] == continuation(PROMPT, 9)
    assert len(bench.generated[victim.id]) < 9
    assert recount(bench.manager).all_free


def test_request_aborted_while_its_step_runs_gets_no_more_tokens():
    bench = Bench(Full())
    request = bench.add(PROMPT, max_tokens=9)
    step = bench.scheduler.plan_step()
    assert step
    bench.scheduler.abort(request.id)
    assert list(bench.scheduler.commit(bench.worker.run(step)).each()) == []
    bench.run()
    assert recount(bench.manager).all_free


def test_quiet_decode_step_names_slots_only():
    bench = Bench(Full(), Sliding(5), block_tokens=16)
    bench.add(PROMPT, max_tokens=9)
    bench.step()
    step = bench.scheduler.plan_step()
    assert step
    assert (step.retire, step.admit, step.advance, step.decode) == ((), (), (), (0,))
    assert len(step.pack()) < 16


def test_random_loads_end_with_every_token_right_and_every_block_free():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    preemptions = 0
    for _ in range(60):
        kinds = [Full(), Sliding(1), Sliding(3), Sliding(6), Sliding(11), Chunked(4), Chunked(7), State()]
        reaches = rng.sample(kinds, rng.randint(1, 3))
        size = rng.choice([2, 3, 4])
        alone = sum(Group(reach, (0,), size).blocks_spanning(27, chunk_tokens=1) for reach in reaches)
        bench = Bench(
            *reaches,
            blocks=1 + alone + rng.randint(0, 20),
            block_tokens=size,
            per_large=[rng.choice([1, 1, 2, 3]) for _ in reaches],
            caching=rng.random() < 0.7,
            max_num_seqs=rng.randint(1, 6),
            max_num_batched_tokens=rng.randint(6, 40),
            max_prefill_chunk_tokens=rng.choice([None, 1, 7]),
            depth=rng.choice([1, 2]),
        )
        wanted: dict[int, tuple[list[int], int]] = {}
        aborted: set[int] = set()
        stops: dict[int, frozenset[int]] = {}
        for _ in range(12):
            prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, 18))]
            count = rng.randint(1, 9)
            request = bench.add(prompt, count, stop=rng.choice([(), (), tuple(range(0, VOCAB, 9))]))
            wanted[request.id] = prompt, count
            stops[request.id] = request.stop_token_ids
            for _ in range(rng.randint(0, 4)):
                bench.step()
            if rng.random() < 0.2:
                victim = RequestId(rng.choice(list(wanted)))
                if bench.scheduler.abort(victim):
                    aborted.add(victim)
        bench.run()
        for request_id, (prompt, count) in wanted.items():
            expected = continuation(prompt, count)
            end = next((n + 1 for n, token in enumerate(expected) if token in stops[request_id]), count)
            expected = expected[:end]
            if request_id in aborted:
                expected = expected[: len(bench.generated[request_id])]
            assert bench.generated[request_id] == expected
        assert recount(bench.manager).all_free
        preemptions += bench.scheduler.preemption.preemptions
    assert preemptions > 0, "the load was too light to preempt anybody"


def test_all_slots_are_seats_while_prompts_wait_for_their_tokens_of_a_step():
    bench = Bench(Full(), max_num_seqs=4, max_num_batched_tokens=8)
    for start in range(3):
        bench.add(list(range(start, start + 8)), max_tokens=9)
    bench.step()
    assert bench.scheduler.is_full and bench.scheduler.num_seated == 1
    assert bench.scheduler.num_seats == 4
    bench.run()
    assert not bench.scheduler.is_full


def test_there_are_no_more_seats_than_the_pool_has_blocks_for():
    bench = Bench(Full(), blocks=10, max_num_seqs=4, max_num_batched_tokens=64)
    for start in range(4):
        bench.add(list(range(10 * start, 10 * start + 14)), max_tokens=9)
    bench.step()
    assert bench.scheduler.is_full and bench.scheduler.num_seated == bench.scheduler.num_seats == 2
    bench.run()
    assert bench.scheduler.num_seats == 4


def test_a_quiet_step_goes_through_one_file_of_scheduling():
    bench = Bench(Full(), Sliding(5), block_tokens=16)
    for start in range(3):
        bench.add([start, *PROMPT], max_tokens=9)
    bench.step()
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent == Path(scheduler_module.__file__).parent:
            entered.add(path.name)

    sys.setprofile(note)
    step = bench.scheduler.plan_step()
    sys.setprofile(None)
    assert step and step.decode == (0, 1, 2)
    result = bench.worker.run(step)._replace(run_us=100)
    sys.setprofile(note)
    bench.scheduler.commit(result)
    sys.setprofile(None)
    assert entered == {"scheduler.py"}
