"""The files beside config and weights: looked at before transformers reads them, which bounds nothing."""

from pathlib import Path

from .config_schema import check_config
from .json_file import MIB, corrupt, read_object, size_of

JSON_FILES = {
    "generation_config.json": MIB,
    "preprocessor_config.json": MIB,
    "processor_config.json": MIB,
    "tokenizer_config.json": 16 * MIB,
    "special_tokens_map.json": MIB,
    "added_tokens.json": 16 * MIB,
    "chat_template.json": MIB,
}
"""Each an object, and its most bytes. Of tokenizers, one has 6,000 added tokens in a MiB."""

OTHER_FILES = {
    "chat_template.jinja": MIB,
    "tokenizer.json": 256 * MIB,
    "tokenizer.model": 256 * MIB,
    "vocab.json": 64 * MIB,
    "merges.txt": 64 * MIB,
    "tekken.json": 256 * MIB,
}
"""Those that are read elsewhere. The largest tokenizers that are around have 35 MB."""


def check_side_files(path: Path) -> None:
    """None has to be there. Raises `CorruptCheckpoint` for one that is and cannot be what its name says."""
    for name, limit in OTHER_FILES.items():
        size = size_of(path / name) or 0
        if size > limit:
            raise corrupt(f"{path / name} has {size} bytes; the limit is {limit}")
    for name, limit in JSON_FILES.items():
        if size_of(path / name) is not None:
            fields = read_object(path / name, limit)
            if name == "generation_config.json":
                check_config(fields, str(path / name))
