"""The tree of points against plain lists of what was entered and kept."""

import random

import pytest

from intarsia.kvcache.points import Point, PointTree, names_between
from intarsia.tests.kvcache.points_check import check_tree, points_below


def names(text: str) -> list[bytes]:
    """Names name all that comes before."""
    return [text[: n + 1].encode() for n in range(len(text))]


def kept(tree: PointTree, text: str) -> list[Point]:
    path = tree.enter(names(text), 0)
    for point in path:
        tree.keep(point)
    return path


def spans(path: list[Point]) -> list[tuple[int, int]]:
    return [(point.start, point.end) for point in path]


def test_prompts_that_begin_alike_share_a_path():
    tree = PointTree()
    assert spans(kept(tree, "abcdef")) == [(0, 6)]
    assert spans(kept(tree, "abcxyz")) == [(0, 3), (3, 6)]
    assert spans(kept(tree, "abcdef")) == [(0, 3), (3, 6)]
    assert spans(kept(tree, "ab")) == [(0, 2)]
    assert spans(kept(tree, "abcdefgh")) == [(0, 2), (2, 3), (3, 6), (6, 8)]


def test_a_walk_ends_where_nothing_is_known():
    tree = PointTree()
    kept(tree, "abcdef")
    path, within, blocks = tree.walk(names("abcq"))
    assert (path, within is not None, blocks) == ([], True, 3)
    path, within, blocks = tree.walk(names("abcdefg"))
    assert (spans(path), within, blocks) == ([(0, 6)], None, 6)
    assert tree.walk(names("xyz")) == ([], None, 0)


def test_names_of_a_path_are_told_across_its_points():
    tree = PointTree()
    kept(tree, "abcdef")
    end = kept(tree, "abcxyz")[-1]
    assert names_between(end, 1, 5) == names("abcxyz")[1:5]


def test_what_was_let_go_is_remembered_and_comes_back():
    tree = PointTree()
    first, last = kept(tree, "abc")[0], kept(tree, "abcdef")[-1]
    tree.let_go(last)
    assert (first.is_end, tree.remembered_names) == (True, 3)
    assert spans(tree.walk(names("abcdefg")).path) == [(0, 3), (3, 6)]
    kept(tree, "abcdeq")  # parts within what is only remembered
    assert spans(tree.walk(names("abcdef")).path) == [(0, 3), (3, 5), (5, 6)]
    assert [point.start for point in tree.remembered] == [5]
    tree.forget_oldest()
    assert (tree.walk(names("abcdef")).blocks, tree.remembered_names) == (5, 0)


@pytest.mark.parametrize("seed", range(30))
def test_random_use_knows_what_a_plain_list_knows(seed: int):
    print("seed", seed)
    rng = random.Random(seed)
    tree, known = PointTree(), set[str]()
    for _ in range(200):
        text = "".join(rng.choice("ab") for _ in range(rng.randint(1, 9)))
        expected = max(
            (n for n in range(len(text) + 1) if any(other.startswith(text[:n]) for other in known)), default=0
        )
        assert tree.walk(names(text)).blocks == expected
        match rng.randrange(4):
            case 0 | 1:
                kept(tree, text)
                known.add(text)
            case 2:
                ends = [point for point in points_below(tree.root) if point.is_kept and point.is_end]
                if ends:
                    tree.let_go(rng.choice(ends))
            case 3:
                if tree.remembered:
                    point = tree.forget_oldest()
                    gone = point.names[0].decode()
                    known = {other if not other.startswith(gone) else gone[:-1] for other in known}
        check_tree(tree)
