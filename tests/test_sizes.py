"""How much one has to hold in mind: the sizes of classes, of functions, and of the whole. Ceilings that only fall."""

import ast
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = ("controller", "deploy", "kernels", "kvcache", "proto", "workers")

MOST_CLASS_LINES = 344
MOST_FUNCTION_LINES = 69
MOST_MEDIAN_LINES = 7


class Size(NamedTuple):
    lines: int
    place: str


def product_files() -> list[Path]:
    return [
        file
        for folder in PRODUCT
        for file in sorted((ROOT / folder).rglob("*.py"))
        if not file.stem.endswith(("_pb2", "_pb2_grpc"))
    ]


def sizes(kinds: tuple[type[ast.AST], ...]) -> Iterator[Size]:
    for file in product_files():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, kinds):
                assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                yield Size(lines, f"{file.relative_to(ROOT)}:{node.lineno} {node.name}")


@pytest.mark.parametrize(
    ("kinds", "most"),
    [((ast.ClassDef,), MOST_CLASS_LINES), ((ast.FunctionDef, ast.AsyncFunctionDef), MOST_FUNCTION_LINES)],
    ids=["classes", "functions"],
)
def test_nothing_is_too_large_to_be_held_in_mind(kinds: tuple[type[ast.AST], ...], most: int):
    large = sorted((size for size in sizes(kinds) if size.lines > most), reverse=True)
    assert not large, "\n".join(f"{size.lines} lines: {size.place}" for size in large)


def test_most_functions_are_a_few_lines():
    assert median(size.lines for size in sizes((ast.FunctionDef, ast.AsyncFunctionDef))) <= MOST_MEDIAN_LINES
