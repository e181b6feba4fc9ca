"""Cache events of a real engine, from the flag to a subscriber."""

from pathlib import Path
from typing import Any

import pytest

zmq: Any = pytest.importorskip("zmq")
msgspec: Any = pytest.importorskip("msgspec")

from intarsia.deploy.settings.options import engine_settings  # noqa: E402
from intarsia.deploy.start.launch import start_engine  # noqa: E402
from intarsia.proto.request import SamplingParams  # noqa: E402
from intarsia.tests.conftest import Loop, free_port  # noqa: E402


def test_a_subscriber_hears_of_the_blocks_of_a_request_and_its_next_turn(ray_cluster: None, talker: Path, loop: Loop):
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    config = f'{{"enable_kv_cache_events": true, "endpoint": "{endpoint}", "topic": "kv"}}'
    engine = loop.run(start_engine(engine_settings(str(talker), kv_cache_memory="1MiB", kv_events_config=config)))
    context = zmq.Context()
    try:
        assert any(endpoint in note for note in engine.client.info.notes)
        sub = context.socket(zmq.SUB)
        sub.setsockopt_string(zmq.SUBSCRIBE, "kv")
        sub.connect(endpoint)

        async def ask(prompt: list[int]) -> None:
            async for _ in engine.client.generate(prompt, SamplingParams(max_tokens=4, temperature=0.0)):
                pass

        events: list[Any] = []
        prompt = list(range(10, 43))
        for number in range(40):  # what comes before a subscriber is known to the publisher is not for it
            loop.run(ask([number + 1, *prompt]))
            if sub.poll(250):
                _, _, payload = sub.recv_multipart()
                events += msgspec.msgpack.decode(payload)[1]
                if any(event["type"] == "BlockStored" for event in events):
                    break
        stored = [event for event in events if event["type"] == "BlockStored"]
        assert {event["medium"] for event in stored} == {"CPU"}
        first = next(event for event in stored if event["parent_block_hash"] is None)
        assert first["token_ids"][1:16] == prompt[:15] and first["block_size"] == 16
    finally:
        context.destroy(linger=0)
        loop.run(engine.shutdown())
