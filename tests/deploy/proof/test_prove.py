"""Small copies of families that the tests do not cover: right ones are found right, wrong ones wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from intarsia.deploy.proof import gate
from intarsia.deploy.proof.gate import check_right, verdict_of
from intarsia.deploy.proof.prove import prove
from intarsia.deploy.proof.sweep import LACKING
from intarsia.deploy.proof.verdict import Verdict, remember, remembered
from intarsia.errors import UnsupportedModel
from intarsia.workers.known_families import REFUSED
from intarsia.workers.layers import adapters

RIGHT = (
    "afmoe", "cohere2_moe", "deepseek_v2", "ernie4_5_moe", "flex_olmo", "glm4_moe", "granite", "granitemoe_swa",
    "hunyuan_v1_moe", "minicpm3", "mixtral", "olmo2",
)  # fmt: skip


def folder_of(family: str, folder: Path, **fields: Any) -> Path:
    """A folder with a config, and no weights: a proof needs none."""
    CONFIG_MAPPING[family](**fields).save_pretrained(folder)
    return folder


def test_a_right_family_is_found_right_on_one_rank_and_two(tmp_path: Path):
    verdict = prove(folder_of("qwen2", tmp_path), (1, 2))
    assert verdict.is_right and verdict.family == "qwen2" and verdict.reason is None
    assert verdict.scaled["num_hidden_layers"][1] == 2


@pytest.mark.slow
@pytest.mark.parametrize("family", RIGHT)
@pytest.mark.parametrize("seed", range(5))
def test_right_families_are_found_right_with_any_weights(family: str, seed: int, tmp_path: Path):
    assert prove(folder_of(family, tmp_path, **LACKING.get(family, {})), (1, 2), [seed]).is_right


def test_a_family_whose_attention_sees_what_comes_later_is_refused_in_plain_words(tmp_path: Path):
    verdict = prove(folder_of("bert", tmp_path), (1,), [0])
    assert not verdict.is_right
    assert "no causal attention: it sees later tokens" in str(verdict.reason)


def test_a_family_whose_queries_are_scaled_in_another_way_is_found_wrong_and_the_layer_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(adapters, "patch_query_scale", lambda module: lambda positions: positions * 0 + 1.5)
    verdict = prove(folder_of("seed_oss", tmp_path), (1,), [0])
    assert not verdict.is_right
    assert "the first layer that differs is model.layers.0" in str(verdict.reason)


@pytest.mark.parametrize(
    "family, why",
    [("gemma4_unified_assistant", "guesses what another model will say"), ("diffusion_gemma", "out of noise"),
     ("rwkv", "in a way of their own"), ("blt", "in patches"), ("git", "in a picture")],
)  # fmt: skip
def test_what_is_known_not_to_be_served_is_refused_in_plain_words(family: str, why: str, tmp_path: Path):
    CONFIG_MAPPING[family](**LACKING.get(family, {})).save_pretrained(tmp_path)
    verdict = prove(tmp_path, (1,))
    assert verdict.reason is not None and f"{family} is not served" in verdict.reason and why in verdict.reason


def test_a_model_that_runs_with_its_encoder_is_not_proven(tmp_path: Path):
    verdict = prove(folder_of("mllama", tmp_path), (1,), [0])
    assert not verdict.is_right and "which a proof leaves out" in str(verdict.reason)


def test_a_family_of_unknown_layers_is_refused_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(REFUSED, "unlimited_ocr")  # of which more is known
    verdict = prove(folder_of("unlimited_ocr", tmp_path), (1,))
    assert not verdict.is_right
    assert "layers of kind 'reference_sliding_attention'; known are" in str(verdict.reason)


def check(model: Path) -> None:
    check_right(str(model), json.loads((model / "config.json").read_text()), 1)


# -- what is remembered ------------------------------------------------------------------------------------------------


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path / "cache" / "models"))
    return tmp_path / "cache"


def test_a_verdict_is_remembered_for_that_model_and_as_many_ranks(own_cache: Path):
    config, verdict = {"model_type": "qwen2", "hidden_size": 64}, Verdict("qwen2", True, (1, 2), 3.0, None, {})
    remember(verdict, config, 2, has_gpu=False)
    assert remembered(config, 2, has_gpu=False) == verdict
    assert remembered(config | {"transformers_version": "1"}, 2, has_gpu=False) == verdict
    assert remembered(config | {"hidden_size": 128}, 2, has_gpu=False) is None
    assert remembered(config, 1, has_gpu=False) is None
    assert remembered(config, 2, has_gpu=True) is None


def test_a_file_that_is_no_verdict_counts_as_none(own_cache: Path):
    config = {"model_type": "qwen2"}
    remember(Verdict("qwen2", True, (1,), 3.0), config, 1, has_gpu=False)
    [file] = (own_cache / "proofs").iterdir()
    for text in ("", "{", "[]", '{"family": 1}'):
        file.write_text(text)
        assert remembered(config, 1, has_gpu=False) is None


def test_a_known_family_needs_no_proof(tmp_path: Path, own_cache: Path):
    check(folder_of("llama", tmp_path / "m"))
    assert not (own_cache / "proofs").exists()


def test_a_wrong_family_is_refused_with_the_reason_and_not_tried_again(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
):
    model = folder_of("electra", tmp_path / "m")
    with pytest.raises(UnsupportedModel, match=r"electra is not served, .* answered wrong: .*no causal attention"):
        check(model)
    monkeypatch.setattr(gate, "run_child", None)
    with pytest.raises(UnsupportedModel, match="electra is not served"):
        check(model)


def test_a_proof_that_comes_to_no_end_is_told_and_not_remembered(tmp_path: Path, own_cache: Path):
    model = folder_of("qwen2", tmp_path / "m")
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_hidden_layers": "many"}))
    config = json.loads((model / "config.json").read_text())
    verdict = verdict_of(str(model), config, 1)
    assert not verdict.is_right and verdict.reason
    assert "came to no end" not in verdict.reason or remembered(config, 1, has_gpu=False) is None
