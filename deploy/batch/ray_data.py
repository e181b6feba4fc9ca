"""Batches as a stage of a Ray Data pipeline: each actor of the stage has an engine, and each row is a line.

    lines.map_batches(BatchLines, fn_constructor_kwargs={"model": "..."}, concurrency=4, batch_size=256, num_cpus=0)

takes what `ray.data.read_text` gives, a column `text`, and gives the same rows with a column `result`. An engine's
workers take their cores and GPUs themselves, so the actor needs none. Rows are in flight together as far as a batch of
them goes: make batches several times as large as `max_num_seqs`.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any

from ...errors import EngineUnavailable
from ..front_end.front_end import FrontEnd, FrontEndSettings
from ..front_end.tokenizer import Tokenizer
from ..openai.app import make_app
from ..settings.options import engine_settings
from ..start.launch import RunningEngine, start_engine
from .answering import OFFLINE, answer

MOST_STREAMS = 1 << 20


class BatchLines:
    """Made once in each actor. model, and what else `engine_settings` takes."""

    def __init__(self, model: str, column: str = "text", **settings: Any):
        self._column = column
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="intarsia", daemon=True).start()
        wanted = engine_settings(model, **settings)
        self._engine: RunningEngine = self._await(start_engine(wanted))
        tokenizer = Tokenizer.of(wanted.model)
        streams = FrontEndSettings(max_streams=MOST_STREAMS, seeds_by_id=True)
        front_end = FrontEnd(self._engine.client, tokenizer, streams, limits=OFFLINE)
        self._app = make_app(lambda: front_end)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Raises `EngineUnavailable` when the engine is gone: Ray Data tries the rows again."""
        return {**batch, "result": self._await(self._answer([str(text) for text in batch[self._column]]))}

    async def _answer(self, lines: list[str]) -> list[str]:
        seen: Counter[str] = Counter()
        asked = []
        for line in lines:  # equal ones are told apart by their number
            seen[line] += 1
            asked.append(answer(self._app, line.encode(), seen[line]))
        results = await asyncio.gather(*asked)
        if None in results:
            raise self._engine.client.connection.failure or EngineUnavailable("the engine is busy for others")
        return [result for result in results if result is not None]

    def _await(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
