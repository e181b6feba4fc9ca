"""A served model for HTTP clients."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from intarsia.deploy.anthropic.app import add_messages
from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.deploy.settings.options import engine_settings
from intarsia.deploy.start.launch import RunningEngine, start_engine
from intarsia.tests import models
from intarsia.tests.conftest import Loop


class Api(NamedTuple):
    url: str
    engine: RunningEngine
    front_end: FrontEnd
    tokenizer: Tokenizer
    oracle: Any


@pytest.fixture(scope="module")
def api(ray_cluster: None, talker: Path, loop: Loop) -> Iterator[Api]:
    """The talker on one worker of a real cluster, called `talker`."""
    settings = engine_settings(str(talker), kv_cache_memory="1MiB", served_model_name="talker")
    engine = loop.run(start_engine(settings))
    tokenizer = Tokenizer.load(talker)
    assert tokenizer is not None

    async def listen() -> tuple[FrontEnd, HttpServer, str]:
        front_end = FrontEnd(engine.client, tokenizer)
        server = HttpServer(make_app(lambda: front_end, interfaces=(add_messages,)))
        return front_end, server, await server.start(port=0)

    front_end, server, url = loop.run(listen())
    yield Api(url, engine, front_end, tokenizer, models.load_oracle(talker))
    loop.run(server.stop())
    loop.run(engine.shutdown())
