"""Only what was proven is served: the families of the tests, and those whose small copy was computed right here."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import UnsupportedModel
from ...workers.checkpoint.config_schema import text_config
from ...workers.known_families import KNOWN_FAMILIES, is_known
from ..checkpoints.child import run_child
from .verdict import Verdict, remember, remembered

DEVICES = "/dev/nvidia0", "/dev/kfd"
"""Without one of these, no GPU is here that torch could use."""


def has_gpu() -> bool:
    return any(os.path.exists(device) for device in DEVICES)


def check_right(model_dir: str, config: Mapping[str, Any], ranks: int, *, runs_own_code: bool = False) -> None:
    """config: of the folder, whose weights need not be there. ranks: on which the model is to run

    runs_own_code: that of the checkpoint, which says itself what it is

    Raises `UnsupportedModel` for a model that would be computed wrong, or of which that is not known. Takes seconds
    when a family is met for the first time."""
    kinds = config.get("model_type"), text_config(config).get("model_type")
    if runs_own_code:
        return
    if kinds[0] is None:
        raise UnsupportedModel(f"{model_dir}/config.json says no model_type, so its family is not known", field="model")
    if kinds[1] is None or is_known(kinds):
        return
    verdict = verdict_of(model_dir, config, ranks, tell=_tell)
    if not verdict.is_right:
        raise UnsupportedModel(
            f"{kinds[1]} is not served, because it would be answered wrong: {verdict.reason}. The tests cover "
            f"{', '.join(KNOWN_FAMILIES.values())}; `intarsia prove {model_dir}` shows how other families are tried.",
            field="model",
        )


def verdict_of(
    model_dir: str,
    config: Mapping[str, Any],
    ranks: int,
    *,
    seeds: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """That which is remembered, or a new one, which is remembered then. seeds: None: as many as it takes"""
    known = remembered(config, ranks, has_gpu=has_gpu()) if seeds is None else None
    if known is not None:
        return known
    kind = text_config(config).get("model_type")
    tell(f"{kind} is met for the first time: a small copy of it is computed here and by transformers ...")
    sizes = [str(size) for size in sorted({1, ranks})]
    more = () if seeds is None else ("--seeds", str(seeds))
    ended = run_child("deploy.proof.prove", (str(Path(model_dir).resolve()), *sizes, *more), None)
    try:
        verdict = Verdict.from_json(ended.last)
    except (ValueError, TypeError, KeyError):
        last = ended.errors[-1] if ended.errors else f"exit status {ended.code}"
        return Verdict(str(kind), False, (1, ranks), 0.0, f"the proof came to no end: {last}")
    remember(verdict, config, ranks, has_gpu=has_gpu())
    tell(f"{kind} is {'right' if verdict.is_right else 'wrong'}, after {verdict.took_s:.0f} s")
    return verdict


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
