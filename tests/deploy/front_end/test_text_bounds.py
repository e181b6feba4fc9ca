"""How long a text may be: never shorter than one whose tokens fit."""

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from intarsia.deploy.front_end.text_bounds import PIECE_CHARS, TextBound, bytes_of, longest_token_bytes
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.errors import RequestTooLarge

BYTES = {character: n for n, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256, "▁": 257}


def bpe(vocab: dict[str, int], normalizer: Any = None, splitter: Any = None, **options: Any) -> Any:
    backend = Backend(models.BPE(vocab=vocab, merges=[], **options))
    if normalizer is not None:
        backend.normalizer = normalizer
    if splitter is not None:
        backend.pre_tokenizer = splitter
    return PreTrainedTokenizerFast(tokenizer_object=backend)


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA_3 = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\w+"), "isolated"), BYTE_LEVEL])


@pytest.mark.parametrize(
    ("fast", "expected"),
    [
        (bpe(BYTES | {"abcdefgh": 256}, splitter=BYTE_LEVEL), 8),
        (bpe(BYTES | {"abcdefgh": 256}, splitter=LLAMA_3), 8),
        (bpe(BYTES | {"abcdefgh": 256}, normalizers.NFC(), BYTE_LEVEL), 32),  # composes up to four times as much
        (bpe(FALLBACK, normalizers.Replace(" ", "▁"), byte_fallback=True, fuse_unk=True, unk_token="<unk>"), 6),
        (bpe({"a": 0, "<unk>": 1}, unk_token="<unk>"), 5),  # each character that it does not know is a token
        (bpe({"a": 0}, splitter=BYTE_LEVEL), None),  # other bytes than a are left out
        (bpe({"a": 0, "<unk>": 1}, unk_token="<unk>", fuse_unk=True), None),
        (bpe(BYTES, normalizers.Strip(), BYTE_LEVEL), None),
        (bpe(BYTES, normalizers.Replace(Regex(" +"), " "), BYTE_LEVEL), None),
        (bpe(BYTES, splitter=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), BYTE_LEVEL])), None),
        (bpe(BYTES, splitter=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTE_LEVEL])), None),
        (PreTrainedTokenizerFast(tokenizer_object=Backend(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))), None),
        (object(), None),  # one written in Python
    ],
)  # fmt: skip
def test_a_token_holds_as_many_bytes_as_the_longest_where_nothing_is_left_out(fast: Any, expected: int | None):
    assert longest_token_bytes(fast) == expected


def test_a_token_that_takes_the_white_space_around_it_holds_any_number_of_bytes():
    fast = bpe(BYTES, splitter=BYTE_LEVEL)
    fast.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert longest_token_bytes(fast) is None


def test_no_text_whose_tokens_fit_is_refused():
    rng = random.Random(seed := 9)
    print("seed", seed)
    backend = Backend(models.BPE(vocab=BYTES | {"aa": 256, "aaaa": 257}, merges=[("a", "a"), ("aa", "aa")]))
    backend.pre_tokenizer, backend.decoder = BYTE_LEVEL, decoders.ByteLevel()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    longest = tokenizer.longest_token_bytes
    assert longest == 4
    for _ in range(300):
        text = "".join(rng.choice(["aaaa", "a", "b", "é", "🎉"]) for _ in range(rng.randrange(200)))
        count = len(tokenizer.encode(text))
        TextBound(count, longest * count).check(bytes_of(text), "prompt")
        assert tokenizer.encode_bounded(text, TextBound(count, longest * count)) == tokenizer.encode(text)


def test_a_text_of_more_bytes_than_all_tokens_hold_is_refused_with_the_numbers():
    with pytest.raises(RequestTooLarge, match="has 4001 bytes, and 1000 tokens hold at most 4000"):
        TextBound(1000, 4000).check(4001, "prompt")
    TextBound(1000, None).check(10**9, "prompt")


def test_far_too_many_tokens_are_seen_in_the_first_pieces_of_a_text():
    counted: list[int] = []

    def count(piece: str) -> int:
        counted.append(len(piece))
        return len(piece.strip())

    bound = TextBound(PIECE_CHARS // 4, None)
    with pytest.raises(RequestTooLarge, match=f"maximum context length is {PIECE_CHARS // 4}"):
        bound.check_tokens("x" * 100 * PIECE_CHARS, count, "prompt")
    assert counted == [PIECE_CHARS]
    bound.check_tokens(" " * 100 * PIECE_CHARS, count, "prompt")  # white space, of which much is a token
    assert len(counted) == 101
    bound.check_tokens("x" * PIECE_CHARS, count, "prompt")  # short: it is known at once
    assert len(counted) == 101


def test_a_text_of_any_length_that_is_few_tokens_is_read(byte_tokenizer: Tokenizer):
    bound = TextBound(1000, None)
    with pytest.raises(RequestTooLarge):
        byte_tokenizer.encode_bounded("x" * 2 * PIECE_CHARS, bound)
    assert len(byte_tokenizer.encode_bounded("x" * 9000, bound)) == 9000  # what is too much the engine says
