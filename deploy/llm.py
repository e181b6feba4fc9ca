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
from typing import Any, Unpack

from ..errors import EngineUnavailable, InvalidRequest, UnknownLease
from ..kvcache.check import Recount
from ..kvcache.misses import Miss
from ..proto.leases import Lease, LeaseReceipt
from ..proto.request import USUAL_OPTIONS, Image, RequestOptions, SamplingParams
from ..proto.status import EngineInfo
from .checkpoints.weights import weights_bar
from .front_end.detokenize import whole_answers, with_text
from .front_end.engine_client import Delta, EngineClient, TokenLogprobs
from .front_end.images import ImageReader, read_images
from .front_end.misses import for_client
from .front_end.tokenizer import Tokenizer, encode_prompt
from .settings.table import EngineArguments
from .start.at_exit import closed_at_exit, is_closed
from .start.before_start import judged
from .start.launch import RunningEngine, start_engine

Prompt = str | Sequence[int]

GIVE_UP_WITHIN_S = 5.0
"""Time for the started processes to end after an interrupted start."""


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
    not_cached: tuple[Miss, ...] = ()  # why the rest of the prompt was not found there
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # of its second token and on, when asked for
    lease: LeaseReceipt | None = None  # what became of `keep_s`

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


class LLM:
    """A started engine. It starts Ray, or joins the one at hand; `shutdown` ends what was started.

    Numbers of tokens and of bytes may be text with a unit: "32k", "64MiB".

    model                     a local Hugging Face checkpoint directory, or its name on the Hub
    tensor_parallel_size      1: Workers that share the model, one GPU each.
    block_size                16: Tokens per KV block.
    kv_cache_memory           None (what a GPU can spare; else 64MiB): Memory for keys and values, per worker.
    gpu_memory_utilization    0.9: Share of a GPU's memory for weights, steps, and keys and values together. Where
                              kv_cache_memory is None.
    enable_prefix_caching     True: Reuse the blocks of known prompt prefixes.
    max_num_batched_tokens    None (2048 on a GPU, 512 on a CPU): Most tokens in one step.
    max_num_seqs              64: Most requests in one step.
    max_model_len             None (the model's own): Most tokens of one request, prompt included: 32k, say.
    max_prefill_chunk_tokens  None (all that fit): Most prompt tokens of one request in one step.
    strategy                  'auto': How memory is laid out: auto, layered, packed, partitioned or uniform.
    expected_average_seq_len  None (from the model): Tokens of a usual request.
    dtype                     'auto': auto, float32, bfloat16 or float16. auto: as saved.
    attention_backend         None (the first that fits): native, triton, flash, flash-legacy, torch or reference.
    max_images_per_request    1: Where the model takes images.
    prefill_share             0.5: Share of a step's time that prompts get at least while others decode; 1: all. A
                              prompt that ends with twice that borrows it from the next step.
    token_interval_ms         None (as prefill_share has it): Milliseconds wanted between two tokens of an answer.
                              Prompts get what is left of them, and a block per step at least.
    priority_ageing_s         30.0: Seconds of waiting that make up for one level of priority.
    longest_prefix_first      False: Of those next in turn, take the one with most in the cache.
    swap_space                0: Host memory per worker for the blocks of preempted requests, e.g. 4GiB. They wait there
                              if they are dearer to compute anew than to copy.
    lease_share               0.0: Share of the cache memory that clients may have kept between turns; 0: none. Requests
                              have the rest: the longest one must fit beside it.
    lease_share_per_tenant    None (all of lease_share): The same, of each tenant.
    max_lease_s               3600.0: Seconds that a lease may last.
    max_wait_s                None (they wait): Requests whose turn would come later are told to try again. In Python:
                              `Overloaded`.
    max_waiting_tokens        33554432: Most tokens of prompts that wait for their turn.
    max_requests_per_tenant   None (any number): Most requests of one tenant, waiting and running.
    min_free_memory           '256MiB': Host memory to keep free: with less, new requests are told to try again.
    enforce_eager             False: Run transformers' modules as they are written; slower.
    torch_compile             False: Compile the model with torch.compile; starting takes minutes.
    same_bits                 False: An answer has the same bits in any company, at any price. On a CPU this holds
                              without it, too, but where torch multiplies prompts much faster; the start tells. On a GPU
                              it is of rows of one step: how a prompt is cut still matters.
    packed_products           'auto': How weights in fewer bits are multiplied: auto, cpu, cpu-int8, triton, reference
                              or expanded. cpu keeps them as they are stored, and triton does on a GPU; cpu-int8 is
                              faster and rounds what they are multiplied with to 8 bits; expanded makes them 16 bits
                              when they are loaded. auto is what the device has of these, with cpu-int8 for checkpoints
                              that are meant so: W8A8, GGUF. reference keeps them, too, and is slow.
    cpu_threads               None (its cores, one less in short steps): Threads of a worker without GPU.
    trust_remote_code         False: Run Python files that come with the checkpoint.
    generation_config         'auto': "auto": sample as the checkpoint asks, unless a request does; "none": do not. What
                              it asks is in its generation_config.json.
    tokenizer                 None (the model's): A folder with another tokenizer, or its name on the Hub.
    chat_template             None (the tokenizer's): A file with another chat template, Jinja.
    served_model_name         None (its folder's name): What clients call the model.
    revision                  None (main): Branch, tag or commit of a model on the Hub. A model that is in the Hub's
                              cache is taken from there, without asking whether a branch has moved.
    otlp_traces_endpoint      None: Send OpenTelemetry traces there, OTLP over HTTP.
    kv_events_config          None: Send cache events over ZeroMQ, as vLLM does and in its JSON. Fields:
                              enable_kv_cache_events, endpoint, replay_endpoint, topic, buffer_steps, hwm,
                              max_queue_size.
    name                      None (drawn): Name of the engine in the Ray cluster.
    give_up_after_s           120.0: Seconds in which processes are lost again and again, and no step is completed.
    insecure_ray              False: Use a Ray that asks for no token: who reaches it runs code here.

    Raises `ModelError` or `InvalidSetting`, naming the field, before or while the engine starts; nothing is left
    running then.
    """

    def __init__(self, model: str, **settings: Unpack[EngineArguments]):
        wanted = judged(model, settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="intarsia", daemon=True)
        self._thread.start()
        self._engine: RunningEngine | None = None
        try:
            # What can be refused at once is refused before workers start.
            self._tokenizer = Tokenizer.of(wanted.model)
            with weights_bar(wanted.model) as watch:
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
        options: RequestOptions = USUAL_OPTIONS,
    ) -> list[RequestOutput]:
        """Complete all prompts (texts or token ids), batched as the engine sees fit; outputs in the prompts' order.

        sampling_params: one for all prompts, or one for each; None: as the checkpoint asks, `info.sampling()`
        images: of each prompt, files in a usual format, one for each image token of it
        options: of all of them: priority, tenant, time limit, for how long the conversations' cache is to be kept

        Raises `InvalidRequest` for the first prompt that cannot be served; the others are stopped.
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
        return self._await(self._generate_all(engine.client, tokenised, params, pictures, options))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        options: RequestOptions = USUAL_OPTIONS,
    ) -> RequestOutput:
        """The model's answer to a conversation: [{"role": "user", "content": "..."}, ...], by its own chat template.

        Raises `InvalidRequest` when the checkpoint has no template, or the template refuses the messages.
        """
        if self._tokenizer is None:
            raise InvalidRequest(f"{self.info.model} has no tokenizer, so it takes token ids only", field="messages")
        return self.generate([self._tokenizer.chat(messages)], sampling_params, options=options)[0]

    def leases(self) -> list[Lease]:
        """The conversations whose cache is held."""
        return list(self._await(self._running().client.questions.leases()))

    def release_lease(self, lease: str) -> None:
        """End one before its time. Raises `UnknownLease` if none of that id is held."""
        if not self._await(self._running().client.questions.release_lease(lease)):
            raise UnknownLease.of(lease)

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
        options: RequestOptions,
    ) -> list[RequestOutput]:
        async with asyncio.TaskGroup() as group:
            asked = zip(prompts, params, images, strict=True)
            tasks = [group.create_task(self._generate(client, *each, options)) for each in asked]
        return [task.result() for task in tasks]

    async def _generate(
        self,
        client: EngineClient,
        prompt: list[int],
        params: SamplingParams,
        images: list[Image],
        options: RequestOptions,
    ) -> RequestOutput:
        # Texts to stop at must be looked for while tokens come; otherwise one piece at the end is enough.
        interval_s = 0.0 if params.stops else math.inf
        asked = client.generate(prompt, params, images=images, options=options, stream_interval_s=interval_s)
        async with contextlib.aclosing(asked) as generation:
            is_kept = options.keep_s is not None
            pieces = whole_answers(with_text(generation, self._tokenizer, params, is_kept=is_kept))
            answers = sorted([piece async for piece in pieces], key=lambda piece: piece[0].answer)
        first, _ = answers[0]
        return RequestOutput(
            prompt_token_ids=tuple(prompt),
            num_cached_tokens=first.num_cached_tokens,
            outputs=tuple(_output(delta, text, params) for delta, text in answers),
            not_cached=for_client(first.misses),
            prompt_logprobs=tuple(first.prompt_logprobs or ()) or None,
            lease=first.lease,
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


def _output(delta: Delta, text: str, params: SamplingParams) -> CompletionOutput:
    """A whole answer."""
    assert delta.finish_reason is not None
    logprobs = tuple(delta.logprobs or ()) if params.logprobs is not None else None
    return CompletionOutput(delta.answer, delta.token_ids, text, delta.finish_reason, logprobs)


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
