"""What our drawings share: colours for light paper and for dark, texts, boxes and lines of an SVG document."""

from xml.sax.saxutils import escape

COLOURS = ("#a8622a", "#3c7a76", "#8a5fa8", "#b5483a", "#5d7a34", "#3f6fa8", "#a3507c", "#7f7a70")
"""The console's woods and its teal, dark enough to be read as headings."""

DARK_COLOURS = ("#dd9a58", "#6fb3ae", "#b48fd0", "#ec7a6c", "#a3c585", "#8db4e2", "#dc95bb", "#b5aea2")

PAPER, INK, SOFT, BLANK = "#faf7f2", "#2b2520", "#6b6055", "#ece4d6"

DARK = dict(zip(COLOURS, DARK_COLOURS, strict=True)) | {
    PAPER: "#1b1714", INK: "#ece4d8", SOFT: "#b3a79b", BLANK: "#332b25", "#bbb": "#5a5048"
}  # fmt: skip
"""What each colour becomes where the reader prefers the dark."""


def dark_style() -> str:
    """A style sheet goes before attributes, so programs that know none still draw the light one."""
    rules = "".join(
        f'[fill="{light}"]{{fill:{dark}}}[stroke="{light}"]{{stroke:{dark}}}' for light, dark in DARK.items()
    )
    return f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"


def text(x: float, y: float, text: str, *, size: int = 13, weight: str = "normal", fill: str = INK,
          anchor: str = "start") -> str:  # fmt: skip
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{fill}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def box(x: float, y: float, width: float, height: float, fill: str, *, opacity: float = 1, stroke: str = "none") -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="{fill}" '
        f'fill-opacity="{opacity}" stroke="{stroke}"/>'
    )


def line(x1: float, y1: float, x2: float, y2: float, stroke: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" stroke-opacity="0.5"/>'
