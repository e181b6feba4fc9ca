"""Images in a prompt: where their encoded tokens lie, and which text sees them.

A text token sees the images that stand right before each other and latest before it. Such a run of images begins at a
block of its own, so that a layer attends to it as to any row of blocks:

    prompt           <img> what is <img> <img> here
    encoder blocks   [  1  ][  1 ]  [  2  ][ 2 3][  3  ]
    sees              1    1   1     2    2 3   2 3
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from ..kvcache.prefix import Encoder
from ..proto.request import Image
from ..proto.step import EncoderInput, View


class Gallery(NamedTuple):
    """The images of one request, laid out."""

    encoder: Encoder
    views: tuple[View, ...]
    inputs: tuple[EncoderInput, ...]


def lay_out(prompt: Sequence[int], image_token_id: int, images: Sequence[Image], block_tokens: int) -> Gallery:
    """`prompt` holds `image_token_id` once for each of `images`, in their order."""
    places = [position for position, token in enumerate(prompt) if token == image_token_id]
    views: list[View] = []
    inputs: list[EncoderInput] = []
    start = end = 0  # of the run, in tokens of the encoder's output
    last = -2
    for position, image in zip(places, images, strict=True):
        if position != last + 1:
            start = end = -(-end // block_tokens) * block_tokens
        inputs.append(EncoderInput(end, image.data))
        end += image.tokens
        views.append(View(position, start // block_tokens, end - start))
        last = position
    content = sha256(b"".join(sha256(image.data).digest() for image in images))
    content.update(repr([view[1:] for view in views]).encode())
    return Gallery(Encoder(content.digest(), end), tuple(views), tuple(inputs))
