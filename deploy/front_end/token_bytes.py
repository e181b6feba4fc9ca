"""The bytes of a token that is a part of a character, which no decoded text shows."""

import re
from functools import cache
from typing import Any

BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
"""How vocabularies of whole characters name their tokens of single bytes."""


def half_character(fast: Any, token_id: int) -> bytes | None:
    """The bytes of a token that is a part of a character; None where the vocabulary's name of it says no bytes. fast: a
    tokenizer of transformers."""
    name = fast.convert_ids_to_tokens(token_id)
    if not isinstance(name, str):
        return None
    if match := BYTE_FALLBACK.fullmatch(name):
        return bytes.fromhex(match[1])
    bytes_of = _byte_level()
    return bytes(bytes_of[character] for character in name) if set(name) <= bytes_of.keys() else None


@cache
def _byte_level() -> dict[str, int]:
    """The byte that each character stands for in vocabularies of bytes: printable ones of Latin-1 for themselves, the
    characters from U+0100 on for the others in their order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
