"""The text part of a multimodal model whose family has no class for it alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from intarsia.deploy.proof.copy import make_copy
from intarsia.deploy.proof.prove import prove
from intarsia.workers.models.text_part import around, has_own_class, name_of_text, text_part_class

SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
TEXT = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip


def whole(family: str = "qwen2_5_vl", **fields: Any) -> PretrainedConfig:
    kind: Any = CONFIG_MAPPING[family]
    return kind(text_config={**TEXT, "rope_parameters": SECTIONS, **fields})


def test_the_whole_is_built_without_what_makes_no_text_of_text():
    config = whole()
    assert not has_own_class(config.get_text_config()) and name_of_text(config) == "text_config"
    kind: Any = text_part_class(config)
    with torch.device("meta"):
        model = kind._from_config(config, dtype=torch.float32)
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    paths = {name.rsplit(".layers", 1)[0] for name, _ in model.named_parameters()}
    assert paths == {
        "lm_head.weight", "model.language_model", "model.language_model.embed_tokens.weight",
        "model.language_model.norm.weight",
    }  # fmt: skip


def test_a_family_with_a_class_for_text_alone_keeps_it():
    assert has_own_class(CONFIG_MAPPING["gemma3"]().get_text_config())


def test_the_whole_is_found_that_a_text_part_belongs_to():
    kind: Any = CONFIG_MAPPING["step3p5"]
    text = kind(sliding_window=8)
    found = around(text)
    assert found.model_type == "step3p7" and found.text_config is text
    assert around(CONFIG_MAPPING["bert"]()) is None


def test_a_copy_of_the_whole_holds_the_text_part_alone(tmp_path: Path):
    changed = make_copy(whole("qwen3_vl", vocab_size=1000), tmp_path, 0)
    assert changed["vocab_size"] == (1000, 128)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert size < 2**20


@pytest.mark.slow
@pytest.mark.parametrize("family", ["muse_glimmer", "muse_spark", "mistral4", "qwen3_vl"])
def test_text_parts_are_found_right_on_one_rank_and_two(family: str, tmp_path: Path):
    config = whole(family) if family == "qwen3_vl" else CONFIG_MAPPING[family]()
    config.save_pretrained(tmp_path)
    verdict = prove(tmp_path, (1, 2))
    assert verdict.is_right, verdict.reason
