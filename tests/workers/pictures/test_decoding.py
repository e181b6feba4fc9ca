"""Pictures as a person sees them, out of files that mean well; and soon an error out of those that do not."""

import io
import os
import random
import struct
import time
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from intarsia.workers.pictures.decoding import MAX_PARTS, MAX_SCANS, BadPicture, decode

MIB = 2**20
PATIENCE_S = 10.0  # what was mended here took from 11 s to more than a minute


def gradient(width: int, height: int, mode: str = "RGB") -> Image.Image:
    values = np.arange(width * height * 4, dtype=np.uint32).reshape(height, width, 4) * 7 % 256
    return Image.fromarray(values.astype(np.uint8), "RGBA").convert(mode)


def saved(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels(image: Image.Image) -> np.ndarray:
    assert image.mode == "RGB"
    return np.asarray(image)


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_picture_is_turned_as_its_exif_says(kind: str, orientation: int):
    """As transformers' `load_image` does, and browsers. 0 and 9 mean nothing."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(gradient(8, 5), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    with Image.open(io.BytesIO(data)) as image:
        expected = ImageOps.exif_transpose(image).convert("RGB")
    assert np.array_equal(pixels(decode(data)), pixels(expected))
    assert decode(data).size == ((5, 8) if orientation in (5, 6, 7, 8) else (8, 5))


@pytest.mark.parametrize("exif", [b"", b"II", b"MM\0*\xff\xff\xff\xff", b"II*\0\x08\0\0\0\xff\xff" + b"\x12\1" * 99])
def test_exif_that_cannot_be_read_turns_nothing(exif: bytes):
    plain = saved(gradient(8, 5), "PNG")
    data = plain[:33] + chunk(b"eXIf", exif) + plain[33:]
    assert np.array_equal(pixels(decode(data)), pixels(decode(plain)))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_see_through_is_white(mode: str):
    """What alpha hides may be anything; transformers' `convert_to_rgb` puts it on white too."""
    from transformers.image_transforms import convert_to_rgb

    image = gradient(16, 9, mode)
    data = saved(image, "PNG", **({"transparency": 3} if mode == "P" else {}))
    with Image.open(io.BytesIO(data)) as opened:
        assert np.array_equal(pixels(decode(data)), np.asarray(convert_to_rgb(opened, return_numpy=True)))
    assert pixels(decode(saved(Image.new("RGBA", (2, 2), (255, 0, 0, 0)), "PNG"))).min() == 255


def test_sixteen_bits_of_grey_keep_their_upper_eight():
    values = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)
    assert np.array_equal(pixels(decode(saved(Image.fromarray(values), "PNG")))[..., 0], values >> 8)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_picture_counts(kind: str):
    frames = [Image.new("RGB", (6, 6), colour) for colour in ("red", "lime", "blue")]
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:])
    assert np.abs(pixels(decode(data)).astype(int) - [255, 0, 0]).max() <= 3


@pytest.mark.parametrize(
    ("mode", "kind"), [("CMYK", "JPEG"), ("L", "JPEG"), ("1", "PNG"), ("P", "GIF"), ("L", "WEBP"), ("P", "BMP")]
)
def test_other_colours_become_rgb(mode: str, kind: str):
    with Image.open(io.BytesIO(data := saved(gradient(12, 7, mode), kind))) as image:
        assert np.array_equal(pixels(decode(data)), pixels(image.convert("RGB")))


@pytest.mark.parametrize("size", [(1, 100_000), (100_000, 1), (1, 1)])
def test_a_picture_may_be_a_line(size: tuple[int, int]):
    if max(size) > 65_535:
        assert decode(saved(Image.new("RGB", size), "PNG")).size == size
    assert decode(saved(Image.new("RGB", (min(size[0], 60_000), min(size[1], 60_000))), "JPEG")).mode == "RGB"


def jpeg_segments(marker: bytes, body: bytes) -> bytes:
    whole = saved(gradient(20, 20), "JPEG")
    segment = b"\xff" + marker + struct.pack(">H", len(body) + 2) + body
    return whole[:2] + segment * (MIB // len(segment)) + whole[2:]


def progressive_jpeg(scans: int) -> bytes:
    whole = saved(Image.new("RGB", (2000, 2000)), "JPEG", progressive=True)
    last = whole.rindex(b"\xff\xda")
    return whole[:-2] + whole[last:-2] * scans + whole[-2:]


def png_chunks(kind: bytes, body: bytes, after: bool) -> bytes:
    whole, part = saved(gradient(20, 20), "PNG"), chunk(kind, body)
    at = len(whole) - 12 if after else 33
    return whole[:at] + part * (MIB // len(part)) + whole[at:]


def gif_blocks(block: bytes) -> bytes:
    whole = saved(gradient(20, 20, "P"), "GIF")
    at = 13 + (3 << ((whole[10] & 7) + 1))
    return whole[:at] + block * (MIB // len(block)) + whole[at:]


@pytest.mark.parametrize(
    "data",
    [
        jpeg_segments(b"\xe1", b"Exif\0\0ab"),
        jpeg_segments(b"\xe2", b""),
        jpeg_segments(b"\xfe", b""),
        jpeg_segments(b"\xdb", b""),
        progressive_jpeg(1000),
        png_chunks(b"abCd", b"", after=False),
        png_chunks(b"tEXt", b"a\0b", after=True),
        png_chunks(b"IDAT", b"", after=False),
        png_chunks(b"fdAT", b"\0\0\0\1", after=True),
        gif_blocks(b"\x21\xfe\0"),
        gif_blocks(b"\x21\xfe\1a\0"),
        gif_blocks(b"\0"),
        gif_blocks(b"\x21\xfe" + b"\1a" * MAX_PARTS + b"\0"),
    ],
    ids=[str(number) for number in range(13)],
)
def test_a_file_of_endless_parts_is_refused_at_once(data: bytes):
    with pytest.raises(BadPicture, match=rf"more than {MAX_PARTS} parts|scans; the limit is {MAX_SCANS}"):
        decode(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_exif_that_names_the_same_bytes_over_and_over_costs_nothing(kind: str):
    """Read as a whole it takes 65,000 times its size."""
    entries = 5000
    large = 60_000 if kind == "JPEG" else 8 * MIB
    body = struct.pack("<H", entries) + b"".join(
        struct.pack("<HHII", tag + 0x200, 7, large - 100_000 if large > MIB else 100, 8) for tag in range(entries)
    )
    exif = b"Exif\0\0" * (kind == "JPEG") + b"II*\0\x08\0\0\0" + body
    exif = exif.ljust(large, b"\0")
    whole = saved(gradient(20, 20), kind)
    if kind == "PNG":
        data = whole[:33] + chunk(b"eXIf", exif) + whole[33:]
    elif kind == "JPEG":
        data = whole[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + whole[2:]
    else:
        data = saved(gradient(20, 20), kind, exif=exif)
    began_s = time.process_time()
    assert decode(data).size == (20, 20)
    assert time.process_time() - began_s < PATIENCE_S


def test_more_pixels_than_allowed_are_refused_by_the_header():
    with pytest.raises(BadPicture, match="has 100 x 100 pixels; the limit is 9999"):
        decode(saved(Image.new("RGB", (100, 100)), "PNG"), max_pixels=9999)


def test_any_bytes_are_a_picture_or_an_error():
    seed = int(os.environ.get("SEED", random.randrange(2**32)))
    print(f"SEED={seed}")
    draw = random.Random(seed)
    exif = Image.Exif()
    exif[0x0112] = 6
    files = [
        saved(gradient(30, 20), "JPEG", progressive=True, exif=exif),
        saved(gradient(30, 20, "CMYK"), "JPEG"),
        saved(gradient(30, 20, "RGBA"), "PNG", exif=exif),
        saved(gradient(30, 20, "P"), "GIF"),
        saved(gradient(30, 20), "WEBP", exif=exif),
        saved(gradient(30, 20), "BMP"),
    ]
    for _ in range(1500):
        data = bytearray(draw.choice(files))
        for _ in range(draw.choice((1, 1, 2, 5))):
            at = draw.randrange(len(data))
            data[at : at + draw.randrange(4)] = draw.randbytes(draw.randrange(4))
        if draw.random() < 0.2:
            del data[draw.randrange(len(data)) :]
        try:
            assert decode(bytes(data), max_pixels=10**6).mode == "RGB"
        except AssertionError:
            raise
        except Exception:  # noqa: BLE001  decoders raise whatever they like; front ends make one typed error of it
            continue
