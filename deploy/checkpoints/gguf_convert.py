"""A GGUF file becomes a checkpoint folder: config, tokenizer, chat template, weights in bfloat16.

    python -m intarsia.deploy.checkpoints.gguf_convert MODEL.gguf FOLDER

A program of its own, because it needs torch: `gguf.py` starts it. It prints "done total" for each tensor. Weights go
tensor by tensor from the mapped file to the folder, so that no more than one of them is in memory.
"""

import functools
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

HEADER_BYTES_PER_TENSOR = 256
"""Room for the header of a safetensors file, which comes first and is known last. It is filled up with blanks."""


def convert(source: Path, folder: Path) -> None:
    """Raises what transformers raises for a file that it cannot read."""
    from transformers import AutoConfig, AutoTokenizer

    gguf: Any = importlib.import_module("gguf")  # the library: to a type checker, `import gguf` is our module
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)  # reading takes seconds, and three ask
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    config = AutoConfig.from_pretrained(**place)
    tokenizer = AutoTokenizer.from_pretrained(**place)
    config.dtype = torch.bfloat16
    tokenizer.save_pretrained(folder)
    with (folder / "model.safetensors").open("wb") as file:
        _Weights(file, gguf.GGUFReader(str(source))).write(config)
    config.save_pretrained(folder)


class _Weights:
    """Writes one safetensors file out of one GGUF file."""

    def __init__(self, file: Any, reader: Any):
        self._file, self._reader = file, reader
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._end = 0

    def write(self, config: Any) -> None:
        room = 4096 + HEADER_BYTES_PER_TENSOR * len(self._reader.tensors)
        self._file.seek(8 + room)
        for name, tensor in self._tensors(config):
            self._add(name, tensor)
        header = json.dumps(self._header).encode()
        assert len(header) <= room, "names of tensors are longer than was thought"
        self._file.seek(0)
        self._file.write(room.to_bytes(8, "little") + header.ljust(room))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        data = tensor.to(torch.bfloat16).contiguous()
        start, self._end = self._end, self._end + data.numel() * 2
        self._header[name] = {"dtype": "BF16", "shape": list(data.shape), "data_offsets": [start, self._end]}
        self._file.write(data.view(torch.uint8).reshape(-1).numpy().data)

    def _tensors(self, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and values as transformers has them."""
        from transformers import AutoModelForCausalLM
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        dequantize = importlib.import_module("gguf").dequantize

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        config.architectures = [type(model).__name__]
        architecture = self._reader.fields["general.architecture"].contents()
        processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
        names = get_gguf_hf_weights_map(model, processor)
        total = len(self._reader.tensors)
        for done, stored in enumerate(self._reader.tensors, start=1):
            found = processor.process(
                weights=dequantize(stored.data, stored.tensor_type),
                name=stored.name,
                tensor_key_mapping=names,
                parsed_parameters={"tensors": {}},
            )
            if found.name in names:
                yield names[found.name], torch.from_numpy(np.require(found.weights, requirements=["C", "W"]))
            print(done, total, flush=True)


if __name__ == "__main__":
    os.environ["TQDM_DISABLE"] = "1"
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
