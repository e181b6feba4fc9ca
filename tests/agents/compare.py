"""What was read in an output, and whether it is what was to be read."""

import json
from typing import Any, NamedTuple

from intarsia.deploy.formats.chosen import markers_of
from intarsia.deploy.formats.events import ArgumentsPiece, CallBegun, CallEnded, Event, Thought, Words

from .cases import Case


class Call(NamedTuple):
    """A call that was read."""

    name: str
    id: str | None
    arguments: str  # JSON, cut where is_whole is False
    is_whole: bool


class Outcome(NamedTuple):
    """All that was read."""

    reasoning: str
    content: str
    calls: tuple[Call, ...]

    @classmethod
    def of(cls, events: list[Event]) -> "Outcome":
        """Raises AssertionError where calls are not whole: begun, ended, one after the other."""
        calls: list[Call] = []
        is_open = False
        for event in events:
            match event:
                case CallBegun(name, id):
                    assert not is_open, "a call begins within another"
                    calls.append(Call(name, id, "", True))
                    is_open = True
                case ArgumentsPiece(text):
                    assert is_open, "arguments without a call"
                    calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + text)
                case CallEnded(is_whole):
                    assert is_open, "a call ends that has not begun"
                    calls[-1] = calls[-1]._replace(is_whole=is_whole)
                    is_open = False
                case Thought() | Words():
                    assert not is_open, "text within a call"
        assert not is_open, "a call does not end"
        return cls(
            "".join(event.text for event in events if isinstance(event, Thought)),
            "".join(event.text for event in events if isinstance(event, Words)),
            tuple(calls),
        )

    def __str__(self) -> str:
        calls = [f"{call.name}({call.arguments}){'' if call.is_whole else ' ...'}" for call in self.calls]
        return f"reasoning {self.reasoning!r}, content {self.content!r}, calls {calls}"


def verdict(case: Case, outcome: Outcome) -> str:
    """ "right", "tolerated", or how it differs."""
    if _fits(case, outcome, case.given["expect"]):
        return "right"
    if any(_fits(case, outcome, other["expect"]) for other in case.given.get("also", ())):
        return "tolerated"
    return f"want {json.dumps(case.given['expect'], ensure_ascii=False)}\n        got  {outcome}"


def _fits(case: Case, outcome: Outcome, expect: dict[str, Any]) -> bool:
    if not _same_text(outcome.reasoning, expect.get("reasoning")):
        return False
    wanted = expect.get("tool_calls") or []
    partial = expect.get("partial_call")
    calls, cut = outcome.calls, None
    if partial is not None and len(calls) == len(wanted) + 1:
        calls, cut = calls[:-1], calls[-1]
    if len(calls) != len(wanted) or not all(map(_same_call, calls, wanted)):
        return False
    if partial is None or cut is not None:
        if not _same_content(case, outcome.content, expect.get("content")):
            return False
        return cut is None or partial is None or _is_cut(cut, partial)
    # The cut call may be given back as text: a rest of the output, behind what was said.
    said = (expect.get("content") or "").strip()
    content = outcome.content.strip()
    return content.startswith(said) and case.given["output"].endswith(content[len(said) :].strip())


def _same_text(got: str, want: str | None) -> bool:
    return got.strip() == (want or "").strip()


def _same_content(case: Case, got: str, want: str | None) -> bool:
    """Of what is no call, the markers may stay or not."""
    if _same_text(got, want):
        return True
    if "malformed" not in case.given.get("tags", ()) or case.form is None:
        return False
    return _bare(case, got) == _bare(case, want or "")


def _bare(case: Case, text: str) -> str:
    markers = sorted({*case.special_tokens, *markers_of(case.form)} if case.form else case.special_tokens, key=len)
    for marker in reversed(markers):
        if len(marker) > 2:
            text = text.replace(marker, "")
    return "".join(text.split())


def _same_call(call: Call, want: dict[str, Any]) -> bool:
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        arguments = call.arguments
    if call.name != want["name"] or arguments != want["arguments"] or not call.is_whole:
        return False
    return "id" not in want or want["id"] == call.id


def _is_cut(call: Call, partial: dict[str, Any]) -> bool:
    """Its arguments are those that were complete, with or without what was seen of the last one."""
    if partial.get("name") is not None and call.name != partial["name"]:
        return False
    complete = partial.get("arguments_complete") or {}
    found = _closed(call.arguments)
    if found is None:
        return False
    more = {key: value for key, value in found.items() if key not in complete}
    seen = partial.get("arguments_seen")
    if any(found.get(key) != value for key, value in complete.items()) or len(more) > 1:
        return False
    return all(isinstance(value, str) and value and str(seen).startswith(value) for value in more.values())


def _closed(text: str) -> dict[str, Any] | None:
    """Cut arguments with what closes them. None: they are the beginning of no object."""
    if not text.strip():
        return {}
    for end in ("", '"}', "}", '": null}', " null}", "]}", '"]}', "}}", '"}}'):
        try:
            found = json.loads(text.rstrip().rstrip(",") + end)
        except ValueError:
            continue
        return {key: value for key, value in found.items() if value is not None or end == ""}
    return None
