"""A large file of the Hub that another process began to fetch is taken up where that one was.

huggingface_hub writes each download to a file of a name of its own, and removes it where it ends early. So a large file
is fetched here, by its means, into `blobs/SHA256.part` of its cache; what is complete and has the sum that the Hub says
gets the name that the cache has for it, and huggingface_hub finds it there. Files of Xet storage come in chunks by
another protocol, without ranges, and are left to huggingface_hub.
"""

import fcntl
import hashlib
import os
import re
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlsplit

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers

from .hub import home_of

LARGE_BYTES = constants.DOWNLOAD_CHUNK_SIZE
"""Files up to this size begin anew: of less than a piece nothing is kept."""

SHA256 = re.compile(r"[0-9a-f]{64}")
PIECE_BYTES = 2**22


class _Place(NamedTuple):
    """Where a file is."""

    url: str
    sha256: str
    size: int
    headers: Mapping[str, str]


def take_up(name: str, commit: str, file: str, bar: Any) -> None:
    """Fetch a large file into the Hub's cache, from where another process was. Does nothing where that cannot be done,
    and leaves it to huggingface_hub. Processes that want the same file take turns.

    bar: a class of bars, as huggingface_hub wants one

    Raises what huggingface_hub does, and `OSError` for a file that cannot be written.
    """
    place = _place(hf_hub_url(name, file, revision=commit))
    if place is None:
        return
    blob = home_of(name) / "blobs" / place.sha256
    part = blob.with_suffix(".part")
    blob.parent.mkdir(parents=True, exist_ok=True)
    with part.open("a+b") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        if blob.exists():  # the other has completed it
            part.unlink(missing_ok=True)
            return
        _complete(opened, place, bar)
        if _sum_of(opened) != place.sha256:  # of another's bytes, or damaged: once more from the front
            opened.truncate(0)
            _complete(opened, place, bar)
        if _sum_of(opened) == place.sha256:
            os.replace(part, blob)
        else:  # it is not removed, for others may wait for it
            opened.truncate(0)


def bytes_of_parts(name: str) -> int:
    """What is here of a model's files that are not complete."""
    return sum(part.stat().st_size for part in (home_of(name) / "blobs").glob("*.part"))


def _place(url: str) -> _Place | None:
    """None: it is small, in Xet storage, or the Hub says no sum of it."""
    headers = build_hf_headers()
    said = get_hf_file_metadata(url, headers=headers)
    is_in_xet = said.xet_file_data is not None and not constants.HF_HUB_DISABLE_XET
    etag, size = said.etag or "", said.size or 0
    if is_in_xet or not SHA256.fullmatch(etag) or not LARGE_BYTES < size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
        return None
    if urlsplit(said.location).netloc != urlsplit(url).netloc:  # the token is for the Hub alone
        headers = {key: value for key, value in headers.items() if key.lower() != "authorization"}
    return _Place(said.location, etag, size, headers)


def _complete(opened: BinaryIO, place: _Place, bar: Any) -> None:
    """Fetch what the file lacks."""
    opened.seek(0, os.SEEK_END)
    if opened.tell() > place.size:
        opened.truncate(0)
        opened.seek(0)
    have: int = opened.tell()
    more: Any = {"headers": dict(place.headers), "expected_size": place.size, "tqdm_class": bar}
    http_get(place.url, opened, resume_size=have, **more)
    opened.flush()


def _sum_of(opened: BinaryIO) -> str:
    opened.seek(0)
    digest = hashlib.sha256()
    while piece := opened.read(PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()
