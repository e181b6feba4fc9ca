"""What must hold of the points of a pool, and of its ends, at any time."""

from collections import Counter

from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.points import Point, PointTree


def points_below(point: Point) -> list[Point]:
    return [each for child in point.children for each in (child, *points_below(child))]


def check_tree(tree: PointTree) -> None:
    points = points_below(tree.root)
    assert len(points) == len(tree)
    for point in points:
        assert point.start < point.end and len(point.names) == point.end - point.start
        assert point.parent is not None and point.start == point.parent.end
        assert point.kept_children == sum(child.is_kept for child in point.children)
        assert point.is_kept != (point in tree.remembered)
        assert not point.is_kept or point.parent is tree.root or point.parent.kept == point.parent.end
    assert tree.remembered_names == sum(len(point.names) for point in tree.remembered)


def check_points(manager: CacheManager) -> None:
    """The tree is whole, and those points are candidates that giving up would free something of."""
    retention = manager.retention
    if retention is None:
        return
    check_tree(retention.tree)
    has_places = retention._blocks.has_places
    candidates = retention._candidates
    assert [point.place for point in candidates] == list(range(len(candidates)))
    for point in points_below(retention.tree.root):
        assert point.users >= 0, "a point has less than no users"
        if point.is_ready and has_places and point.encoder is None:
            assert point.lengths and all(length // retention._size == point.end for length in point.lengths)
        if has_places and point.encoder is None and point.is_kept and point.is_end:
            assert point.is_ready or point.users, f"{point.start} to {point.end} is kept, and serves no point"
        whole = point.encoder is not None or not has_places
        could_be = point.is_kept and not point.users and (point.is_end if whole else point.is_ready)
        assert (point.place >= 0) == could_be, f"{point.start} to {point.end} is a candidate or not: {could_be}"


def check_ends(manager: CacheManager) -> None:
    """Each end is counted once for each block that ends there, and once if blocks that are known go on beyond it."""
    ends, groups = manager.pool.known.ends, manager.pool.groups
    tails: dict[bytes, Counter[int]] = {}
    for end, (full, tail_tokens, count) in ends._of.items():
        assert count == sum(end in group.index for group in groups), "an end is in more or fewer blocks than it counts"
        tails.setdefault(full, Counter())[tail_tokens] += count
    held = {(holder, end) for holder, each in ends._held.items() for end in each}
    for end, (full, tail_tokens, holders) in ends._within.items():
        assert holders and all(any(name in group.index for group in groups) for name in holders), (
            "no block holds an end"
        )
        assert {(name, end) for name in holders} <= held
        held -= {(name, end) for name in holders}
        tails.setdefault(full, Counter())[tail_tokens] += 1
    assert not held and tails == ends._tails
