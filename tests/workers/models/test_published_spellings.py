"""Releases of 2026 in fewer bits, scaled down: their tensors' names, what is packed in them, and what they say of it.

Each loads with every rank's share as that of a plain twin, or is refused with the reason. None is silently wrong.
Sources: the configs and indexes of the releases named, and threads about them.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING

from intarsia.deploy.proof.copy import make_copy
from intarsia.errors import CorruptCheckpoint
from intarsia.proto.worker import ModelSettings
from intarsia.tests import models, packing
from intarsia.tests.packing import BLOCK, FORMATS, GROUP, Tensors, share
from intarsia.tests.workers.models.test_unpacked import answers
from intarsia.workers.checkpoint.files import Checkpoint
from intarsia.workers.models.load import load_model
from intarsia.workers.models.unpacked import Unpacked
from intarsia.workers.tensor_parallel import TensorParallel

Pack = Callable[[Tensor], tuple[Tensors, Tensor]]
RANKS = (0, 1), (1, 2), (3, 4)
"""Rank and size."""


@dataclass(frozen=True, slots=True)
class Release:
    family: str
    packed: tuple[tuple[str, Pack], ...]
    """Patterns of names of weights, as the release has them, and how those are packed. The first that fits counts."""

    said: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, Any] = field(default_factory=dict)
    """hf_quant_config.json"""

    rename: tuple[tuple[str, str], ...] = ()
    """Of the family's names to those of the release."""

    around: str | None = None
    """model_type of the multimodal model around the text model."""

    more: Tensors = field(default_factory=dict)
    """Tensors of parts that are not loaded, and scales of caches."""

    notes: int = 0


# -- how a weight is packed --------------------------------------------------------------------------------------------


def nvfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    return packing.nvfp4(weight, "modelopt")


def nvfp4_weights_only(weight: Tensor) -> tuple[Tensors, Tensor]:
    stored, plain = nvfp4(weight)
    del stored["input_scale"]
    return stored, plain


def nvfp4_of_compressed_tensors(weight: Tensor) -> tuple[Tensors, Tensor]:
    stored, plain = packing.nvfp4(weight, "compressed-tensors")
    return {**stored, "input_global_scale": torch.tensor([300.0])}, plain


def gptq(weight: Tensor) -> tuple[Tensors, Tensor]:
    return packing.gptq(weight)


def static_fp8(weight: Tensor) -> tuple[Tensors, Tensor]:
    """As compressed-tensors has it: scales are lists of one."""
    stored, plain = packing.fp8_tensor(weight)
    return {**stored, "weight_scale": stored["weight_scale"].view(1), "input_scale": torch.tensor([0.02])}, plain


def rows_of_experts(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Experts in one tensor, a scale for each row of each."""
    stored, plain = packing.fp8_rows(weight.flatten(0, 1))
    in_threes = {suffix: tensor.unflatten(0, weight.shape[:2]) for suffix, tensor in stored.items()}
    return in_threes, plain.view(weight.shape)


def blocks_of_experts(weight: Tensor) -> tuple[Tensors, Tensor]:
    """gpt-oss: [experts, inputs, outputs] are stored the other way round."""
    stored, plain = [], []
    for expert in weight:
        tensors, numbers = packing.mxfp4(expert.T.contiguous())
        stored.append(tensors)
        plain.append(numbers.T)
    codes = torch.stack([tensors["weight_packed"] for tensors in stored])
    scale = torch.stack([tensors["weight_scale"] for tensors in stored])
    return {"_blocks": codes.unflatten(2, (-1, 16)), "_scales": scale}, torch.stack(plain)


# -- what is said ------------------------------------------------------------------------------------------------------


def fp8_blocks(*excluded: str) -> dict[str, Any]:
    said: dict[str, Any] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK),
    }  # fmt: skip
    return said | {"modules_to_not_convert": list(excluded)} if excluded else said


def compressed(format: str, *ignore: str, **more: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(dict(FORMATS[format].config))), "ignore": list(ignore), **more}


def modelopt(algorithm: str, *excluded: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": list(excluded), **more}


def of_hf_quant_config(algorithm: str, *excluded: str, **more: Any) -> dict[str, Any]:
    about = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": list(excluded)}
    return {"producer": {"name": "modelopt", "version": "0.47"}, "quantization": {**about, **more}}


def layers(pattern: str, count: int = 4) -> Iterable[str]:
    return (pattern.replace("*", str(n), 1) for n in range(count))


TEXT = "model.language_model.layers.*"
VISION: Tensors = {"model.visual.blocks.0.attn.qkv.weight": torch.zeros(48, 16)}
MTP: Tensors = {"mtp.fc.weight": torch.zeros(16, 32), "mtp.layers.0.mlp.up_proj.weight": torch.zeros(32, 16)}
INNER = ((r"^model\.", "model.language_model."),)
OUTER = ((r"^", "language_model."),)
FP8_MTP: Tensors = {
    "mtp.layers.0.mlp.up_proj.weight": torch.zeros(32, 16).to(torch.float8_e4m3fn),
    "mtp.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(2, 1),
}
CACHE_SCALES: Tensors = {
    "model.language_model.layers.3.self_attn.k_proj.k_scale": torch.tensor(0.5),
    "model.language_model.layers.3.self_attn.v_proj.v_scale": torch.tensor(0.25),
}

DELTA_FP8 = r".*(linear_attn\.(in_proj_qkv|in_proj_z|in_proj_qkvz|out_proj)|self_attn\.[qkvo]_proj)\.weight"
MLP = r".*mlp\.(gate|up|down)_proj\.weight"
EXPERTS = r".*experts\.\d+\.(gate|up|down)_proj\.weight"
SHARED = r".*shared_expert\.(gate|up|down)_proj\.weight"
LINEAR = packing.LINEAR.pattern

GATED = "gate", "up", "down"
MIXED_LAYERS: dict[str, Any] = {
    **{f"{name}.self_attn.{x}_proj": {"quant_algo": "FP8"} for name in layers(TEXT) for x in "qkvo"},
    **{
        f"{name}.linear_attn.{part}": {"quant_algo": "FP8"}
        for name in layers(TEXT)
        for part in ("in_proj_qkv", "in_proj_z", "out_proj")
    },
    "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
}
CONTRADICTING = {
    "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}}
}

# -- the releases ------------------------------------------------------------------------------------------------------

RELEASES: dict[str, Release] = {
    "Qwen3.5-27B-FP8": Release(
        "qwen3_5",
        ((DELTA_FP8, packing.fp8_blocks), (MLP, packing.fp8_blocks)),
        fp8_blocks(
            "lm_head", "model.language_model.embed_tokens", "model.visual.blocks.0.attn.qkv", "mtp.fc",
            *layers(f"{TEXT}.linear_attn.conv1d"), *layers(f"{TEXT}.linear_attn.in_proj_a"),
            *layers(f"{TEXT}.linear_attn.in_proj_b"),
        ),
        rename=INNER, around="qwen3_5", more={**VISION, **FP8_MTP},
    ),
    "Qwen3.5-35B-A3B-FP8": Release(
        "qwen3_5_moe",
        ((DELTA_FP8, packing.fp8_blocks), (EXPERTS, packing.fp8_blocks), (SHARED, packing.fp8_blocks)),
        fp8_blocks(
            "lm_head", *layers(f"{TEXT}.mlp.gate"), *layers(f"{TEXT}.mlp.shared_expert_gate"),
            *layers(f"{TEXT}.linear_attn.in_proj_a"), *layers(f"{TEXT}.linear_attn.in_proj_b"),
        ),
        rename=INNER, around="qwen3_5_moe", more={**VISION, **MTP},
    ),
    "Qwen3-Next-80B-A3B-Instruct-FP8": Release(
        "qwen3_next",
        ((DELTA_FP8, packing.fp8_blocks), (EXPERTS, packing.fp8_blocks), (SHARED, packing.fp8_blocks)),
        fp8_blocks("lm_head", *layers("model.layers.*.linear_attn.in_proj_ba"), *layers("model.layers.*.mlp.gate")),
        more=FP8_MTP,
    ),
    "Qwen3.5-27B-GPTQ-Int4": Release(
        "qwen3_5", ((MLP, gptq),),
        {**packing.of_gptq(), "dynamic": {"-:.*attn.*": {}, "-:.*mtp.*": {}, "-:.*visual.*": {}}, "lm_head": False},
        rename=INNER, around="qwen3_5", more={**VISION, **MTP},
    ),
    "Qwen3.5-35B-A3B-GPTQ-Int4": Release(
        "qwen3_5_moe", ((EXPERTS, gptq),),
        {**packing.of_gptq(), "dynamic": {"-:.*attn.*": {}, "-:.*shared_expert.*": {}, "-:.*mtp.*": {}}},
        rename=INNER, around="qwen3_5_moe",
    ),
    "RedHatAI Qwen3.5-9B-FP8-dynamic": Release(
        "qwen3_5", ((r".*self_attn\..*_proj\.weight", packing.fp8_rows), (MLP, packing.fp8_rows)),
        compressed("fp8-rows", "lm_head", "re:.*linear_attn.*", "re:.*visual.*", "re:.*mtp.*", "re:.*embed_tokens$"),
        rename=INNER, around="qwen3_5", more=VISION,
    ),
    "RedHatAI Qwen3.5-9B-quantized.w4a16": Release(
        "qwen3_5", ((r".*proj(_\w+)?\.weight", packing.ct_int),),
        compressed("w4a16", "re:.*lm_head", "re:.*visual.*", "re:^mtp.*"),
        rename=INNER, around="qwen3_5", more={**VISION, **MTP},
    ),
    "nvidia Qwen3.5-122B-A10B-NVFP4": Release(
        "qwen3_5_moe", ((EXPERTS, nvfp4),),
        modelopt(
            "NVFP4", "lm_head", *layers(f"{TEXT}.linear_attn*"), *layers(f"{TEXT}.self_attn*"),
            *layers(f"{TEXT}.mlp.shared_expert*"), "model.visual*", "mtp*",
        ),
        rename=INNER, around="qwen3_5_moe", more={**VISION, **MTP},
    ),
    "nvidia Qwen3.6-27B-NVFP4": Release(
        "qwen3_5",
        ((DELTA_FP8, packing.fp8_tensor), (MLP, nvfp4_weights_only), (r"lm_head\.weight", nvfp4_weights_only)),
        modelopt(
            "MIXED_PRECISION", "mtp*", "model.visual*", config_groups=CONTRADICTING,
            quantized_layers=MIXED_LAYERS
            | {f"{name}.mlp.{x}_proj": {"quant_algo": "W4A16_NVFP4"} for name in layers(TEXT) for x in GATED},
        ),
        of_hf_quant_config("MIXED_PRECISION", "mtp*", quantized_layers=MIXED_LAYERS),
        rename=INNER, around="qwen3_5", more={**VISION, **MTP, **CACHE_SCALES},
    ),
    "nvidia Qwen3.6-35B-A3B-NVFP4": Release(
        "qwen3_5_moe",
        ((DELTA_FP8, packing.fp8_tensor), (EXPERTS, nvfp4_weights_only), (r"lm_head\.weight", nvfp4_weights_only)),
        modelopt(
            "MIXED_PRECISION", "mtp*", "model.visual*", config_groups=CONTRADICTING,
            quantized_layers=MIXED_LAYERS
            | {f"{name}.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in layers(TEXT)},
        ),
        rename=INNER, around="qwen3_5_moe", more=CACHE_SCALES,
    ),
    "nvidia Nemotron-3-Nano-30B-A3B-NVFP4": Release(
        "nemotron_h",
        ((rf"(?!.*layers\.[02]\.){LINEAR}", nvfp4),),
        beside=of_hf_quant_config(
            "NVFP4", "lm_head", *layers("backbone.layers.*.mixer.conv1d"),
            *(f"backbone.layers.0.mixer.{part}" for part in ("in_proj", "out_proj")),
            *(f"backbone.layers.2.mixer.{part}_proj" for part in "qkvo"),
        ),
    ),
    "nvidia Nemotron-3.5-Lightning-NVFP4": Release(
        "nemotron_h",
        ((r".*mixer\.(in|out)_proj\.weight", packing.fp8_tensor), (r".*experts\.\d+\..*", nvfp4_weights_only),
         (r"lm_head\.weight", nvfp4_weights_only)),
        beside=of_hf_quant_config(
            "MIXED_PRECISION",
            quantized_layers={
                "backbone.layers.0.mixer.in_proj": {"quant_algo": "FP8"},
                "backbone.layers.4.mixer.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
            },
        ),
        more={
            "backbone.layers.2.mixer.k_proj.k_scale": torch.tensor(1.0),
            "backbone.layers.2.mixer.v_proj.v_scale": torch.tensor(1.0),
        },
    ),
    "nvidia Nemotron-3-Super-120B-A12B-FP8": Release(
        "nemotron_h", ((LINEAR, packing.fp8_tensor),), beside=of_hf_quant_config("FP8", "lm_head", "*.mixer.conv1d"),
    ),
    "deepseek-ai DeepSeek-V3": Release(
        "deepseek_v3", ((LINEAR, packing.fp8_blocks), (r".*kv_a_proj_with_mqa\.weight", packing.fp8_blocks)),
        fp8_blocks(),
    ),
    "MiniMaxAI MiniMax-M2.5": Release(
        "minimax", ((LINEAR, packing.fp8_blocks),),
        fp8_blocks("gate", "e_score_correction_bias", "lm_head", "output_gate"),
    ),
    "RedHatAI granite-4.0-h-small-FP8-dynamic": Release(
        "granite4",
        ((r".*block_sparse_moe\.(in|out)put_linear\.weight", rows_of_experts), (LINEAR, packing.fp8_rows)),
        compressed("fp8-rows", "re:.*lm_head", "re:.*router.*", "re:.*conv1d"),
    ),
    "AI21-Jamba-Mini-1.7-FP8": Release(
        "jamba", ((r".*(in|out|x|[qkvo]|gate|up|down)_proj\.weight", packing.fp8_rows),),
        compressed("fp8-rows", "lm_head", *layers("model.layers.*.mamba.dt_proj")),
    ),
    "tiiuae Falcon-H1-34B-Instruct-GPTQ-Int4": Release("falcon_h1", ((LINEAR, gptq),), packing.of_gptq()),
    "RedHatAI gemma-3-27b-it-FP8-dynamic": Release(
        "gemma3", ((LINEAR, packing.fp8_rows),),
        compressed("fp8-rows", "re:.*lm_head", "re:vision_tower.*", "re:multi_modal_projector.*"),
        rename=OUTER, around="gemma3",
        more={"vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight": torch.zeros(16, 16)},
    ),
    "RedHatAI Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": Release(
        "llama4", ((EXPERTS, packing.fp8_rows), (SHARED, packing.fp8_rows),
                   (r".*feed_forward\.\w+_proj\.weight", packing.fp8_rows)),
        compressed("fp8-rows", "re:.*lm_head", "re:.*self_attn.*", "re:.*router", "re:.*vision.*", "re:.*projector.*"),
        rename=OUTER, around="llama4",
    ),
    "RedHatAI Llama-4-Scout-17B-16E-Instruct-quantized.w4a16": Release(
        "llama4", ((EXPERTS, packing.ct_int), (SHARED, packing.ct_int)),
        compressed("w4a16", "re:.*lm_head", "re:.*self_attn", "re:.*router", "re:.*feed_forward.(gate|up|down)_proj"),
        rename=OUTER, around="llama4",
    ),
    "RedHatAI Llama-4-Scout-17B-16E-Instruct-NVFP4": Release(
        "llama4", ((EXPERTS, nvfp4_of_compressed_tensors), (SHARED, nvfp4_of_compressed_tensors)),
        compressed("nvfp4", "re:.*lm_head", "re:.*self_attn", "re:.*router", "re:.*feed_forward.(gate|up|down)_proj"),
        rename=OUTER, around="llama4",
    ),
    "nvidia Gemma-4-26B-A4B-NVFP4": Release(
        "gemma4", ((EXPERTS, nvfp4), (MLP, nvfp4)),
        modelopt("NVFP4", "lm_head", "model.vision_tower*", *layers(f"{TEXT}.self_attn*"), *layers(f"{TEXT}.router*")),
        rename=INNER, around="gemma4",
    ),
    "RedHatAI gemma-4-26B-A4B-it-NVFP4": Release(
        "gemma4", ((EXPERTS, nvfp4_of_compressed_tensors), (MLP, nvfp4_of_compressed_tensors)),
        compressed("nvfp4", "lm_head", "re:.*self_attn.*", "re:.*router.*", "re:.*vision.*"),
        rename=(*INNER, (r"\.experts\.(\d)", r".moe.experts.\1")), around="gemma4",
    ),
    "openai gpt-oss-20b": Release(
        "gpt_oss", ((r".*experts\.(gate_up|down)_proj", blocks_of_experts),),
        {"quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
    ),
    "static FP8 of compressed-tensors": Release(
        "qwen3_5", ((MLP, static_fp8),), compressed("fp8-rows", "lm_head", "re:.*attn.*", kv_cache_scheme=None),
    ),
    "Qwen3-Next AWQ-4bit that is compressed-tensors": Release(
        "qwen3_next", ((EXPERTS, lambda weight: packing.ct_int(weight, symmetric=False)),),
        compressed("w4a16-zero-points", "lm_head", "re:.*attn.*", "re:.*shared_expert.*", "re:.*mlp.gate$"),
    ),
    "a list that omits modules that are packed": Release(
        "qwen3_next", ((EXPERTS, gptq), (SHARED, gptq)),
        {**packing.of_gptq(), "dynamic": {"-:.*shared_expert.*": {}, "-:.*self_attn.*": {}}},
        notes=1,  # of the delta nets, which no list has and nothing packs
    ),
}  # fmt: skip


# -- a release from a tiny checkpoint ----------------------------------------------------------------------------------


def write(release: Release, source: Path, folder: Path) -> tuple[Path, Path]:
    """Folders of the release and of its plain twin."""
    plain = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    config = json.loads((source / "config.json").read_text())
    apart = packing.one_by_one(plain, config)
    stored: Tensors = dict(release.more)
    count = 0
    for name, tensor in list(apart.items()):
        published = name
        if not name.startswith("lm_head") or release.rename == OUTER:
            for pattern, instead in release.rename:
                published = re.sub(pattern, instead, published)
        pack = next((pack for pattern, pack in release.packed if re.fullmatch(pattern, published)), None)
        if pack is None:
            stored[published] = tensor
            continue
        tensors, apart[name] = pack(tensor)
        module = published.removesuffix("weight")
        stored |= {f"{module}{suffix}": each.contiguous() for suffix, each in tensors.items()}
        count += 1
    assert count, "nothing was packed"
    for path, tensors in ((folder / "packed", stored), (folder / "plain", packing.together(apart, plain, config))):
        path.mkdir()
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config))
    if release.around:
        config = {"model_type": release.around, "text_config": config}
    if release.said:
        config["quantization_config"] = dict(release.said)
    (folder / "packed" / "config.json").write_text(json.dumps(config))
    if release.beside:
        (folder / "packed" / "hf_quant_config.json").write_text(json.dumps(dict(release.beside)))
    return folder / "packed", folder / "plain"


@pytest.fixture(scope="module")
def source_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = models.make_checkpoint(family, tmp_path_factory.mktemp("sources") / family)
        return made[family]

    return make


@pytest.mark.parametrize("name", RELEASES)
def test_a_release_gives_every_rank_the_share_of_its_plain_twin(
    name: str, source_of: Callable[[str], Path], tmp_path: Path
):
    release = RELEASES[name]
    packed, plain = write(release, source_of(release.family), tmp_path)
    assert len(Checkpoint(packed).notes) == release.notes, Checkpoint(packed).notes
    for rank, size in RANKS:
        found, wanted = share(packed, rank, size), share(plain, rank, size)
        assert found.keys() == wanted.keys()
        for parameter, numbers in wanted.items():
            torch.testing.assert_close(
                found[parameter], numbers, rtol=0, atol=0, msg=f"{parameter} of rank {rank} of {size}"
            )


EXPERTS_OF_INKLING = re.compile(r".*\.mlp\.experts\.w(13|2)_weight")


def mxfp8_of_experts(name: str, experts: Tensor) -> tuple[Tensors, Tensor]:
    each, plain = zip(*map(packing.mxfp8, experts), strict=True)
    scale = torch.stack([tensors["weight_scale"] for tensors in each])
    return {name: torch.stack([tensors["weight"] for tensors in each]), f"{name}_scale": scale}, torch.stack(plain)


def nvfp4_of_experts(name: str, experts: Tensor) -> tuple[Tensors, Tensor]:
    """The scale of an expert is a quotient of two numbers, of which one is the same for all."""
    each, plain = zip(*map(nvfp4, experts), strict=True)
    codes, scale, whole = (torch.stack([tensors[f"weight{x}"] for tensors in each]) for x in ("", "_scale", "_scale_2"))
    denominator = torch.tensor(2048.0)
    beside = {"_scale": scale, "_amax": whole.flatten() * denominator, "_outer_scale_denominator": denominator}
    return {name: codes} | {name + suffix: tensor for suffix, tensor in beside.items()}, torch.stack(plain)


@pytest.mark.parametrize(
    "family, said, pack",
    [
        ("inkling2_text", {"quant_method": "mxfp8", "weight_block_size": [1, 32]}, mxfp8_of_experts),
        ("inkling2_loop_text", {"quant_method": "fp8"}, mxfp8_of_experts),
        ("inkling2_loop_text", {}, nvfp4_of_experts),
    ],
)
def test_experts_of_inkling_2_are_read_whose_gate_and_up_take_turns(
    family: str, said: Mapping[str, Any], pack: Callable[[str, Tensor], tuple[Tensors, Tensor]], tmp_path: Path
):
    """As Inkling-2-Small-MXFP8 and Inkling-2-Mini have them: all of a layer in one tensor, and their scales beside."""
    packed, plain = folders = tmp_path / "packed", tmp_path / "plain"
    for folder in folders:
        make_copy(CONFIG_MAPPING[family](), folder, seed=0)
        stored = load_file(folder / "model.safetensors")
        for name in filter(EXPERTS_OF_INKLING.fullmatch, list(stored)):
            tensors, numbers = pack(name, stored[name])
            stored |= tensors if folder == packed else {name: numbers}
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": dict(said)}))
    weights = Checkpoint(packed).packed.weights
    assert weights and all(EXPERTS_OF_INKLING.fullmatch(name) for name in weights)
    for rank, size in ((0, 1), (1, 2)):
        found, wanted = share(packed, rank, size), share(plain, rank, size)
        assert found.keys() == wanted.keys()
        for parameter, numbers in wanted.items():
            torch.testing.assert_close(found[parameter], numbers, rtol=0, atol=0, msg=parameter)


def turned_nvfp4(experts: Tensor) -> tuple[Tensors, Tensor]:
    """Inputs before outputs, and so are pairs and groups of them."""
    each, plain = zip(*(nvfp4(expert.T.contiguous()) for expert in experts), strict=True)
    codes, scale, whole = (torch.stack([tensors[f"weight{x}"] for tensors in each]) for x in ("", "_scale", "_scale_2"))
    beside = {"_weight_scale": scale.transpose(1, 2), "_weight_scale_2": whole.flatten()}
    return {"": codes.transpose(1, 2), **beside, "_input_scale": torch.ones(())}, torch.stack(plain).transpose(1, 2)


def turned_fp8(experts: Tensor) -> tuple[Tensors, Tensor]:
    """With one scale for all of a layer."""
    scale = experts.abs().max() / 448
    codes = (experts / scale).to(torch.float8_e4m3fn)
    return {"": codes, "_weight_scale": scale, "_input_scale": torch.ones(())}, codes.float() * scale


def turned_fp8_blocks(experts: Tensor) -> tuple[Tensors, Tensor]:
    """As transformers would write them."""
    each, plain = zip(*map(packing.fp8_blocks, experts), strict=True)
    codes, scale = (torch.stack([tensors[name] for tensors in each]) for name in ("weight", "weight_scale_inv"))
    return {"": codes, "_scale_inv": scale}, torch.stack(plain)


@pytest.mark.parametrize(
    "said, pack",
    [
        (modelopt("NVFP4", "*self_attn*", "*router*"), turned_nvfp4),
        (modelopt("FP8", "*self_attn*", "*router*"), turned_fp8),
        (fp8_blocks(), turned_fp8_blocks),
    ],
)
def test_experts_of_llama_4_in_one_tensor_are_read_and_stay_packed(
    said: Mapping[str, Any], pack: Callable[[Tensor], tuple[Tensors, Tensor]], source_of: Callable, tmp_path: Path
):
    """As nvidia/Llama-4-Scout-17B-16E-Instruct-NVFP4 and -FP8 have them."""
    config = json.loads((source_of("llama4") / "config.json").read_text())
    stored = {name: tensor.float() for name, tensor in load_file(source_of("llama4") / "model.safetensors").items()}
    plain, experts_bytes = dict(stored), 0
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts_bytes += stored[name].nbytes
        tensors, plain[name] = pack(stored.pop(name))
        stored |= {name + suffix: tensor for suffix, tensor in tensors.items()}
    for kind, tensors in (("packed", stored), ("plain", plain)):
        (tmp_path / kind).mkdir()
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, tmp_path / kind / "model.safetensors", metadata={"format": "pt"})
        more = {"quantization_config": dict(said)} if kind == "packed" else {}
        (tmp_path / kind / "config.json").write_text(json.dumps(config | more))
    # Every rank's share is the plain twin's.
    for rank, size in RANKS:
        found, wanted = share(tmp_path / "packed", rank, size), share(tmp_path / "plain", rank, size)
        assert found.keys() == wanted.keys()
        for parameter, numbers in wanted.items():
            torch.testing.assert_close(found[parameter], numbers, rtol=0, atol=0, msg=parameter)
    # Experts stay in their bits, and answer as transformers does with the twin.
    kept, expanded = (
        load_model(
            ModelSettings(str(tmp_path / "packed"), dtype="float32", packed_products=products),
            TensorParallel(),
            torch.device("cpu"),
        ).facts.weight_bytes
        for products in ("reference", "expanded")
    )
    assert kept < expanded - 0.7 * experts_bytes
    oracle = models.load_oracle(tmp_path / "plain")
    expected = [models.greedy(oracle, prompt, 8) for prompt in models.PROMPTS]
    for products in ("cpu", "reference"):
        assert asyncio.run(answers(tmp_path / "packed", models.PROMPTS, 8, packed_products=products)) == expected


def test_a_scheme_that_only_the_text_config_has_is_read(source_of: Callable[[str], Path], tmp_path: Path):
    """Of a multimodal model, as Kimi-K2.5 has it."""
    packed, plain = write(RELEASES["Qwen3.5-27B-FP8"], source_of("qwen3_5"), tmp_path)
    config = json.loads((packed / "config.json").read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (packed / "config.json").write_text(json.dumps(config))
    loaded = [
        load_model(ModelSettings(str(path), dtype="float32"), TensorParallel(), torch.device("cpu"))
        for path in (packed, plain)
    ]
    found, wanted = (dict(each.module.named_parameters()) for each in loaded)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert loaded[0].facts.notes == loaded[1].facts.notes


def test_experts_one_by_one_of_which_one_is_missing_are_refused(source_of: Callable[[str], Path], tmp_path: Path):
    packed, _ = write(RELEASES["nvidia Gemma-4-26B-A4B-NVFP4"], source_of("gemma4"), tmp_path)
    tensors = load_file(packed / "model.safetensors")
    for suffix in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        del tensors[f"model.language_model.layers.1.experts.2.up_proj.{suffix}"]
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptCheckpoint, match=r"layers\.1\.experts\.0\.up_proj\.weight \(nvfp4.* has shape \[3, "):
        share(packed, 0, 1)


def test_a_scale_of_an_expert_that_no_scheme_reads_is_refused(source_of: Callable[[str], Path], tmp_path: Path):
    packed, _ = write(RELEASES["nvidia Gemma-4-26B-A4B-NVFP4"], source_of("gemma4"), tmp_path)
    tensors = load_file(packed / "model.safetensors")
    tensors["model.language_model.layers.1.experts.2.up_proj.smoothing_scale"] = torch.ones(64)
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptCheckpoint, match=r"experts\.2\.up_proj\.smoothing_scale would never be read.*nvfp4"):
        share(packed, 0, 1)


# -- shapes ------------------------------------------------------------------------------------------------------------


def write_one(folder: Path, said: Mapping[str, Any], **tensors: Tensor) -> Path:
    save_file({f"x.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": dict(said)}))
    return folder


def fp8_of_128(rows: int, columns: int, block: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and what they mean."""
    generator = torch.Generator().manual_seed(rows)
    codes = packing.e4m3(torch.randn(rows, columns, generator=generator) * 100)
    scale = torch.rand(-(-rows // block), -(-columns // block), generator=generator) / 1000 + 0.0005
    spread = scale.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    return codes, scale, codes.float() * spread


def read(path: Path, rows: int = 0) -> Tensor:
    checkpoint = Checkpoint(path)
    weight: Any = checkpoint.packed.weights["x.weight"]
    return Unpacked(checkpoint, weight, torch.float32).read(0, rows)


def test_rows_of_a_latent_whose_last_block_is_partial_are_read_with_its_scale(tmp_path: Path):
    """576 rows have 5 rows of scales; so have 2624, where the latent is merged with queries of 2048, 21."""
    for rows in (576, 2624):
        codes, scale, plain = fp8_of_128(rows, 192)
        said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        path = write_one(tmp_path, said, weight=codes, weight_scale_inv=scale)
        assert torch.equal(read(path), plain) and torch.equal(read(path, rows - 70), plain[rows - 70 :])
        write_one(tmp_path, said, weight=codes, weight_scale_inv=scale[:-1])
        with pytest.raises(CorruptCheckpoint, match=r"x\.weight_scale_inv is .* FP8 weight .*\[\d+, 2\]"):
            Checkpoint(path)


def test_block_scales_with_dimensions_of_one_are_read(tmp_path: Path):
    codes, scale, plain = fp8_of_128(576, 320)
    said = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    path = write_one(tmp_path, said, weight=codes, weight_scale=scale[:, None, :, None])
    assert torch.equal(read(path), plain) and torch.equal(read(path, 200), plain[200:])


@pytest.mark.parametrize("as_bytes", [True, False])
def test_powers_of_two_as_scales_are_read_from_either_kind_of_number(as_bytes: bool, tmp_path: Path):
    """Of blocks, as DeepSeek-V3.2 has it, and of 32 columns of a row."""
    stored, plain = packing.mxfp8(torch.randn(48, 96, generator=torch.Generator().manual_seed(5)))
    scale = stored["weight_scale"] if as_bytes else stored["weight_scale"].view(torch.float8_e8m0fnu)
    path = write_one(tmp_path, modelopt("MXFP8"), weight=stored["weight"], weight_scale=scale)
    assert torch.equal(read(path), plain)
    codes, scale, _ = fp8_of_128(576, 320)
    powers = torch.exp2(torch.floor(torch.log2(scale)))
    said = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    kind = torch.float32 if as_bytes else torch.float8_e8m0fnu
    path = write_one(tmp_path, said, weight=codes, weight_scale_inv=powers.to(kind))
    spread = powers.repeat_interleave(128, 0)[:576].repeat_interleave(128, 1)[:, :320]
    assert torch.equal(read(path), codes.float() * spread)


def test_scales_that_are_interleaved_for_eight_ranks_are_refused(tmp_path: Path):
    """Queries, keys and values of MiMo-V2.5-Pro: 27136 rows and 216 rows of scales, here a sixteenth of each."""
    rows, columns, block = 1696, 384, 8
    codes = packing.e4m3(torch.ones(rows, columns))
    assert 8 * -(-rows // 8 // block) == 216 and -(-rows // block) == 212
    said = {"quant_method": "fp8", "weight_block_size": [block, block]}
    path = write_one(tmp_path, said, weight=codes, weight_scale_inv=torch.ones(216, 48))
    with pytest.raises(CorruptCheckpoint, match=r"x\.weight_scale_inv is F32 \[216, 48\].* FP8 .*\[212, 48\]"):
        Checkpoint(path)


def test_a_group_size_is_that_of_the_release(tmp_path: Path):
    """Groups of 128, of which the tiny models have none."""
    weight = torch.randn(16, 128, generator=torch.Generator().manual_seed(3))
    stored, plain = packing.ct_int(weight)
    scale = stored["weight_scale"]
    said = compressed("w4a16", "lm_head")
    said["config_groups"]["group_0"]["weights"]["group_size"] = 128
    path = write_one(tmp_path, said, **{**stored, "weight_scale": scale[:, :1]})
    torch.testing.assert_close(read(path), plain / scale.repeat_interleave(GROUP, 1) * scale[:, :1])
    write_one(tmp_path, said, **stored)
    with pytest.raises(CorruptCheckpoint, match=r"weight_scale is .*W4A16 \(groups of 128\).*\[16, 1\]"):
        Checkpoint(path)
