"""What the weights of a checkpoint take in memory, by their formats: told by the headers of its files alone."""

import contextlib
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...proto.worker import ModelSettings
from ...workers.checkpoint.config_schema import text_config
from ...workers.checkpoint.files import Checkpoint
from ...workers.checkpoint.gguf.tensors import PLAIN, GgufWeights
from ...workers.checkpoint.packed.formats import Packed
from ..terminal.banner import human_bytes
from ..terminal.loading_bar import Watch, loading_bar

ITEM_BYTES = {"float64": 8, "float32": 4, "float": 4}
"""Bytes of one number, by dtype; of others: 2."""

NOT_TEXT = "vision", "visual", "audio", "multi_modal", "multimodal", "mtp."
"""Parts of tensors' names that are not loaded, mostly: to take them for loaded would refuse what fits."""


EXPANDED_BY_TRITON = frozenset({"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS"})
"""Kinds of GGUF files whose blocks have scales or leasts that the kernels for GPUs do not take."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes on all ranks together, at the least: without what ranks hold twice, and parts that are not loaded."""

    dtype: str  # of numbers that are not packed, once they are loaded
    plain: int
    packed: Mapping[str, int]  # format -> as they are stored
    expanded: Mapping[str, int]  # format -> once they are expanded to numbers of `dtype`

    def total(self, *, expands: bool) -> int:
        """expands: packed weights, too, take as many bytes as numbers of `dtype` do"""
        return self.plain + sum((self.expanded if expands else self.packed).values())

    def with_triton(self) -> int:
        """On GPUs with Triton, which expands some formats when it loads them."""
        kept = (self.expanded[name] if name in EXPANDED_BY_TRITON else size for name, size in self.packed.items())
        return self.plain + sum(kept)

    def by_format(self) -> dict[str, int]:
        """Format -> bytes, the most first. Numbers that are not packed have their dtype for a format."""
        found = {**self.packed, self.dtype: self.plain}
        return dict(sorted(((name, size) for name, size in found.items() if size), key=lambda each: -each[1]))

    def in_words(self) -> str:
        """ "FP8 26.9 GiB, bfloat16 1.2 GiB" """
        return ", ".join(f"{_shown(name)} {human_bytes(size)}" for name, size in self.by_format().items())

    def expanded_in_words(self) -> str:
        """ "bfloat16 54.6 GiB" """
        return f"{self.dtype} {human_bytes(self.total(expands=True))}"


def weigh(checkpoint: Checkpoint, dtype: str) -> Weights:
    """dtype: that of the settings; auto: as the config says"""
    name = dtype_of(text_config(checkpoint.config), dtype, checkpoint.config)
    item_bytes, packed = ITEM_BYTES.get(name, 2), checkpoint.packed
    plain = filter(_is_text, set(checkpoint.names()) - packed.taken)
    kept: dict[str, int] = {}
    expanded: dict[str, int] = {}
    if checkpoint.gguf is not None:
        return _weigh_gguf(checkpoint.gguf, name)
    for weight in (each for each in packed.weights.values() if _is_text(each.name)):
        stored = [checkpoint.stored(tensor) for tensor in weight.stored]
        form = weight.format if isinstance(weight, Packed) else "mxfp4"
        kept[form] = kept.get(form, 0) + sum(tensor.stop - tensor.start for tensor in stored)
        expanded[form] = expanded.get(form, 0) + item_bytes * weight.numbers(stored[0].shape)
    return Weights(name, item_bytes * sum(math.prod(checkpoint.shape(each)) for each in plain), kept, expanded)


def shapes_of(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Of the weights that are loaded, by their names in the checkpoint; those of packed ones once they are expanded.
    gpt-oss's experts are [experts, rows, columns]."""
    packed = checkpoint.packed
    found = {name: checkpoint.shape(name) for name in checkpoint.names() if name not in packed.taken}
    for name, weight in packed.weights.items():
        if isinstance(weight, Packed):
            found[name] = (weight.experts, *weight.shape) if weight.experts else weight.shape
        else:
            experts, rows, groups, half = checkpoint.shape(weight.codes)
            found[name] = experts, rows, groups * half * 2
    return {name: shape for name, shape in found.items() if _is_text(name)}


def _weigh_gguf(weights: GgufWeights, dtype: str) -> Weights:
    """A tensor of blocks is packed."""
    item_bytes, plain = ITEM_BYTES.get(dtype, 2), 0
    kept: dict[str, int] = {}
    expanded: dict[str, int] = {}
    for name in weights.manifest.made:
        for tensor in weights.parts(name):
            if tensor.kind.name in PLAIN:
                plain += item_bytes * math.prod(tensor.shape)
            else:
                form = tensor.kind.name
                kept[form] = kept.get(form, 0) + tensor.stop - tensor.start
                expanded[form] = expanded.get(form, 0) + item_bytes * math.prod(tensor.shape)
    return Weights(dtype, plain, kept, expanded)


@functools.lru_cache(maxsize=1)
def weights_in(folder: str, dtype: str) -> Weights:
    """As `weigh`, for what is told more than once on the way to an engine. Raises what `Checkpoint` does."""
    return weigh(Checkpoint(folder), dtype)


def weights_bar(model: ModelSettings) -> contextlib.AbstractContextManager[Watch | None]:
    """The `loading_bar` of an engine that starts. Raises what `Checkpoint` does."""
    return loading_bar(weight_bytes=weights_in(model.model_dir, model.dtype).total(expands=False))


def dtype_of(text: Mapping[str, Any], dtype: str, whole: Mapping[str, Any] | None = None) -> str:
    """The numbers of the weights once they are loaded. text, whole: the config's text part, and all of it"""
    said = [each.get(name) for each in (text, whole or {}) for name in ("dtype", "torch_dtype")]
    name = dtype if dtype != "auto" else next((one for one in said if isinstance(one, str)), "float32")
    return name.removeprefix("torch.")


def _is_text(name: str) -> bool:
    return not any(part in name for part in NOT_TEXT)


def _shown(form: str) -> str:
    return form if form.startswith(("bfloat", "float")) else form.upper()
