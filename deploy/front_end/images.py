"""Images in requests: taken as bytes or data URLs, looked at and bounded before they go anywhere."""

import base64
import binascii
import threading
from collections.abc import Sequence

from PIL import UnidentifiedImageError

from ...errors import InvalidRequest
from ...proto.request import Image
from ...proto.status import EngineInfo
from ...workers.checkpoint.json_file import clipped
from ...workers.pictures.decoding import FORMATS, BadPicture, decode
from ...workers.pictures.tiling import count_tiles, tile_processor, tile_tokens

MAX_IMAGE_BYTES = 10 * 1024 * 1024
LONGEST_SCHEME_CHARS = 20

AT_ONCE = 2
"""Images that one front end decodes at a time: each may take 0.6 GB while it is."""


class ImageReader:
    """Checks images for one model, and knows how many tokens each becomes."""

    def __init__(self, model_dir: str, max_images: int = 1):
        """max_images: in one request. Raises `CorruptCheckpoint` if the checkpoint does not say how images are
        prepared."""
        from transformers import AutoConfig

        self.max_images = max_images
        self._processor = tile_processor(model_dir)
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
        self._tile_tokens = tile_tokens(config.vision_config)
        self._turns = threading.Semaphore(AT_ONCE)

    @classmethod
    def of(cls, info: EngineInfo) -> "ImageReader | None":
        """The reader for the model of a running engine; None if it takes no images."""
        return cls(info.model_dir, info.max_images_per_request) if info.image_token_id is not None else None

    def read(self, data: bytes) -> Image:
        """Raises `InvalidRequest` for what is no image, or too large a one."""
        _check_size(len(data))
        try:
            with self._turns:
                width, height = decode(data).size  # as workers will do: whatever can go wrong goes wrong here
        except BadPicture as error:
            raise InvalidRequest(f"an image {error}. Send a smaller or plainer one.", field="images") from None
        except UnidentifiedImageError:
            raise InvalidRequest(
                f"{len(data)} bytes of an image are none of the formats {', '.join(FORMATS)}", field="images"
            ) from None
        except Exception as error:  # noqa: BLE001  decoders raise whatever they like on broken files
            raise InvalidRequest(f"an image cannot be decoded: {clipped(str(error))}", field="images") from None
        return Image(data, count_tiles(self._processor, width, height) * self._tile_tokens)


def read_images(reader: ImageReader | None, images: Sequence[bytes | str], model: str) -> list[Image]:
    """The images of a request, as files or data URLs. Raises `InvalidRequest`; also when the model takes none."""
    if not images:
        return []
    for image in images:
        if isinstance(image, str):
            _check_scheme(image)  # who sent an address is told that first, whatever the model takes
    reader = check_images(reader, images, model)
    return [reader.read(from_data_url(image) if isinstance(image, str) else image) for image in images]


def check_images(reader: ImageReader | None, images: Sequence[bytes | str], model: str) -> ImageReader:
    """Raises `InvalidRequest` for images that the model does not take, be they what they may."""
    if reader is None:
        raise InvalidRequest(f"{model} takes no images, and the request has {len(images)}", field="images")
    if len(images) > reader.max_images:  # before any is decoded
        raise InvalidRequest(
            f"the request has {len(images)} images; max_images_per_request is {reader.max_images}. Send "
            "fewer, or start the engine with a larger one.",
            field="images",
            asked=len(images),
            limit=reader.max_images,
        )
    return reader


def _check_size(size: int) -> None:
    if size > MAX_IMAGE_BYTES:
        raise InvalidRequest(
            f"an image has {size} bytes; the limit is {MAX_IMAGE_BYTES}. Send a smaller one.",
            field="images",
            asked=size,
            limit=MAX_IMAGE_BYTES,
        )


def _check_scheme(url: str) -> None:
    scheme = url[:LONGEST_SCHEME_CHARS].partition(":")[0]
    if scheme.lower() != "data":
        raise InvalidRequest(
            f"images are taken as base64 data URLs (data:image/png;base64,...), not from {scheme or 'nowhere'}: "
            "this server fetches nothing",
            field="images",
        )


def from_data_url(url: str) -> bytes:
    """The bytes of "data:image/png;base64,....". Raises `InvalidRequest` for any other address: nothing is fetched."""
    _check_scheme(url)
    head, comma, body = url.partition(":")[2].partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidRequest("an image's data URL must read data:image/...;base64,...", field="images")
    _check_size(len(body) * 3 // 4 - 2)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"an image's data URL is no base64: {error}", field="images") from None
