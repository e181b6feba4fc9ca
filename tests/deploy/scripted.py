"""An engine that plays a script, for edges that a real engine seldom shows."""

import asyncio
import threading
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from intarsia.errors import Overloaded
from intarsia.proto.reply import Delta
from intarsia.proto.request import USUAL_OPTIONS, Image, RequestOptions, SamplingParams
from intarsia.proto.status import EngineInfo, EngineLoad, GroupInfo

HANG: Any = "hang"
"""In a script: nothing more comes until the caller gives up."""

INFO = EngineInfo(
    model="tiny-hybrid",
    model_dir="/models/tiny-hybrid",
    architecture="Gemma3ForCausalLM",
    dtype="float32",
    device="cpu",
    tensor_parallel_size=2,
    weight_bytes=3 * 2**20,
    vocab_size=300,
    max_model_len=1000,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    eos_token_ids=(1, 106),
    strategy="layered",
    groups=(
        GroupInfo("full", (5, 11), 16, 16384),
        GroupInfo("sliding-64", tuple(i for i in range(12) if i not in (5, 11)), 16, 16384),
    ),
    num_blocks=1000,
    num_buffers=2,
    kv_cache_bytes=64 * 2**20,
    max_len_concurrency=12.5,
    enable_prefix_caching=True,
)


class ScriptedEngine:
    """Plays one script for every request: deltas are yielded, errors raised, `HANG` waits for ever."""

    def __init__(self, script: Sequence[Any]):
        self.info = INFO
        self.asked: list[tuple[list[int], SamplingParams, str | None]] = []
        self.closed = threading.Event()
        self.full: Overloaded | None = None  # what it has just said
        self.server: Any = None  # the GrpcServer in front
        self._script = script
        self.connection = self.questions = self.refusals = self
        self._gone, self._here = asyncio.Event(), asyncio.Event()

    def is_full(self, tenant: str) -> bool:
        return self.full is not None

    def check_room(self, tenant: str) -> None:
        if self.full is not None:
            raise self.full

    async def load(self, viewer: str | None = None) -> EngineLoad:
        return EngineLoad(0, 0, 1000, 0, 1000, *[0] * 8)

    async def away(self) -> None:
        await self._gone.wait()

    async def back(self) -> bool:
        await self._here.wait()
        return True

    async def go(self) -> None:
        """As when it is lost."""
        self._here.clear()
        self._gone.set()

    async def come_back(self) -> None:
        self._gone.clear()
        self._here.set()

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        images: Sequence[Image] = (),
        options: RequestOptions = USUAL_OPTIONS,
        stream_interval_s: float = 0.0,
        instead: Any = None,
        with_room: Any = None,
    ) -> "ScriptedGeneration":
        self.asked.append((list(prompt_token_ids), sampling, request_id))
        self.options = options
        return ScriptedGeneration(self._script, self.closed, request_id or uuid.uuid4().hex)


class ScriptedGeneration:
    """Plays a script to the code that iterates."""

    unread_bytes = 0

    def __init__(self, script: Sequence[Any], closed: threading.Event, request_id: str):
        self.request_id = request_id
        self._closed = closed
        self._deltas = self._play(script)

    async def _play(self, script: Sequence[Any]) -> AsyncGenerator[Delta, None]:
        try:
            for entry in script:
                if entry is HANG:
                    await asyncio.sleep(3600)
                if isinstance(entry, Exception):
                    raise entry
                yield entry
        finally:
            self._closed.set()

    def __aiter__(self) -> AsyncGenerator[Delta, None]:
        return self._deltas

    def end(self, index: int) -> None:
        self._closed.set()

    def abort(self, error: Exception) -> None:
        self._closed.set()

    async def aclose(self) -> None:
        await self._deltas.aclose()
