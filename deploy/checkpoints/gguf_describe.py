"""What a GGUF file says beside its weights becomes a folder: config, tokenizer, chat template, and which of its tensors
make which parameters.

    python -m intarsia.deploy.checkpoints.gguf_describe FOLDER SHA256 MODEL.gguf [PART.gguf ..]

A program of its own, because it needs torch and transformers: `gguf.py` starts it. Weights are not read.
"""

import functools
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import IntarsiaError
from ...workers.checkpoint.gguf.header import read_gguf_headers
from ...workers.checkpoint.gguf.manifest import GgufFile, Manifest, write_manifest
from .gguf import TOLD
from .gguf_parameters import empty_model, find_parameters

OUTPUT = "output.weight"
"""Where it lacks, the output shares the embedding's weights."""


def describe(sources: Sequence[Path], folder: Path, sha256: str) -> None:
    """sources: the file, or all parts of a model that is split. sha256: theirs

    Raises what transformers raises for a file that it cannot read, and `ModelError`."""
    from transformers import AutoConfig, AutoTokenizer

    header = read_gguf_headers(sources)
    source = sources[0]
    place: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    config = AutoConfig.from_pretrained(**place)
    config.dtype = torch.bfloat16
    if len(sources) > 1:  # transformers looks for it in the first part
        config.tie_word_embeddings = OUTPUT not in header.tensors
    model = empty_model(config)
    config.architectures = [type(model).__name__]
    found = find_parameters(model, header, source)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
    config.save_pretrained(folder)
    files = tuple(map(GgufFile.at, sources))
    write_manifest(folder, Manifest(files, sha256, found.made, found.unused))


if __name__ == "__main__":
    os.environ["TQDM_DISABLE"] = "1"
    gguf: Any = importlib.import_module("gguf")  # the library: to a type checker, `import gguf` is our module
    asked = sys.argv[1:]
    files = [Path(each) for each in asked[2:]]
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)  # reading takes seconds, and several ask
    try:
        describe(files, Path(asked[0]), asked[1])
    except IntarsiaError as error:
        print(json.dumps(error.to_wire()))
        sys.exit(TOLD)
