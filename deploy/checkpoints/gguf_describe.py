"""What a GGUF file says beside its weights becomes a folder: config, tokenizer, chat template, and which of its tensors
make which parameters.

    python -m intarsia.deploy.checkpoints.gguf_describe MODEL.gguf FOLDER SHA256

A program of its own, because it needs torch and transformers: `gguf.py` starts it. Weights are not read.
"""

import functools
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from ...errors import IntarsiaError
from ...workers.checkpoint.gguf.header import read_gguf_header
from ...workers.checkpoint.gguf.manifest import Manifest, write_manifest
from .gguf import TOLD
from .gguf_parameters import empty_model, find_parameters


def describe(source: Path, folder: Path, sha256: str) -> None:
    """sha256: the file's

    Raises what transformers raises for a file that it cannot read, and `ModelError`."""
    from transformers import AutoConfig, AutoTokenizer

    header = read_gguf_header(source)
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    config = AutoConfig.from_pretrained(**place)
    config.dtype = torch.bfloat16
    model = empty_model(config)
    config.architectures = [type(model).__name__]
    found = find_parameters(model, header, source)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
    config.save_pretrained(folder)
    state = source.stat()
    write_manifest(folder, Manifest(source, state.st_size, state.st_mtime_ns, sha256, found.made, found.unused))


if __name__ == "__main__":
    os.environ["TQDM_DISABLE"] = "1"
    gguf: Any = importlib.import_module("gguf")  # the library: to a type checker, `import gguf` is our module
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)  # reading takes seconds, and several ask
    try:
        describe(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    except IntarsiaError as error:
        print(json.dumps(error.to_wire()))
        sys.exit(TOLD)
