"""Released configs whose families have another name in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from intarsia.errors import CorruptCheckpoint
from intarsia.workers.checkpoint.config_schema import check_config
from intarsia.workers.checkpoint.files import read_config
from intarsia.workers.checkpoint.spellings import config_of, in_usual_words

SMALL = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}


def folder_with(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(SMALL | fields))
    return folder


@pytest.mark.parametrize(
    ("released", "family"), [("kimi_k2", "deepseek_v3"), ("mimo", "qwen2"), ("Yi", "llama"), ("qwen3", "qwen3")]
)
def test_a_family_is_called_as_transformers_calls_it(released: str, family: str, tmp_path: Path):
    folder = folder_with(tmp_path, model_type=released)
    assert read_config(folder / "config.json")["model_type"] == family
    assert config_of(folder).model_type == family


@pytest.mark.parametrize("released", ["minimax_text_01", "minimax_m1"])
def test_minimax_numbers_become_kinds_and_its_factors_get_their_names(released: str, tmp_path: Path):
    fields = {"attn_type_list": [0, 0, 0, 1], "layernorm_mlp_alpha": 3.5, "layernorm_full_attention_beta": 2.0}
    config = config_of(folder_with(tmp_path, model_type=released, **fields))
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert (config.mlp_alpha_factor, config.full_attn_beta_factor) == (3.5, 2.0)


def test_other_configs_stay_as_they_are():
    fields = {"model_type": "olmo2", "attn_type_list": [1]}
    assert in_usual_words(fields) == fields
    assert in_usual_words({"model_type": ["kimi_k2"]}) == {"model_type": ["kimi_k2"]}


def test_a_list_of_layers_may_name_those_that_guess_further_tokens():
    kinds = ["full_attention"] * 5
    check_config(SMALL | {"layer_types": kinds, "num_nextn_predict_layers": 1}, "config")
    for guessing in (None, 2):
        with pytest.raises(CorruptCheckpoint, match="layer_types must name each of the 4 layers, not 5"):
            check_config(SMALL | {"layer_types": kinds, "num_nextn_predict_layers": guessing}, "config")
