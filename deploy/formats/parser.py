"""An answer as it comes, parted into thoughts, words and calls.

    parser = Parser(known.HERMES, schemas, prompt_end="<think>\\n")
    parser.push("I look it up.</think><tool_call>{...")   ->   [Thought("I look it up."), ...]

What it says does not depend on how the text was cut. Nothing is lost: what is no marker and no call is words.
"""

from collections.abc import Iterable, Mapping

from .answer_parser import AnswerParser
from .calls import CallsReader
from .cursor import Steps
from .described import Calls, Format, Thoughts, Wrapper
from .events import CutOff, Event, NotACall, Thought, Words
from .stops import StopGate
from .typed import Schema


class Parser(AnswerParser):
    """Of the formats that a description says."""

    def __init__(
        self,
        form: Format,
        schemas: Mapping[str, Schema],
        *,
        prompt_end: str = "",
        finds_calls: bool = True,
        single_tokens: frozenset[str] = frozenset(),
    ):
        super().__init__(schemas, prompt_end=prompt_end, finds_calls=finds_calls, single_tokens=single_tokens)
        self._form = form
        self._stops = StopGate(form.stops, single_tokens)
        self._calls = form.calls if finds_calls else ()
        self._out = self._told  # where events go: elsewhere while a call is only tried
        self._space = ""  # behind what was said or thought; no part of it if a marker follows
        self._has_said = False
        self._strips = False  # whether white space before the next words is no part of them
        self._is_wrapped = False  # whether what is said stands between the markers of a wrapper
        self._section_close = ""  # of calls that broke off: a marker all the same

    def push(self, text: str, marks: Iterable[int] = ()) -> list[Event]:
        return super().push(*self._stops.push(text, marks))

    def finish(self) -> list[Event]:
        self._cursor.feed(*self._stops.rest())
        return super().finish()

    def _run(self) -> Steps[None]:
        yield from self._opening()
        yield from self._content()
        self._flush_space()

    # Thoughts

    def _opening(self) -> Steps[None]:
        """Thoughts that the prompt has begun, or that the answer begins with."""
        thoughts = self._form.thoughts
        begun = begun_thoughts(self._form, self._prompt_end)
        if begun is not None:
            yield from self._thoughts(begun)
            return
        if not thoughts:
            return
        cursor = self._cursor
        cursor.keep()
        yield from cursor.skip_space()
        opens = {mark: each for each in thoughts for mark in each.opens}
        found = yield from cursor.match((*opens, *(mark for each in thoughts for mark in each.closes)))
        if found is None:
            cursor.go_back()
        cursor.forget()
        if found in opens:
            yield from self._thoughts(opens[found])
        elif found is not None:
            self._strips = True

    def _thoughts(self, form: Thoughts) -> Steps[None]:
        """Up to the marker that ends them, or to a call, if no such marker follows it."""
        cursor = self._cursor
        self._space = ""
        yield from cursor.skip_space()
        yield from cursor.match(form.opens)
        if form.label:
            yield from cursor.match((form.label,))
        yield from cursor.skip_space()
        openers = self._openers_in_thoughts()
        while True:
            place, marker = cursor.find((*form.closes, *openers))
            self._tell(Thought, cursor.text[cursor.at : place])
            cursor.at = place
            if marker is None:
                if cursor.has_ended:
                    break
                yield
            elif marker in form.closes:
                cursor.at += len(marker)
                break
            elif (yield from self._ends_thoughts(form, marker)):
                break
        self._space, self._strips = "", True

    def _ends_thoughts(self, form: Thoughts, marker: str) -> Steps[bool]:
        """Does a call begin at a marker within thoughts? It does where the thoughts are never closed behind it. Until
        that is known, nothing is told."""
        cursor, space = self._cursor, self._space
        cursor.keep()
        self._out = []
        is_call = yield from self._block(marker)
        self._out, self._space, self._section_close = self._told, space, ""
        if not is_call:
            cursor.go_back()
            cursor.forget()
            self._tell(Thought, cursor.text[cursor.at : cursor.at + len(marker)])
            cursor.at += len(marker)
            return False
        while True:
            place, close = cursor.find(form.closes)
            cursor.at = place
            if close is not None or cursor.has_ended:
                break
            yield
        end = cursor.at
        cursor.go_back()
        cursor.forget()
        if close is None:
            return True
        self._tell(Thought, cursor.text[cursor.at : end])
        cursor.at = end
        return False

    # Words, and calls among them

    def _content(self) -> Steps[None]:
        cursor, form = self._cursor, self._form
        wrappers = {mark: each for each in form.wrappers for mark in (each.open, each.close)}
        thoughts = {mark: each for each in form.thoughts if each.is_anywhere for mark in each.opens}
        openers = self._openers()
        while True:
            closes = (self._section_close,) if self._section_close else ()
            place, marker = cursor.find((*openers, *wrappers, *thoughts, *closes))
            self._tell(Words, cursor.text[cursor.at : place])
            cursor.at = place
            if marker is None:
                if cursor.has_ended:
                    return
                yield
            elif marker in thoughts:
                cursor.at += len(marker)
                yield from self._thoughts(thoughts[marker])
            elif marker in closes:
                cursor.at += len(marker)
                self._section_close = ""
            elif marker in wrappers and self._is_wrapper(wrappers[marker], marker):
                cursor.at += len(marker)
            elif marker in wrappers or not (yield from self._block(marker)):
                self._tell(Words, cursor.text[cursor.at : cursor.at + len(marker)])
                cursor.at += len(marker)

    def _is_wrapper(self, wrapper: Wrapper, marker: str) -> bool:
        """Is a marker that of a wrapper, and not some text that looks like one?"""
        if wrapper.is_always:
            return True
        if marker == wrapper.close:
            is_open, self._is_wrapped = self._is_wrapped, False
            return is_open
        self._is_wrapped = not self._has_said
        self._strips = self._strips or self._is_wrapped
        return self._is_wrapped

    def _openers(self) -> tuple[str, ...]:
        """Texts at which calls may begin."""
        return tuple(dict.fromkeys(mark for each in self._calls for mark in each.opens))

    def _openers_in_thoughts(self) -> tuple[str, ...]:
        """Those among thoughts: markers, and special tokens alone where calls have some."""
        found: dict[str, None] = {}
        for calls in self._calls:
            tokens = [mark for mark in calls.opens if self._cursor.begins_with_token(mark)]
            found |= dict.fromkeys((tokens or calls.opens) if calls.is_marked else ())
        return tuple(found)

    def _block(self, marker: str) -> Steps[bool]:
        """Calls that begin at a marker. False: there are none, and the cursor is where it was."""
        for calls in self._calls:
            if marker not in calls.opens or (calls.is_first_only and self._has_said):
                continue
            self._cursor.keep()
            is_done = yield from self._try(calls, marker)
            if not is_done:
                self._cursor.go_back()
            self._cursor.forget()
            if is_done:
                return True
        return False

    def _try(self, calls: Calls, marker: str) -> Steps[bool]:
        """Read a block by one of the descriptions. False: it is none of this kind, and nothing was told."""
        cursor = self._cursor
        reader = CallsReader(cursor, calls, self._schemas, self._out)
        is_done = True
        try:
            yield from reader.block(marker)
        except CutOff:
            # The answer ends in a call. With its name it is a call, without it is text.
            if reader.reading.draft.name is not None:
                reader.reading.draft.end(is_whole=False)
                cursor.at = len(cursor.text)
            else:
                is_done = reader.count > 0
                cursor.go_back()
        except NotACall:
            # What was told stays told: the call ends there, and the rest is text.
            if reader.reading.draft.is_told:
                reader.reading.draft.end(is_whole=False)
            is_done = reader.has_told
            if reader.is_in_section and is_done:
                self._section_close = calls.section_close
            cursor.go_back()
        if is_done:
            self._space, self._strips = "", True
        return is_done

    # What is told

    def _tell(self, kind: type[Thought] | type[Words], text: str) -> None:
        """Tell text, but for the white space at its end, which may belong to a marker behind it."""
        if kind is Words and self._strips:
            text = text.lstrip()
        if not text:
            return
        text = self._space + text
        bare = text.rstrip()
        self._space = text[len(bare) :]
        if bare:
            self._out.append(kind(bare))
            if kind is Words:
                self._has_said, self._strips = True, False

    def _flush_space(self) -> None:
        if self._space and not self._strips:
            self._out.append(Words(self._space))
            self._space = ""


def begun_thoughts(form: Format, prompt_end: str) -> Thoughts | None:
    """The thoughts that the end of a prompt has begun, if any."""
    end = prompt_end.rstrip()
    for each in form.thoughts:
        if end.endswith(tuple((open + label).rstrip() for open in each.opens for label in ("", each.label))):
            return each
    return None
