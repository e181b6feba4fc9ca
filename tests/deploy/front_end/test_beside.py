"""Threads beside a loop: whose turn it is, and what is not done any more."""

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from intarsia.deploy.front_end.beside import Beside
from intarsia.errors import Overloaded

WITHIN_S = 30.0


class Held:
    """Work that begins, says so, and goes on until it is let go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go = threading.Event()

    def __call__(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.begun.append(name)
            assert self.go.wait(WITHIN_S)
            return name

        return work


@contextmanager
def held() -> Iterator[Held]:
    work = Held()
    try:
        yield work
    finally:
        work.go.set()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.001)


def test_one_tenant_leaves_a_thread_for_the_next_one():
    async def case() -> None:
        beside = Beside(threads=3)
        with held() as slow:
            flood = [asyncio.ensure_future(beside.run("flood", slow(f"flood {n}"))) for n in range(10)]
            await until(lambda: len(slow.begun) == 2)
            assert await asyncio.wait_for(beside.run("other", lambda: "at once"), WITHIN_S) == "at once"
            assert len(slow.begun) == 2
            slow.go.set()
            assert await asyncio.gather(*flood) == [f"flood {n}" for n in range(10)]

    asyncio.run(case())


def test_tenants_take_turns_and_each_has_its_own_order():
    async def case() -> None:
        beside, done = Beside(threads=1), []
        with held() as first:
            work = [beside.run("a", first("a0"))]
            for tenant, count in (("a", 4), ("b", 2), ("c", 1)):
                work += [beside.run(tenant, lambda name=f"{tenant}{n}": done.append(name)) for n in range(1, count + 1)]
            tasks = [asyncio.ensure_future(each) for each in work]
            await until(lambda: first.begun == ["a0"])
            first.go.set()
            await asyncio.gather(*tasks)
        assert done == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]

    asyncio.run(case())


def test_work_whose_client_has_left_is_not_begun():
    async def case() -> None:
        beside, done = Beside(threads=1, max_waiting=1), []
        with held() as first:
            running = asyncio.ensure_future(beside.run("a", first("a0")))
            await until(lambda: bool(first.begun))
            for _ in range(3):  # each leaves room for the next
                given_up = asyncio.ensure_future(beside.run("a", lambda: done.append("never")))
                await asyncio.sleep(0)
                given_up.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await given_up
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            first.go.set()
            assert await beside.run("a", lambda: "next") == "next"
        assert not done

    asyncio.run(case())


@pytest.mark.parametrize("limits", [{"max_waiting": 2}, {"max_waiting_bytes": 25}])
def test_a_tenant_with_too_much_waiting_is_told_to_come_later_and_others_are_not(limits: dict[str, int]):
    async def case() -> None:
        beside = Beside(threads=1, **limits)
        with held() as first:
            tasks = [asyncio.ensure_future(beside.run("a", first(f"a{n}"), 10)) for n in range(3)]
            await until(lambda: bool(first.begun))
            with pytest.raises(Overloaded, match="2 of your requests, of 20 bytes") as refused:
                await beside.run("a", lambda: None, 10)
            assert refused.value.retry_after_s
            tasks.append(asyncio.ensure_future(beside.run("b", first("b"), 1000)))
            await asyncio.sleep(0)
            first.go.set()
            assert await asyncio.gather(*tasks) == ["a0", "a1", "a2", "b"]

    asyncio.run(case())


def test_what_work_raises_is_raised_where_it_was_asked_for():
    async def case() -> None:
        beside = Beside()
        for _ in range(10):  # and the threads go on
            with pytest.raises(ZeroDivisionError):
                await beside.run("a", lambda: 1 // 0)
        assert await beside.run("a", lambda: 1) == 1

    asyncio.run(case())


def test_threads_end_with_what_they_worked_for():
    async def case() -> None:
        beside = Beside()
        await asyncio.gather(*(beside.run(str(n), threading.get_ident) for n in range(20)))

    before = threading.active_count()
    asyncio.run(case())
    gc.collect()
    asyncio.run(until(lambda: threading.active_count() <= before))
