"""Embeddings whose weights stay packed: shared with the output, or alone; with every format, on one rank and two."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from intarsia.kernels.products import CodesLinear, NativeCodesLinear, PackedEmbedding
from intarsia.proto.request import SamplingParams
from intarsia.proto.worker import ModelSettings
from intarsia.tests import models, packing
from intarsia.tests.conftest import Loop
from intarsia.tests.gguf_twins import make_twin
from intarsia.tests.local import complete, make_engine
from intarsia.tests.packing import FORMATS, make_twins
from intarsia.workers.checkpoint.files import Checkpoint
from intarsia.workers.models.load import load_model
from intarsia.workers.models.loaded_model import LoadedModel
from intarsia.workers.tensor_parallel import TensorParallel

CPU = torch.device("cpu")
TOKENS = 8
needs_compiler = pytest.mark.skipif(NativeCodesLinear.lacks() is not None, reason="there is no C++ compiler")


@pytest.fixture
def with_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twins whose embeddings are packed, too."""
    monkeypatch.setattr(packing, "LINEAR", re.compile(rf"{packing.LINEAR.pattern}|.*embed_tokens\.weight"))


def loaded(folder: Path, products: str = "cpu", dtype: str = "float32") -> LoadedModel:
    return load_model(ModelSettings(str(folder), dtype=dtype, packed_products=products), TensorParallel(), CPU)


async def answers(path: Path, prompts: list[list[int]], workers: Any = None, **settings: Any) -> list[list[int]]:
    engine = await make_engine(path, workers, dtype="float32", **settings)
    asked = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    return [completion.token_ids for completion in await complete(engine, prompts, asked)]


@pytest.mark.parametrize("products", ["cpu", "reference"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_weight_that_an_embedding_shares_answers_as_the_plain_twin(
    name: str, products: str, with_embeddings: None, tiny: Callable, tmp_path: Path
):
    source = tiny("gemma3")
    folder = make_twins(source.path, tmp_path, FORMATS[name])
    oracle = models.load_oracle(folder / "plain", ())
    expected = [models.greedy(oracle, prompt, TOKENS) for prompt in source.prompts]
    assert asyncio.run(answers(folder / "packed", source.prompts, packed_products=products)) == expected


@needs_compiler
@pytest.mark.parametrize("products", ["cpu", "reference"])
@pytest.mark.parametrize("architecture", ["gemma3", "lfm2", "llama"])
def test_no_parameter_of_a_gguf_file_s_blocks_is_expanded(architecture: str, products: str, tmp_path: Path):
    folder = make_twin(architecture, tmp_path, "Q4_K").folder()
    model = loaded(folder, products)
    embedding: Any = model.module.get_input_embeddings()  # type: ignore[operator]
    output: Any = model.module.get_output_embeddings()  # type: ignore[operator]
    assert isinstance(embedding, PackedEmbedding) and isinstance(output, CodesLinear)
    assert (embedding.output is output) == (architecture != "llama")
    assert all(each.dim() == 1 or "conv" in name for name, each in model.module.named_parameters())
    gguf = Checkpoint(folder).gguf
    assert gguf is not None
    stored = sum(tensor.stop - tensor.start for tensor in gguf.tensors.values())
    assert model.facts.weight_bytes <= 1.05 * stored


@needs_compiler
def test_rows_are_looked_up_with_the_bits_of_the_numbers_rounded_once(tmp_path: Path):
    twin = make_twin("gemma3", tmp_path, "Q5_K")
    wanted = loaded(twin.plain, "expanded", "bfloat16").module.get_input_embeddings()  # type: ignore[operator]
    tokens = torch.tensor([[0, 7, 7, 319], [5, 4, 3, 2]])
    with torch.inference_mode():
        for products in ("cpu", "reference"):
            found = loaded(twin.folder(), products, "bfloat16").module.get_input_embeddings()  # type: ignore[operator]
            assert found(tokens).dtype == torch.bfloat16
            assert torch.equal(found(tokens), wanted(tokens))
            assert found.weight.shape == (320, 256) and found.weight.is_meta


@pytest.mark.parametrize("products", ["cpu", "reference"])
@pytest.mark.parametrize("architecture", ["gemma3", "llama"])
def test_two_ranks_look_up_their_own_rows(
    architecture: str, products: str, tmp_path: Path, two_workers: Any, loop: Loop
):
    twin = make_twin(architecture, tmp_path, "Q4_K")
    oracle = models.load_oracle(twin.plain)
    prompts = models.prompts(seed=1, lengths=[5, 33])
    expected = [models.greedy(oracle, prompt, TOKENS) for prompt in prompts]
    assert loop.run(answers(twin.folder(), prompts, two_workers, packed_products=products)) == expected


def test_an_embedding_that_others_compute_with_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("intarsia.workers.models.kept.only_looks_up", lambda module: False)
    model = loaded(make_twin("gemma3", tmp_path, "Q4_K").folder(), "reference")
    assert not isinstance(model.module.get_output_embeddings(), CodesLinear)  # type: ignore[operator]
