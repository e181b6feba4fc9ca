"""What a proof came to, and the file in which it is remembered. Without torch: each start asks for it."""

import json
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from ..checkpoints.gguf import cache_folder

PROOFS = "proofs"
DIGITS = 24
OUR_PARTS = "controller", "kernels", "kvcache", "proto", "workers", "deploy/proof"
"""What computes; a proof holds until any of it changes."""

NOT_OF_THE_FAMILY = {
    "_name_or_path", "architectures", "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype",
    "transformers_version", "quantization_config", "id2label", "label2id",
}  # fmt: skip
"""Fields of a config on which nothing depends that is computed in a proof."""


class Verdict(NamedTuple):
    family: str  # model_type of the text part; empty if that is not known
    is_right: bool
    ranks: tuple[int, ...]
    took_s: float
    reason: str | None = None  # why not
    scaled: Mapping[str, list[Any]] = {}  # from, to

    def to_json(self) -> str:
        return json.dumps({**self._asdict(), "scaled": dict(self.scaled)})

    @classmethod
    def from_json(cls, text: str) -> "Verdict":
        """Raises `ValueError` and `TypeError` for what is none."""
        read = json.loads(text)
        return cls(**{**read, "ranks": tuple(read["ranks"])})


def remembered(config: Mapping[str, Any], ranks: int, *, has_gpu: bool) -> Verdict | None:
    """config: as config.json has it. None: nothing is known of such a model with so many ranks"""
    try:
        return Verdict.from_json(_file(config, ranks, has_gpu=has_gpu).read_text())
    except (OSError, ValueError, TypeError, KeyError):
        return None


def remember(verdict: Verdict, config: Mapping[str, Any], ranks: int, *, has_gpu: bool) -> None:
    """Where that cannot be written, the next start proves it again."""
    file = _file(config, ranks, has_gpu=has_gpu)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        making = file.with_suffix(".new")
        making.write_text(verdict.to_json())
        making.rename(file)
    except OSError:
        return


def _file(config: Mapping[str, Any], ranks: int, *, has_gpu: bool) -> Path:
    fields = {name: value for name, value in config.items() if name not in NOT_OF_THE_FAMILY}
    parts = (json.dumps(fields, sort_keys=True), str(ranks), str(has_gpu), *_versions(), _our_sum())
    return cache_folder().parent / PROOFS / f"{sha256('|'.join(parts).encode()).hexdigest()[:DIGITS]}.json"


def _versions() -> tuple[str, ...]:
    return tuple(f"{name} {version(name)}" for name in ("torch", "transformers"))


@cache
def _our_sum() -> str:
    """Of the files that compute."""
    root, found = Path(__file__).parents[2], sha256()
    for part in OUR_PARTS:
        for file in sorted((root / part).rglob("*")):
            if file.suffix in (".py", ".cpp", ".h"):
                found.update(file.read_bytes())
    return found.hexdigest()
