"""Models out of GGUF files: each rank's share has the numbers of the plain twin, and engines answer as it does."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from intarsia.deploy.checkpoints.gguf import folder_of
from intarsia.deploy.checkpoints.real_models import real_checkpoint
from intarsia.errors import CorruptCheckpoint, ModelNotFound
from intarsia.proto.request import SamplingParams
from intarsia.tests import models
from intarsia.tests.gguf_twins import KINDS, VOCAB, Piece, Twin, make_twin
from intarsia.tests.local import complete, make_engine
from intarsia.tests.packing import share
from intarsia.workers.checkpoint.files import Checkpoint
from intarsia.workers.models.from_gguf import gguf_sources
from intarsia.workers.models.gguf_blocks import BLOCK_FORMATS

K_MIX = {
    "attn_q": "Q4_K", "attn_k": "IQ4_XS", "attn_v": "Q6_K", "attn_output": "Q5_K", "ffn_gate": "Q4_K", "ffn_up": "Q3_K",
    "ffn_down": "Q2_K", "token_embd": "Q6_K", "output": "Q5_K", "attn_qkv": "Q4_K", "ssm_out": "Q6_K",
}  # fmt: skip
"""By the last part of a tensor's name, as files of several kinds have it; Q4_1 for others."""

PRODUCTS = "cpu", "reference", "expanded"


def mixed(name: str) -> str:
    return K_MIX.get(name.split(".")[-2], "Q4_1")


def prompts(seed: int = 1) -> list[list[int]]:
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (5, 33, 47)]


async def answers(path: Path, tokens: int, **settings: Any) -> list[list[int]]:
    engine = await make_engine(path, dtype="float32", **settings)
    asked = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return [completion.token_ids for completion in await complete(engine, prompts(), asked)]


def check_answers(twin: Twin, products: Sequence[str], tokens: int, **settings: Any) -> None:
    oracle = models.load_oracle(twin.plain)
    expected = [models.greedy(oracle, prompt, tokens) for prompt in prompts()]
    assert len({tuple(answer) for answer in expected}) == len(expected), "it says the same whatever it is asked"
    folder = twin.folder()
    for way in products:
        assert asyncio.run(answers(folder, tokens, packed_products=way, **settings)) == expected, way


@pytest.mark.parametrize("architecture", KINDS)
def test_every_rank_s_share_has_the_numbers_of_the_twin(architecture: str, tmp_path: Path):
    twin = make_twin(architecture, tmp_path, mixed)
    folder = twin.folder()
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        ours, theirs = share(folder, rank, size), share(twin.plain, rank, size)
        assert ours.keys() == theirs.keys()
        for name, numbers in theirs.items():
            near = 1e-6 if "A_log" in name else 0  # a logarithm of what was an exponential
            torch.testing.assert_close(ours[name], numbers, rtol=near, atol=0, msg=f"{name}, rank {rank} of {size}")


@pytest.mark.parametrize(
    ("architecture", "tensors_a_part"),
    [("llama", 7), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("gemma3", 3), ("qwen35moe", 1)))],
)
def test_a_split_model_has_the_numbers_of_the_twin_and_none_is_written_again(
    architecture: str, tensors_a_part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path / "cache"))
    twin = make_twin(architecture, tmp_path, mixed, tensors_a_part=tensors_a_part)
    found = real_checkpoint(str(twin.file))
    assert found is not None and found.name == "tiny"
    assert not list(found.folder.glob("*.gguf"))
    for rank, size in ((0, 1), (1, 2)):
        ours, theirs = share(found.folder, rank, size), share(twin.plain, rank, size)
        assert ours.keys() == theirs.keys()
        for name, numbers in theirs.items():
            near = 1e-6 if "A_log" in name else 0
            torch.testing.assert_close(ours[name], numbers, rtol=near, atol=0, msg=f"{name}, rank {rank} of {size}")


def test_a_split_model_one_of_whose_parts_changed_is_refused(tmp_path: Path):
    twin = make_twin("llama", tmp_path, "Q4_0", tensors_a_part=7)
    folder = twin.folder()
    last = max(tmp_path.glob("*.gguf"))
    whole = last.read_bytes()
    os.utime(last, ns=(1, 1))
    Checkpoint(folder)  # the same, at another time
    last.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CorruptCheckpoint, match="has changed since it was looked at"):
        Checkpoint(folder)
    last.write_bytes(whole + b"x")
    with pytest.raises(CorruptCheckpoint, match=f"{last.name} has changed"):
        Checkpoint(folder)
    last.unlink()
    with pytest.raises(ModelNotFound, match=f"{last.name}, which cannot be read"):
        Checkpoint(folder)


NEAR_OTHERS = {"gemma2", "qwen2", "qwen2moe", "qwen35moe"}
"""Engines of these are slow tests: their tensors are looked at above, and engines of their kind have others."""


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=[pytest.mark.slow] if name in NEAR_OTHERS else []) for name in KINDS]
)
def test_an_engine_of_every_architecture_answers_as_transformers_with_the_plain_twin(architecture: str, tmp_path: Path):
    check_answers(make_twin(architecture, tmp_path, mixed), PRODUCTS, 8)


LLAMA_3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def llama_3_factors(head_dim: int) -> np.ndarray:
    """What llama.cpp's converter makes of `LLAMA_3`: what a frequency is divided by."""
    waves = 2 * np.pi * LLAMA_3["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    trained, low, high = (
        LLAMA_3[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    part = np.clip((trained / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - part) / LLAMA_3["factor"] + part)).astype(np.float32)


def test_factors_of_positions_are_those_of_llama_3(tmp_path: Path):
    factors = llama_3_factors(head_dim=64)
    assert factors[0] == 1 and factors[-1] == 8 and len(set(factors.tolist())) > 5
    extra = [Piece("rope_freqs.weight", factors, "F32")]
    twin = make_twin("llama", tmp_path, "Q8_0", extra=extra, rope_parameters=LLAMA_3)
    unstretched = models.load_oracle(twin.plain, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0})
    longest = prompts()[-1]
    assert models.greedy(unstretched, longest, 8) != models.greedy(models.load_oracle(twin.plain), longest, 8)
    check_answers(twin, PRODUCTS, 8)
    assert not Checkpoint(twin.folder()).notes


@pytest.mark.parametrize("format", [*BLOCK_FORMATS, "F16", "BF16", "F32", "TQ1_0"])
def test_an_engine_of_every_format_answers_as_transformers_with_the_plain_twin(format: str, tmp_path: Path):
    check_answers(make_twin("llama", tmp_path, format), PRODUCTS, 8)


@pytest.mark.parametrize("format", ["Q4_K", "Q6_K", "Q4_0", "F16", "TQ1_0"])
@pytest.mark.parametrize("dim, start, stop", [(0, 0, 100), (0, 37, 201), (1, 0, 128), (1, 40, 200), (1, 13, 201)])
def test_a_slice_of_turned_rows_is_that_of_the_twin(format: str, dim: int, start: int, stop: int, tmp_path: Path):
    twin = make_twin("llama", tmp_path, format)
    name = "model.layers.1.self_attn.q_proj.weight"
    meant = share(twin.plain, 0, 1)[name].narrow(dim, start, stop - start)
    gguf = Checkpoint(twin.folder()).gguf
    assert gguf is not None
    source = gguf_sources(gguf, torch.float32)[name]
    torch.testing.assert_close(source.read(dim, start, stop), meant, rtol=0, atol=0)
    codes = source.codes(dim, start, stop)
    if codes is not None:
        torch.testing.assert_close(codes.numbers(torch.float32), meant, rtol=0, atol=0)
    is_cut_within_bytes = dim == 1 and stop == 201
    assert (codes is None) == (is_cut_within_bytes or format in ("F16", "TQ1_0"))


def test_columns_in_another_order_stay_packed_on_one_rank(tmp_path: Path):
    twin = make_twin("qwen35", tmp_path, "Q6_K")
    name = "model.layers.0.linear_attn.out_proj.weight"
    gguf = Checkpoint(twin.folder()).gguf
    assert gguf is not None
    source, meant = gguf_sources(gguf, torch.float32)[name], share(twin.plain, 0, 1)[name]
    some = source.codes(0, 20, 90)
    assert some is not None and source.codes(1, 0, 128) is None
    torch.testing.assert_close(some.numbers(torch.float32), meant[20:90], rtol=0, atol=0)
    torch.testing.assert_close(source.read(1, 0, 128), meant[:, :128], rtol=0, atol=0)


def test_no_scale_of_a_file_is_taken_for_another(tmp_path: Path):
    """The twin's numbers are those of the file: with other ones the answers are others."""
    twin, other = (make_twin("llama", tmp_path / str(seed), "Q4_K", seed=seed) for seed in (0, 1))
    assert asyncio.run(answers(twin.folder(), 8)) != asyncio.run(answers(other.folder(), 8))


# -- a file that is no longer what it was ------------------------------------------------------------------------------


def test_a_file_of_another_size_is_refused_in_words(tmp_path: Path):
    twin = make_twin("llama", tmp_path, "Q4_0")
    folder = twin.folder()
    with twin.file.open("ab") as file:
        file.write(b"more")
    with pytest.raises(CorruptCheckpoint, match=r"tiny\.gguf has changed since it was looked at"):
        Checkpoint(folder)


def test_a_file_of_another_date_is_read_and_refused_if_it_is_another(tmp_path: Path):
    twin = make_twin("llama", tmp_path, "Q4_0")
    folder = twin.folder()
    os.utime(twin.file, ns=(1, 1))
    assert Checkpoint(folder).gguf is not None
    data = bytearray(twin.file.read_bytes())
    data[-1] ^= 1
    twin.file.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match=r"tiny\.gguf has changed since it was looked at"):
        Checkpoint(folder)


def test_a_file_that_is_gone_is_told(tmp_path: Path):
    twin = make_twin("llama", tmp_path, "Q4_0")
    folder = twin.folder()
    twin.file.unlink()
    with pytest.raises(ModelNotFound, match=r"the weights are in .*tiny\.gguf, which cannot be read: No such file"):
        Checkpoint(folder)


def test_the_folder_in_the_cache_is_the_same_as_that_made_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path / "cache"))
    twin = make_twin("gemma3", tmp_path, mixed)
    cached, here = folder_of("tiny", [twin.file]), twin.folder()
    names = sorted(path.name for path in here.iterdir())
    assert sorted(path.name for path in cached.iterdir()) == names
    assert all((cached / name).read_bytes() == (here / name).read_bytes() for name in names)
