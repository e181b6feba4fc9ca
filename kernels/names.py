"""What the attention backends are called and where each of them runs, for code that must not import torch."""

from collections.abc import Collection, Mapping

from ..errors import InvalidSetting

ATTENTION_BACKENDS: Mapping[str, Collection[str]] = {
    "native": ("cpu",),
    "flash": ("cuda",),
    "flash-legacy": ("cuda",),
    "triton": ("cuda",),
    "torch": ("cpu", "cuda"),
    "reference": ("cpu", "cuda"),
}
"""Name -> types of device, as torch calls them. Fastest first. A test compares it with what the backends say."""


def no_such_backend(name: str, known: Collection[str] = ATTENTION_BACKENDS) -> InvalidSetting:
    return InvalidSetting(
        f"there is no attention backend '{name}'; choose one of: {', '.join(known)}.", field="attention_backend"
    )
