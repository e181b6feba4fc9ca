"""What a format is made of. A description is data: it says which markers stand where, and names the kind of thing
between them. `parser.py` reads an answer by it, and `grammar.py` makes an answer follow it.

    Thoughts   <think> .. </think>
    Calls      section_open ( open BODY close )* section_close
    BODY       one of JsonCall, KeyedCall, NamedJson, Tagged, Pythonic, Braced
"""

from dataclasses import dataclass, field
from typing import Literal

NAMED_ID = "functions.{name}:{count}"
"""The id of a call where it is the tool's name and the count of calls in the conversation before it."""

NAME_KEYS = ("name", "tool_name", "function_name")
ARGUMENT_KEYS = ("arguments", "parameters", "args")


@dataclass(frozen=True, slots=True)
class Thoughts:
    """Reasoning, before what is said."""

    open: str
    close: str
    also_open: tuple[str, ...] = ()  # other spellings
    also_close: tuple[str, ...] = ()
    label: str = ""  # that may stand behind `open`, and belongs to it
    is_anywhere: bool = False  # whether they may come behind words as well

    @property
    def opens(self) -> tuple[str, ...]:
        return (self.open, *self.also_open)

    @property
    def closes(self) -> tuple[str, ...]:
        return (self.close, *self.also_close)


@dataclass(frozen=True, slots=True)
class Wrapper:
    """Markers around what is said, which are no part of it."""

    open: str
    close: str
    is_always: bool = False  # whether they are so anywhere; else only at the beginning, and once


@dataclass(frozen=True, slots=True)
class JsonCall:
    """`{"name": .., "arguments": {..}}`, or a list of such."""

    name_key: str = "name"  # the one that the template writes; others are understood
    arguments_key: str = "arguments"
    is_list: bool = False  # whether the template writes a list
    needs_arguments: bool = False  # without them it is no call: where no marker says that it is one


@dataclass(frozen=True, slots=True)
class KeyedCall:
    """`[{NAME: {..}}, ..]`: the name is the one key."""


@dataclass(frozen=True, slots=True)
class NamedJson:
    """The name, and the JSON of the arguments behind it: `NAME[ARGS]{..}`."""

    ends: tuple[str, ...] = ()  # markers between name and arguments; without any, the arguments' brace is the end
    lead: str = ""  # what stands before the name: this,
    before: str = ""  # and then this marker; what is there in its place is passed over
    id_mark: str = ""  # a marker behind the name; the call's id is between it and the next
    id_pattern: str = ""  # where what stands for the name is an id: it has the name in its first group
    fence: str = ""  # behind the arguments
    fence_open: str = ""  # before them, where it is no end of the name


@dataclass(frozen=True, slots=True)
class Tagged:
    """The name, and tags around each argument: `<function=NAME><parameter=KEY>VALUE</parameter></function>`."""

    name_end: str = ""  # behind the name; without it, the name ends with its line, or where the next tag begins
    attributes_end: str = ""  # behind more that is said of the call
    key_open: str = ""
    key_end: str = ""
    value_open: str = ""  # what stands before it, behind the key, are attributes
    value_close: str = ""
    type_mark: str = ""  # an attribute that tells whether the value is a string: `string="true"`
    gap: str = ""  # what the template puts between the tags
    is_lined: bool = False  # whether one line break at each end of a value belongs to the tags
    whole_open: str = ""  # a tag around all arguments as JSON
    whole_close: str = ""
    lead: str = ""  # as in NamedJson
    before: str = ""
    end: str = ""  # behind the last argument, before the marker that closes the call
    has_entities: bool = False  # whether names are written with `&quot;` and `&amp;`


@dataclass(frozen=True, slots=True)
class Pythonic:
    """`[name(key="value"), ..]`."""

    is_bracketed: bool = True  # else one call a line


@dataclass(frozen=True, slots=True)
class Braced:
    """`call:NAME{key:<quote>text<quote>,n:2}`."""

    quote: str
    before: str = "call:"


Body = JsonCall | KeyedCall | NamedJson | Tagged | Pythonic | Braced


@dataclass(frozen=True, slots=True)
class Calls:
    """How calls are marked, and what each is."""

    body: Body
    open: str = ""  # before each call; without it, a call begins with its own first character
    close: str = ""
    section_open: str = ""  # before all of them
    section_close: str = ""
    also_open: tuple[str, ...] = ()  # other spellings of `open`
    is_known_only: bool = False  # whether only the names of given tools make it a call
    inner: str = ""  # what the template puts between these markers and the call
    between: str = ",;"  # characters that may separate calls
    is_first_only: bool = False  # whether a call without a marker may stand at the beginning only
    has_own_ids: bool = False  # whether the template wants the model's own ids back

    @property
    def opens(self) -> tuple[str, ...]:
        """Markers that a call may begin with, or a section of calls."""
        marks = (self.section_open, self.open, *self.also_open)
        return tuple(dict.fromkeys(mark for mark in marks if mark)) or self._first_chars

    @property
    def _first_chars(self) -> tuple[str, ...]:
        """Of calls without a marker."""
        if isinstance(self.body, JsonCall):
            return ("[", "{") if self.body.is_list else ("{",)
        return ("[",)

    @property
    def is_marked(self) -> bool:
        return bool(self.open or self.section_open)


@dataclass(frozen=True, slots=True)
class Format:
    """All of it: how a model writes an answer."""

    name: str
    calls: tuple[Calls, ...] = ()  # the first is the one that the template writes; the others are understood
    thoughts: tuple[Thoughts, ...] = ()
    wrappers: tuple[Wrapper, ...] = ()
    stops: tuple[str, ...] = ()  # at the end of an answer, or of calls that an answer ends with
    has_named_ids: bool = False  # whether its ids are as `NAMED_ID`
    id_chars: int = 0  # how many letters and digits the template wants in the id of a call; 0: any id will do
    kind: Literal["marked", "channels"] = "marked"  # which parser: the common one, or that of `harmony.py`
    signs: tuple[str, ...] = ()  # texts that a template of it has, all of them
    aliases: tuple[str, ...] = ()  # other names, those of other servers
    thought_aliases: tuple[str, ...] = field(default=())  # names of other servers for the thoughts

    @property
    def markers(self) -> tuple[str, ...]:
        """All texts that are no words of an answer, longest first. Some are single tokens."""
        found: list[str] = [*self.stops]
        for thoughts in self.thoughts:
            found += [*thoughts.opens, *thoughts.closes]
        for wrapper in self.wrappers:
            found += [wrapper.open, wrapper.close]
        for calls in self.calls:
            found += [calls.section_open, calls.section_close, calls.open, calls.close, *calls.also_open]
            found += _marks_of(calls.body)
        return tuple(sorted({each for each in found if each.strip()}, key=lambda each: (-len(each), each)))


def _marks_of(body: Body) -> list[str]:
    match body:
        case NamedJson():
            return [*body.ends, body.before, body.id_mark, body.fence]
        case Tagged():
            return [body.name_end, body.key_open, body.key_end, body.value_open, body.value_close]
        case Braced():
            return [body.quote]
        case _:
            return []
