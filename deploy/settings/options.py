"""Settings of an engine, under the names the field uses, composed into the settings of its components."""

from typing import Unpack

from ...controller.admission.overload import OverloadSettings
from ...controller.scheduling.settings import SchedulerSettings
from ...controller.startup import EngineSettings
from ...kvcache.plan import PlanSettings
from ...proto.worker import ModelSettings
from ..checkpoints.hub import HubSettings
from ..checkpoints.model_dir import find_model
from .setting import fields_of
from .sizes import parse_bytes
from .table import ENGINE, EngineArguments

CPU_KV_CACHE_MEMORY = "64MiB"


def engine_settings(model: str, **given: Unpack[EngineArguments]) -> EngineSettings:
    """Settings of an engine. Raises `InvalidSetting`, naming the field, and `ModelNotFound`.

    A model of the Hub is fetched if it is not here.

    kv_cache_memory: None: what `gpu_memory_utilization` leaves of a GPU beside weights and steps; without a GPU,
        `CPU_KV_CACHE_MEMORY`
    """
    components = fields_of(ENGINE, given)
    found = find_model(str(model), HubSettings(**components["hub"]).revision)
    engine, plan = components["engine"], components["plan"]
    if plan["memory_bytes"] is None:
        plan["memory_bytes"] = parse_bytes(CPU_KV_CACHE_MEMORY, "kv_cache_memory")
    else:
        engine["gpu_memory_utilization"] = None
    engine["served_model_name"] = engine["served_model_name"] or found.name
    return EngineSettings(
        model=ModelSettings(str(found.path), **components["model"]),
        plan=PlanSettings(**plan),
        scheduler=SchedulerSettings(**components["scheduler"]),
        overload=OverloadSettings(**components["overload"]),
        **engine,
    )
