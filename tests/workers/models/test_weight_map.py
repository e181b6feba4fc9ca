"""Parameters made of several tensors: read in part, they are the same part of the whole."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from intarsia.errors import CorruptCheckpoint, UnsupportedModel
from intarsia.proto.request import SamplingParams
from intarsia.proto.worker import ModelSettings
from intarsia.tests.local import complete, make_engine
from intarsia.workers.checkpoint.files import Checkpoint
from intarsia.workers.models.load import load_model
from intarsia.workers.models.weight_map import InTurns, Joined, Mxfp4, Part, Source, Stacked, TurnedMatrix, _of_messages
from intarsia.workers.tensor_parallel import TensorParallel


class Whole:
    """A source at hand."""

    origin = "at hand"

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        return self.tensor[(slice(None),) * dim + (slice(start, stop),)]

    def codes(self, dim: int = 0, start: int = 0, stop: int | None = None) -> None:
        return None


def check_every_slice(source: Source, whole: Tensor) -> None:
    assert source.shape == tuple(whole.shape)
    assert torch.equal(source.read(), whole)
    for dim, length in enumerate(whole.shape):
        borders = sorted({0, 1, length // 2, length - 1, length})
        for start, stop in [*pairwise(borders), (0, length), (length, length)]:
            assert torch.equal(source.read(dim, start, stop), whole.narrow(dim, start, stop - start)), (
                dim,
                start,
                stop,
            )


def test_stacked_tensors_are_read_as_one():
    parts = [torch.randn(6, 4) for _ in range(3)]
    check_every_slice(Stacked(tuple(map(Whole, parts))), torch.stack(parts))


@pytest.mark.parametrize(("dim", "first", "last"), [(0, 2, 9), (1, 0, 3), (1, 1, 4)])
def test_a_part_of_a_tensor_is_read_as_a_tensor_of_its_own(dim: int, first: int, last: int):
    whole = torch.randn(11, 4)
    check_every_slice(Part(Whole(whole), dim, first, last), whole.narrow(dim, first, last - first))


@pytest.mark.parametrize("dim, first, last", [(0, 0, None), (0, 1, 3), (1, 2, 4)])
def test_a_matrix_stored_the_other_way_round_is_read_as_it_is_held(dim: int, first: int, last: int | None):
    stored = torch.arange(20.0).view(5, 4)
    turned = TurnedMatrix(Whole(stored))
    assert turned.shape == (4, 5)
    assert torch.equal(turned.read(dim, first, last), Whole(stored.T).read(dim, first, last))


@pytest.mark.parametrize("dim", [0, 1])
def test_halves_that_are_stored_in_turns_are_read_one_after_the_other(dim: int):
    halves = [torch.randn(5, 5, 3) for _ in range(2)]
    stored = torch.stack(halves, dim=dim + 1).flatten(dim, dim + 1)
    check_every_slice(InTurns(Whole(stored), dim), torch.cat(halves, dim=dim))


def test_queries_of_messages_are_those_of_each_layer_side_by_side():
    outer, between = torch.randn(6, 5), torch.randn(6, 5)
    each = zip(outer[0::2], between[0::2], between[1::2], outer[1::2], strict=True)
    check_every_slice(_of_messages(Whole(outer), Whole(between)), torch.stack([torch.stack(rows) for rows in each]))


def test_joined_tensors_are_read_as_one():
    parts = [torch.randn(3, 2, 5), torch.randn(3, 7, 5)]
    check_every_slice(Joined(tuple(map(Whole, parts)), 1), torch.cat(parts, dim=1))


def test_experts_gate_and_up_are_stacked_and_joined():
    gate, up = [torch.randn(6, 4) for _ in range(3)], [torch.randn(6, 4) for _ in range(3)]
    source = Joined((Stacked(tuple(map(Whole, gate))), Stacked(tuple(map(Whole, up)))), 1)
    check_every_slice(source, torch.cat((torch.stack(gate), torch.stack(up)), dim=1))


def packed_experts(seed: int, outputs: int = 6, groups: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (2, outputs, groups, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(118, 130, (2, outputs, groups), generator=generator, dtype=torch.uint8)


def test_four_bit_experts_are_what_transformers_makes_of_them():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = packed_experts(1)
    theirs = convert_moe_packed_tensors(blocks.clone(), scales.clone())
    check_every_slice(Mxfp4(Whole(blocks), Whole(scales)), theirs.contiguous())


def make_four_bit_twins(source: Path, folder: Path) -> None:
    """Writes folder/packed, gpt-oss as released: the experts' matrices packed, everything else as in folder/plain."""
    import shutil

    for kind in ("packed", "plain"):
        shutil.copytree(source, folder / kind)
    config = json.loads((source / "config.json").read_text())
    weights = load_file(source / "model.safetensors")
    packed, plain = dict(weights), dict(weights)
    for n, (name, tensor) in enumerate(weights.items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            generator = torch.Generator().manual_seed(n)
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 126, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
            del packed[name]
            packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, scales
            plain[name] = Mxfp4(Whole(blocks), Whole(scales)).read().float().contiguous()
    save_file(packed, folder / "packed" / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, folder / "plain" / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "packed" / "config.json").write_text(json.dumps(config))


def test_a_four_bit_checkpoint_gives_the_tokens_of_the_same_weights_unpacked(tiny: Callable, tmp_path: Path):
    import asyncio

    make_four_bit_twins(tiny("gpt_oss").path, tmp_path)

    async def tokens(kind: str) -> list[list[int]]:
        completions = await complete(
            await make_engine(tmp_path / kind), tiny("gpt_oss").prompts, SamplingParams(temperature=0, max_tokens=12)
        )
        return [completion.token_ids for completion in completions]

    assert asyncio.run(tokens("packed")) == asyncio.run(tokens("plain"))


def test_other_quantised_weights_are_refused_by_name(tiny: Callable, tmp_path: Path):
    import shutil

    path = Path(shutil.copytree(tiny("llama").path, tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(UnsupportedModel, match=r"quantised weights that are not read: its method is hqq"):
        Checkpoint(path)


def test_a_checkpoint_without_one_expert_is_corrupt_and_says_which_parameter(tiny: Callable, tmp_path: Path):
    import shutil

    path = Path(shutil.copytree(tiny("jamba").path, tmp_path / "model"))
    weights = load_file(path / "model.safetensors")
    name = next(name for name in weights if "experts.2.gate_proj" in name)
    del weights[name]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CorruptCheckpoint, match=r"experts\.gate_up_proj"):
        load_model(ModelSettings(str(path)), TensorParallel(), torch.device("cpu"))


@pytest.mark.parametrize("family", ["llama", "jamba", "bamba", "gemma4_e"])
def test_two_ranks_read_little_more_than_their_halves(family: str, tiny: Callable, monkeypatch: pytest.MonkeyPatch):
    """Weights that all ranks need whole are read by both; in these tiny models, norms and routers mostly."""
    read_numbers = 0
    real = Checkpoint.read

    def count(self: Checkpoint, *args: object, **kwargs: object) -> Tensor:
        nonlocal read_numbers
        tensor = real(self, *args, **kwargs)  # type: ignore[arg-type]
        read_numbers += tensor.numel()
        return tensor

    monkeypatch.setattr(Checkpoint, "read", count)
    path = tiny(family).path
    facts = load_model(ModelSettings(str(path)), TensorParallel(), torch.device("cpu")).facts
    whole = read_numbers
    assert whole * 4 == pytest.approx(facts.weight_bytes, rel=0.02)
    for rank in range(2):
        read_numbers = 0
        facts = load_model(ModelSettings(str(path), 2), TensorParallel(rank, 2), torch.device("cpu")).facts
        assert read_numbers * 4 == pytest.approx(facts.weight_bytes, rel=0.02)
        assert read_numbers < 0.62 * whole
