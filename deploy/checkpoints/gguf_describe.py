"""What a GGUF file says beside its weights becomes a folder: config, tokenizer, chat template, and which of its tensors
make which parameters.

    python -m intarsia.deploy.checkpoints.gguf_describe FOLDER SHA256 MODEL.gguf [PART.gguf ..]

A program of its own, because it needs torch and transformers: `gguf.py` starts it. Weights are not read.
"""

import functools
import importlib
import json
import os
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import CorruptCheckpoint, IntarsiaError
from ...workers.checkpoint.gguf.header import GgufHeader, read_gguf_headers
from ...workers.checkpoint.gguf.manifest import GgufFile, Manifest, write_manifest
from ...workers.checkpoint.gguf.tensors import ROPE_FACTORS
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
    stretched = stretch_positions(config, header, sources)
    model = empty_model(config)
    config.architectures = [type(model).__name__]
    found = find_parameters(model, header, source)
    AutoTokenizer.from_pretrained(**place).save_pretrained(folder)
    config.save_pretrained(folder)
    unused = tuple(name for name in found.unused if not (stretched and name == ROPE_FACTORS))
    files = tuple(map(GgufFile.at, sources))
    write_manifest(folder, Manifest(files, sha256, found.made, unused))


def stretch_positions(config: Any, header: GgufHeader, files: Sequence[Path]) -> bool:
    """Whether the file has factors that frequencies of rotary positions are divided by, as Llama 3.1 and later need.
    The config has them afterwards: `longrope` is the kind that takes any, and here both of its sets are the same.
    transformers does not read them.

    Raises `CorruptCheckpoint`: they cannot be this model's."""
    text = config.get_text_config()
    tensor, ropes = header.tensors.get(ROPE_FACTORS), text.rope_parameters
    if tensor is None or tensor.kind.name != "F32" or ropes.get("rope_type") != "default":
        return False
    file = files[tensor.part]
    with file.open("rb") as opened:
        opened.seek(tensor.start)
        factors = [value for (value,) in struct.iter_unpack("<f", opened.read(tensor.stop - tensor.start))]
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    expected = int(head_dim * ropes.get("partial_rotary_factor", 1.0)) // 2
    if len(factors) != expected or not all(0 < factor < float("inf") for factor in factors):
        raise CorruptCheckpoint(
            f"{file}: the tensor '{ROPE_FACTORS}' must hold {expected} positive numbers, one for each frequency of a "
            f"head's positions; it holds {len(factors)}, from {min(factors)} to {max(factors)}.",
            field="model",
        )
    text.rope_parameters = ropes | {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": text.max_position_embeddings,
    }
    return True


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
