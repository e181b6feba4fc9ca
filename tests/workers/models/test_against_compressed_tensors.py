"""Weights that compressed-tensors packs are read as it unpacks them itself, bit by bit."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from intarsia.workers.checkpoint.files import Checkpoint
from intarsia.workers.models.unpacked import Unpacked

pytest.importorskip("compressed_tensors", reason="of the dev extra")

ROWS, COLUMNS = 72, 192
INT = {"type": "int", "symmetric": True}
FLOAT = {"type": "float", "symmetric": True}
GROUPS = {"strategy": "group", "group_size": 32}
BYTES = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 of a tensor": ("float-quantized", {**FLOAT, "num_bits": 8, "strategy": "tensor"}),
    "fp8 of rows": ("float-quantized", {**FLOAT, "num_bits": 8, "strategy": "channel"}),
    "fp8 of blocks": (
        "float-quantized", {**FLOAT, "num_bits": 8, "strategy": "block", "block_structure": [24, 64]},
    ),
    "int8 of a tensor": ("int-quantized", {**INT, "num_bits": 8, "strategy": "tensor"}),
    "int8 of rows": ("int-quantized", {**INT, "num_bits": 8, "strategy": "channel"}),
    "int8 of rows with zero points": (
        "int-quantized", {**INT, "num_bits": 8, "strategy": "channel", "symmetric": False},
    ),
    "int4 of groups": ("pack-quantized", {**INT, **GROUPS, "num_bits": 4}),
    "int4 of groups with zero points": ("pack-quantized", {**INT, **GROUPS, "num_bits": 4, "symmetric": False}),
    "int4 of rows": ("pack-quantized", {**INT, "num_bits": 4, "strategy": "channel"}),
    "int4 of rows with zero points": (
        "pack-quantized", {**INT, "num_bits": 4, "strategy": "channel", "symmetric": False},
    ),
    "packed int8 of groups": ("pack-quantized", {**INT, **GROUPS, "num_bits": 8}),
    "packed int8 of groups with zero points": (
        "pack-quantized", {**INT, **GROUPS, "num_bits": 8, "symmetric": False},
    ),
    "packed int8 of rows": ("pack-quantized", {**INT, "num_bits": 8, "strategy": "channel"}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {**FLOAT, "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
    ),
    "mxfp4": ("mxfp4-pack-quantized", {**FLOAT, **GROUPS, **BYTES, "num_bits": 4}),
    "mxfp8": ("mxfp8-quantized", {**FLOAT, **GROUPS, **BYTES, "num_bits": 8}),
}  # fmt: skip
"""Format, and the arguments of the weights."""


def units(weight: Tensor, said: Mapping[str, Any]) -> Tensor:
    """What shares a scale, side by side in the last dimension."""
    rows, columns = weight.shape
    if said["strategy"] == "tensor":
        return weight.view(1, -1)
    if said["strategy"] == "channel":
        return weight.view(rows, 1, columns)
    if said["strategy"] == "block":
        height, width = said["block_structure"]
        return weight.view(rows // height, height, columns // width, width).transpose(1, 2).flatten(2)
    return weight.view(rows, -1, said["group_size"])


def packed(format: str, said: dict[str, Any], weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What compressed-tensors stores, and what it makes of that."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**said)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": weight}
    together = units(weight, said)
    low, high = together.amin(-1), together.amax(-1)
    if format.startswith("nvfp4"):
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    scale, zero = calculate_qparams(low, high, args, state.get("weight_global_scale"))
    state["weight_scale"] = scale
    if not args.symmetric:
        state["weight_zero_point"] = zero.to(torch.int8)
    compressor: Any = BaseCompressor.get_value_from_registry(format)
    stored = compressor.compress(state, scheme)
    return stored, compressor.decompress(stored, scheme)["weight"]


@pytest.mark.parametrize("name", CASES)
def test_a_weight_is_read_as_compressed_tensors_unpacks_it(name: str, tmp_path: Path):
    format, said = CASES[name]
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(7)) * 0.1 + 0.01
    stored, theirs = packed(format, said, weight)
    described = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": said, "format": format}},
    }
    save_file(
        {f"proj.{suffix}": tensor.detach().contiguous() for suffix, tensor in stored.items()},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": described}))
    checkpoint = Checkpoint(tmp_path)
    found: Any = checkpoint.packed.weights["proj.weight"]
    ours = Unpacked(checkpoint, found, torch.float32)
    # It computes floats of 4 bits in bfloat16.
    assert torch.equal(ours.read().to(theirs.dtype), theirs)
    assert torch.equal(ours.read(1, 70, 130).to(theirs.dtype), theirs[:, 70:130])
    # That it is no other weight by chance.
    assert float((ours.read() - weight).norm() / weight.norm()) < 0.2
