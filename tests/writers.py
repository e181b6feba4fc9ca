"""Checkpoints by the tools that people quantise models with: run as a program, for they change libraries that they use.

    python writers.py WRITER SCHEME PLAIN FOLDER TRUTH

Quantises the checkpoint in PLAIN, saves it to FOLDER by the tool's own code, and to TRUTH the numbers that the tool
itself takes its weights for, by the names of an unquantised model. Ends with `NOT_INSTALLED` where it cannot be
imported.
"""

# pyright: reportMissingImports=false
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

NOT_INSTALLED = 3
TOKENS = torch.randint(0, 128, (4, 32), generator=torch.Generator().manual_seed(0))
GROUP = 32


def load(plain: str, **settings: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, **settings).eval()


def make_tokenizer() -> Any:
    """Of numbers, as some tools ask for one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(number): number for number in range(128)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", unk_token="0", eos_token="1")
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made


def texts() -> list[str]:
    return [" ".join(map(str, row.tolist())) for row in TOKENS]


# -- the tools ---------------------------------------------------------------------------------------------------------


def by_llmcompressor(scheme: str, plain: str, folder: str) -> Mapping[str, Tensor]:
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    model = load(plain)
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head", "re:.*gate$"])
    rows = Dataset.from_dict({"input_ids": TOKENS.tolist(), "attention_mask": torch.ones_like(TOKENS).tolist()})
    settings = {"max_seq_length": 32, "num_calibration_samples": 4, "pipeline": "basic"}
    oneshot(model=model, dataset=rows, recipe=recipe, processor=make_tokenizer(), **settings)
    truth = {}
    for name, module in model.named_modules():
        args = getattr(getattr(module, "quantization_scheme", None), "weights", None)
        if args is not None:
            zero: Any = getattr(module, "weight_zero_point", None)
            whole: Any = getattr(module, "weight_global_scale", None)
            truth[f"{name}.weight"] = fake_quantize(module.weight, module.weight_scale, zero, args, whole)
    model.save_pretrained(folder, save_compressed=True)
    return truth


def by_auto_round(scheme: str, plain: str, folder: str) -> Mapping[str, Tensor]:
    """scheme: the tool's name of it, its format, and what else it is told."""
    from auto_round import AutoRound

    name, format, *more = scheme.split(" ")
    settings = {"iters": 0, "disable_opt_rtn": True, "nsamples": 2, "seqlen": 16, "device_map": "cpu"}
    settings |= {"low_cpu_mem_usage": False, "dataset": texts(), **(json.loads(more[0]) if more else {})}
    tool = AutoRound(load(plain), make_tokenizer(), scheme=name, **settings)
    model, _ = tool.quantize()
    linears = [(name.removesuffix(".orig_layer"), each) for name, each in _linears(model)]
    truth = {f"{name}.weight": each.weight.detach().float() for name, each in linears}
    tool.save_quantized(folder, format=format, inplace=False)
    return truth


def by_gptqmodel(scheme: str, plain: str, folder: str) -> Mapping[str, Tensor]:
    """scheme: its configuration, as JSON."""
    os.environ["GPTQMODEL_CPU_WORKERS"] = "2"
    from gptqmodel import GPTQModel, QuantizeConfig

    make_tokenizer().save_pretrained(plain)
    config: Any = QuantizeConfig(**json.loads(scheme), device="cpu")
    tool: Any = GPTQModel.load(plain, config, backend="torch")
    rows = [{"input_ids": row, "attention_mask": [1] * 32} for row in TOKENS.tolist()]
    tool.quantize(rows * 4, batch_size=1)
    tool.save(folder)
    read: Any = GPTQModel.load(folder, backend="torch", device="cpu", dtype=torch.float16)
    packed = {name: each for name, each in read.model.named_modules() if hasattr(each, "dequantize_weight")}
    return {f"{name}.weight": each.dequantize_weight().T.float() for name, each in packed.items()}


def by_modelopt(scheme: str, plain: str, folder: str) -> Mapping[str, Tensor]:
    """scheme: the name of its configuration"""
    import copy

    import modelopt.torch.quantization as quantization
    from modelopt.torch.export import export_hf_checkpoint

    def show(model: Any) -> None:
        for row in TOKENS:
            model(row[None])

    model = quantization.quantize(load(plain), copy.deepcopy(getattr(quantization, scheme)), show)
    folded = copy.deepcopy(model)
    quantization.fold_weight(folded)
    truth = {}
    for name, linear in _linears(folded):
        inputs = getattr(linear.input_quantizer, "pre_quant_scale", None)
        truth[f"{name}.weight"] = linear.weight if inputs is None else linear.weight * inputs.flatten()
    export_hf_checkpoint(model, export_dir=folder)
    return truth


def by_torchao(scheme: str, plain: str, folder: str) -> Mapping[str, Tensor]:
    import torchao.quantization as quantization
    from transformers import TorchAoConfig

    in_groups = quantization.PerGroup(GROUP)
    configs: dict[str, Callable[[], Any]] = {
        "int8": quantization.Int8WeightOnlyConfig,
        "int8 of groups": lambda: quantization.Int8WeightOnlyConfig(granularity=in_groups),
        "int4 in bytes": lambda: quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int4,  # pyright: ignore[reportAttributeAccessIssue]
            granularity=in_groups,
        ),
        "fp8": quantization.Float8WeightOnlyConfig,
    }
    model = load(plain, quantization_config=TorchAoConfig(configs[scheme]()), device_map="cpu")
    truth = {name: each.dequantize() for name, each in model.named_parameters() if type(each) is not torch.nn.Parameter}
    model.save_pretrained(folder)
    return truth


def _linears(model: Any) -> list[tuple[str, Any]]:
    return [(name, each) for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)]


WRITERS: dict[str, tuple[str, Callable[[str, str, str], Mapping[str, Tensor]]]] = {
    "llmcompressor": ("llmcompressor", by_llmcompressor),
    "auto-round": ("auto_round", by_auto_round),
    "gptqmodel": ("gptqmodel", by_gptqmodel),
    "modelopt": ("modelopt", by_modelopt),
    "torchao": ("torchao", by_torchao),
}
"""What is imported of each, and what runs it."""


def main(writer: str, scheme: str, plain: str, folder: str, truth: str) -> None:
    torch.set_num_threads(1)
    package, write = WRITERS[writer]
    try:
        __import__(package)
    except ImportError as error:
        print(error)
        sys.exit(NOT_INSTALLED)
    with torch.no_grad():
        numbers = write(scheme, plain, folder)
    # Some make a folder of their own in it.
    if not (Path(folder) / "config.json").exists():
        for file in next(Path(folder).glob("*/config.json")).parent.iterdir():
            shutil.move(file, folder)
    save_file({name: each.detach().float().contiguous().clone() for name, each in numbers.items()}, truth)


if __name__ == "__main__":
    main(*sys.argv[1:])
