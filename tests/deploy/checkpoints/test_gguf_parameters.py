"""What transformers makes of a file's tensors is seen by a probe, and a file that is no whole model is refused before
its weights are read: by the names of tensor and parameter."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from intarsia.deploy.checkpoints.gguf_parameters import Probe, find_parameters, made_of
from intarsia.errors import CorruptCheckpoint, UnsupportedModel
from intarsia.tests.gguf_twins import Twin, make_twin
from intarsia.workers.checkpoint.gguf.header import KINDS, GgufTensor, read_gguf_header
from intarsia.workers.checkpoint.gguf.manifest import Made, read_manifest

FILE = Path("some.gguf")
F32 = KINDS[0]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return make_twin("llama", tmp_path_factory.mktemp("llama"), "Q4_0")


def rewritten(twin: Twin, folder: Path, change: Any) -> Twin:
    """The same file with other tensors. change: (name, tensor) -> what is written of it: (name, data, kind) or None"""
    reader: Any = gguf.GGUFReader(str(twin.file))
    folder.mkdir(exist_ok=True)
    writer: Any = gguf.GGUFWriter(str(folder / "other.gguf"), "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind, *inner = field.types
        writer.add_key_value(field.name, field.contents(), kind, *inner[-1:])
    for tensor in reader.tensors:
        for name, data, kind in change(tensor.name, tensor) or ():
            writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Twin(folder / "other.gguf", twin.plain)


def as_it_is(tensor: Any) -> list[tuple[str, Any, Any]]:
    return [(tensor.name, tensor.data, tensor.tensor_type)]


def test_a_file_that_is_written_anew_is_read_as_before(twin: Twin, tmp_path: Path):
    other = rewritten(twin, tmp_path, lambda name, tensor: as_it_is(tensor))
    before, after = read_manifest(twin.folder()), read_manifest(other.folder())
    assert before is not None and after is not None and before.made == after.made


def test_a_missing_tensor_is_refused_by_its_name_and_its_parameter_s(twin: Twin, tmp_path: Path):
    other = rewritten(twin, tmp_path, lambda name, each: None if name == "blk.1.ffn_up.weight" else as_it_is(each))
    told = r"lacks 1 of the model's tensors, the first of them model\.layers\.1\.mlp\.up_proj\.weight \(blk\.1\.ffn_up"
    with pytest.raises(CorruptCheckpoint, match=told):
        other.folder()


def test_a_tensor_of_no_use_is_refused_by_its_name(twin: Twin, tmp_path: Path):
    def change(name: str, tensor: Any) -> Any:
        extra = [("blk.0.attn_sinks.weight", tensor.data, tensor.tensor_type)] if name == "output_norm.weight" else []
        return [*as_it_is(tensor), *extra]

    with pytest.raises(
        CorruptCheckpoint, match=r"1 tensors that the model has no use for, .* 'blk.0.attn_sinks.weight'"
    ):
        rewritten(twin, tmp_path, change).folder()


@pytest.mark.parametrize(("factors", "told"), [([1.0] * 16, "it holds 16"), ([1.0] * 31 + [0.0], "from 0.0 to 1.0")])
def test_factors_of_positions_of_another_model_are_refused(twin: Twin, factors: list[float], told: str, tmp_path: Path):
    def change(name: str, tensor: Any) -> Any:
        extra = [("rope_freqs.weight", np.array(factors, np.float32), gguf.GGMLQuantizationType.F32)]
        return [*as_it_is(tensor), *(extra if name == "output_norm.weight" else [])]

    with pytest.raises(CorruptCheckpoint, match=f"'rope_freqs.weight' must hold 32 positive numbers.*{told}"):
        rewritten(twin, tmp_path, change).folder()


def test_a_tensor_of_another_shape_is_refused_by_its_name(twin: Twin, tmp_path: Path):
    def change(name: str, tensor: Any) -> Any:
        data = tensor.data[:-1] if name == "blk.0.attn_v.weight" else tensor.data
        return [(name, data, tensor.tensor_type)]

    told = r"blk\.0\.attn_v\.weight of shape \[127, 256\] would make model\.layers\.0\.self_attn\.v_proj\.weight"
    with pytest.raises(CorruptCheckpoint, match=told):
        rewritten(twin, tmp_path, change).folder()


def test_a_tensor_that_calls_itself_of_another_kind_is_refused_by_its_name(twin: Twin, tmp_path: Path):
    """Of 32 columns in 24 bytes and not in 18, it would lie upon the next one."""
    data = bytearray(twin.file.read_bytes())
    name = b"blk.0.attn_v.weight"
    place = data.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", data, place) == (2,)
    struct.pack_into("<I", data, place, 7)
    (tmp_path / "other.gguf").write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=r"holds the tensor 'blk\.0\.attn_v\.weight' of Q5_1 in bytes \d+ to"):
        read_gguf_header(tmp_path / "other.gguf")


def test_a_file_that_was_cut_off_is_refused(twin: Twin, tmp_path: Path):
    (tmp_path / "other.gguf").write_bytes(twin.file.read_bytes()[:-100])
    with pytest.raises(CorruptCheckpoint, match="it was cut off"):
        read_gguf_header(tmp_path / "other.gguf")


# -- what a probe says -------------------------------------------------------------------------------------------------


def probed(shape: tuple[int, ...], change: Any) -> Made:
    tensor = GgufTensor("t", shape, F32, 0, 0)
    *rows, columns = shape
    count = 1
    for length in rows or [columns]:
        count *= length
    numbers = -torch.arange(1, count + 1, dtype=torch.float64)
    value = numbers.view(*rows, 1).repeat(*[1] * len(rows), min(columns, 2)) if rows else numbers
    return made_of("p", [Probe(tensor, "p", change(value))], FILE)


def test_what_was_done_to_a_probe_is_found():
    assert probed((6, 9), lambda value: value) == Made(("t",))
    assert probed((5,), lambda value: value - 1) == Made(("t",), added=-1.0)
    assert probed((3, 4), lambda value: value[torch.tensor([2, 0, 1])]) == Made(("t",), rows=(2, 0, 1))
    assert probed((4,), lambda value: torch.log(-value)[[1, 0, 3, 2]]) == Made(("t",), is_log=True, rows=(1, 0, 3, 2))
    assert probed((4, 3), lambda value: value.unsqueeze(1)) == Made(("t",), unit_dim=1)


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value * 2,
        lambda value: value.T,
        lambda value: value[:2],
        lambda value: value.flip(1) + torch.tensor([0.0, 1.0]),
        lambda value: torch.cat((value[:1], value[:1], value[2:])),
    ],
)
def test_what_is_not_known_to_be_done_to_a_probe_is_refused(change: Any):
    with pytest.raises(
        UnsupportedModel, match=r"some\.gguf: transformers makes p of t in a way that is not known here"
    ):
        probed((3, 4), change)


def test_gate_and_up_of_experts_are_joined_in_their_order_and_both_must_be_there(tmp_path: Path):
    folder = make_twin("qwen3moe", tmp_path, "Q8_0").folder()
    manifest = read_manifest(folder)
    assert manifest is not None
    joined = manifest.made["model.layers.1.mlp.experts.gate_up_proj"]
    assert joined == Made(("blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight"), joined_dim=1)
    value = torch.zeros(2, 6, 2, dtype=torch.float64)
    value[:, :3] = -torch.arange(1, 7, dtype=torch.float64).view(2, 3, 1)
    with pytest.raises(CorruptCheckpoint, match="holds only t of the tensors that make p"):
        made_of("p", [Probe(GgufTensor("t", (2, 3, 4), F32, 0, 0), "p", value)], FILE)


def test_parameters_that_find_no_tensor_are_told_whatever_the_way(tmp_path: Path):
    twin = make_twin("lfm2", tmp_path, "Q8_0")
    header = read_gguf_header(twin.file)
    from transformers import AutoConfig

    from intarsia.deploy.checkpoints.gguf_parameters import empty_model

    some = {name: tensor for name, tensor in header.tensors.items() if "shortconv.conv" not in name}
    with pytest.raises(CorruptCheckpoint, match=r"the first of them model\.layers\.0\.conv\.conv\.weight"):
        find_parameters(empty_model(AutoConfig.from_pretrained(twin.plain)), header._replace(tensors=some), twin.file)
