"""The table of settings: what it promises to the components, to the commands and to type checkers."""

import dataclasses
from typing import Any, Unpack, get_type_hints

import pytest

from intarsia.controller.admission.overload import OverloadSettings
from intarsia.controller.leases.settings import LeaseSettings
from intarsia.controller.scheduling.settings import SchedulerSettings
from intarsia.controller.startup import EngineSettings
from intarsia.deploy.checkpoints.hub import HubSettings
from intarsia.deploy.console import ConsoleSettings
from intarsia.deploy.front_end.access import AccessSettings
from intarsia.deploy.front_end.front_end import FrontEndSettings
from intarsia.deploy.llm import LLM
from intarsia.deploy.openai.stored import StoreSettings
from intarsia.deploy.settings.limits import Limits
from intarsia.deploy.settings.options import engine_settings
from intarsia.deploy.settings.setting import Setting
from intarsia.deploy.settings.table import ENGINE, OF_BATCH, OF_SERVE, SERVER, EngineArguments
from intarsia.deploy.start.serve import ServerSettings
from intarsia.kvcache.plan import PlanSettings
from intarsia.proto.worker import ModelSettings

COMPONENTS: dict[str, Any] = {
    "engine": EngineSettings,
    "model": ModelSettings,
    "plan": PlanSettings,
    "scheduler": SchedulerSettings,
    "overload": OverloadSettings,
    "leases": LeaseSettings,
    "server": ServerSettings,
    "access": AccessSettings,
    "front_end": FrontEndSettings,
    "console": ConsoleSettings,
    "store": StoreSettings,
    "limits": Limits,
    "hub": HubSettings,
}

ONE_FOR_THE_OTHER = {"kv_cache_memory", "gpu_memory_utilization"}
"""Without the first, the second says how much memory there is."""


@pytest.mark.parametrize("row", [*ENGINE, *SERVER], ids=lambda row: row.name)
def test_a_setting_fills_a_field_of_its_component_with_the_default_that_the_field_has(row: Setting):
    component, _, name = row.fills.partition(".")
    [field] = [field for field in dataclasses.fields(COMPONENTS[component]) if field.name == name]
    assert row.name in ONE_FOR_THE_OTHER or field.default == row.value({})


def test_the_default_of_memory_is_a_share_of_a_gpu_until_memory_is_given():
    assert engine_settings("demo").gpu_memory_utilization == 0.9
    assert engine_settings("demo", kv_cache_memory="1MiB", gpu_memory_utilization=0.5).gpu_memory_utilization is None


def test_no_two_settings_have_one_name_or_fill_one_field():
    for rows in (ENGINE, SERVER):
        assert len({row.name for row in rows}) == len({row.fills for row in rows}) == len(rows)


def test_serve_takes_every_setting_and_batch_those_of_an_engine_that_answers_at_its_own_pace():
    serve, batch = [row.name for row in OF_SERVE], [row.name for row in OF_BATCH]
    assert set(serve) - {row.name for row in (*ENGINE, *SERVER)} == {"disable_hybrid_kv_cache_manager", "log_level"}
    assert {row.name for row in ENGINE} - set(batch) == {"max_wait_s"}
    assert batch == serve[: len(batch)]


def test_type_checkers_know_the_arguments_of_the_offline_api():
    assert get_type_hints(LLM.__init__)["settings"] == Unpack[EngineArguments]
    assert get_type_hints(engine_settings)["given"] == Unpack[EngineArguments]
    assert get_type_hints(EngineArguments)["max_model_len"] == int | str | None
