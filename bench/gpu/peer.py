"""transformers' continuous batching, with the weights that our engine has."""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from .device import Bench
from .weights import RandomCheckpoint, write_config


def continuous_batching(config: dict[str, Any], count: int, length: int, new: int, bench: Bench) -> float:
    """Tokens per second, of a second time."""
    model = _model(config, bench)
    generator = torch.Generator().manual_seed(0)
    vocab = config["vocab_size"]

    def once() -> float:
        inputs = torch.randint(1, vocab, (count, length), generator=generator, device="cpu").tolist()
        started = time.perf_counter()
        _generate(model, inputs, new, bench)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    once()
    return count * new / once()


def _generate(model: Any, inputs: list[list[int]], new: int, bench: Bench) -> None:
    """In a rehearsal a forward pass is played for it: it asks for streams and memory that a pretended device lacks."""
    if bench.is_rehearsed:
        with torch.no_grad():
            model(input_ids=torch.tensor(inputs, device=bench.device))
        return
    settings = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    model.generate_batch(
        inputs=inputs,
        generation_config=settings,
        continuous_batching_config=ContinuousBatchingConfig(),
        progress_bar=False,
    )


def _model(config: dict[str, Any], bench: Bench) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(Path(folder), config)
        weights = RandomCheckpoint(path, bench)
        read = AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device(bench.device):
            model = AutoModelForCausalLM.from_config(read, dtype=read.dtype, attn_implementation="sdpa")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights.read(name))
    return model.eval()
