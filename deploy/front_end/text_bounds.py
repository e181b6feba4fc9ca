"""How long a text may be whose tokens are to fit: judged before it is tokenised, which takes seconds for megabytes.

A token stands for so many bytes of a text, so a model that takes `max_model_len` tokens takes no text of more bytes
than that many of its longest ones. What the tokens of a shorter text are is known when it has been tokenised; where it
would be much too long, its first pieces tell it.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from ...errors import ContextTooLong

PIECE_CHARS = 1 << 17
"""A text is counted in pieces of that. Where it is cut, a few tokens more are counted than it has."""

USUAL_BYTES_OF_A_TOKEN = 8
"""Most texts have fewer. What has more may be one of a few long tokens, or of far too many: that is counted first."""

SLACK = 2
"""The pieces of a text have never so many times the tokens of the whole."""

KEEPS = {"ByteLevel", "Metaspace", "Prepend", "Digits", "UnicodeScripts"}
"""Steps of tokenizers that leave out nothing of a text."""

COMPOSES = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 4}
"""Steps that may say the same in so many times fewer bytes: three Hangul letters of 9 bytes are a syllable of 3."""


def longest_token_bytes(fast: Any) -> int | None:
    """Bytes of a text that one token stands for at most. None where it may be any number: where the tokenizer leaves
    out white space, say, or has one token for any number of characters that it does not know.

    fast: a tokenizer of transformers.
    """
    backend = getattr(fast, "backend_tokenizer", None)
    if backend is None:
        return None
    normalizer, splitter = _described(backend.normalizer), _described(backend.pre_tokenizer)
    of_normalizer, of_splitter = _factor(normalizer), _factor(splitter)
    added = backend.get_added_tokens_decoder().values()
    vocab = backend.get_vocab()
    if of_normalizer is None or of_splitter is None or any(token.lstrip or token.rstrip for token in added):
        return None
    if not _knows_every_character(backend.model, vocab, "ByteLevel" in f"{normalizer}{splitter}"):
        return None
    # A vocabulary may have a character of two or three bytes in a byte's stead: this is never too little.
    longest = max(len(token.encode("utf-8", "surrogatepass")) for token in vocab)
    return max(4, longest) * of_normalizer * of_splitter


def _described(step: Any) -> Any:
    return json.loads(step.__getstate__()) if step is not None else None


def _factor(step: Any) -> int | None:
    """How many times more bytes go into a step than come out; None: any number."""
    kind = step["type"] if step else "ByteLevel"
    if kind == "Replace":
        pattern = step["pattern"].get("String")
        return None if pattern is None or len(step["content"].encode()) < len(pattern.encode()) else 1
    if kind in ("Split", "Punctuation"):
        return None if step["behavior"] == "Removed" else 1
    if kind == "Sequence":
        product = 1
        for factor in map(_factor, step.get("normalizers", step.get("pretokenizers", ()))):
            if factor is None:
                return None
            product *= factor
        return product
    return 1 if kind in KEEPS else COMPOSES.get(kind)


def _knows_every_character(model: Any, vocab: dict[str, int], has_bytes_as_characters: bool) -> bool:
    """Else what it does not know becomes one token, however much it is, or none."""
    if type(model).__name__ != "BPE":
        return False
    if has_bytes_as_characters:
        from tokenizers.pre_tokenizers import ByteLevel

        return all(character in vocab for character in ByteLevel.alphabet())
    if model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    return model.unk_token is not None and not model.fuse_unk


class TextBound(NamedTuple):
    """Bounds the length of texts that may have at most `max_tokens` tokens."""

    max_tokens: int
    max_bytes: int | None  # None: any number of bytes may be few tokens

    def check(self, size_bytes: int, field: str) -> None:
        """Raises `ContextTooLong` for a text that is longer than any of so many tokens."""
        if self.max_bytes is not None and size_bytes > self.max_bytes:
            raise self.too_long(f"the text has {size_bytes} bytes", size_bytes, field)

    def too_long(self, what: str, size_bytes: int, field: str) -> ContextTooLong:
        """The error for a text of more than `max_bytes`. what: that it is, in words."""
        assert self.max_bytes is not None
        what = f"{what}, and {self.max_tokens} tokens hold at most {self.max_bytes} bytes"
        return ContextTooLong.of(what, self.max_tokens, field=field, asked=size_bytes, limit=self.max_bytes)

    def check_tokens(self, text: str, count: Callable[[str], int], field: str) -> None:
        """Raises `ContextTooLong` where the first pieces of a text have far too many tokens already. count: of a
        piece, which takes some time."""
        if len(text) <= PIECE_CHARS or bytes_of(text) <= USUAL_BYTES_OF_A_TOKEN * self.max_tokens:
            return
        tokens = 0
        for start in range(0, len(text), PIECE_CHARS):
            tokens += count(text[start : start + PIECE_CHARS])
            if tokens > SLACK * self.max_tokens:
                what = f"the first {start + PIECE_CHARS} of {len(text)} characters are about {tokens} tokens"
                raise ContextTooLong.of(what, self.max_tokens, field=field, asked=tokens, limit=self.max_tokens)


def bytes_of(text: str) -> int:
    """The length of a text in UTF-8, in bytes."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
