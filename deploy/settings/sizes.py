"""Amounts as people write them: bytes with a unit, tokens by the thousand."""

import contextlib
import re
from collections.abc import Mapping
from typing import Any

from ...errors import InvalidSetting

BYTES: Mapping[str, int] = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip

TOKENS: Mapping[str, int] = {"": 1, "k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}
"""As vLLM has it: 32k is 32,000, and 32K is 32,768."""

NUMBER = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(value: Any, field: str) -> int:
    """A number of bytes from 1048576, "1048576", "1MiB" or "1 MB". Raises `InvalidSetting`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = NUMBER.fullmatch(str(value))
    if match is None or match[2].upper() not in BYTES:
        raise InvalidSetting(
            f"{field} must be a number of bytes with an optional unit (B, KiB, MiB, GiB, TiB, KB, MB, GB, TB), "
            f"got {value!r}",
            field=field,
        )
    return int(float(match[1]) * BYTES[match[2].upper()])


def parse_tokens(value: Any, field: str) -> int:
    """A number of tokens from 32768, "32768", "32K", "32k" or "1.5m". Raises `InvalidSetting`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = NUMBER.fullmatch(str(value).removeprefix("-"))
    tokens = float(match[1]) * TOKENS[match[2]] if match is not None and match[2] in TOKENS else 0.5
    if tokens != int(tokens):
        raise InvalidSetting(
            f"{field} must be a whole number of tokens, or one with a unit (32k is 32,000, 32K is 32,768, 1m is "
            f"1,000,000, 1M is 1,048,576), got {value!r}",
            field=field,
        )
    return int(tokens) * (-1 if str(value).startswith("-") else 1)


def parse_lengths(text: str | None) -> list[int]:
    """Lengths in tokens from "2048,8192" or "2K,8K"; none for None."""
    try:
        return [parse_tokens(part, "context") for part in text.split(",")] if text is not None else []
    except InvalidSetting:
        raise InvalidSetting(
            f"context must be whole numbers of tokens, separated by commas; got {text!r}", field="context"
        ) from None


def parse_expected_length(value: str | int | None, field: str) -> int | None:
    """Tokens of a usual request; None for none, or for an empty variable. Raises `InvalidSetting`."""
    if value is None or value == "":
        return None
    with contextlib.suppress(InvalidSetting):
        if (tokens := parse_tokens(value, field)) > 0:
            return tokens
    raise InvalidSetting(
        f"{field} (EXPECTED_AVERAGE_SEQ_LENGTH) must be a positive whole number of tokens, got {value!r}", field=field
    )
