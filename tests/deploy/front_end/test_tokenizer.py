import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from intarsia.deploy.demo import DEMO_MODEL_DIR
from intarsia.deploy.front_end.tokenizer import TextStream, Tokenizer, encode_prompt, text_notes
from intarsia.deploy.settings.options import engine_settings
from intarsia.errors import CorruptCheckpoint, InvalidRequest, InvalidSetting

HALF = "\N{REPLACEMENT CHARACTER}"


def pieces(tokenizer: Tokenizer, token_ids: list[int], at_once: int = 1) -> list[str]:
    stream = tokenizer.stream()
    told = [stream.push(token_ids[start : start + at_once]) for start in range(0, len(token_ids), at_once)]
    return [*told, stream.finish()]


@pytest.mark.parametrize("at_once", [1, 2, 5])
@pytest.mark.parametrize("text", ["plain words", "naïve café", "中文字", "🎉🎉", "👩‍👩‍👧 a\n b", ""])
def test_streamed_text_is_whole_characters_and_all_of_it(byte_tokenizer: Tokenizer, text: str, at_once: int):
    told = pieces(byte_tokenizer, byte_tokenizer.encode(text), at_once)
    assert "".join(told) == text
    assert HALF not in "".join(told)


def test_character_of_four_bytes_comes_with_its_last_byte(byte_tokenizer: Tokenizer):
    ids = byte_tokenizer.encode("🎉")
    assert len(ids) == 3  # the first two bytes are one token
    assert pieces(byte_tokenizer, ids) == ["", "", "🎉", ""]


def test_half_a_character_at_the_end_is_told_by_finish(byte_tokenizer: Tokenizer):
    assert pieces(byte_tokenizer, byte_tokenizer.encode("a🎉")[:-1]) == ["a", "", "", HALF]


def test_special_tokens_have_no_text(byte_tokenizer: Tokenizer):
    eos = byte_tokenizer.encode("<eos>")
    assert len(eos) == 1
    assert pieces(byte_tokenizer, [*byte_tokenizer.encode("hi"), *eos]) == ["h", "i", "", ""]


def test_any_bytes_stream_to_what_they_decode_to_at_once(byte_tokenizer: Tokenizer):
    """Random bytes are seldom UTF-8: a model with random weights says such things."""
    rng = random.Random(7)
    for _ in range(300):
        ids = [rng.randrange(257) for _ in range(rng.randrange(30))]
        assert "".join(pieces(byte_tokenizer, ids, rng.randrange(1, 4))) == byte_tokenizer.decode(ids), ids


def test_a_conversation_has_special_tokens_beside_its_templates_where_they_are_wanted(
    byte_backend: Backend, tmp_path: Path
):
    backend = Backend.from_str(byte_backend.to_str())
    eos = backend.token_to_id("<eos>")
    backend.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", eos)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    fast.chat_template = "{{ messages[0].content }}"
    fast.save_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    plain = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert plain == tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.chat([{"role": "user", "content": "hi"}], add_special_tokens=True) == [eos, *plain]


class SpaceMarking(Tokenizer):
    """As Llama's: a word's first token carries its space, unknown characters fall back to bytes."""

    def __init__(self):
        words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁a", "a", "b", "中"]
        vocab = {word: index for index, word in enumerate(words)}
        self.backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        self.backend.decoder = decoders.Sequence(steps)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.backend.encode(text.replace(" ", "▁")).ids

    def decode(self, token_ids) -> str:
        return self.backend.decode(list(token_ids))


def test_spaces_between_words_survive_streaming():
    tokenizer = SpaceMarking()
    rng = random.Random(7)
    for _ in range(300):
        text = "".join(rng.choice(["a", "b", " ", "  ", "中", "é", "🎉", "\n"]) for _ in range(rng.randrange(20)))
        ids = tokenizer.encode(text)
        assert "".join(pieces(tokenizer, ids, rng.randrange(1, 4))) == tokenizer.decode(ids), text


def test_broken_fallback_bytes_never_fail_and_later_words_come_through():
    tokenizer = SpaceMarking()
    broken = [1 + byte for byte in (0x41, 0xE4, 0xFF, 0x42)]
    assert "".join(pieces(tokenizer, [*broken, *tokenizer.encode("ab a")])).endswith("ab a")


def test_any_cut_of_texts_with_broken_bytes_in_them_streams_to_the_whole(byte_tokenizer: Tokenizer):
    rng = random.Random(seed := 13)
    print("seed", seed)
    for _ in range(300):
        ids = byte_tokenizer.encode("".join(rng.choice(["a", "é", "中", "🎉", " b"]) for _ in range(60)))
        for _ in range(rng.choice([0, 1, 60])):
            ids.insert(rng.randrange(len(ids)), rng.randrange(257))
        assert "".join(pieces(byte_tokenizer, ids, rng.choice([1, 5, 32, 500]))) == byte_tokenizer.decode(ids), ids


def test_bytes_that_never_become_a_character_are_told_and_not_decoded_again_and_again():
    decoded = 0

    class Counting(Tokenizer):
        def decode(self, token_ids) -> str:
            nonlocal decoded
            decoded += len(token_ids)
            return HALF * len(token_ids)

    told = "".join(pieces(Counting(None), [7] * 3000))
    assert told == HALF * 3000
    assert decoded < 3000 * 200  # 9,000,000 if each token decoded all before it


def test_a_text_that_the_tokenizers_library_breaks_on_is_refused():
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+"), "isolated")
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    with pytest.raises(InvalidRequest, match="cannot read this text of 11000000 characters") as refused:
        tokenizer.encode(" " * 11_000_000)
    assert refused.value.field == "prompt"
    assert tokenizer.encode("a a") == [0, 0]


def test_many_tokens_decode_as_few_do(byte_tokenizer: Tokenizer):
    ids = [*byte_tokenizer.encode("é🎉 " * 2000 + "<eos>"), 200, 7]
    whole = byte_tokenizer._fast.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert byte_tokenizer._decodes_as_its_backend
    assert byte_tokenizer.decode(ids) == whole and "<eos>" not in whole


def test_bytes_of_tokens_joined_are_those_of_the_text(byte_tokenizer: Tokenizer):
    text = "é🎉 wood 木 \ufffd"
    ids = byte_tokenizer.encode(text)
    assert b"".join(map(byte_tokenizer.bytes_of, ids)).decode() == text
    halves = [byte_tokenizer.bytes_of(token) for token in ids if "\ufffd" in byte_tokenizer.text_of(token)]
    assert any(half != "\ufffd".encode() for half in halves)


def test_bytes_of_a_byte_token_of_a_vocabulary_of_characters_are_that_byte():
    vocab = {"<unk>": 0, "a": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.ByteFallback()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    ids = tokenizer.encode("a木")
    assert len(ids) == 4 and b"".join(map(tokenizer.bytes_of, ids)) == "a木".encode()


def test_the_text_of_a_token_is_looked_up_once(byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    eos = byte_tokenizer.encode("<eos>")[0]
    assert byte_tokenizer.text_of(eos) == "<eos>"
    monkeypatch.setattr(byte_tokenizer, "_fast", None)
    assert byte_tokenizer.text_of(eos) == "<eos>"


def test_folder_without_tokenizer_files_has_none(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert Tokenizer.load(tmp_path) is None


def test_tokenizer_config_alone_is_no_tokenizer(tmp_path: Path):
    """transformers would make one with an empty vocabulary, to which every text is no tokens at all."""
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    assert Tokenizer.load(tmp_path) is None


def test_truncated_tokenizer_file_is_a_corrupt_checkpoint(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {')
    with pytest.raises(CorruptCheckpoint, match=str(tmp_path)):
        Tokenizer.load(tmp_path)


def test_text_prompt_without_tokenizer_says_to_send_token_ids():
    with pytest.raises(InvalidRequest, match="token ids") as refusal:
        encode_prompt(None, "hello", "tiny-hybrid")
    assert refusal.value.field == "prompt"


def test_stream_of_no_tokens_says_nothing(byte_tokenizer: Tokenizer):
    stream = TextStream(byte_tokenizer)
    assert (stream.push([]), stream.finish()) == ("", "")


def test_a_conversation_becomes_tokens_by_the_checkpoints_own_template(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[me]{% endif %}"
    )
    monkeypatch.setattr(byte_tokenizer._fast, "chat_template", template)
    ids = byte_tokenizer.chat([{"role": "you", "content": "hi"}])
    assert byte_tokenizer.decode(ids) == "[you]hi[me]"


def test_a_template_that_refuses_is_the_callers_error(byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(byte_tokenizer._fast, "chat_template", "{{ raise_exception('only one system message') }}")
    with pytest.raises(InvalidRequest, match="refuses these messages: only one system message") as caught:
        byte_tokenizer.chat([{"role": "you", "content": "hi"}])
    assert caught.value.field == "messages"


def test_a_template_cannot_reach_out_of_its_sandbox(byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(byte_tokenizer._fast, "chat_template", "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        byte_tokenizer.chat([{"role": "you", "content": "hi"}])


def test_a_checkpoint_without_a_template_says_so(byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(byte_tokenizer._fast, "chat_template", None)
    with pytest.raises(InvalidRequest, match="has no chat template"):
        byte_tokenizer.chat([{"role": "you", "content": "hi"}])


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("tokenizer_config.json", {"model_max_length": "many"}),
        ("tokenizer_config.json", {"model_max_length": [1]}),
        ("tokenizer_config.json", {"extra_special_tokens": 3}),
        ("tokenizer_config.json", {"tokenizer_class": []}),
        ("tokenizer.json", {"model": None}),
        ("tokenizer.json", {"added_tokens": {}}),
        ("tokenizer.json", {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}}),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", ""),
        ("tokenizer.json", " " * 10_000 + "{"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_hostile_tokenizer_is_one_typed_error(file: str, fields: dict | str, tmp_path: Path):
    path = Path(shutil.copytree(DEMO_MODEL_DIR, tmp_path / "model"))
    whole = fields if isinstance(fields, str) else json.dumps(json.loads((path / file).read_text()) | fields)
    (path / file).write_text(whole)
    with pytest.raises(CorruptCheckpoint, match="the tokenizer in") as refusal:
        Tokenizer.load(path)
    assert len(str(refusal.value)) < 500 + len(str(path))


def settings_of(model: Path, **given: Any) -> Any:
    return engine_settings(str(model), **given).model


def test_another_folder_gives_the_tokenizer_and_another_file_the_template(tmp_path: Path):
    bare = Path(shutil.copytree(DEMO_MODEL_DIR, tmp_path / "bare"))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (bare / file).unlink()
    assert Tokenizer.of(settings_of(bare)) is None
    found = Tokenizer.of(settings_of(bare, tokenizer=str(DEMO_MODEL_DIR)))
    assert found is not None and found.encode("inlay")
    (tmp_path / "own.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    own = Tokenizer.of(settings_of(DEMO_MODEL_DIR, chat_template=str(tmp_path / "own.jinja")))
    assert own is not None
    assert own.decode(own.chat([{"role": "user", "content": "walnut"}])) == "<walnut>"


@pytest.mark.parametrize("template", ["", " \n", "{% for x in %}", "{{ a", b"\xff", "x" * (2**20 + 1)])
def test_a_file_that_is_no_template_is_refused_by_name(template: str | bytes, tmp_path: Path):
    file = tmp_path / "own.jinja"
    file.write_bytes(template if isinstance(template, bytes) else template.encode())
    with pytest.raises(InvalidSetting, match="chat_template") as refusal:
        Tokenizer.of(settings_of(DEMO_MODEL_DIR, chat_template=str(file)))
    assert refusal.value.field == "chat_template" and "\n" not in str(refusal.value)


def test_notes_tell_what_is_missing_for_text_and_for_chat(tmp_path: Path, byte_tokenizer: Tokenizer):
    assert ["no tokenizer" in note and "--tokenizer" in note for note in text_notes(None)] == [True]
    notes = list(text_notes(byte_tokenizer))
    assert ["no chat template" in note and "--chat-template" in note for note in notes] == [True]
    assert not list(text_notes(Tokenizer.load(DEMO_MODEL_DIR)))


def test_a_template_is_refused_where_the_tokenizer_would_not_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    monkeypatch.setattr(PreTrainedTokenizerFast, "get_chat_template", lambda self, *_: "", raising=False)
    with pytest.raises(InvalidSetting, match="leave chat_template out"):
        Tokenizer.of(settings_of(DEMO_MODEL_DIR, chat_template=str(tmp_path / "own.jinja")))
