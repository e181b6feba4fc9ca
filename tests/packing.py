"""Checkpoints in fewer bits, each with a twin that holds the same weights as plain numbers.

What transformers makes of the twin is the truth: no quantiser takes part in it. Numbers of a twin are computed here by
the formula of each format, element by element, and not by what is tested.
"""

import functools
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from intarsia.workers.models.families import EXPERTS_ONE_BY_ONE

Tensors = dict[str, Tensor]
"""By what stands behind the module's name."""

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
GROUP = 32
BLOCK = 24, 40
"""Divides none of the tiny models' sizes, so that the last blocks are partial."""

LINEAR = re.compile(r".*(proj|proj_\w+|_linear|\bw[123]|fc\d?|dense)\.weight")
"""Weights that are packed. Routers, embeddings and norms are not, and the narrow ones of delta nets are."""


@dataclass(frozen=True, slots=True)
class Format:
    """One way to pack a weight, and what config.json says of it."""

    config: Mapping[str, Any]
    pack: Callable[[Tensor], tuple[Tensors, Tensor]]
    """[rows, columns] float32 -> stored tensors, and the numbers that they stand for, float32."""

    group: int = 1
    """What columns are a multiple of, else a weight stays as it is; rows too where words lie along them."""

    rows: int = 1


def make_twins(source: Path, folder: Path, format: Format, only: Callable[[str], bool] = lambda name: True) -> Path:
    """Writes folder/packed and folder/plain of a checkpoint. Returns the folder."""
    for kind in ("packed", "plain"):
        shutil.copytree(source, folder / kind, dirs_exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    whole = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    plain = one_by_one(whole, config)
    packed = dict(plain)
    count = 0
    for name, weight in list(plain.items()):
        if not LINEAR.fullmatch(name) or weight.dim() != 2 or not only(name):
            continue
        if weight.shape[1] % format.group or weight.shape[0] % format.rows:
            continue
        tensors, plain[name] = format.pack(weight)
        del packed[name]
        module = name.removesuffix(".weight")
        packed |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
        count += 1
    assert count, "nothing was packed"
    for kind, tensors in (("packed", packed), ("plain", together(plain, whole, config))):
        save_file(tensors, folder / kind / "model.safetensors", metadata={"format": "pt"})
    (folder / "packed" / "config.json").write_text(json.dumps(config | {"quantization_config": dict(format.config)}))
    return folder


def one_by_one(plain: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Experts that the family holds in one tensor, as tools store them."""
    turned = EXPERTS_ONE_BY_ONE.get(config["model_type"])
    if turned is None:
        return dict(plain)
    apart: Tensors = {}
    for name, tensor in plain.items():
        if not re.search(r"experts\.(gate_up|down)_proj$", name):
            apart[name] = tensor
            continue
        module, _, last = name.rpartition(".")
        for n, expert in enumerate(tensor.transpose(1, 2) if turned else tensor):
            gate_and_up = zip(("gate_proj", "up_proj"), expert.chunk(2))
            parts = gate_and_up if last == "gate_up_proj" else [("down_proj", expert)]
            apart |= {f"{module}.{n}.{part}.weight": weight.contiguous() for part, weight in parts}
    return apart


def together(apart: Tensors, plain: Tensors, config: Mapping[str, Any]) -> Tensors:
    """What `one_by_one` took apart. plain: names and shapes of the whole ones"""
    turned = EXPERTS_ONE_BY_ONE.get(config["model_type"])
    whole: Tensors = {}
    for name, like in plain.items():
        if name in apart:
            whole[name] = apart[name]
            continue
        module, _, last = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        experts = [torch.cat([apart[f"{module}.{n}.{part}.weight"] for part in parts]) for n in range(len(like))]
        stacked = torch.stack(experts)
        whole[name] = (stacked.transpose(1, 2) if turned else stacked).contiguous()
    return whole


def share(path: Path, rank: int, size: int) -> Mapping[str, Tensor]:
    """The parameters of one rank, of the text model of a checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from intarsia.workers.checkpoint.files import Checkpoint
    from intarsia.workers.models.weights import fill_weights
    from intarsia.workers.tensor_parallel import TensorParallel

    config = AutoConfig.from_pretrained(path).get_text_config()
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill_weights(
        module,
        Checkpoint(path),
        TensorParallel(rank, size),
        config,
        torch.float32,
        torch.device("cpu"),
        lambda done, total: None,
    )
    return dict(module.named_parameters())


# -- floats of 8 bits ------------------------------------------------------------------------------------------------


def e4m3(values: Tensor) -> Tensor:
    return values.clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8_blocks(weight: Tensor) -> tuple[Tensors, Tensor]:
    rows, columns = weight.shape
    shape = -(-rows // BLOCK[0]), -(-columns // BLOCK[1])
    scale = torch.empty(shape)
    codes, plain = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(shape[0]):
        for j in range(shape[1]):
            place = slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1])
            scale[i, j] = (weight[place].abs().max() / 448).bfloat16().float()
            codes[place] = e4m3(weight[place] / scale[i, j])
            plain[place] = codes[place].float() * scale[i, j]
    return {"weight": codes, "weight_scale_inv": scale.bfloat16()}, plain


def fp8_rows(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = e4m3(weight / scale)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8_tensor(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().max() / 448
    codes = e4m3(weight / scale)
    stored = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.02)}
    return stored, codes.float() * scale


def mxfp8(weight: Tensor) -> tuple[Tensors, Tensor]:
    groups = weight.unflatten(1, (-1, 32))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1))) - 8
    codes = e4m3(groups / torch.exp2(exponent).unsqueeze(-1))
    plain = codes.float() * torch.exp2(exponent).unsqueeze(-1)
    return {"weight": codes.flatten(1), "weight_scale": (exponent + 127).to(torch.uint8)}, plain.flatten(1)


def int8_rows(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16().float()
    codes = (weight / scale).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scale.bfloat16()}, codes.float() * scale


# -- integers in words -----------------------------------------------------------------------------------------------


def in_stream(codes: Tensor, dim: int, bits: int) -> Tensor:
    """Integers along `dim` without gaps, bit after bit from the lowest of the first word on."""
    codes = codes.to(torch.uint8).movedim(dim, -1)
    stream = np.unpackbits(codes.numpy()[..., None], axis=-1, bitorder="little")[..., :bits].reshape(
        *codes.shape[:-1], -1
    )
    stream = np.pad(stream, (*((0, 0) for _ in codes.shape[:-1]), (0, -stream.shape[-1] % 32)))
    words = np.packbits(stream, axis=-1, bitorder="little").view(np.int32)
    return torch.from_numpy(words).movedim(-1, dim)


def in_words(codes: Tensor, dim: int, order: tuple[int, ...]) -> Tensor:
    """Integers of 4 bits side by side along `dim`; order: in which place of its word the first, second, .. is."""
    codes = codes.long().movedim(dim, -1)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 8)).unflatten(-1, (-1, 8))
    words = torch.zeros(codes.shape[:-1], dtype=torch.int64)
    for i, place in enumerate(order):
        words |= codes[..., i] << (4 * place)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).movedim(-1, dim)


def groups_of(weight: Tensor, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [rows, columns], scales and zero points [rows, groups], all such that (code - zero) * scale is meant."""
    groups = weight.unflatten(1, (-1, GROUP))
    top = 2**bits - 1
    if symmetric:
        scale = groups.abs().amax(-1) / (top / 2)
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = (high - low) / top
        zero = (-low / scale).round().clamp(1, top)
    scale = scale.half().float()
    codes = ((groups / scale.unsqueeze(-1)).round() + zero.unsqueeze(-1)).clamp(0, top)
    return codes.flatten(1), scale, zero


def meant(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return ((codes.unflatten(1, (-1, GROUP)) - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).flatten(1)


def ct_int(weight: Tensor, bits: int = 4, symmetric: bool = True) -> tuple[Tensors, Tensor]:
    codes, scale, zero = groups_of(weight, bits, symmetric)
    stored = {
        "weight_packed": in_stream(codes, 1, bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        stored["weight_zero_point"] = in_stream(zero, 0, bits)
    return stored, meant(codes, scale, zero)


def awq(weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scale, zero = groups_of(weight, 4, symmetric=False)
    order = (0, 4, 1, 5, 2, 6, 3, 7)  # column 1 in the fifth place
    stored = {
        "qweight": in_words(codes.T, 1, order),
        "qzeros": in_words(zero.T, 1, order),
        "scales": scale.T.half(),
    }
    return stored, meant(codes, scale, zero)


def gptq(
    weight: Tensor, version: int = 1, symmetric: bool = True, shuffled: bool = False, bits: int = 4
) -> tuple[Tensors, Tensor]:
    columns = weight.shape[1]
    order = (
        torch.randperm(columns, generator=torch.Generator().manual_seed(columns)) if shuffled else torch.arange(columns)
    )
    codes, scale, zero = groups_of(weight[:, order], bits, symmetric)
    plain = torch.empty_like(weight)
    plain[:, order] = meant(codes, scale, zero)
    in_place = torch.empty_like(codes)
    in_place[:, order] = codes
    group_of = torch.empty(columns, dtype=torch.int32)
    group_of[order] = torch.arange(columns, dtype=torch.int32) // GROUP
    stored = {
        "qweight": in_stream(in_place.T, 0, bits),
        "qzeros": in_stream(zero.T - int(version == 1), 1, bits),
        "scales": scale.T.half(),
        "g_idx": group_of,
    }
    return stored, plain


# -- whole numbers in bytes ------------------------------------------------------------------------------------------


def int8_groups(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Of 4 bits, one in a byte."""
    codes, scale, zero = groups_of(weight, 4, symmetric=True)
    return {"weight": (codes - 8).to(torch.int8), "weight_scale": scale}, meant(codes, scale, zero)


def inputs_scale(weight: Tensor) -> Tensor:
    return (torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1])) + 0.5).bfloat16()


def int8_smooth(weight: Tensor) -> tuple[Tensors, Tensor]:
    """modelopt, with what inputs are multiplied with."""
    inputs = inputs_scale(weight)
    whole = weight / inputs.float()
    scale = whole.abs().amax(1) / 127
    codes = (whole / scale[:, None]).round().clamp(-128, 127).to(torch.int8)
    stored = {"weight": codes, "weight_scale": scale, "pre_quant_scale": inputs, "input_scale": torch.tensor(0.02)}
    return stored, codes.float() * scale[:, None] * inputs.float()


def int4_pairs_of_rows(weight: Tensor) -> tuple[Tensors, Tensor]:
    """modelopt, W4A16_AWQ."""
    inputs = inputs_scale(weight)
    codes, scale, zero = groups_of(weight / inputs.float(), 4, symmetric=True)
    signed = (codes - 8).to(torch.int8).view(torch.uint8) & 15
    stored = {"weight": signed[0::2] | (signed[1::2] << 4), "weight_scale": scale, "pre_quant_scale": inputs}
    return stored, meant(codes, scale, zero) * inputs.float()


def torchao_int8(weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, scale, zero = groups_of(weight, 8, symmetric=False)
    stored = {
        "_weight_qdata": (codes - 128).to(torch.int8),
        "_weight_scale": scale,
        "_weight_zero_point": (zero - 128).to(torch.int8),
    }
    return stored, meant(codes, scale, zero)


def torchao_fp8(weight: Tensor) -> tuple[Tensors, Tensor]:
    stored, plain = fp8_rows(weight)
    return {"_weight_qdata": stored["weight"], "_weight_scale": stored["weight_scale"]}, plain


def fp8_groups(weight: Tensor) -> tuple[Tensors, Tensor]:
    groups = weight.unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(-1) / 448
    codes = e4m3(groups / scale.unsqueeze(-1))
    return {"weight": codes.flatten(1), "weight_scale": scale}, (codes.float() * scale.unsqueeze(-1)).flatten(1)


# -- floats of 4 bits ------------------------------------------------------------------------------------------------


def e2m1(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and what they mean: the nearest."""
    nearest = (values.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    return nearest + 8 * (values < 0), E2M1[nearest] * torch.where(values < 0, -1.0, 1.0)


def in_bytes(codes: Tensor) -> Tensor:
    low, high = codes[:, 0::2], codes[:, 1::2]
    return (low | (high << 4)).to(torch.uint8)


def nvfp4(weight: Tensor, by: str) -> tuple[Tensors, Tensor]:
    groups = weight.unflatten(1, (-1, 16))
    divisor = 2688 / weight.abs().max()
    scale = e4m3(groups.abs().amax(-1) / 6 * divisor)
    if by == "compressed-tensors":
        whole = scale.float() / divisor
        about = {"weight_global_scale": divisor.view(1)}
    else:
        whole = scale.float() * (1 / divisor)
        about = {"weight_scale_2": 1 / divisor, "input_scale": torch.tensor(0.01)}
    codes, values = e2m1(groups / whole.unsqueeze(-1))
    name = "weight_packed" if by == "compressed-tensors" else "weight"
    stored = {name: in_bytes(codes.flatten(1)), "weight_scale": scale, **about}
    return stored, (values * whole.unsqueeze(-1)).flatten(1)


def mxfp4(weight: Tensor) -> tuple[Tensors, Tensor]:
    groups = weight.unflatten(1, (-1, 32))
    exponent = torch.ceil(torch.log2(groups.abs().amax(-1) / 6))
    codes, values = e2m1(groups / torch.exp2(exponent).unsqueeze(-1))
    stored = {"weight_packed": in_bytes(codes.flatten(1)), "weight_scale": (exponent + 127).to(torch.uint8)}
    return stored, (values * torch.exp2(exponent).unsqueeze(-1)).flatten(1)


def mxfp4_modelopt(weight: Tensor) -> tuple[Tensors, Tensor]:
    stored, plain = mxfp4(weight)
    return {"weight": stored["weight_packed"], "weight_scale": stored["weight_scale"]}, plain


# -- what config.json says -------------------------------------------------------------------------------------------


def of_compressed_tensors(kind: str, weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
        },
        "ignore": ["lm_head"],
        **more,
    }


def of_gptq(version: int = 1, symmetric: bool = True, shuffled: bool = False) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "sym": symmetric,
        "desc_act": shuffled,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
    }


INTEGERS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}

FORMATS: dict[str, Format] = {
    "fp8-blocks": Format({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}, fp8_blocks),
    "fp8-rows": Format(
        of_compressed_tensors("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}), fp8_rows
    ),
    "fp8-modelopt": Format({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_tensor),
    "mxfp8": Format({"quant_method": "modelopt", "quant_algo": "MXFP8"}, mxfp8, 32),
    "int8": Format(
        of_compressed_tensors("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}), int8_rows
    ),
    "w4a16": Format(of_compressed_tensors("pack-quantized", INTEGERS), ct_int, GROUP),
    "w4a16-zero-points": Format(
        of_compressed_tensors("pack-quantized", {**INTEGERS, "symmetric": False}),
        lambda weight: ct_int(weight, symmetric=False),
        GROUP,
    ),
    "w8a16-zero-points": Format(
        of_compressed_tensors("pack-quantized", {**INTEGERS, "num_bits": 8, "symmetric": False}),
        lambda weight: ct_int(weight, 8, symmetric=False),
        GROUP,
    ),
    "w8a16": Format(
        of_compressed_tensors("pack-quantized", {**INTEGERS, "num_bits": 8}), lambda weight: ct_int(weight, 8), GROUP
    ),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq, GROUP, 8
    ),
    "gptq": Format(of_gptq(), gptq, GROUP, 8),
    "gptq-zero-points": Format(
        of_gptq(symmetric=False), lambda weight: gptq(weight, symmetric=False), GROUP, 8
    ),
    "gptq-8-bits": Format(
        {**of_gptq(symmetric=False), "bits": 8}, lambda weight: gptq(weight, symmetric=False, bits=8), GROUP, 8
    ),
    "gptq-v2-by-activation": Format(
        of_gptq(2, shuffled=True), lambda weight: gptq(weight, 2, shuffled=True), GROUP, 8
    ),
    "nvfp4": Format(
        of_compressed_tensors(
            "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        ),
        lambda weight: nvfp4(weight, "compressed-tensors"),
        16,
    ),
    "nvfp4-modelopt": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, lambda weight: nvfp4(weight, "modelopt"), 16
    ),
    "mxfp4": Format(
        of_compressed_tensors("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32}), mxfp4, 32
    ),
}  # fmt: skip

RARE_FORMATS: dict[str, Format] = {
    **{
        f"w{bits}a16{'' if symmetric else '-zero-points'}": Format(
            of_compressed_tensors("pack-quantized", {**INTEGERS, "num_bits": bits, "symmetric": symmetric}),
            functools.partial(ct_int, bits=bits, symmetric=symmetric),
            GROUP,
        )
        for bits, symmetric in ((2, True), (3, False), (5, True), (6, False), (7, True))
    },
    **{
        f"gptq-{bits}-bits": Format(
            {**of_gptq(symmetric=False), "bits": bits},
            functools.partial(gptq, symmetric=False, bits=bits),
            GROUP,
            16 if bits == 2 else 32,
        )
        for bits in (2, 3, 6)
    },
    "int8-groups": Format(of_compressed_tensors("int-quantized", INTEGERS), int8_groups, GROUP),
    "fp8-groups": Format(
        of_compressed_tensors(
            "float-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": GROUP}
        ),
        fp8_groups,
        GROUP,
    ),
    "int8-modelopt": Format({"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"}, int8_smooth),
    "w4a16-modelopt": Format({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, int4_pairs_of_rows, GROUP, 2),
    "mxfp4-modelopt": Format({"quant_method": "modelopt", "quant_algo": "mxfp4"}, mxfp4_modelopt, 32),
    "int8-torchao": Format({"quant_method": "torchao", "quant_type": {}}, torchao_int8, GROUP),
    "fp8-torchao": Format({"quant_method": "torchao", "quant_type": {}}, torchao_fp8),
}
"""Those that fewer models have: what is true of the others is tried with them less often."""
