"""A run as a drawing: when each request was sent, how long its first token and its whole answer took.

+-------------------------------------------+
| title                                     |
| seconds  .  .   time to first token       |
|          :..:   each request a dot        |
|                 whole answers             |
|                 tokens per second         |
+-------------------------------------------+
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..terminal.drawing import INK, PAPER, SOFT, dark_style, line, text
from .client import Outcome
from .drive import Measured
from .report import percentile

WIDTH, PANEL_HEIGHT, MARGIN, GAP = 960, 190, 56, 46
FIRST, WHOLE, RATE = "#3c7a76", "#a8622a", "#3f6fa8"
MOST_DOTS = 4000  # more are thinned out evenly


class Panel(NamedTuple):
    """One drawing of values over time."""

    title: str
    colour: str
    points: Sequence[tuple[float, float]]  # seconds after the start, value
    is_line: bool = False
    mark: float | None = None  # a value to draw a line at


def draw(measured: Measured, found: Mapping[str, Any], title: str) -> str:
    """The drawing as an SVG document."""
    done = [outcome for outcome in measured.outcomes if outcome.error is None]
    took_s = max(1e-9, measured.ended_s - measured.began_s)
    panels = [
        _dots("Time to first token, s", FIRST, measured, done, [one.first_token_s for one in done]),
        _dots("Whole answers, s", WHOLE, measured, done, [one.total_s for one in done]),
        Panel("Events with tokens per second", RATE, _per_second(measured, done, took_s), is_line=True),
    ]
    parts = [text(MARGIN, 30, title, size=18, weight="bold"), text(MARGIN, 50, _summary(found), size=12, fill=SOFT)]
    y = 76.0
    for panel in panels:
        _draw_panel(parts, panel, took_s, y)
        y += PANEL_HEIGHT + GAP
    height = round(y)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="Helvetica, Arial, sans-serif"><rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>'
    )
    return "\n".join([head, dark_style(), *parts, "</svg>\n"])


def _dots(title: str, colour: str, measured: Measured, done: Sequence[Outcome], values_s: Sequence[float]) -> Panel:
    points = [(one.sent_s - measured.began_s, value) for one, value in zip(done, values_s, strict=True)]
    every = -(-len(points) // MOST_DOTS) if points else 1
    median = percentile(sorted(values_s), 50) if values_s else None
    return Panel(title, colour, points[::every], mark=median)


def _per_second(measured: Measured, done: Sequence[Outcome], took_s: float) -> list[tuple[float, float]]:
    """Over a hundred stretches, or stretches of a second where a run is longer than that."""
    stretch_s = max(took_s / 100, min(1.0, took_s / 10))
    counts = Counter(int((came_s - measured.began_s) / stretch_s) for one in done for came_s in one.came_s)
    return [((n + 0.5) * stretch_s, counts[n] / stretch_s) for n in range(int(took_s / stretch_s) + 1)]


def _summary(found: Mapping[str, Any]) -> str:
    return (
        f"{found['completed']:,} requests in {found['duration']:.1f} s, {found['failed']:,} failed; "
        f"{found['output_throughput']:.1f} output tokens/s; first token: median {found['median_ttft_ms']:.0f} ms, "
        f"p99 {found['p99_ttft_ms']:.0f} ms; then {found['median_tpot_ms']:.1f} ms a token"
    )


def _draw_panel(parts: list[str], panel: Panel, took_s: float, top: float) -> None:
    bottom, right = top + PANEL_HEIGHT, WIDTH - MARGIN
    most = max((value for _, value in panel.points), default=0.0) or 1.0

    def place(at_s: float, value: float) -> tuple[float, float]:
        return MARGIN + at_s / took_s * (right - MARGIN), bottom - value / most * (PANEL_HEIGHT - 24)

    parts.append(text(MARGIN, top + 10, panel.title, size=13, weight="bold", fill=panel.colour))
    parts.append(line(MARGIN, bottom, right, bottom, SOFT))
    for share in (0.0, 0.5, 1.0):
        _, y = place(0, share * most)
        parts.append(text(MARGIN - 6, y + 4, f"{share * most:.3g}", size=10, fill=SOFT, anchor="end"))
        parts.append(text(MARGIN + share * (right - MARGIN), bottom + 14, f"{share * took_s:.3g} s", size=10,
                          fill=SOFT, anchor="middle"))  # fmt: skip
    places = [place(*point) for point in panel.points]
    if panel.is_line:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{panel.colour}" stroke-width="1.5"/>')
    else:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{panel.colour}" fill-opacity="0.55"/>'
                  for x, y in places]  # fmt: skip
    if panel.mark is not None:
        _, y = place(0, panel.mark)
        parts.append(line(MARGIN, y, right, y, panel.colour))
        parts.append(text(right, y - 4, f"median {panel.mark:.3g}", size=10, fill=INK, anchor="end"))
