"""Every causal language model that the installed transformers knows, each as its config class has it, put to the proof.

    python -m intarsia.deploy.proof.sweep [FAMILY ..] [--ranks 1 2] [--seeds 3] [--out FILE]

Prints a line for each: what it is, how long that took, and why not. With `--out` verdicts are written there as JSON
lines, and families that are there already are left out: so a sweep can go on where it was ended.
"""

import argparse
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...workers.known_families import is_known
from .prove import SEEDS, prove
from .verdict import Verdict

LACKING: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 6, "attn_layer_indices": [2, 5]},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "nemotron": {"num_key_value_heads": 8},
}
"""What a config class leaves open though no model can be without it."""


def families() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def sweep(names: Sequence[str], ranks: Sequence[int], seeds: int) -> Iterator[tuple[str, Verdict]]:
    from transformers import CONFIG_MAPPING

    for name in names:
        with tempfile.TemporaryDirectory(prefix="intarsia-sweep-") as folder:
            try:
                CONFIG_MAPPING[name](**LACKING.get(name, {})).save_pretrained(folder)
            except Exception as error:  # transformers raises errors of any kind
                yield name, Verdict(name, False, tuple(ranks), 0.0, f"its config has no defaults: {error}")
                continue
            yield name, prove(Path(folder), ranks, range(seeds))


def status_of(name: str, verdict: Verdict) -> str:
    """In a word or two, as `docs/families.md` has it."""
    if verdict.is_right:
        return "tested" if is_known((name, verdict.family)) else "proven on load"
    return "refused"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["TQDM_DISABLE"] = "1"
    known: set[str] = set()
    if args.out is not None and args.out.exists():
        known = {json.loads(line)["name"] for line in args.out.read_text().splitlines()}
    names = [name for name in args.families or families() if name not in known]
    for name, verdict in sweep(names, args.ranks, args.seeds):
        print(f"{name:28} {status_of(name, verdict):15} {verdict.took_s:5.1f} s  {verdict.reason or ''}", flush=True)
        if args.out is not None:
            with args.out.open("a") as out:
                out.write(json.dumps({"name": name, **json.loads(verdict.to_json())}) + "\n")


if __name__ == "__main__":
    main()
