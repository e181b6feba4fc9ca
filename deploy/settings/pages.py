"""What people read about settings, made of the table: `docs/settings.md`, and the arguments in the docstring of `LLM`.

python -m intarsia.deploy.settings.pages    writes both; tests/deploy/settings/test_pages.py fails until it was run
"""

import textwrap
from collections.abc import Iterable
from pathlib import Path

from .setting import Setting
from .table import ENGINE, LIMITS, SERVER

ROOT = Path(__file__).resolve().parents[2]
PAGE, PROGRAM = ROOT / "docs" / "settings.md", ROOT / "deploy" / "llm.py"

NAME_CHARS, LINE_CHARS = 26, 120

FIRST, AFTER = f"    {ENGINE[0].name}", "\n\n    Raises"
"""What the arguments in the docstring begin with, and what comes after them."""


def page() -> str:
    return f"""# Settings

Each is a flag of `intarsia serve` (`--block-size`), an environment variable (`INTARSIA_BLOCK_SIZE`) and a key of the
file that `--config` names (`block_size`). Flags come first, then variables, then the file; `--print-config` says what
comes from where. A setting is written once, in [the table](../deploy/settings/table.py), and this page is made of it.

## Of an engine

`LLM` and the Serve application take these by the same names, `intarsia batch` all but `--max-wait-s`. Where there is no
server, that one is None: requests wait.

{_table(ENGINE)}

## Of a server

{_table(row for row in SERVER if row not in LIMITS)}

What a client may send, hold open and leave unread are settings of a server, too:
[the table of limits](reliability.md).
"""


def _table(rows: Iterable[Setting]) -> str:
    lines = [f"| `--{row.name.replace('_', '-')}` | {_default(row)} | {_sentences(row)} |" for row in rows]
    return "\n".join(["| flag | default | meaning |", "|---|---|---|", *lines])


def _default(row: Setting) -> str:
    value = row.for_servers
    if value is None:
        return row.unset or "none"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`" if value != "" else "empty"


def _sentences(row: Setting) -> str:
    return f"{row.help} {row.more}".rstrip()


def arguments() -> str:
    """The arguments of `LLM`, as lines of its docstring."""
    return "\n".join(line for row in ENGINE for line in _argument(row))


def _argument(row: Setting) -> list[str]:
    default = f"None ({row.unset})" if row.default is None and row.unset not in ("", "none") else repr(row.default)
    text = f"    {row.name:<{NAME_CHARS}}{default}: {_sentences(row)}"
    return textwrap.wrap(text, LINE_CHARS, subsequent_indent=" " * (4 + NAME_CHARS), break_on_hyphens=False)


def with_arguments(program: str) -> str:
    """The text of `llm.py` with the arguments as they are now."""
    before, _, rest = program.partition(FIRST)
    _, after, rest = rest.partition(AFTER)
    return f"{before}{arguments()}{after}{rest}"


if __name__ == "__main__":
    PAGE.write_text(page())
    PROGRAM.write_text(with_arguments(PROGRAM.read_text()))
