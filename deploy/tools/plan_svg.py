"""A memory plan as a drawing: the memory in large pages, and what one of them looks like in each group.

+------------------------------------------------------------+
| title                                                      |
| arena   [null][     ][     ][     ][     ] ...             |
| group   [ block | block | block ]   one large page         |
|            layers inside a block                           |
+------------------------------------------------------------+
"""

from collections.abc import Iterator

from ...kvcache.plan import Group, MemoryPlan
from ...kvcache.reach import Keeps
from ..terminal.banner import human_bytes
from ..terminal.drawing import BLANK, COLOURS, PAPER, SOFT, box, dark_style, line, text
from .plan import PlanReport

WIDTH = 960
MARGIN = 32
BAR_CELLS = 32
MOST_BLOCKS = 13  # drawn of one large page
MOST_LAYERS = 12  # drawn of one block


def draw_plan(report: PlanReport) -> str:
    """The drawing as an SVG document."""
    parts: list[str] = []
    y = MARGIN
    y = _title(parts, report, y)
    for number, arena in enumerate(report.plan.arenas):
        groups = [(g, group) for g, group in enumerate(report.plan.groups) if group.arena == number]
        y = _memory(parts, report.plan, number, arena.num_pages, arena.page_bytes, y)
        for g, group in groups:
            y = _group(parts, report.plan, g, group, arena.page_bytes, y)
    y = _legend(parts, report.plan, y)
    height = y + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, Arial, sans-serif">',
            f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>',
            dark_style(),
            *parts,
            "</svg>\n",
        ]
    )


def _title(parts: list[str], report: PlanReport, y: int) -> int:
    parts.append(text(MARGIN, y + 10, report.model.model, size=20, weight="bold"))
    ranks = f" per rank, {report.tensor_parallel_size} ranks" if report.tensor_parallel_size > 1 else ""
    what = f"{human_bytes(report.settings.memory_bytes)}{ranks}, strategy {report.plan.strategy}"
    buffers = f"{report.plan.num_buffers} buffer{'s' if report.plan.num_buffers > 1 else ''}"
    padding = f"{report.plan.padding_fraction:.2%} padding"
    parts.append(text(MARGIN, y + 32, f"{what}, {buffers}, {padding}", size=13, fill=SOFT))
    return y + 56


def _memory(parts: list[str], plan: MemoryPlan, number: int, pages: int, page_bytes: int, y: int) -> int:
    """One arena: a bar of large pages, the first one null."""
    name = "The memory" if len(plan.arenas) == 1 else f"Partition {number}"
    parts.append(text(MARGIN, y + 12, f"{name}: {pages:,} large pages of {human_bytes(page_bytes)}", weight="bold"))
    owners = [g for g, group in enumerate(plan.groups) if group.arena == number]
    cells = min(BAR_CELLS, pages)
    width = (WIDTH - 2 * MARGIN) / cells
    for cell in range(cells):
        x = MARGIN + cell * width
        fill = "#bbb" if cell == 0 else COLOURS[owners[cell % len(owners)] % len(COLOURS)]
        parts.append(box(x, y + 22, width - 1.5, 26, fill, opacity=1 if cell == 0 else 0.75))
    parts.append(text(MARGIN + 2, y + 62, "null", size=10, fill=SOFT))
    if cells < pages:
        parts.append(text(WIDTH - MARGIN, y + 62, f"and {pages - cells:,} more", size=10, fill=SOFT, anchor="end"))
    if len(owners) > 1:
        said = "any group may own any of them"
        parts.append(text(WIDTH / 2, y + 62, said, size=10, fill=SOFT, anchor="middle"))
    return y + 84


def _group(parts: list[str], plan: MemoryPlan, g: int, group: Group, large_bytes: int, y: int) -> int:
    """A large page of one group: its blocks, and the layers inside a block."""
    colour = COLOURS[g % len(COLOURS)]
    a_block = "a block is a state" if group.reach.keeps is Keeps.STATE else f"{group.block_tokens} tokens a block"
    count = "1 block" if group.pages_per_large == 1 else f"{group.pages_per_large} blocks"
    heading = (
        f"Group {g}: {group.reach.name}, {len(group.layers)} layers; {count} of {human_bytes(group.block_bytes)} "
        f"in a large page, {a_block}"
    )
    parts.append(text(MARGIN, y + 12, heading, weight="bold", fill=colour))
    shown = min(group.pages_per_large, MOST_BLOCKS)
    left_out = group.pages_per_large > shown
    width = (WIDTH - 2 * MARGIN) / (shown + left_out)
    for block in range(shown):
        parts.append(box(MARGIN + block * width, y + 20, width - 3, 34, colour, opacity=0.25, stroke=colour))
        label = f"block {block + 1}" if width > 56 else str(block + 1)
        parts.append(text(MARGIN + block * width + (width - 3) / 2, y + 41, label, size=11, anchor="middle"))
    if left_out:
        x = MARGIN + shown * width + width / 2
        parts.append(text(x, y + 41, f"... {group.pages_per_large}", size=11, anchor="middle", fill=SOFT))
    top = y + 66
    parts.append(line(MARGIN, y + 54, MARGIN, top, colour))
    parts.append(line(MARGIN + width - 3, y + 54, WIDTH - MARGIN, top, colour))
    return _layers(parts, plan, group, colour, top)


def _layers(parts: list[str], plan: MemoryPlan, group: Group, colour: str, y: int) -> int:
    """One block, magnified: a cell per layer, and the padding after the last one."""
    several = len({place.buffer for place in group.places}) > 1
    labels = list(_layer_labels(group, several))
    padding = 1 - group.content_bytes / group.block_bytes
    extra = 1 if padding > 0.001 else 0
    width = (WIDTH - 2 * MARGIN) / (len(labels) + extra)
    for n, label in enumerate(labels):
        parts.append(box(MARGIN + n * width, y, width - 1.5, 30, colour, opacity=0.6))
        parts.append(text(MARGIN + n * width + width / 2, y + 19, label, size=10, anchor="middle"))
    if extra:
        x = MARGIN + len(labels) * width
        parts.append(box(x, y, width - 1.5, 30, BLANK, stroke=SOFT))
        parts.append(text(x + width / 2, y + 19, f"padding {padding:.1%}", size=9, anchor="middle", fill=SOFT))
    where = "each layer in a buffer of its own" if several else "one after the other in one buffer"
    parts.append(text(MARGIN, y + 45, f"a block, magnified: its layers, {where}", size=10, fill=SOFT))
    return y + 66


def _layer_labels(group: Group, several: bool) -> Iterator[str]:
    shown = group.layers if len(group.layers) <= MOST_LAYERS else group.layers[: MOST_LAYERS - 2]
    for n, layer in enumerate(shown):
        yield f"layer {layer}, buf {group.places[n].buffer}" if several else f"layer {layer}"
    if len(shown) < len(group.layers):
        yield f"{len(group.layers) - len(shown) - 1} more"
        yield f"layer {group.layers[-1]}"


def _legend(parts: list[str], plan: MemoryPlan, y: int) -> int:
    x = MARGIN
    for g, group in enumerate(plan.groups):
        label = f"group {g}: {group.reach.name}{' (drafter)' if group.is_draft else ''}"
        width = 30 + 7 * len(label)
        if x + width > WIDTH - MARGIN:
            x, y = MARGIN, y + 20
        parts.append(box(x, y, 12, 12, COLOURS[g % len(COLOURS)], opacity=0.75))
        parts.append(text(x + 18, y + 11, label, size=12))
        x += width
    return y + 16
