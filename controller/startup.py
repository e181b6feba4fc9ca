"""From settings and a worker group to an engine that is ready to serve."""

import bisect
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ..errors import InvalidRequest, InvalidSetting
from ..kvcache.manager import CacheManager
from ..kvcache.plan import MemoryPlan, PlanSettings
from ..kvcache.settings import CacheSettings
from ..kvcache.strategies import plan_memory
from ..proto.request import SamplingParams
from ..proto.status import EngineInfo, GroupInfo
from ..proto.tracing import tracer_of
from ..proto.worker import ModelFacts, ModelSettings, RunnerLimits, check_length
from .admission.overload import OverloadSettings
from .engine import Engine
from .kv_publisher import KvEventsSettings
from .leases.leases import Leases
from .leases.settings import LeaseSettings
from .losses import GIVE_UP_AFTER_S, Losses
from .scheduling.scheduler import Scheduler
from .scheduling.settings import SchedulerSettings
from .step_runner import StepRunner

SMALLEST_TRIAL_BYTES, LARGEST_TRIAL_BYTES = 2**20, 2**36
"""Of a plan that only has to be one."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """All an engine is started with; each part belongs to one component."""

    model: ModelSettings
    plan: PlanSettings
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    overload: OverloadSettings = field(default_factory=OverloadSettings)
    leases: LeaseSettings = field(default_factory=LeaseSettings)
    max_model_len: int | None = None  # prompt and generated tokens of one request; None: what the model was made for
    prefix_caching: bool = True
    gpu_memory_utilization: float | None = None  # of a GPU's memory, for all; None, or no GPU: what `plan` says
    max_images_per_request: int = 1  # where a model takes images
    generation_config: str = "auto"  # "auto": sample as the checkpoint's says, unless a request does; "none": do not
    served_model_name: str | None = None  # None: the checkpoint folder's
    name: str | None = None  # of the engine within the Ray cluster; None: drawn
    kv_events: KvEventsSettings | None = None  # cache events for routers that know vLLM's; None: none
    insecure_ray: bool = False  # a Ray that asks for no token will do
    give_up_after_s: float = GIVE_UP_AFTER_S  # when processes are lost again and again without a step in between

    def __post_init__(self):
        if self.max_model_len is not None and self.max_model_len < 2:
            raise InvalidSetting(
                f"max_model_len must leave room for a prompt token and a new one (2), got {self.max_model_len}",
                field="max_model_len",
            )
        if self.give_up_after_s <= 0:
            raise InvalidSetting(
                f"give_up_after_s must be above 0 seconds, got {self.give_up_after_s}", field="give_up_after_s"
            )
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise InvalidSetting(
                f"gpu_memory_utilization must be more than 0 and at most 1, got {share}", field="gpu_memory_utilization"
            )
        if self.max_images_per_request < 1:
            raise InvalidSetting(
                f"max_images_per_request must be at least 1, got {self.max_images_per_request}",
                field="max_images_per_request",
            )
        if self.generation_config not in ("auto", "none"):
            raise InvalidSetting(
                f'generation_config must be "auto" or "none", got {self.generation_config!r}', field="generation_config"
            )


class Workers(StepRunner, Protocol):
    """The tensor-parallel workers, wherever they run, before a model is loaded."""

    async def load(self, settings: ModelSettings) -> ModelFacts: ...

    async def allocate(self, plan: MemoryPlan, limits: RunnerLimits) -> None: ...

    async def spare_memory(self, trial: MemoryPlan, limits: RunnerLimits, share: float) -> int | None: ...


async def build_engine(settings: EngineSettings, workers: Workers) -> Engine:
    """Load the model, plan and allocate the memory. The engine's loop is the caller's to run."""
    facts = await workers.load(settings.model)
    max_model_len = _max_model_len(settings, facts)
    limits = settings.scheduler.on(facts.device)
    sizes = RunnerLimits(limits.max_num_seqs, limits.step_tokens, max_model_len)
    wanted = await _with_spare_memory(_plan_settings(settings, facts), settings, facts, workers, sizes)
    plan = plan_memory(facts.layers, wanted, max_model_len)
    await workers.allocate(plan, sizes)
    manager = CacheManager(plan, CacheSettings(prefix_caching=settings.prefix_caching))
    info = _describe(settings, facts, plan, sizes)
    tracer = tracer_of("controller", settings.model.traces_endpoint)
    losses = Losses(settings.give_up_after_s)
    if plan.leasable_blocks:
        Leases(manager, settings.leases)
    return Engine(
        info, Scheduler(limits, manager), manager, workers, tracer=tracer, overload=settings.overload, losses=losses
    )


def _max_model_len(settings: EngineSettings, facts: ModelFacts) -> int:
    if settings.max_model_len is None:
        return facts.max_positions
    check_length(settings.max_model_len, facts.max_positions)
    return settings.max_model_len


def _plan_settings(settings: EngineSettings, facts: ModelFacts) -> PlanSettings:
    """With room for the images of a request, each in blocks of its own."""
    size = settings.plan.block_tokens
    image_tokens = -(-facts.image_tokens // size) * size
    return replace(settings.plan, encoder_tokens=image_tokens * settings.max_images_per_request)


async def _with_spare_memory(
    wanted: PlanSettings, settings: EngineSettings, facts: ModelFacts, workers: Workers, sizes: RunnerLimits
) -> PlanSettings:
    """With all the memory that the devices have to spare, where that was asked for and they have their own."""
    if settings.gpu_memory_utilization is None:
        return wanted
    trial = _smallest_plan(wanted, facts, sizes.max_model_len)
    spare = await workers.spare_memory(trial, sizes, settings.gpu_memory_utilization)
    return wanted if spare is None else replace(wanted, memory_bytes=spare)


def _smallest_plan(wanted: PlanSettings, facts: ModelFacts, max_model_len: int) -> MemoryPlan:
    """Of a power of two of bytes."""
    memory_bytes = SMALLEST_TRIAL_BYTES
    while True:
        try:
            return plan_memory(facts.layers, replace(wanted, memory_bytes=memory_bytes), max_model_len)
        except InvalidSetting:
            if memory_bytes >= LARGEST_TRIAL_BYTES:
                raise
            memory_bytes *= 2


def _longest(plan: MemoryPlan, max_model_len: int) -> int | None:
    """Tokens of the longest request that the pool can hold; None: any that is allowed."""
    if plan.fits(max_model_len):
        return None
    return bisect.bisect_left(range(max_model_len), True, key=lambda length: not plan.fits(length + 1))


def _sampling_defaults(
    settings: EngineSettings, facts: ModelFacts
) -> tuple[tuple[tuple[str, float], ...], tuple[str, ...]]:
    """What the checkpoint asks for, and notes on what of it is of no use."""
    if settings.generation_config == "none":
        return (), ()
    usable, notes = [], []
    for name, value in facts.sampling_defaults:
        try:
            SamplingParams(**dict[str, Any]({name: value}))
            usable.append((name, value))
        except InvalidRequest as error:
            notes.append(f"generation_config.json: {error}; it is left out")
    return tuple(usable), tuple(notes)


def _describe(settings: EngineSettings, facts: ModelFacts, plan: MemoryPlan, sizes: RunnerLimits) -> EngineInfo:
    model_dir = Path(settings.model.model_dir)
    sampling_defaults, sampling_notes = _sampling_defaults(settings, facts)
    return EngineInfo(
        model=settings.served_model_name or model_dir.name,
        model_dir=str(model_dir),
        architecture=facts.architecture,
        dtype=facts.dtype,
        device=facts.device,
        tensor_parallel_size=settings.model.tensor_parallel_size,
        weight_bytes=facts.weight_bytes,
        vocab_size=facts.vocab_size,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        eos_token_ids=facts.eos_token_ids,
        strategy=plan.strategy,
        groups=tuple(
            GroupInfo(group.reach.name, group.layers, group.block_tokens, group.page_bytes) for group in plan.groups
        ),
        num_blocks=plan.usable_blocks,
        num_buffers=plan.num_buffers,
        kv_cache_bytes=plan.memory_bytes,
        max_len_concurrency=plan.concurrency(sizes.max_model_len),
        enable_prefix_caching=settings.prefix_caching,
        image_token_id=facts.image_token_id,
        max_images_per_request=settings.max_images_per_request if facts.image_token_id is not None else 0,
        notes=facts.notes + sampling_notes + plan.notes,
        pool_request_len=_longest(plan, sizes.max_model_len),
        sampling_defaults=sampling_defaults,
        lease_blocks=plan.leasable_blocks,
    )
