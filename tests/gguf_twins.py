"""GGUF files of tiny random models, each with a twin that holds the same weights as plain numbers.

The gguf library names the tensors, writes the files and computes the twins' numbers. How tensors are turned on their
way into a file is done here, as llama.cpp's converter does it. What is tested takes no part in any of it.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from intarsia.workers.checkpoint.gguf.manifest import MANIFEST, read_manifest

VOCAB = 320
SPREAD = 0.06
"""Root mean square of a weight's numbers."""

FACTORS = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Where a block has float16 numbers: that of its scales, and that of its leasts. The library writes no such blocks, so
they are drawn at random."""

MIDDLE = {"Q2_K": 1.5, "Q3_K": 0.0, "Q4_K": 7.5, "Q5_K": 15.5, "Q6_K": 0.0, "IQ4_NL": 0.0, "IQ4_XS": 0.0}
"""Of the codes. So many times a scale is a least, for numbers around zero."""

Turn = Callable[[Any, str, np.ndarray], np.ndarray]
"""(config, tensor of the file, its numbers as the model has them) -> as the file has them."""


class Piece(NamedTuple):
    """A tensor of the file: bytes of rows, or plain numbers."""

    name: str
    data: np.ndarray
    format: str


class Kind(NamedTuple):
    """An architecture: a tiny config, how tensors are turned, and what a file says beside what all say."""

    config: Callable[[], PretrainedConfig]
    turn: Turn = lambda config, name, numbers: numbers
    says: Callable[[Any], Mapping[str, Any]] = lambda config: {}


class Twin(NamedTuple):
    file: Path
    plain: Path

    def folder(self) -> Path:
        """That which the file gets in the cache, made in this process."""
        from intarsia.deploy.checkpoints.gguf import parts_beside
        from intarsia.deploy.checkpoints.gguf_describe import describe
        from intarsia.workers.checkpoint.gguf.manifest import sha256_of

        made = self.file.parent / "made"
        made.mkdir(exist_ok=True)
        files = parts_beside(self.file)
        describe(files, made, sha256_of(*files))
        return made


def make_twin(
    architecture: str,
    folder: Path,
    formats: str | Callable[[str], str],
    seed: int = 0,
    tensors_a_part: int = 0,
    extra: Sequence[Piece] = (),
    **changes: Any,
) -> Twin:
    """folder/tiny.gguf and folder/plain.

    formats: of weights with two dimensions or more, by their names in the file
    tensors_a_part: of a model that is split, whose parts are beside the file; 0: it is not
    extra: tensors that the twin does not have
    changes: of the config
    """
    print(f"seed {seed}")
    kind = KINDS[architecture]
    config = kind.config()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = np.random.default_rng(seed)
    state = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    pieces: list[Piece] = []
    for stored, numbers in _tensors(architecture, config, state):
        if numbers.ndim == 1 and "A_log" not in stored and "ssm_a" not in stored:  # such that one more is exact
            numbers += np.round(generator.normal(0, 0.1, numbers.shape) * 1024).astype(np.float32) / 1024
        turned = kind.turn(config, stored, numbers)
        is_vector = turned.ndim == 1 or "conv" in stored
        format = "F32" if is_vector else formats if isinstance(formats, str) else formats(stored)
        data, read = packed(np.ascontiguousarray(turned), format, generator)
        pieces.append(Piece(stored, data, format))
        if not is_vector:
            # The twin gets the numbers of the file, each at the place where it came from.
            places = kind.turn(config, stored, np.arange(numbers.size, dtype=np.float64).reshape(numbers.shape))
            back = np.empty(numbers.size, np.float32)
            back[places.astype(np.int64).ravel()] = read.ravel()
            numbers[...] = back.reshape(numbers.shape)
    model.load_state_dict({name: torch.from_numpy(each) for name, each in state.items()}, strict=False)
    model.tie_weights()
    model.save_pretrained(folder / "plain")
    write(folder / "tiny.gguf", architecture, config, [*pieces, *extra], tensors_a_part)
    first = min(folder.glob("tiny*.gguf"))
    return Twin(first, folder / "plain")


def dequantised(folder: Path, target: Path, dtype: torch.dtype) -> Path:
    """The checkpoint that transformers itself makes of a GGUF file: plain numbers in `target`.

    folder: that which the file has in the cache
    """
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    manifest = read_manifest(folder)
    assert manifest is not None, f"{folder} is no folder of a GGUF file"
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(MANIFEST, "*.gguf"))
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    read = load_gguf_checkpoint(str(manifest.paths[0]), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(read, strict=False, assign=True)
    assert set(missing) <= set(model._tied_weights_keys or ()) and not unexpected
    model.tie_weights()
    model.to(dtype).save_pretrained(target)
    return target


def packed(numbers: np.ndarray, format: str, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """What the file has, and the numbers that it stands for. Those of `FACTORS` are others than were given."""
    kind = gguf.GGMLQuantizationType[format]
    if format not in FACTORS:
        data = gguf.quants.quantize(numbers, kind)
    else:
        columns, size = gguf.GGML_QUANT_SIZES[kind]
        shape = *numbers.shape[:-1], numbers.shape[-1] // columns, size
        blocks = generator.integers(0, 256, shape, dtype=np.uint8)
        _set_factors(blocks, format, 1.0)
        flat = blocks.reshape(*numbers.shape[:-1], -1)
        rms = float(np.sqrt(np.square(gguf.quants.dequantize(flat, kind)).mean()))
        _set_factors(blocks, format, SPREAD / rms)
        data = blocks.reshape(flat.shape)
    return data, gguf.quants.dequantize(data, kind).astype(np.float32).reshape(numbers.shape)


def _set_factors(blocks: np.ndarray, format: str, factor: float) -> None:
    for place, value in zip(FACTORS[format], (factor, factor * MIDDLE[format]), strict=False):
        blocks[..., place : place + 2] = np.array([value], np.float16).view(np.uint8)


def write(file: Path, architecture: str, config: Any, pieces: list[Piece], tensors_a_part: int = 0) -> None:
    """With a tokenizer of bytes."""
    writer: Any = gguf.GGUFWriter(str(file), architecture, split_max_tensors=tensors_a_part)
    writer.add_context_length(512)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", 0))
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(VOCAB)
    writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", getattr(config, "norm_eps", 0.0)))
    writer.add_rope_freq_base(10_000.0)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    said = {"head_count_kv": config.num_key_value_heads, "rope_dimension_count": head_dim}
    for name, value in (said | dict(KINDS[architecture].says(config))).items():
        getattr(writer, f"add_{name}")(value)
    alphabet = [chr(n) for n in range(0x100, 0x100 + VOCAB - 1)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*alphabet, "".join(alphabet[:2])])
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges([" ".join(alphabet[:2])])
    for name, data, format in pieces:
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[format])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(architecture: str, config: Any, state: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Names in the file, and numbers of the model: views, of experts that share a parameter too."""
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table: Any = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, numbers in state.items():
        if name.endswith("experts.gate_up_proj"):
            layer, half = name.split(".")[2], numbers.shape[1] // 2
            yield f"blk.{layer}.ffn_gate_exps.weight", numbers[:, :half]
            yield f"blk.{layer}.ffn_up_exps.weight", numbers[:, half:]
        elif name.endswith("dt_bias"):
            yield f"blk.{name.split('.')[2]}.ssm_dt.bias", numbers
        elif name.endswith("A_log"):
            yield table.get_name(name), numbers
        elif name.endswith("experts.down_proj"):
            yield f"{table.get_name(name)}.weight", numbers
        else:
            base, _, suffix = name.rpartition(".")
            yield f"{table.get_name(base)}.{suffix}", numbers


# -- what llama.cpp's converter does to tensors ------------------------------------------------------------------------


def _pairs(config: Any, name: str, numbers: np.ndarray) -> np.ndarray:
    """Queries and keys: the two halves of a head's rows take turns."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return numbers
    return numbers.reshape(heads, 2, -1, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)


def _one_more(config: Any, name: str, numbers: np.ndarray) -> np.ndarray:
    return numbers + np.float32(1) if name.endswith("norm.weight") else numbers


def _squeezed(config: Any, name: str, numbers: np.ndarray) -> np.ndarray:
    return numbers.squeeze(1) if "conv.weight" in name else numbers


def _flat_gate(config: Any, name: str, numbers: np.ndarray) -> np.ndarray:
    return numbers.squeeze(0) if "ffn_gate_inp_shexp" in name else numbers


def _tiled(config: Any, name: str, numbers: np.ndarray) -> np.ndarray:
    """Value heads of one key head lie side by side in the model, and apart from each other in a file."""
    if "ssm_a" in name and not name.endswith("alpha.weight"):
        numbers = -np.exp(numbers)
    if "ssm_conv1d" in name:
        numbers = numbers.squeeze(1)
    if name.endswith("norm.weight") and "ssm_norm" not in name:
        return numbers + np.float32(1)
    keys, values, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    last = name.removeprefix("blk.").partition(".")[2]
    if last in ("ssm_a", "ssm_dt.bias", "ssm_alpha.weight", "ssm_beta.weight"):
        return _swapped(numbers, keys, values // keys, 1)
    if last == "attn_gate.weight":
        return _swapped(numbers, keys, values // keys, size)
    if last in ("attn_qkv.weight", "ssm_conv1d.weight"):
        first = 2 * keys * config.linear_key_head_dim
        return np.concatenate((numbers[:first], _swapped(numbers[first:], keys, values // keys, size)))
    if last == "ssm_out.weight":
        return _swapped(numbers.T, keys, values // keys, size).T
    return _flat_gate(config, name, numbers)


def _swapped(rows: np.ndarray, keys: int, each: int, size: int) -> np.ndarray:
    return rows.reshape(keys, each, size, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


# -- the architectures -------------------------------------------------------------------------------------------------

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "max_position_embeddings": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "initializer_range": SPREAD,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "rope_theta": 10_000.0,
}  # fmt: skip
S, F, L = "sliding_attention", "full_attention", "linear_attention"
WINDOW = 12


def _llama() -> PretrainedConfig:
    return LlamaConfig(**COMMON, tie_word_embeddings=False)


def _gemma2() -> PretrainedConfig:
    return Gemma2Config(**COMMON, layer_types=[S, F], sliding_window=WINDOW)


def _gemma3() -> PretrainedConfig:
    ropes = {kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in (S, F)}
    return Gemma3TextConfig(
        **{**COMMON, "num_hidden_layers": 6}, layer_types=[S] * 5 + [F], sliding_window=WINDOW, rope_parameters=ropes
    )


def _qwen3() -> PretrainedConfig:
    return Qwen3Config(**{**COMMON, "num_attention_heads": 2, "head_dim": 128}, tie_word_embeddings=False)


def _qwen2() -> PretrainedConfig:
    return Qwen2Config(**COMMON, tie_word_embeddings=True)


EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}


def _qwen3moe() -> PretrainedConfig:
    return Qwen3MoeConfig(
        **COMMON, **EXPERTS, moe_intermediate_size=768, norm_topk_prob=True, tie_word_embeddings=False
    )


def _qwen2moe() -> PretrainedConfig:
    return Qwen2MoeConfig(
        **{**COMMON, "num_key_value_heads": 4}, **EXPERTS, moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632, tie_word_embeddings=False,
    )  # fmt: skip


def _lfm2() -> PretrainedConfig:
    common = {name: value for name, value in COMMON.items() if name not in ("head_dim", "rope_theta")}
    return Lfm2Config(
        **common, layer_types=["conv", F], conv_L_cache=3, block_auto_adjust_ff_dim=False, tie_word_embeddings=True,
        norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip


DELTA: dict[str, Any] = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 64, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": [L, L, L, F], "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25,
                        "mrope_section": [3, 3, 2], "mrope_interleaved": True},
}  # fmt: skip


def _qwen35() -> PretrainedConfig:
    return Qwen3_5TextConfig(**{**COMMON, "num_hidden_layers": 4}, **DELTA)


def _qwen35moe() -> PretrainedConfig:
    common = {**COMMON, "num_hidden_layers": 4, **DELTA, **EXPERTS}
    return Qwen3_5MoeTextConfig(**common, moe_intermediate_size=256, shared_expert_intermediate_size=256)


def _says_of_delta_nets(config: Any) -> dict[str, Any]:
    return {
        "full_attention_interval": 4,
        "ssm_conv_kernel": config.linear_conv_kernel_dim,
        "ssm_state_size": config.linear_key_head_dim,
        "ssm_group_count": config.linear_num_key_heads,
        "ssm_time_step_rank": config.linear_num_value_heads,
        "ssm_inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "rope_dimension_sections": [3, 3, 2, 0],
        "rope_dimension_count": config.head_dim // 4,
    }


def _says_of_experts(config: Any) -> dict[str, Any]:
    return {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}


def _says_of_mixed(config: Any) -> dict[str, Any]:
    widths = {
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
    }
    return {**_says_of_delta_nets(config), **_says_of_experts(config), **widths}


def _says_of_windows(config: Any) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window}


def _says_of_convolutions(config: Any) -> dict[str, Any]:
    heads = [config.num_key_value_heads if kind == F else 0 for kind in config.layer_types]
    return {"head_count_kv": heads, "shortconv_l_cache": config.conv_L_cache}


KINDS = {
    "llama": Kind(_llama, _pairs),
    "gemma2": Kind(_gemma2, _one_more, _says_of_windows),
    "gemma3": Kind(_gemma3, _one_more, _says_of_windows),
    "qwen3": Kind(_qwen3),
    "lfm2": Kind(_lfm2, _squeezed, _says_of_convolutions),
    "qwen35": Kind(_qwen35, _tiled, _says_of_delta_nets),
    "qwen35moe": Kind(_qwen35moe, _tiled, _says_of_mixed),
    "qwen2": Kind(_qwen2),
    "qwen2moe": Kind(_qwen2moe, _flat_gate, _says_of_experts),
    "qwen3moe": Kind(_qwen3moe, says=_says_of_experts),
}
