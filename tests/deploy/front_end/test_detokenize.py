import asyncio
import random

import pytest

from intarsia.deploy.front_end.detokenize import AT_ONCE_VALUES, StopGate, _parts, whole_answers, with_text
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.errors import InvalidRequest
from intarsia.proto.reply import Delta, Rows, TokenLogprobs
from intarsia.proto.request import SamplingParams


def through(gate: StopGate, pieces: list[str]) -> tuple[str, str | None]:
    told = ""
    for piece in pieces:
        text, stop = gate.push(piece)
        told += text
        if stop is not None:
            return told, stop
    return told + gate.rest(), None


@pytest.mark.parametrize(
    ("stops", "pieces", "told", "stop"),
    [
        (["</s>"], ["a < b", " end"], "a < b end", None),
        (["</s>"], ["end </", "s> more"], "end ", "</s>"),
        (["</s>"], ["end </", "sure"], "end </sure", None),
        (["ab", "b"], ["xa", "b"], "x", "ab"),  # the first to begin
        (["aab"], ["a", "a", "a", "b"], "a", "aab"),
        (["\n\n"], ["one\n", "\ntwo"], "one", "\n\n"),
        ([], ["any", "thing"], "anything", None),
        (["z"], ["half a </"], "half a </", None),
    ],
)
def test_text_passes_up_to_the_first_stop(stops: list[str], pieces: list[str], told: str, stop: str | None):
    assert through(StopGate(stops, include=False), pieces) == (told, stop)


def test_the_stop_itself_is_told_when_that_is_wanted():
    assert through(StopGate(["</s>"], include=True), ["end </", "s> more"]) == ("end </s>", "</s>")


def test_any_cut_of_a_text_ends_at_the_same_place():
    rng = random.Random(seed := 11)
    print("seed", seed)
    for _ in range(2000):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(0, 14)))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        pieces, rest = [], text
        while rest:
            size = rng.randint(1, len(rest))
            pieces.append(rest[:size])
            rest = rest[size:]
        first = min((text.find(stop) for stop in stops if stop in text), default=len(text))
        told, found = through(StopGate(stops, include=False), pieces)
        assert (found is not None) == any(stop in text for stop in stops)
        assert found is None or (found in stops and text.startswith(told + found))
        # Cut finely, a stop that ends earlier is seen before one that begins earlier.
        assert text.startswith(told) and (told == text[:first] or (found is not None and len(told) > first))
        assert not any(stop in told for stop in stops)


class Scripted:
    """A generation of one token per delta, for each of its answers in turn."""

    def __init__(self, *answers: list[int]):
        self._answers = answers
        self.ended: list[int] = []

    async def __aiter__(self):
        for n in range(max(map(len, self._answers))):
            for index, ids in enumerate(self._answers):
                if n < len(ids) and index not in self.ended:
                    reason = "length" if n == len(ids) - 1 else None
                    yield Delta((ids[n],), None, reason, answer=index)

    def end(self, index: int) -> None:
        self.ended.append(index)

    def enough(self, index: int) -> None:
        pass


def told_by(tokenizer: Tokenizer | None, text: str, sampling: SamplingParams) -> list[tuple[str, str | None]]:
    ids = tokenizer.encode(text) if tokenizer else [1, 2, 3]

    async def collect() -> list[tuple[str, str | None]]:
        return [(piece, delta.finish_reason) async for delta, piece in with_text(Scripted(ids), tokenizer, sampling)]

    return asyncio.run(collect())


def test_generation_ends_with_the_token_that_completes_a_stop(byte_tokenizer: Tokenizer):
    told = told_by(byte_tokenizer, "abcdefgh", SamplingParams(stop="de"))
    assert told == [("a", None), ("b", None), ("c", None), ("", None), ("", "stop")]


def test_each_answer_ends_at_its_own_stop(byte_tokenizer: Tokenizer):
    generation = Scripted(byte_tokenizer.encode("ab.cd"), byte_tokenizer.encode("xyz"))
    told = ["", ""]
    reasons = {}

    async def collect() -> None:
        async for delta, text in with_text(generation, byte_tokenizer, SamplingParams(n=2, stop=".")):
            told[delta.answer] += text
            reasons[delta.answer] = delta.finish_reason

    asyncio.run(collect())
    assert told == ["ab", "xyz"]
    assert reasons == {0: "stop", 1: "length"}
    assert generation.ended == [0]


def test_what_only_looked_like_a_stop_is_told_in_the_end(byte_tokenizer: Tokenizer):
    assert "".join(text for text, _ in told_by(byte_tokenizer, "abcd", SamplingParams(stop="de"))) == "abcd"


def test_a_stop_before_min_tokens_is_text_like_any(byte_tokenizer: Tokenizer):
    told = told_by(byte_tokenizer, "a.b.c.d", SamplingParams(stop=".", min_tokens=4, max_tokens=16))
    assert "".join(text for text, _ in told) == "a.b"
    assert told[-1] == ("", "stop")


def test_stop_strings_without_a_tokenizer_are_refused():
    assert told_by(None, "", SamplingParams())[-1] == ("", "length")
    with pytest.raises(InvalidRequest, match="no tokenizer, so it cannot stop at a text") as caught:
        told_by(None, "", SamplingParams(stop="x"))
    assert caught.value.field == "stop"


class AtOnce:
    """A generation whose answer comes in one delta."""

    def __init__(self, delta: Delta):
        self._delta = delta
        self.ended: list[int] = []

    async def __aiter__(self):
        yield self._delta

    def end(self, index: int) -> None:
        self.ended.append(index)

    def enough(self, index: int) -> None:
        pass


def many(ids: list[int], top: int = 0) -> Delta:
    rows = tuple(TokenLogprobs(token, -1.0, ((token, -1.0),) * top) for token in ids)
    return Delta(tuple(ids), Rows.of(rows) if top else None, "length", 7, Rows.of([TokenLogprobs(1, -2.0, ())]))


@pytest.mark.parametrize("top", [0, 20])
def test_a_long_delta_is_told_in_parts_between_which_others_have_their_turn(byte_tokenizer: Tokenizer, top: int):
    text = "naïve 🎉 " * 400
    whole = many(byte_tokenizer.encode(text), top)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def collect() -> list[tuple[Delta, str]]:
        beside = asyncio.ensure_future(others())
        found = [each async for each in with_text(AtOnce(whole), byte_tokenizer, SamplingParams(max_tokens=10**4))]
        beside.cancel()
        return found

    found = asyncio.run(collect())
    at_once = AT_ONCE_VALUES // (1 + top)
    assert max(len(delta.token_ids) for delta, _ in found) == at_once and turns >= len(found) - 2
    assert "".join(piece for _, piece in found) == text
    assert [delta.finish_reason for delta, _ in found] == [None] * (len(found) - 1) + ["length"]
    assert [delta.prompt_logprobs is None for delta, _ in found] == [False] + [True] * (len(found) - 1)

    async def joined() -> list[tuple[Delta, str]]:
        pieces = with_text(AtOnce(whole), byte_tokenizer, SamplingParams(max_tokens=10**4))
        return [each async for each in whole_answers(pieces)]

    assert asyncio.run(joined()) == [(whole, text)]


def test_nothing_is_told_of_what_came_behind_a_stop_in_the_same_delta(byte_tokenizer: Tokenizer):
    generation = AtOnce(many(byte_tokenizer.encode("ab" * 300 + "." + "cd" * 2000)))

    async def collect() -> list[tuple[Delta, str]]:
        return [each async for each in with_text(generation, byte_tokenizer, SamplingParams(stop="."))]

    found = asyncio.run(collect())
    assert "".join(text for _, text in found) == "ab" * 300
    assert found[-1][0].finish_reason == "stop" and generation.ended == [0]


def test_tokens_that_have_more_log_probabilities_than_are_told_at_once_come_one_by_one():
    top = tuple((token, -1.0) for token in range(AT_ONCE_VALUES))
    rows = Rows.of(TokenLogprobs(token, -1.0, top) for token in range(3))
    delta = Delta(answer=0, token_ids=(0, 1, 2), logprobs=rows, finish_reason="length")
    told = list(_parts(delta))
    assert [part.token_ids for part in told] == [(0,), (1,), (2,)]
    assert [part.finish_reason for part in told] == [None, None, "length"]
