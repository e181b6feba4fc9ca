"""Checkpoints that differ from the tiny families in one respect."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from intarsia.errors import UnsupportedModel
from intarsia.proto.request import SamplingParams
from intarsia.proto.worker import ModelSettings
from intarsia.tests import models, tiny_configs
from intarsia.tests.conftest import Loop
from intarsia.tests.local import complete, make_engine
from intarsia.workers.models.load import load_model
from intarsia.workers.tensor_parallel import TensorParallel

GREEDY = SamplingParams(temperature=0, max_tokens=12)


async def tokens(path: Path, workers: Any = None, **settings: Any) -> list[list[int]]:
    engine = await make_engine(path, workers, **settings)
    return [completion.token_ids for completion in await complete(engine, models.PROMPTS, GREEDY)]


def test_text_model_inside_a_multimodal_checkpoint_is_found(tmp_path: Path):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=tiny_configs.gemma3().to_dict(),
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=127,
    )
    torch.manual_seed(3)
    whole = Gemma3ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    assert asyncio.run(tokens(tmp_path)) == [models.greedy(whole, prompt, 12) for prompt in models.PROMPTS]


def test_vocabulary_that_does_not_divide_among_the_workers_gives_the_same_tokens(
    tmp_path: Path, two_workers: Any, loop: Loop
):
    from transformers import LlamaForCausalLM

    config: Any = tiny_configs.llama()
    config.vocab_size = 131
    torch.manual_seed(4)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    expected = [models.greedy(model, prompt, 12) for prompt in models.PROMPTS]
    assert loop.run(tokens(tmp_path, two_workers)) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_follows_the_oracle_for_the_first_tokens(dtype: str, tiny: Callable):
    model = tiny("ministral")
    for output, expected in zip(asyncio.run(tokens(model.path, dtype=dtype)), model.expected, strict=True):
        assert len(output) == 12
        assert output[0] == expected[0]


def test_parameters_that_a_family_has_in_float32_stay_so_in_a_model_of_16_bits(tiny: Callable):
    path = tiny("kimi_linear").path
    settings = ModelSettings(str(path), dtype="bfloat16")
    loaded: Any = load_model(settings, TensorParallel(), torch.device("cpu")).module
    dtypes = {name: parameter.dtype for name, parameter in loaded.named_parameters()}
    wide = {name.rpartition(".")[2] for name, dtype in dtypes.items() if dtype == torch.float32}
    assert "dt_bias" in wide and "A_log" not in wide
    assert dtypes["model.embed_tokens.weight"] == torch.bfloat16


def test_page_memory_follows_the_dtype(tiny: Callable):
    async def blocks(dtype: str) -> int:
        return (await make_engine(tiny("llama").path, dtype=dtype)).info.num_blocks

    assert asyncio.run(blocks("bfloat16")) == 2 * asyncio.run(blocks("float32")) + 1


def test_an_untested_family_runs_as_its_config_has_it(tmp_path: Path, two_workers: Any, loop: Loop):
    path = granite(tmp_path)
    expected = [models.greedy(models.load_oracle(path), prompt, 12) for prompt in models.PROMPTS]
    assert asyncio.run(tokens(path)) == expected
    assert loop.run(tokens(path, two_workers)) == expected


def granite(path: Path) -> Path:
    """Not among the known: Llama with multipliers."""
    from transformers import GraniteConfig, GraniteForCausalLM

    torch.manual_seed(5)
    config = GraniteConfig(
        **tiny_configs.HEADS_BY_WIDTH, num_hidden_layers=3, embedding_multiplier=2.0, residual_multiplier=0.7
    )
    GraniteForCausalLM(config).save_pretrained(path)
    return path


HOMEMADE = """
from transformers import GraniteConfig, GraniteForCausalLM
from transformers.models.granite.modeling_granite import GraniteAttention


class HomemadeConfig(GraniteConfig):
    model_type = "homemade"


class HomemadeForCausalLM(GraniteForCausalLM):
    config_class = HomemadeConfig
"""


def homemade(path: Path, more: str = "") -> Path:
    """Granite whose code comes with the checkpoint. more: of the model's class, and what follows it."""
    granite(path)
    fields = json.loads((path / "config.json").read_text())
    fields |= {
        "model_type": "homemade",
        "architectures": ["HomemadeForCausalLM"],
        "auto_map": {
            "AutoConfig": "homemade.HomemadeConfig",
            "AutoModelForCausalLM": "homemade.HomemadeForCausalLM",
        },
    }
    (path / "config.json").write_text(json.dumps(fields))
    (path / "homemade.py").write_text(HOMEMADE + more)
    return path


def test_layers_that_never_call_our_attention_are_refused_by_number(tmp_path: Path):
    """A generic attempt must not pretend to have paged what layers compute by themselves."""
    path = homemade(
        tmp_path,
        """
    def __init__(self, config):
        super().__init__(config)
        for index in (0, 2):
            self.model.layers[index].self_attn = OwnAttention(config, index)


class OwnAttention(GraniteAttention):
    def forward(self, hidden_states, **kwargs):
        return self.o_proj(self.q_proj(hidden_states)), None
""",
    )
    with pytest.raises(UnsupportedModel, match="layers 0, 2 compute their attention in a way of their own"):
        asyncio.run(tokens(path, trust_remote_code=True))


def test_a_model_that_takes_no_attention_but_its_own_is_refused(tmp_path: Path):
    path = homemade(
        tmp_path,
        """
    def __init__(self, config):
        self.attention = {"eager": 1, "sdpa": 2}[config._attn_implementation]
        super().__init__(config)
""",
    )
    with pytest.raises(UnsupportedModel, match="homemade cannot be built with an attention of ours: KeyError"):
        asyncio.run(tokens(path, trust_remote_code=True))


def test_code_that_comes_with_a_checkpoint_runs_only_when_that_is_wanted(tmp_path: Path):
    path = homemade(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"cannot read .*config\.json"):
        asyncio.run(tokens(path))
    outputs = asyncio.run(tokens(path, trust_remote_code=True))
    assert all(len(output) == 12 for output in outputs)
    (tmp_path / "plain").mkdir()
    assert outputs == asyncio.run(tokens(granite(tmp_path / "plain")))


def test_sharded_files_give_the_same_tokens(tiny: Callable, tmp_path: Path):
    model = tiny("granite4")
    models.load_oracle(model.path).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert asyncio.run(tokens(tmp_path)) == [expected[:12] for expected in model.expected]


def test_loading_tells_how_far_it_is(tiny: Callable):
    told: list[tuple[int, int]] = []
    settings = ModelSettings(str(tiny("llama").path))
    load_model(settings, TensorParallel(), torch.device("cpu"), lambda done, total: told.append((done, total)))
    assert told == sorted(told) and told[-1][0] == told[-1][1]


def test_minimax_rotates_as_many_numbers_as_its_config_says(tmp_path: Path):
    """Against transformers, which rotates all of them, on weights whose numbers are reordered: those that are to stay
    are paired with each other, at frequency 0."""
    rotary = 8
    model = models.make_checkpoint("minimax", tmp_path / "minimax")
    fields = json.loads((model / "config.json").read_text())
    whole = asyncio.run(tokens(model))
    (model / "config.json").write_text(json.dumps(fields | {"rotary_dim": rotary}))
    oracle = models.load_oracle(model)
    head = oracle.config.head_dim
    still = torch.arange(rotary, head)
    first = torch.cat((torch.arange(rotary // 2), still[: len(still) // 2]))
    second = torch.cat((torch.arange(rotary // 2, rotary), still[len(still) // 2 :]))
    order = torch.cat((first, second))
    with torch.no_grad():
        for layer in oracle.model.layers:
            for projection in (getattr(layer.self_attn, name, None) for name in ("q_proj", "k_proj")):
                if projection is not None:
                    heads = projection.weight.unflatten(0, (-1, head))
                    projection.weight.copy_(heads[:, order].flatten(0, 1))
    frequencies = torch.zeros(head // 2)
    theta = oracle.config.rope_parameters["rope_theta"]
    frequencies[: rotary // 2] = 1.0 / theta ** (torch.arange(0, rotary, 2) / rotary)
    oracle.model.rotary_emb.inv_freq = frequencies
    expected = [models.greedy(oracle, prompt, 12) for prompt in models.PROMPTS]
    assert asyncio.run(tokens(model)) == expected
    assert expected != whole
