"""`intarsia prove`: how a small copy of a model fares, for people or programs."""

import json

from rich.console import Console
from rich.table import Table

from ...workers.checkpoint.config_schema import text_config
from ...workers.checkpoint.files import CONFIG, read_config
from ...workers.known_families import is_known
from ..checkpoints.model_dir import find_model
from .gate import verdict_of
from .verdict import Verdict

LONGEST_LIST = 6


def run(model: str, tensor_parallel_size: int, seeds: int | None, *, as_json: bool) -> bool:
    """Whether it is computed right. seeds: None: what is remembered will do"""
    folder = find_model(model, with_weights=False).path
    config = read_config(folder / CONFIG)
    console = Console(stderr=True, highlight=False)
    verdict = verdict_of(str(folder), config, tensor_parallel_size, seeds=seeds, tell=console.print)
    if as_json:
        print(verdict.to_json())
    else:
        _print(verdict, is_known((config.get("model_type"), text_config(config).get("model_type"))))
    return verdict.is_right


def _print(verdict: Verdict, is_tested: bool) -> None:
    console = Console(highlight=False)
    table = Table("scaled", "of the model", "of the copy", box=None, pad_edge=False, header_style="bold")
    for name, (old, new) in sorted(verdict.scaled.items()):
        table.add_row(name, _short(old), _short(new))
    console.print(table)
    ranks = " and ".join(str(size) for size in verdict.ranks)
    console.print(f"\nfamily      {verdict.family}{', which the tests cover too' if is_tested else ''}")
    console.print(f"ranks       {ranks}")
    console.print(f"took        {verdict.took_s:.1f} s")
    console.print(f"verdict     {'[green]right[/green]' if verdict.is_right else '[red]not served[/red]'}")
    if verdict.reason:
        console.print(f"reason      {verdict.reason}", markup=False)


def _short(value: object) -> str:
    if isinstance(value, list) and len(value) > LONGEST_LIST:
        return f"{len(value)} of {json.dumps(value[:LONGEST_LIST])[1:-1]}, .."
    text = json.dumps(value)
    return text if len(text) < 60 else f"{text[:57]}..."
