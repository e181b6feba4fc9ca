"""The offline API: an engine used from an ordinary Python program.

with LLM("path/to/checkpoint", tensor_parallel_size=2) as llm:
    outputs = llm.generate(["One prompt", "another"], SamplingParams(temperature=0, max_tokens=32))
"""

import asyncio
import contextlib
import math
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import EngineUnavailable, InvalidRequest
from ..kvcache.check import Recount
from ..proto.request import USUAL_TERMS, Image, SamplingParams, Terms
from ..proto.status import EngineInfo
from .front_end.detokenize import with_text
from .front_end.engine_client import Delta, EngineClient, TokenLogprobs
from .front_end.images import ImageReader, read_images
from .front_end.tokenizer import Tokenizer, encode_prompt
from .settings.options import engine_settings
from .start.at_exit import closed_at_exit, is_closed
from .start.before_start import judged
from .start.launch import RunningEngine, start_engine
from .terminal.loading_bar import loading_bar

Prompt = str | Sequence[int]

GIVE_UP_WITHIN_S = 5.0
"""For what was started to end, where somebody interrupts the start."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer."""

    index: int
    token_ids: tuple[int, ...]  # generated; the end token included, if there was one
    text: str  # empty when the checkpoint has no tokenizer
    finish_reason: str  # "stop" or "length"
    logprobs: tuple[TokenLogprobs, ...] | None  # one per generated token, when asked for


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What became of one prompt. `token_ids`, `text`, `finish_reason` and `logprobs` are those of the first answer."""

    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    outputs: tuple[CompletionOutput, ...]  # as many as `n` asks for
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of its second token and on, when asked for

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        return self.outputs[0].logprobs


class _Growing:
    """An answer as it grows."""

    def __init__(self, index: int):
        self._index = index
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._text = ""
        self._finish_reason: str | None = None

    def add(self, delta: Delta, text: str) -> None:
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs or ()
        self._text += text
        self._finish_reason = delta.finish_reason

    def finished(self, wants_logprobs: bool) -> CompletionOutput:
        assert self._finish_reason is not None
        logprobs = tuple(self._logprobs) if wants_logprobs else None
        return CompletionOutput(self._index, tuple(self._token_ids), self._text, self._finish_reason, logprobs)


class LLM:
    """A started engine. It starts Ray, or joins the one at hand; `shutdown` ends what was started.

    model                     a local Hugging Face checkpoint directory, or its name on the Hub if it was downloaded
    tensor_parallel_size      1: workers that share the model, one GPU (or share of the CPU cores) each
    block_size                16: tokens per KV block
    kv_cache_memory           for keys and values on each worker, as text with a unit or a number of bytes; None: what a
                              GPU can spare, else 64 MiB
    gpu_memory_utilization    0.9: share of a GPU's memory that may be used, if kv_cache_memory is None
    enable_prefix_caching     True: reuse the blocks of known prompt prefixes
    max_num_batched_tokens    2048: most tokens in one step
    max_num_seqs              64: most requests in one step
    max_model_len             None: most tokens of one request, prompt included; None: what the model was made for
    max_prefill_chunk_tokens  None: most prompt tokens of one request in one step; None: all that fit
    prefill_share             0.5: of a step's time, which prompts get at least while others decode; 1: all they need
    priority_ageing_s         30: seconds of waiting that make up for one level of priority
    longest_prefix_first      False: of those next in turn, take the one with most of its prompt in the cache
    swap_space                0: bytes of host memory on each worker, where blocks of preempted requests wait that are
                              dearer to compute anew than to copy
    max_wait_s                None: seconds; a request whose turn would come later is refused with `Overloaded`
    max_waiting_tokens        2**25: most tokens of prompts that wait for their turn
    max_requests_per_tenant   None: most requests of one tenant, waiting and running
    min_free_memory           "256MiB" of the host's memory that is kept free: with less, new requests are refused
    dtype                     "auto": as saved, or "float32", "bfloat16", "float16"
    attention_backend         None: the first that covers the model, or its name
    max_images_per_request    1: where a model takes images
    enforce_eager             False: run transformers' modules as they are written, nothing fused or recorded; slower
    torch_compile             False: compile the model with torch.compile, which takes minutes when it starts
    cpu_threads               None: threads of each worker, where a CPU computes; None: its share of the cores, one
                              less for short steps
    allow_generic             False: try an architecture that nobody has tested, as plain attention
    trust_remote_code         False: run Python files that come with the checkpoint
    generation_config         "auto": what a request leaves out is sampled as the checkpoint's generation_config.json
                              asks; "none": as `SamplingParams` has it
    tokenizer                 None: a folder with another tokenizer; None: the checkpoint's own
    chat_template             None: a file with another chat template; None: the tokenizer's own
    served_model_name         None: what the model is called in answers; None: as its folder is
    otlp_traces_endpoint      None: URL that takes OpenTelemetry's traces (OTLP over HTTP)
    name                      None: of the engine in the Ray cluster; None: drawn
    give_up_after_s           120: seconds in which processes are lost again and again, and no step is completed
    insecure_ray              False: use a Ray that asks for no token, so anybody who reaches its ports runs code

    Raises `ModelError` or `InvalidSetting`, naming the field, before or while the engine starts; nothing is left
    running then.
    """

    def __init__(self, model: str, **settings: Any):
        wanted = judged(model, engine_settings(model, **settings))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="intarsia", daemon=True)
        self._thread.start()
        self._engine: RunningEngine | None = None
        try:
            # What can be refused at once is refused before workers start.
            self._tokenizer = Tokenizer.of(wanted.model)
            with loading_bar() as watch:
                self._engine = self._await(start_engine(wanted, watch))
            self._images = ImageReader.of(self.info)
        except BaseException:
            self._give_up()
            self.shutdown()
            raise
        closed_at_exit(self)

    @property
    def info(self) -> EngineInfo:
        return self._running().client.info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        images: Sequence[Sequence[bytes]] | None = None,
        terms: Terms = USUAL_TERMS,
    ) -> list[RequestOutput]:
        """Complete all prompts (texts or token ids), batched as the engine sees fit; outputs in the prompts' order.

        sampling_params: one for all prompts, or one for each; None: as the checkpoint asks, `info.sampling()`
        images: of each prompt, files in a usual format, one for each image token of it
        terms: priority, tenant and time limit of all of them

        Raises `InvalidRequest` for the first prompt that can not be served; the others are stopped.
        """
        engine = self._running()
        listed = [prompts] if _is_single(prompts) else list(prompts)  # type: ignore[list-item]
        wanted = engine.client.info.sampling() if sampling_params is None else sampling_params
        params = _one_for_each(wanted, len(listed))
        tokenised = [self._tokens(prompt) for prompt in listed]  # type: ignore[arg-type]
        pictures = [read_images(self._images, files, self.info.model) for files in images or [()] * len(listed)]
        if len(pictures) != len(listed):
            raise InvalidRequest(
                f"there are {len(listed)} prompts and {len(pictures)} lists of images; give one for each",
                field="images",
            )
        return self._await(self._generate_all(engine.client, tokenised, params, pictures, terms))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        """The model's answer to a conversation: [{"role": "user", "content": "..."}, ...], by its own chat template.

        Raises `InvalidRequest` when the checkpoint has no template, or the template refuses the messages.
        """
        if self._tokenizer is None:
            raise InvalidRequest(f"{self.info.model} has no tokenizer, so it takes token ids only", field="messages")
        return self.generate([self._tokenizer.chat(messages)], sampling_params)[0]

    def recount(self) -> Recount:
        """Count every block of the pool from the block tables. Raises `AssertionError` on any contradiction."""
        return self._await(self._running().recount())

    def stats(self) -> dict[str, Any]:
        """The engine's counters since its start."""
        return self._await(self._running().stats())

    def reset_prefix_cache(self) -> None:
        self._await(self._running().reset_prefix_cache())

    def shutdown(self) -> None:
        """End the engine; may be called twice. What is open when the program ends is shut down then."""
        is_closed(self)
        if self._engine is not None:
            engine, self._engine = self._engine, None
            self._await(engine.shutdown())
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _tokens(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        return encode_prompt(self._tokenizer, prompt, self.info.model)

    async def _generate_all(
        self,
        client: EngineClient,
        prompts: list[list[int]],
        params: list[SamplingParams],
        images: list[list[Image]],
        terms: Terms,
    ) -> list[RequestOutput]:
        async with asyncio.TaskGroup() as group:
            asked = zip(prompts, params, images, strict=True)
            tasks = [group.create_task(self._generate(client, *each, terms)) for each in asked]
        return [task.result() for task in tasks]

    async def _generate(
        self, client: EngineClient, prompt: list[int], params: SamplingParams, images: list[Image], terms: Terms
    ) -> RequestOutput:
        answers = [_Growing(index) for index in range(params.n)]
        cached_tokens, prompt_logprobs = 0, None
        # Only who looks for a text to stop at has to read along.
        interval_s = 0.0 if params.stops else math.inf
        asked = client.generate(prompt, params, images=images, terms=terms, stream_interval_s=interval_s)
        async with contextlib.aclosing(asked) as generation:
            async for delta, text in with_text(generation, self._tokenizer, params):
                answers[delta.answer].add(delta, text)
                if delta.answer == 0:
                    cached_tokens = delta.num_cached_tokens
                    prompt_logprobs = tuple(delta.prompt_logprobs or ()) or prompt_logprobs
        return RequestOutput(
            prompt_token_ids=tuple(prompt),
            num_cached_tokens=cached_tokens,
            outputs=tuple(answer.finished(params.logprobs is not None) for answer in answers),
            prompt_logprobs=prompt_logprobs,
        )

    def _running(self) -> RunningEngine:
        if self._engine is None:
            raise EngineUnavailable("this LLM was shut down; make a new one")
        return self._engine

    def _await(self, work: Coroutine) -> Any:
        """Run a coroutine on our loop and wait. An `ExceptionGroup` of a task group gives up its first error."""
        asked = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return asked.result()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        except KeyboardInterrupt:
            asked.cancel()
            raise

    def _give_up(self) -> None:
        """End what is being started, within reason."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=GIVE_UP_WITHIN_S)

        self._await(end())


def _is_single(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _one_for_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequest(
            f"there are {count} prompts and {len(params)} sampling_params; give one for all or one for each",
            field="sampling_params",
        )
    return list(params)
