"""How little memory for keys and values a tiny model can be served with, so that requests have to give way."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from transformers import AutoConfig

from intarsia.deploy.proof.engines import least_memory as of_layers
from intarsia.workers.checkpoint.layer_specs import positions_of, read_layers


class Asked(Protocol):
    """A checkpoint, and the images of each prompt for it."""

    @property
    def path(self) -> Path: ...

    @property
    def images(self) -> Sequence[Sequence[bytes]]: ...


def least_memory(model: Asked, block_size: int, tokens: int, ranks: int = 1, item_bytes: int = 4) -> int:
    """Bytes on a rank in which a request of so many tokens just fits, to a kibibyte, and a large page to spare.

    item_bytes: of a number in the cache
    """
    config = AutoConfig.from_pretrained(model.path).get_text_config()
    layers = read_layers(config, ranks, item_bytes)
    encoder_tokens = 3 * -(-20 // block_size) * block_size if any(model.images) else 0  # 4 tiles of 5, of 3 images
    return of_layers(layers, block_size, tokens, positions_of(config), encoder_tokens)
