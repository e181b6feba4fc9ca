"""A real model, and transformers' own of the same numbers."""

import pydoc_data.topics
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from intarsia.deploy.checkpoints.real_models import REAL_MODELS, installed_files, real_checkpoint
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.tests.gguf_twins import dequantised
from intarsia.tests.models import load_oracle

ROOT = Path(__file__).parents[2]

TEXT_CHARS = 32_000
"""More than 6,000 tokens."""


class Real(NamedTuple):
    path: Path
    plain: Path  # the numbers that transformers reads out of the same file, in float32
    tokenizer: Tokenizer
    oracle: Any

    def pieces(self, lengths: Sequence[int]) -> list[list[int]]:
        """Real text of so many tokens each, from different places."""
        return [self.tokenizer.encode(text)[:length] for text, length in zip(texts(len(lengths)), lengths, strict=True)]


def texts(count: int) -> list[str]:
    """What Python says of itself, and our licence: each long enough for the longest piece. Not our own pages, which
    change, and all figures with them."""
    topics: dict[str, str] = pydoc_data.topics.topics
    all_of_it = "\n\n".join([*(topics[name] for name in sorted(topics)), (ROOT / "LICENSE").read_text()])
    apart = (len(all_of_it) - TEXT_CHARS) // count
    return [all_of_it[n * apart : n * apart + TEXT_CHARS] for n in range(count)]


def load(name: str, work: Path) -> Real:
    if installed_files(name) is None or find_spec("gguf") is None:
        pytest.skip(f"{name} is not installed: {REAL_MODELS[name].install}")
    found = real_checkpoint(name)
    assert found is not None and found.name == name
    tokenizer = Tokenizer.load(found.folder)
    assert tokenizer is not None
    plain = dequantised(found.folder, work / "plain", torch.float32)
    return Real(found.folder, plain, tokenizer, load_oracle(plain))
