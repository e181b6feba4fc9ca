"""What is asked: sessions of turns, drawn from a seed or read from a file.

Prompts are made of common words, each of which is one token for most tokenizers, so a length in words is about one in
tokens; what the server counted is what is reported. With `vocabulary` prompts are exact rows of token ids instead.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import InvalidSetting
from ..replay.traces import json_objects, open_text

COMMON = """
the of and to in is you that it he was for on are as with his they at be this have from or one had by word but
not what all were we when your can said there use an each which she do how their if will up other about out many
then them these so some her would make like him into time has look two more write go see number no way could
people my than first water been call who oil its now find long down day did get come made may part
"""
WORDS = COMMON.split()

TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"To {name.replace('_', ' ')}.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
    for name in ("read_file", "write_file", "run_command", "search_files")
)
"""Those of an agent."""

BLOCK_WORDS = 512
"""Of a block in a Mooncake trace, which the format fixes."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request."""

    words: int  # that are new in its prompt
    most_tokens: int  # of its answer
    pause_s: float = 0.0  # after the answer before it, of its session
    ids: tuple[int, ...] = ()  # of blocks, where words are alike if their ids are; empty: no others are alike
    is_tool_result: bool = False


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow each other. The prompt of each is the session so far, and its own new words."""

    number: int
    turns: tuple[Turn, ...]
    begins_s: float | None = None  # after the start of all; None: as the rate has it
    instructions: int = 0  # words that all sessions of a kind begin with
    kind: int = 0  # which instructions
    texts: tuple[str, ...] = ()  # of each turn, where a file has them


@dataclass(frozen=True, slots=True)
class ShapeSettings:
    """What a shape is drawn with. Lengths are in words, or in token ids."""

    sessions: int = 100  # for shapes with one turn each: requests
    input_length: int = 512
    output_length: int = 128
    range_ratio: float = 0.0  # lengths are drawn from (1 - ratio) to (1 + ratio) times these
    prefix_length: int = 0  # that all prompts begin with
    turns: int = 8  # of an agent
    kinds: int = 4  # of agents, each with instructions of its own
    pause_s: float = 2.0  # the median of an agent's pauses, while a tool runs
    seed: int = 0
    path: Path | None = None  # of a trace, or of conversations
    speed: float = 1.0  # times as fast as a trace's own clock
    scale: float = 1.0  # lengths of a trace times this

    def __post_init__(self):
        for name in ("sessions", "input_length", "output_length", "turns", "kinds"):
            if getattr(self, name) < 1:
                raise InvalidSetting(f"{name} must be at least 1, got {getattr(self, name)}", field=name)
        for name in ("speed", "scale"):
            if not getattr(self, name) > 0:
                raise InvalidSetting(f"{name} must be above 0, got {getattr(self, name)}", field=name)
        if not 0 <= self.range_ratio < 1:
            raise InvalidSetting(f"range_ratio must lie in [0, 1), got {self.range_ratio}", field="range_ratio")


def random_lengths(settings: ShapeSettings) -> Iterator[Session]:
    """One prompt each, none like another, but for a prefix that all have."""
    rng = random.Random(settings.seed)
    for number in range(settings.sessions):
        turn = Turn(_near(rng, settings.input_length, settings), _near(rng, settings.output_length, settings))
        yield Session(number, (turn,), instructions=settings.prefix_length)


def chats(settings: ShapeSettings) -> Iterator[Session]:
    """Conversations of people: ShareGPT's file where there is one, else lengths that are spread as its are."""
    if settings.path is None:
        rng = random.Random(settings.seed)
        for number in range(settings.sessions):
            # Of ShareGPT's first turns about half the prompts are shorter than 40 tokens, and a tenth longer than 600.
            words = min(4 * settings.input_length, max(4, int(rng.lognormvariate(3.7, 1.9))))
            tokens = min(4 * settings.output_length, max(4, int(rng.lognormvariate(5.0, 1.0))))
            yield Session(number, (Turn(words, tokens),))
        return
    for number, entry in enumerate(_json_list(settings.path)):
        said = [each.get("value", "") for each in entry.get("conversations", ()) if isinstance(each, dict)]
        if len(said) >= 2 and number < settings.sessions:
            turn = Turn(len(said[0].split()), max(1, len(said[1].split()) * 4 // 3))
            yield Session(number, (turn,), texts=(said[0],))


def trace(settings: ShapeSettings) -> Iterator[Session]:
    """Requests at their times, in Mooncake's format: timestamp in ms, lengths in tokens, ids of blocks of 512."""
    if settings.path is None:
        raise InvalidSetting("a trace needs a file: --path FILE", field="path")
    for number, (line, entry) in enumerate(json_objects(settings.path, "path")):
        if number >= settings.sessions:
            return
        try:
            words = max(1, round(entry["input_length"] * settings.scale))
            tokens = max(1, round(entry["output_length"] * settings.scale))
            at_s = entry["timestamp"] / 1000 / settings.speed
            ids = tuple(entry["hash_ids"])[: -(-words // max(1, round(BLOCK_WORDS * settings.scale)))]
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidSetting(
                f"line {line} of {settings.path} is no request of Mooncake's format: {error!r}", field="path"
            ) from None
        yield Session(number, (Turn(words, tokens, ids=ids),), begins_s=at_s)


def agents(settings: ShapeSettings) -> Iterator[Session]:
    """Each a long conversation with few words of a user and many of tools, after pauses in which a tool runs."""
    rng = random.Random(settings.seed)
    for number in range(settings.sessions):
        turns = [Turn(_near(rng, settings.input_length, settings), _near(rng, settings.output_length, settings))]
        for _ in range(settings.turns - 1):
            pause_s = settings.pause_s * rng.lognormvariate(0.0, 1.0)
            words = _near(rng, settings.input_length, settings)
            turns.append(Turn(words, _near(rng, settings.output_length, settings), pause_s, is_tool_result=True))
        kind = rng.randrange(settings.kinds)
        yield Session(number, tuple(turns), instructions=settings.prefix_length or 4 * settings.input_length, kind=kind)


SHAPES: dict[str, Callable[[ShapeSettings], Iterator[Session]]] = {
    "random": random_lengths,
    "sharegpt": chats,
    "trace": trace,
    "agents": agents,
}


class Prompts:
    """Makes texts, or rows of token ids, of lengths."""

    def __init__(self, settings: ShapeSettings, vocabulary: range | None = None):
        """vocabulary: of which token ids prompts are made. None: they are texts."""
        self._settings, self.vocabulary = settings, vocabulary

    def instructions(self, session: Session) -> list[Any]:
        return self._drawn(session.instructions, "instructions", session.kind)

    def new_words(self, session: Session, place: int) -> list[Any]:
        """Of one of its turns."""
        turn = session.turns[place]
        if not turn.ids:
            return self._drawn(turn.words, "turn", session.number, place)
        size, words = max(1, round(BLOCK_WORDS * self._settings.scale)), list[Any]()
        for block in turn.ids:
            words += self._drawn(min(size, turn.words - len(words)), "block", block)
        return words + self._drawn(turn.words - len(words), "rest", session.number)

    def _drawn(self, count: int, *name: Any) -> list[Any]:
        rng = random.Random(f"{self._settings.seed} {name}")
        return rng.choices(WORDS if self.vocabulary is None else self.vocabulary, k=max(0, count))


@dataclass(slots=True)
class History:
    """What was said in a session so far, as a server is told it."""

    prompts: Prompts
    session: Session
    words: list[Any] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self):
        self.words = self.prompts.instructions(self.session)
        if self.words and not isinstance(self.words[0], int):
            self.messages = [{"role": "system", "content": " ".join(self.words)}]

    def ask(self, place: int) -> None:
        """Add the new words of a turn."""
        new = self.prompts.new_words(self.session, place)
        self.words += new
        text = self.session.texts[place] if self.session.texts else " ".join(map(str, new))
        calls = self.messages[-1].get("tool_calls") if self.messages else None
        if self.session.turns[place].is_tool_result and calls:
            self.messages += [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]
        else:
            self.messages.append({"role": "user", "content": text})

    def answered(self, text: str, calls: Sequence[dict[str, Any]]) -> None:
        if not self.words or not isinstance(self.words[0], int):
            self.words.append(text)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        self.messages.append(message | ({"tool_calls": list(calls)} if calls else {}))

    @property
    def prompt(self) -> str | list[int]:
        """For completions."""
        if self.session.texts:
            return self.session.texts[-1]
        return self.words if self.words and isinstance(self.words[0], int) else " ".join(self.words)


def _near(rng: random.Random, length: int, settings: ShapeSettings) -> int:
    ratio = settings.range_ratio
    return max(1, round(rng.uniform(1 - ratio, 1 + ratio) * length))


def _json_list(path: Path) -> list[dict[str, Any]]:
    with open_text(path, "path") as file:
        try:
            entries = json.load(file)
        except ValueError as error:
            raise InvalidSetting(f"{path} is no JSON: {error}", field="path") from None
    if not isinstance(entries, list):
        raise InvalidSetting(f"{path} is no list of conversations, as ShareGPT's file is", field="path")
    return [entry for entry in entries if isinstance(entry, dict)]
