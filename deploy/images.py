"""Images in requests: taken as bytes or data URLs, looked at and bounded before they go anywhere. None is fetched."""

import base64
import binascii
import io
from collections.abc import Sequence

from PIL import Image as Pillow
from PIL import UnidentifiedImageError

from ..controller.images import Image
from ..controller.info import EngineInfo
from ..errors import InvalidRequest
from ..workers.tiles import count_tiles, tile_processor, tile_tokens

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")

MAX_IMAGE_BYTES = 10 * 1024 * 1024
MAX_IMAGE_PIXELS = 40_000_000
"""Decoded to RGB, 120 MB. A few kilobytes of PNG can claim to be terapixels, so the header is asked first."""


class ImageReader:
    """Checks images for one model, and knows how many tokens each becomes."""

    def __init__(self, model_dir: str):
        """Raises `CorruptCheckpoint` if the checkpoint does not say how images are prepared."""
        from transformers import AutoConfig

        self._processor = tile_processor(model_dir)
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        self._tile_tokens = tile_tokens(config.vision_config)

    @classmethod
    def of(cls, info: EngineInfo) -> "ImageReader | None":
        """For the model of a running engine; None if it takes no images."""
        return cls(info.model_dir) if info.image_token_id is not None else None

    def read(self, data: bytes) -> Image:
        """Raises `InvalidRequest` for what is no image, or too large a one."""
        if len(data) > MAX_IMAGE_BYTES:
            raise InvalidRequest(
                f"an image has {len(data)} bytes; the limit is {MAX_IMAGE_BYTES}. Send a smaller one.",
                field="images",
                asked=len(data),
                limit=MAX_IMAGE_BYTES,
            )
        try:
            with Pillow.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > MAX_IMAGE_PIXELS:
                    raise InvalidRequest(
                        f"an image has {width} x {height} pixels; the limit is {MAX_IMAGE_PIXELS} in all. Send a "
                        "smaller one.",
                        field="images",
                        asked=width * height,
                        limit=MAX_IMAGE_PIXELS,
                    )
                image.convert("RGB")  # what workers will do: whatever can go wrong goes wrong here
        except InvalidRequest:
            raise
        except UnidentifiedImageError:
            raise InvalidRequest(
                f"{len(data)} bytes of an image are none of the formats {', '.join(FORMATS)}", field="images"
            ) from None
        except Exception as error:  # noqa: BLE001  decoders raise whatever they like on broken files
            raise InvalidRequest(f"an image can not be decoded: {error}", field="images") from None
        return Image(data, count_tiles(self._processor, width, height) * self._tile_tokens)


def read_images(reader: ImageReader | None, images: Sequence[bytes], model: str) -> list[Image]:
    """The images of a request. Raises `InvalidRequest`; also when the model takes none."""
    if not images:
        return []
    if reader is None:
        raise InvalidRequest(f"{model} takes no images, and the request has {len(images)}", field="images")
    return [reader.read(data) for data in images]


def from_data_url(url: str) -> bytes:
    """The bytes of "data:image/png;base64,....". Raises `InvalidRequest` for any other address: nothing is fetched."""
    scheme, _, rest = url.partition(":")
    if scheme.lower() != "data":
        raise InvalidRequest(
            f"images are taken as base64 data URLs (data:image/png;base64,...), not from {scheme[:20] or 'nowhere'}: "
            "this server fetches nothing",
            field="images",
        )
    head, comma, body = rest.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidRequest("an image's data URL must read data:image/...;base64,...", field="images")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"an image's data URL is no base64: {error}", field="images") from None
