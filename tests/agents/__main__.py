"""`python -m intarsia.tests.agents FOLDER`: runs a folder of parser cases, and prints counts and differences."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from intarsia.deploy.formats.chosen import parser_of
from intarsia.deploy.formats.events import Event

from .cases import Case, cases_in
from .compare import Outcome, verdict
from .cuts import TEXT_MODES, Token, tokens_of
from .templates import rendered

TOKENS = "one token at a time"


def main(given: str) -> int:
    """0 if all cases are right or tolerated, cut in every way. given: a folder of cases, or one with such a folder"""
    folder = Path(given) / "cases" if (Path(given) / "cases").is_dir() else Path(given)
    counts: dict[str, Counter[str]] = {mode: Counter() for mode in (*TEXT_MODES, TOKENS)}
    families: dict[str, Counter[str]] = {}
    differences: list[str] = []
    for case in cases_in(folder):
        own = families.setdefault(case.given.get("family", case.id.rpartition("-")[0]), Counter())
        found = dict(read(case))
        for mode, said in found.items():
            counts[mode][said if said in ("right", "tolerated") else "different"] += 1
        worst = next((said for said in found.values() if said not in ("right", "tolerated")), None)
        own["right" if worst is None else "different"] += 1
        own["cases"] += 1
        if worst is not None:
            modes = ", ".join(mode for mode, said in found.items() if said == worst)
            differences.append(
                f"{case.id} ({case.form.name if case.form else 'unknown format'}; {modes})\n        {worst}"
            )
    if not families:
        print(f"{given} has no file of cases: JSON with a list named cases", file=sys.stderr)
        return 2
    for line in differences:
        print(line)
    _print_counts(counts, families)
    failed = sum(own["different"] for own in families.values())
    templates = folder.parent / "templates"
    if templates.is_dir():
        for line in rendered(templates):
            print(line)
    return 1 if failed else 0


def _print_counts(counts: dict[str, Counter[str]], families: dict[str, Counter[str]]) -> None:
    for family, own in families.items():
        print(f"{family:20} {own['right']:4} of {own['cases']}")
    for mode, own in counts.items():
        total = sum(own.values())
        print(f"{mode:26} {own['right'] + own['tolerated']:4} of {total} ({own['tolerated']} of them tolerated)")
    cases = sum(own["cases"] for own in families.values())
    print(f"all ways                   {sum(own['right'] for own in families.values()):4} of {cases}")


def read(case: Case) -> Iterator[tuple[str, str]]:
    """The verdict for each way to cut. A way that gives another answer than the whole text is said to differ."""
    if case.form is None:
        yield "whole text", f"the format {case.given['format']!r} is unknown"
        return
    # Only token ids tell some cases apart: as text they are not asked.
    expected = _outcome(case, [Token(case.given["output"], False)], ()) if not case.needs_tokens else None
    for mode, cuts in TEXT_MODES.items() if expected is not None else ():
        outcomes = [_outcome(case, [Token(piece, False) for piece in pieces], ()) for pieces in cuts(case)]
        if outcomes:
            other = next((each for each in outcomes if each != expected), None)
            said = verdict(case, outcomes[0])
            yield mode, said if other is None else f"cut otherwise, {other}\n        whole {expected}"
    yield TOKENS, verdict(case, _outcome(case, tokens_of(case), case.special_tokens))


def _outcome(case: Case, pieces: Sequence[Token], single_tokens: Sequence[str]) -> Outcome:
    assert case.form is not None
    parser = parser_of(case.form, case.tools, prompt_end=case.given.get("prompt_end", ""), single_tokens=single_tokens)
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece.text, (0,) if piece.is_special else ())
    return Outcome.of(events + parser.finish())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("python -m intarsia.tests.agents FOLDER: a folder of parser cases, one JSON file for each family")
    sys.exit(main(sys.argv[1]))
