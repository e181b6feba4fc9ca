"""The table of model families: what each keeps, how it is laid out, what runs. `docs/families.md` is its output."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from ...errors import InvalidSetting, UnsupportedModel
from ...kvcache.plan import PlanSettings
from ...kvcache.reach import Keeps
from ...kvcache.spec import LayerSpec
from ...kvcache.strategies import plan_memory
from ...workers.known_families import KNOWN_FAMILIES
from ..checkpoints.known_models import KnownModel, known_models

MEMORY_BYTES = 40 << 30
BLOCK_TOKENS = 16
RANKS = (1, 2, 4, 8)

MODEL_TYPE_OF = {
    "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text", "granite4_h": "granitemoehybrid",
    "llama4": "llama4_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text",
    "minimax_m3": "minimax_m3_vl_text", "step3p7": "step3p5", "muse_glimmer": "muse_glimmer_text",
    "mistral_large4": "mistral_large4_text", "glm5_next": "glm5_next_text",
}  # fmt: skip
"""Family in the table of known models -> model_type, where these differ."""


class FamilyRow(NamedTuple):
    """One family, by an example of it."""

    name: str
    example: str  # a model of the family, by its id on the hub
    layer_kinds: str
    groups: int
    strategy: str  # that `auto` takes
    tensor_parallel: str  # sizes that divide the example's heads
    prefix_cache: str
    status: str


HEADINGS = ("family", "example", "layer kinds", "groups", "strategy", "TP", "prefix cache", "status")


def family_rows() -> list[FamilyRow]:
    """All families that run, then those whose memory can be planned only."""
    examples = {MODEL_TYPE_OF.get(model.family, model.family): model for model in reversed(known_models())}
    rows = [_row(name, _Example.of(examples[model_type]), "runs") for model_type, name in KNOWN_FAMILIES.items()]
    others = sorted((known for type_, known in examples.items() if type_ not in KNOWN_FAMILIES), key=lambda k: k.family)
    rows += [_row(known.family, _Example.of(known), NOT_RUN.get(known.family, PROVEN)) for known in others]
    return rows


def markdown(rows: Sequence[FamilyRow]) -> Iterator[str]:
    yield f"| {' | '.join(HEADINGS)} |"
    yield f"|{'|'.join('---' for _ in HEADINGS)}|"
    for row in rows:
        yield f"| {' | '.join(str(value) for value in row)} |"


def print_rows(rows: Sequence[FamilyRow], console: Console | None = None) -> None:
    """A table for people: what fits a line of 80 columns. `markdown` has the rest."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("family", "an example keeps", "strategy", "TP"):
        table.add_column(name, overflow="fold")
    for status in dict.fromkeys(row.status for row in rows):
        table.add_row(f"[dim]{status}:[/dim]")
        for row in rows:
            if row.status == status:
                table.add_row(row.name, row.layer_kinds, row.strategy, row.tensor_parallel.replace(", ", " "))
    console = console or Console(highlight=False)
    console.print(table)
    console.print("\nThe example of each, groups and prefix cache: intarsia families --markdown", highlight=False)


PROVEN = "proven on load"

NOT_RUN: dict[str, str] = {}
"""Families of known models that are refused, and why."""

INTRODUCTION = """\
# Model families

Made by `intarsia families --docs`. "Runs": the tests put the family through the whole gate
(`tests/workers/test_families.py`). Groups and strategy are those of the example in 40 GiB, with blocks of 16 tokens and
an expected length of 8,192; TP names the sizes, of 1, 2, 4 and 8, that divide its heads and states. A prefix hit ends
at any token, or where a state was saved: at the last block border and the very end of a prompt, where prompts part,
and every 512 to 4,096 tokens.

Other families are proven on load: whether such a model is answered right is proven when it is served for the first
time, by a small copy of it; `intarsia prove MODEL` does that by hand, and says what is missing where it fails.
What became of each architecture of transformers: [proven families](proven_families.md).
"""


def docs_page() -> Iterator[str]:
    """`docs/families.md`."""
    yield INTRODUCTION
    yield from markdown(family_rows())


def run(*, as_markdown: bool, as_page: bool) -> None:
    """Print the table in one of its forms."""
    if not as_page and not as_markdown:
        print_rows(family_rows())
        return
    for line in docs_page() if as_page else markdown(family_rows()):
        print(line)


class _Example(NamedTuple):
    name: str
    layers: Callable[[int], Sequence[LayerSpec]]  # one rank's share, given how many there are
    max_tokens: int
    encoder_tokens: int

    @classmethod
    def of(cls, known: KnownModel) -> "_Example":
        return cls(known.id, known.layers, known.max_position, known.encoder_tokens)


def _row(name: str, example: _Example, status: str) -> FamilyRow:
    layers = example.layers(1)
    settings = PlanSettings(MEMORY_BYTES, BLOCK_TOKENS, encoder_tokens=example.encoder_tokens)
    plan = plan_memory(layers, settings, example.max_tokens)
    return FamilyRow(
        name,
        example.name,
        _kinds(layers),
        len(plan.groups),
        plan.strategy,
        ", ".join(str(ranks) for ranks in RANKS if _divides(example, ranks)),
        _prefix_cache(layers),
        status,
    )


def _divides(example: _Example, ranks: int) -> bool:
    try:
        example.layers(ranks)
    except (InvalidSetting, UnsupportedModel):
        return False
    return True


def _kinds(layers: Sequence[LayerSpec]) -> str:
    """The kinds of layers, as in "10 full + 52 sliding-1024", in the order of their first layers; sharing layers
    counted apart."""
    counts: dict[str, int] = {}
    for layer in layers:
        kind = layer.reach.name + (" (latent)" if layer.value_dim == 0 and layer.reach.keeps is Keeps.TOKENS else "")
        kind = f"{kind} (shared)" if layer.shares is not None else kind
        counts[kind] = counts.get(kind, 0) + 1
    return " + ".join(f"{count} {kind}" for kind, count in counts.items())


def _prefix_cache(layers: Sequence[LayerSpec]) -> str:
    """The places at which the next request with the same beginning can go on."""
    keeps = {layer.reach.keeps for layer in layers}
    where = "at saved states" if Keeps.STATE in keeps else "at any token"
    return f"{where}, images by content" if Keeps.ENCODER in keeps else where
