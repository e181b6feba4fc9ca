import base64
import io
import struct
import zlib
from collections.abc import Callable

import PIL.Image
import pytest

from intarsia.deploy.front_end.images import MAX_IMAGE_BYTES, ImageReader, from_data_url, read_images
from intarsia.errors import CorruptCheckpoint, InvalidRequest
from intarsia.tests.models import picture
from intarsia.workers.pictures.decoding import decode


@pytest.fixture
def reader(tiny: Callable) -> ImageReader:
    return ImageReader(str(tiny("mllama").path))


@pytest.mark.parametrize(
    ("size", "tiles"), [((20, 20), 1), ((60, 25), 3), ((30, 80), 3), ((56, 56), 4), ((28, 112), 4)]
)
def test_tokens_of_an_image_follow_from_the_tiles_it_fills(reader: ImageReader, size: tuple[int, int], tiles: int):
    """Tiles of 28 pixels, of 4 patches and a class token each."""
    assert reader.read(picture(*size, seed=1)).tokens == tiles * 5


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_usual_formats_are_read(reader: ImageReader, kind: str):
    file = io.BytesIO()
    PIL.Image.new("RGB", (20, 20), (9, 8, 7)).save(file, kind)
    assert reader.read(file.getvalue()).tokens == 5


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "0 bytes of an image are none of the formats PNG, JPEG"),
        (b"%PDF-1.7 no picture", "none of the formats"),
        (b"\x00" * (MAX_IMAGE_BYTES + 1), f"the limit is {MAX_IMAGE_BYTES}"),
        (picture(20, 20, 1)[:100], "cannot be decoded"),
    ],
)
def test_what_is_no_image_is_refused_with_the_reason(reader: ImageReader, data: bytes, why: str):
    with pytest.raises(InvalidRequest, match=why) as caught:
        reader.read(data)
    assert caught.value.field == "images"


def test_a_small_file_that_claims_terapixels_is_refused_by_its_header(reader: ImageReader):
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 1_000_000, 1_000_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\x00" * 1000))
    with pytest.raises(InvalidRequest, match=r"pixels|cannot be decoded"):
        reader.read(bomb)


def test_data_urls_give_their_bytes():
    data = picture(20, 20, 1)
    assert from_data_url("data:image/png;base64," + base64.b64encode(data).decode()) == data


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("https://example.org/cat.png", "not from https: this server fetches nothing"),
        ("file:///etc/passwd", "not from file"),
        ("/etc/passwd", "not from /etc/passwd"),
        ("data:image/png,abc", "must read data:image"),
        ("data:image/png;base64,@@@", "no base64"),
    ],
)
def test_other_addresses_are_refused_and_nothing_is_fetched(url: str, why: str):
    with pytest.raises(InvalidRequest, match=why):
        from_data_url(url)


def test_a_model_without_images_says_so():
    assert read_images(None, [], "tiny") == []
    with pytest.raises(InvalidRequest, match="tiny takes no images, and the request has 1"):
        read_images(None, [b"x"], "tiny")


def test_a_checkpoint_that_lacks_its_image_settings_is_corrupt(tiny: Callable, tmp_path):
    with pytest.raises(CorruptCheckpoint, match=r"preprocessor_config\.json cannot be read"):
        ImageReader(str(tmp_path))


def test_more_images_than_a_request_may_have_are_refused_before_one_is_decoded(reader: ImageReader):
    with pytest.raises(InvalidRequest, match=r"2 images; max_images_per_request is 1"):
        read_images(reader, [b"no image", b"nor this"], "tiny")


def test_a_data_url_longer_than_an_image_may_be_is_refused_before_it_is_decoded():
    with pytest.raises(InvalidRequest, match="the limit is"):
        from_data_url("data:image/png;base64," + "@" * (2 * MAX_IMAGE_BYTES))


def test_a_turned_image_is_counted_as_it_is_seen(reader: ImageReader):
    file, exif = io.BytesIO(), PIL.Image.Exif()
    exif[0x0112] = 6
    PIL.Image.new("RGB", (28, 112)).save(file, "JPEG", exif=exif)
    assert reader.read(file.getvalue()).tokens == reader.read(picture(112, 28, 1)).tokens


@pytest.mark.parametrize("size", [(1, 100_000), (100_000, 1)])
def test_a_line_of_pixels_goes_all_the_way_to_tiles(reader: ImageReader, size: tuple[int, int]):
    file = io.BytesIO()
    PIL.Image.new("RGB", size).save(file, "PNG")
    image = reader.read(file.getvalue())
    tiles = reader._processor(images=[[decode(image.data)]], return_tensors="pt")["num_tiles"][0][0]
    assert image.tokens == tiles * 5
