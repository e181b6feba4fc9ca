"""What real.py measures: two real models, real shapes with random weights, their prompts, and what a token reads."""

import json
import os
import pydoc_data.topics
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from intarsia.deploy.checkpoints.gguf import cache_folder
from intarsia.deploy.checkpoints.real_models import REAL_MODELS, installed_files, real_checkpoint
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.workers.checkpoint.layer_specs import read_layers

ROOT = Path(__file__).resolve().parents[2]
FULL, SLIDING, CONV = "full_attention", "sliding_attention", "conv"


def _qwen3_5() -> Any:
    """Qwen3.5-0.8B's sizes: three gated delta nets to one gated attention."""
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        vocab_size=248_320, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16,
        linear_key_head_dim=128, linear_value_head_dim=128, max_position_embeddings=32_768, tie_word_embeddings=True,
    )  # fmt: skip


def _lfm2() -> Any:
    """LFM2-350M's sizes: short convolutions, and attention in six of sixteen layers."""
    from transformers import Lfm2Config

    attention = (2, 5, 8, 10, 12, 14)
    return Lfm2Config(
        vocab_size=65_536, hidden_size=1024, intermediate_size=6656, block_auto_adjust_ff_dim=True,
        block_ffn_dim_multiplier=1.0, block_multiple_of=256, num_hidden_layers=16, num_attention_heads=16,
        num_key_value_heads=8, layer_types=[FULL if n in attention else CONV for n in range(16)], conv_L_cache=3,
        max_position_embeddings=32_768, tie_word_embeddings=True,
    )  # fmt: skip


def _granite_h() -> Any:
    """Granite-4.0-350m-h's sizes: Mamba-2, and attention in four of thirty-two layers."""
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        vocab_size=100_352, hidden_size=768, intermediate_size=2048, shared_intermediate_size=2048,
        num_local_experts=0, num_experts_per_tok=0, num_hidden_layers=32, num_attention_heads=12,
        num_key_value_heads=4, layer_types=["attention" if n in (10, 13, 17, 27) else "mamba" for n in range(32)],
        mamba_n_heads=48, mamba_d_head=32, mamba_n_groups=1, mamba_d_state=128, mamba_d_conv=4, mamba_expand=2,
        position_embedding_type="nope", attention_multiplier=0.015625, embedding_multiplier=12, logits_scaling=3,
        residual_multiplier=0.246, max_position_embeddings=32_768, tie_word_embeddings=True,
    )  # fmt: skip


def _gpt_oss() -> Any:
    """gpt-oss's kinds of layers and vocabulary, small: windows and sinks, 4 of 16 experts."""
    from transformers import GptOssConfig

    return GptOssConfig(
        vocab_size=201_088, hidden_size=1024, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=16,
        num_key_value_heads=4, head_dim=64, sliding_window=128, layer_types=[SLIDING, FULL] * 4, num_local_experts=16,
        num_experts_per_tok=4, tie_word_embeddings=False,
    )  # fmt: skip


SHAPES: dict[str, Callable[[], Any]] = {
    "qwen3.5-0.8b-shape": _qwen3_5,
    "lfm2-350m-shape": _lfm2,
    "granite-4-350m-h-shape": _granite_h,
    "gpt-oss-small-shape": _gpt_oss,
}


class Model:
    """A checkpoint folder, and what there is to know of it."""

    def __init__(self, name: str, work: Path):
        """`name`: a real model's, a shape's, or a checkpoint folder. What has to be made for it goes to `work`."""
        self.name, self._work = name, work
        self.is_real, self.is_shape = name in REAL_MODELS, name in SHAPES
        self.folder = _shape(work / name, SHAPES[name]) if self.is_shape else _checkpoint(name, work)
        self.tokenizer = Tokenizer.load(self.folder)
        self.config = json.loads((self.folder / "config.json").read_text())

    def gguf(self) -> Path | None:
        """The file that the weights come in, its parts joined; None for what is no real model."""
        files = installed_files(self.name) if self.is_real else None
        if not files:
            return None
        joined = self._work / f"{self.name}.gguf"
        if not joined.is_file():
            with _whole(joined) as making, making.open("wb") as target:
                for file in files:
                    with file.open("rb") as source:
                        shutil.copyfileobj(source, target)
        return joined

    def prompts(self, streams: int, tokens: int, round_: int) -> list[list[int]]:
        """Real English, other places of it in each round: our pages, our licence, what Python says of itself. Without
        a tokenizer its bytes are the tokens."""
        pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "LICENSE"]
        text = "\n\n".join([*(page.read_text() for page in pages), *map(str, pydoc_data.topics.topics.values())])
        length = 16 * tokens  # characters, more than enough
        apart = (len(text) - length) // streams
        pieces = [text[n * apart + round_ * 997 % apart :][:length] for n in range(streams)]
        if self.tokenizer is not None:
            return [self.tokenizer.encode(piece)[:tokens] for piece in pieces]
        return [[byte % self.config["vocab_size"] for byte in piece.encode()[:tokens]] for piece in pieces]

    def token_bytes(self, dtype: str, streams: int, length: int, gguf: Path | None = None) -> int:
        """What a new token after `length` others must read: its share of the step's weights (those of `gguf` if it is
        given), its keys and values, and its states."""
        from transformers import AutoConfig

        item_bytes = 4 if dtype == "float32" else 2
        weights = _gguf_bytes(gguf) if gguf else self._step_weights(streams) * item_bytes
        own = 0
        for layer in read_layers(AutoConfig.from_pretrained(self.folder).get_text_config(), 1, item_bytes):
            seen = length - layer.reach.oldest_needed(length) if layer.reach.keeps_tokens else 0
            own += seen * layer.token_bytes + layer.state_bytes
        return round(weights / streams + own)

    def _step_weights(self, streams: int) -> float:
        """Numbers of which a step reads each once: of experts those that are expected to be chosen by any stream, and
        of a table of embeddings nothing, unless it is the output's too."""
        experts, chosen = self.config.get("num_local_experts") or 1, self.config.get("num_experts_per_tok") or 1
        share = 1 - (1 - chosen / experts) ** streams if experts > 1 else 1.0
        sizes = _tensor_sizes(self.folder)
        has_output = any("lm_head" in name for name in sizes)
        return sum(
            count * (share if ".experts." in name else 1.0)
            for name, count in sizes.items()
            if not (has_output and "embed_tokens" in name)
        )


def default_work() -> Path:
    return cache_folder() / "bench"


def _checkpoint(name: str, work: Path) -> Path:
    """Of a real model plain numbers in bfloat16, which all sides can read."""
    found = real_checkpoint(name)
    if found is None:
        return Path(name).resolve()
    folder = work / f"{found.name}-bfloat16"
    if folder.is_dir():
        return folder
    import torch

    from intarsia.tests.gguf_twins import dequantised

    with _whole(folder) as making:
        dequantised(found.folder, making, torch.bfloat16)
    return folder


def _shape(folder: Path, config: Callable[[], Any]) -> Path:
    if folder.is_dir():
        return folder
    import torch
    from transformers import AutoModelForCausalLM

    with _whole(folder) as making:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).save_pretrained(making)
    return folder


class _whole:
    """A file or folder that is made under another name first, so that a half-made one is never taken for it."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._making = path, Path(tempfile.mkdtemp(dir=path.parent)) / path.name

    def __enter__(self) -> Path:
        return self._making

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None:
            os.replace(self._making, self._path)
        shutil.rmtree(self._making.parent, ignore_errors=True)


def _tensor_sizes(folder: Path) -> dict[str, int]:
    """Name of each tensor -> how many numbers it has."""
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118  it is no dictionary
                count = 1
                for side in opened.get_slice(name).get_shape():
                    count *= side
                sizes[name] = count
    return sizes


def _gguf_bytes(file: Path) -> int:
    import importlib

    return sum(int(tensor.n_bytes) for tensor in importlib.import_module("gguf").GGUFReader(str(file)).tensors)
