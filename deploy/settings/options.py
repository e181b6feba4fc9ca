"""Settings of an engine, under the names the field uses, composed into the settings of its components."""

from dataclasses import dataclass, replace
from typing import Unpack

from ...controller.admission.overload import OverloadSettings
from ...controller.leases.settings import LeaseSettings
from ...controller.scheduling.settings import SchedulerSettings
from ...controller.startup import EngineSettings
from ...kvcache.plan import PlanSettings
from ...proto.worker import ModelSettings
from ..checkpoints.hub import HubSettings
from ..checkpoints.model_dir import FoundModel, find_model
from .setting import fields_of
from .sizes import parse_bytes
from .table import ENGINE, EngineArguments

CPU_KV_CACHE_MEMORY = "64MiB"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Settings of an engine whose model is not found yet."""

    engine: EngineSettings  # its folder of the model is empty
    revision: str | None

    def of(self, found: FoundModel) -> EngineSettings:
        """The settings of an engine with this model."""
        model = replace(self.engine.model, model_dir=str(found.path))
        return replace(self.engine, model=model, served_model_name=self.engine.served_model_name or found.name)


def engine_settings(model: str, **given: Unpack[EngineArguments]) -> EngineSettings:
    """Settings of an engine. Raises `InvalidSetting`, naming the field, and `ModelNotFound`.

    A model of the Hub is fetched if it is not here.

    kv_cache_memory: None: what `gpu_memory_utilization` leaves of a GPU beside weights and steps; without a GPU,
        `CPU_KV_CACHE_MEMORY`
    """
    wanted = wanted_settings(**given)
    return wanted.of(find_model(str(model), wanted.revision))


def wanted_settings(**given: Unpack[EngineArguments]) -> Wanted:
    """What is wanted of an engine, before its model is looked for. Raises as `engine_settings`."""
    if given.get("tokenizer") is not None:
        _composed({**given, "tokenizer": None})  # what can be refused is refused before a tokenizer is fetched
    return _composed(given)


def _composed(given: EngineArguments) -> Wanted:
    components = fields_of(ENGINE, given)
    engine, plan = components["engine"], components["plan"]
    if plan["memory_bytes"] is None:
        plan["memory_bytes"] = parse_bytes(CPU_KV_CACHE_MEMORY, "kv_cache_memory")
    else:
        engine["gpu_memory_utilization"] = None
    settings = EngineSettings(
        model=ModelSettings("", **components["model"]),
        plan=PlanSettings(**plan),
        scheduler=SchedulerSettings(**components["scheduler"]),
        overload=OverloadSettings(**components["overload"]),
        leases=LeaseSettings(**components["leases"]),
        **engine,
    )
    return Wanted(settings, HubSettings(**components["hub"]).revision)
