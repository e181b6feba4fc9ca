import json
from pathlib import Path

import pytest

from intarsia.deploy.replay.traces import detect, read_trace
from intarsia.errors import InvalidSetting


def write(path: Path, *lines) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_mooncake_names_its_blocks(tmp_path):
    path = write(tmp_path / "t", {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [4, 9]})
    (request,) = read_trace(path)
    assert (request.length, request.ids, request.block_tokens) == (700, [4, 9], 512)


def test_prompts_without_ids_share_nothing(tmp_path):
    path = write(tmp_path / "t", "TIMESTAMP,ContextTokens,GeneratedTokens", "x,40,1", "x,40,1")
    first, second = read_trace(path)
    assert len(first.ids) == len(second.ids) == 3
    assert not set(first.ids) & set(second.ids)


def test_parts_of_rag_prompts_are_shared_as_prefixes_only(tmp_path):
    one = {"t": 0, "session": 0, "input_length": 48, "output_length": 1, "parts": [["s", 1, 20], ["p", 7, 28]]}
    two = one | {"parts": [["s", 1, 20], ["p", 8, 28]]}
    other = one | {"parts": [["p", 7, 28], ["s", 1, 20]]}
    a, b, c = (request.ids for request in read_trace(write(tmp_path / "t", one, two, other)))
    assert a[:1] == b[:1]
    assert not set(a[1:]) & set(b[1:])
    assert not set(a) & set(c)


def test_sessions_are_interleaved_and_their_ids_kept_apart(tmp_path):
    def session(start: float) -> dict:
        return {"session": "s", "block_size": 64, "requests": [[start, 0, 128, 1, None, None, [[5, 2]]]]}

    first, second = read_trace(write(tmp_path / "t", session(500), session(0)))
    assert (first.ids, second.ids) == ([(1 << 32) + 5, (1 << 32) + 6], [5, 6])  # the second starts 120 s later


def test_longer_prompts_can_be_left_out(tmp_path):
    path = write(tmp_path / "t", "num_prefill_tokens,num_decode_tokens", "40,1", "50,1")
    assert [request.length for request in read_trace(path, longest_prompt=40)] == [40]


@pytest.mark.parametrize(("content", "says"), [("what is this", "no trace of a known format"), ("", "no trace of")])
def test_an_unknown_file_is_refused_with_what_is_known(tmp_path, content: str, says: str):
    with pytest.raises(InvalidSetting, match=says):
        detect(write(tmp_path / "t", content))


def test_a_missing_file_and_a_broken_line_are_said(tmp_path):
    with pytest.raises(InvalidSetting, match="cannot be read: No such file"):
        list(read_trace(tmp_path / "none"))
    with pytest.raises(InvalidSetting, match="not what its format promises"):
        list(read_trace(write(tmp_path / "t", {"hash_ids": [1]})))
    with pytest.raises(InvalidSetting, match="format must be one of mooncake"):
        list(read_trace(write(tmp_path / "t", {"hash_ids": [1]}), "moon"))
