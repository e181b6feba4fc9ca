"""From the bytes of an image file to its pixels, for front ends and workers alike. Free of torch.

The pixels are those that a person sees in a browser, as transformers' own loading makes them: turned as the file's
EXIF says, see-through parts on white, of an animation the first frame.
"""

import io
import re
from collections.abc import Iterator
from typing import Any

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")

MAX_PARTS = 8192
"""Chunks, segments or blocks of one file. Decoders take some us for each, and some ms for each scan: 272 KB of a
thousand scans took 11 s, 10 MB of empty EXIF segments 71 s."""

MAX_PIXELS = 40_000_000
"""Decoded to RGB, 120 MB. A few kilobytes of PNG can claim to be terapixels, so the header is asked first."""

MAX_SCANS = 64
"""Of a progressive JPEG; encoders make 10."""

ORIENTATION, SHORT = 0x0112, 3  # of EXIF, and its type
JPEG_NOTES = {*range(0xE1, 0xEE), 0xEF, 0xFE}  # segments for applications; APP0 and APP14 tell how colours are stored
PNG_PIXELS = {b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"}


class BadPicture(ValueError):
    """A file that is not decoded, with the reason."""


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> Any:
    """Pillow's image in RGB. Raises `BadPicture` before anything is decoded, or any error that a decoder raises.

    max_pixels: that its header may claim
    """
    from PIL import Image

    data, exif = _pixels_and_notes(data)
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        width, height = image.size
        if width * height > max_pixels:
            raise BadPicture(f"has {width} x {height} pixels; the limit is {max_pixels} in all")
        image.load()
        turns = Image.Transpose
        turn = {
            2: turns.FLIP_LEFT_RIGHT, 3: turns.ROTATE_180, 4: turns.FLIP_TOP_BOTTOM, 5: turns.TRANSPOSE,
            6: turns.ROTATE_270, 7: turns.TRANSVERSE, 8: turns.ROTATE_90,
        }.get(_orientation(exif or image.info.get("exif", b"")))  # fmt: skip
        rgb = _on_white(_eight_bits(image))
        return rgb if turn is None else rgb.transpose(turn)


def _pixels_and_notes(data: bytes) -> tuple[bytes, bytes]:
    """The file without what is not about its pixels, and its EXIF. Decoders read notes of any number and size, and
    not in bounds: EXIF may name the same bytes 60,000 times over. Raises `BadPicture`."""
    if data.startswith(b"\xff\xd8"):
        return _jpeg(data)
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return _png(data)
    if data.startswith(b"GIF8"):
        for count, _ in enumerate(_gif_blocks(data)):
            _check_parts(count)
    return data, b""


def _jpeg(data: bytes) -> tuple[bytes, bytes]:
    kept, exif, at, count = [data[:2]], b"", 2, 0
    while data[at : at + 1] == b"\xff" and data[at + 1 : at + 2] != b"\xda":
        _check_parts(count := count + 1)
        marker = data[at + 1] if at + 1 < len(data) else 0
        end = at + (1 if marker == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4], "big"))
        if marker == 0xE1 and not exif and data[at + 4 : at + 10] == b"Exif\0\0":
            exif = data[at + 4 : end]
        if marker not in JPEG_NOTES and marker != 0xFF:
            kept.append(data[at:end])
        at = end
    scans = data.count(b"\xff\xda", at)
    if scans > MAX_SCANS:
        raise BadPicture(f"has {scans} scans; the limit is {MAX_SCANS}")
    _check_parts(sum(1 for _ in re.finditer(rb"\xff[^\x00\xd0-\xd7]", data[at:])))
    return b"".join((*kept, data[at:])), exif


def _png(data: bytes) -> tuple[bytes, bytes]:
    kept, exif, at, count = [data[:8]], b"", 8, 0
    while at < len(data):
        _check_parts(count := count + 1)
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        kind = data[at + 4 : at + 8]
        if kind == b"eXIf":
            exif = data[at + 8 : end - 4]
        if kind in PNG_PIXELS:
            kept.append(data[at:end])
        at = end
    return b"".join(kept), exif


def _gif_blocks(data: bytes) -> Iterator[int]:
    """Up to the first image, which is all that is looked at."""
    at = 13 + (3 << ((data[10] & 7) + 1) if len(data) > 10 and data[10] & 0x80 else 0)
    while at < len(data) and data[at] != 0x2C:
        yield at
        if data[at] != 0x21:  # no extension: decoders pass over it
            at += 1
            continue
        at += 2
        while at < len(data) and data[at]:
            yield at
            at += 1 + data[at]
        at += 1


def _check_parts(count: int) -> None:
    if count > MAX_PARTS:
        raise BadPicture(f"has more than {MAX_PARTS} parts")


def _orientation(exif: bytes) -> int:
    """As the first directory of a TIFF says; 1, upright, where it cannot be read."""
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II": "little", b"MM": "big"}.get(tiff[:2])
    if order is None:
        return 1

    def number(at: int, size: int) -> int:
        return int.from_bytes(tiff[at : at + size], order)  # type: ignore[arg-type]

    start = number(4, 4)
    for entry in range(start + 2, start + 2 + 12 * number(start, 2), 12):
        if number(entry, 2) == ORIENTATION and number(entry + 2, 2) == SHORT:
            return number(entry + 8, 2)
    return 1


def _eight_bits(image: Any) -> Any:
    """Of 16, the upper ones. Pillow would show everything above 255 as white."""
    if not image.mode.startswith("I"):
        return image
    import numpy as np
    from PIL import Image

    return Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))


def _on_white(image: Any) -> Any:
    """As transformers' `convert_to_rgb` does."""
    from PIL import Image

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    seen = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen).convert("RGB")
