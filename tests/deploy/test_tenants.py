"""What one tenant's key can read must not move with another's prompts. Both servers, an engine of simulated workers."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from intarsia import SamplingParams
from intarsia.controller.engine import Engine
from intarsia.controller.server import EngineServer
from intarsia.deploy.client import Client
from intarsia.deploy.front_end.access import Access, AccessSettings
from intarsia.deploy.front_end.engine_client import EngineClient
from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.grpc.server import GrpcServer
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.deploy.settings.limits import Limits
from intarsia.errors import IntarsiaError, InvalidRequest, Overloaded
from intarsia.kvcache.events import Cleared, Event
from intarsia.tests.controller.test_engine import make_engine

PROMPT = [7, 3, 9, 1] * 10
SHORT = SamplingParams(max_tokens=4)


class Place:
    """Servers whose keys are alice's, bob's, and the admin's."""

    def __init__(self, engine: Engine, front_end: FrontEnd, grpc_address: str, url: str):
        self.engine = engine
        self.front_end = front_end
        self.grpc = grpc_address
        self.url = url

    def ask(self, key: str, prompt: list[int] = PROMPT, request_id: str = "") -> list[int]:
        with Client(self.grpc, api_key=key) as client:
            return [t for chunk in client.generate(prompt, SHORT, request_id=request_id) for t in chunk.token_ids]

    def metrics(self, key: str) -> str:
        answer = httpx.get(f"{self.url}/metrics", headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200
        return answer.text

    def figures(self, key: str) -> list[Any]:
        """All that the key can read of it."""
        with Client(self.grpc, api_key=key) as client:
            return [self.metrics(key), client.load(), client.cache_state(), client.model_info()]


class Watching:
    """What a key is told of the cache, in a thread of its own."""

    def __init__(self, place: Place, key: str):
        self.told: list[Event] = []
        self.error: IntarsiaError | None = None
        self._client = Client(place.grpc, api_key=key)
        self._began = threading.Event()
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()
        assert self._began.wait(10)

    def _listen(self) -> None:
        try:
            for events in self._client.watch_cache():
                self.told += events
                self._began.set()
        except IntarsiaError as error:
            self.error = error
            self._began.set()

    def names(self) -> int:
        return sum(len(event.hashes) for event in self.told if not isinstance(event, Cleared))

    def close(self) -> None:
        self._client.close()
        self.thread.join(10)


@pytest.fixture
def place(loop: Any, tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "keys").write_text("oak alice\nash bob\nelm\n")
    (tmp_path / "admin").write_text("yew\n")
    access = Access(AccessSettings(api_key_file=str(tmp_path / "keys"), admin_key_file=str(tmp_path / "admin")))
    ending: list[Any] = []

    async def start() -> Place:
        engine = make_engine()
        running = asyncio.ensure_future(engine.run())
        door = EngineServer(engine)
        client = await EngineClient.connect(await door.start("127.0.0.1"))
        front_end = FrontEnd(client, None, limits=Limits(max_watchers=4, max_key_watchers=2))
        http, rpc = HttpServer(make_app(lambda: front_end, access), access), GrpcServer(front_end, access)
        url, address = await http.start(port=0), await rpc.start(port=0)
        ending.extend((http.stop, rpc.stop, client.close, door.close))

        async def cancel() -> None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

        ending.append(cancel)
        return Place(engine, front_end, address, url)

    yield loop.run(start())
    for end in ending:
        loop.run(end())


def test_no_figure_of_one_key_moves_with_another_s_prompts(place: Place):
    place.ask("ash", [5] * 30)
    for reader in ("ash", "elm"):  # another tenant's key, and one of no tenant
        watching = Watching(place, reader)
        before, told = place.figures(reader), list(watching.told)
        place.ask("oak", PROMPT)
        place.ask("oak", [5] * 30)
        assert place.figures(reader) == before
        assert watching.told == told
        watching.close()


def test_a_prompt_that_another_has_asked_looks_like_one_that_was_never_asked(place: Place):
    place.ask("oak", PROMPT)

    def grown(prompt: list[int]) -> dict[str, float]:
        before = samples(place.metrics("ash"))
        place.ask("ash", prompt)
        return {name: value - before[name] for name, value in samples(place.metrics("ash")).items()}

    assert grown(PROMPT) == grown([2, 8, 4, 6] * 10)
    admin = samples(place.metrics("yew"))
    assert admin["intarsia:prefix_tokens_lost_total{'cause': 'salt'}"] > 0
    assert not any("cause" in name for key in ("ash", "elm") for name in samples(place.metrics(key)))


def samples(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            found[f"{sample.name}{labels or ''}"] = sample.value
    return found


def test_a_tenant_sees_its_own_requests_and_the_admin_all(place: Place):
    place.ask("oak", PROMPT)
    place.ask("oak", PROMPT)
    place.ask("ash", [5] * 30)
    with (
        Client(place.grpc, api_key="oak") as alice,
        Client(place.grpc, api_key="ash") as bob,
        Client(place.grpc, api_key="yew") as admin,
    ):
        own, others, everybody = alice.load(), bob.load(), admin.load()
        assert (own.finished_requests, others.finished_requests, everybody.finished_requests) == (2, 1, 3)
        assert (own.prompt_tokens, others.prompt_tokens, everybody.prompt_tokens) == (80, 30, 110)
        assert own.cached_tokens > 0 == others.cached_tokens
        assert (own.generated_tokens, others.generated_tokens, everybody.generated_tokens) == (8, 4, 12)
        assert (own.steps, others.steps) == (0, 0) and everybody.steps > 0
        assert (own.pool_use, own.num_blocks) == (0, everybody.num_blocks)
        assert alice.cache_state().kept_pages == 0 < admin.cache_state().kept_pages
    lines = samples(place.metrics("oak"))
    assert lines["vllm:prompt_tokens_total"] == 80
    assert lines["vllm:prefix_cache_hits_total"] == own.cached_tokens
    assert samples(place.metrics("yew"))["vllm:prompt_tokens_total"] == 110


def test_what_a_tenant_holds_is_told_to_it_alone(place: Place):
    with Client(place.grpc, api_key="oak") as alice, Client(place.grpc, api_key="ash") as bob:
        answer: Any = alice.generate(PROMPT, SamplingParams(max_tokens=50))
        place.engine._workers.step_s = 0.05  # type: ignore[attr-defined]
        next(answer)
        own, others = alice.load(), bob.load()
        assert (own.running, others.running) == (1, 0) and own.pool_use > 0 == others.pool_use
        held, none = alice.cache_state(), bob.cache_state()
        assert held.requests == 1 and held.groups[0].held_blocks > 0
        assert none.requests == 0 and none.groups[0].held_blocks == 0
        place.engine._workers.step_s = 0.0  # type: ignore[attr-defined]
        answer.close()


def test_watchers_are_told_of_their_own_blocks_and_the_admin_of_all(place: Place):
    place.ask("oak", [9] * 21)
    early = {key: Watching(place, key) for key in ("oak", "ash", "yew")}
    place.ask("oak", PROMPT)
    place.ask("ash", PROMPT)
    place.ask("oak", [4] * 17)
    for key, count in (("oak", 2), ("ash", 1), ("yew", 3)):
        wait_for(lambda key=key: early[key].names() > 0)
        assert early[key].names() > 0, (key, count)
    wait_for(lambda: early["yew"].names() == early["oak"].names() + early["ash"].names())
    assert early["oak"].names() > early["ash"].names() > 0
    late = Watching(place, "ash")  # is told the same, of a subscription that goes on
    wait_for(lambda: late.names() == early["ash"].names())
    for each in (*early.values(), late):
        each.close()


def wait_for(what: Any, seconds: float = 10.0) -> None:
    waiter = threading.Event()
    for _ in range(int(seconds * 100)):
        if what():
            return
        waiter.wait(0.01)
    assert what()


def test_watchers_are_bounded_per_key_and_in_sum(place: Place):
    first = [Watching(place, "oak") for _ in range(2)]
    more = Watching(place, "oak")
    assert isinstance(more.error, Overloaded) and "may have 2" in more.error.message
    others = [Watching(place, key) for key in ("ash", "elm")]
    most = Watching(place, "yew")
    assert isinstance(most.error, Overloaded) and "may be 4" in most.error.message
    assert not any(each.error for each in (*first, *others))
    first[0].close()
    wait_for(lambda: place.front_end._watchers.total == 3)
    again = Watching(place, "yew")
    assert again.error is None
    for each in (*first[1:], *others, more, most, again):
        each.close()


def test_one_id_may_be_two_tenants_at_once_and_each_stops_its_own(place: Place):
    place.engine._workers.step_s = 0.01  # type: ignore[attr-defined]
    long = SamplingParams(max_tokens=90)
    with Client(place.grpc, api_key="oak") as alice, Client(place.grpc, api_key="ash") as bob:
        first: Any = alice.generate([1, 2], long, request_id="foo")
        next(first)
        assert not bob.abort("foo")
        second: Any = bob.generate([1, 2], long, request_id="foo")
        next(second)
        with pytest.raises(InvalidRequest, match="in use"):
            next(iter(alice.generate([1, 2], long, request_id="foo")))
        assert bob.abort("foo")
        with pytest.raises(IntarsiaError, match="was aborted"):
            list(second)
        assert not bob.abort("foo")
        next(first)
        assert alice.abort("foo")
        with contextlib.suppress(IntarsiaError):
            list(first)
    place.engine._workers.step_s = 0.0  # type: ignore[attr-defined]


def test_ids_that_could_not_be_one_are_refused_when_they_are_to_be_stopped(place: Place):
    with Client(place.grpc, api_key="oak") as client:
        for request_id in ("a" * 129, "\x00", "ü"):
            with pytest.raises(InvalidRequest, match="printable"):
                client.abort(request_id)


def test_without_tenants_every_key_sees_all(loop: Any):
    async def read() -> None:
        engine = make_engine()
        running = asyncio.ensure_future(engine.run())
        door = EngineServer(engine)
        client = await EngineClient.connect(await door.start("127.0.0.1"))
        front_end = FrontEnd(client, None)
        access = Access(AccessSettings(api_key=("oak", "ash")))
        server = GrpcServer(front_end, access)
        address = await server.start(port=0)

        def ask() -> tuple[int, int]:
            with Client(address, api_key="oak") as one, Client(address, api_key="ash") as other:
                list(one.generate(PROMPT, SHORT))
                return one.load().finished_requests, other.load().finished_requests

        assert await asyncio.to_thread(ask) == (1, 1)
        await server.stop()
        await client.close()
        await door.close()
        running.cancel()

    loop.run(read())


def probed(place: Place, key: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{place.url}/v1/probe", json=body, headers={"Authorization": f"Bearer {key}"})


def test_a_probe_tells_a_tenant_of_its_own_prompts_and_requests_only(place: Place):
    place.ask("oak", PROMPT)
    found = {key: probed(place, key, prompt=PROMPT).json()["engines"][0]["figures"] for key in ("oak", "ash", "elm")}
    assert found["oak"]["cached_tokens"] > 30
    assert found["ash"] == found["elm"] == found["oak"] | {"cached_tokens": 0}
    refused = probed(place, "ash", prompt=PROMPT, cache_salt="alice")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "cache_salt"
    # A router with the admin key asks on behalf of any tenant.
    asked = probed(place, "yew", prompt=PROMPT, cache_salt="alice").json()
    assert asked["engines"][0]["figures"]["cached_tokens"] == found["oak"]["cached_tokens"]
    assert asked["prompt_tokens"] == 40 and asked["engines"][0]["figures"]["tokens_per_s"] > 0
    assert probed(place, "none", prompt=PROMPT).status_code == 401
    with Client(place.grpc, api_key="ash") as bob, Client(place.grpc, api_key="oak") as alice:
        [(_, others)], [(_, own)] = bob.probe(PROMPT), alice.probe(PROMPT)
        assert others is not None and own is not None
        assert own.cached_tokens == found["oak"]["cached_tokens"] and others == own._replace(cached_tokens=0)
        with pytest.raises(InvalidRequest, match="another tenant"):
            bob.probe(PROMPT, cache_salt="alice")


def test_a_probe_counts_the_running_requests_of_its_viewer(place: Place):
    with Client(place.grpc, api_key="oak") as alice, Client(place.grpc, api_key="ash") as bob:
        answer: Any = alice.generate(PROMPT, SamplingParams(max_tokens=50))
        place.engine._workers.step_s = 0.05  # type: ignore[attr-defined]
        next(answer)
        [(_, own)], [(_, others)] = alice.probe(PROMPT), bob.probe(PROMPT)
        assert own is not None and others is not None
        assert (own.running, others.running) == (1, 0) and own.pool_use > 0 == others.pool_use
        assert own.tokens_per_s is None is others.tokens_per_s
        place.engine._workers.step_s = 0.0  # type: ignore[attr-defined]
        answer.close()
