"""Is a model's family computed here as transformers computes it? A program of its own, because it needs torch.

    python -m intarsia.deploy.proof.prove MODEL_DIR RANKS.. [--seeds 3]

Prints a verdict as JSON, its last line. A small copy of the model (`scaled.py`) with random weights is computed by
transformers, and by an engine in this process with each number of ranks. Weights that lead to a near tie between
experts can make two right computations differ. So of several seeds one may differ; if two do, the family is refused.
"""

import argparse
import asyncio
import logging
import os
import re
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import IntarsiaError
from ...workers.checkpoint.json_file import clipped
from ...workers.checkpoint.spellings import config_of
from .verdict import Verdict

SEEDS = 3
PREFIX = "intarsia-proof-"
COPY_PATH = re.compile(rf"\S*{PREFIX}\w+(/config\.json)?")


def prove(model_dir: Path, ranks: Sequence[int], seeds: Sequence[int] = range(SEEDS)) -> Verdict:
    """Stops when it knows: after one seed, if nothing differs."""
    started_s = time.monotonic()
    family = ""
    changed: dict[str, tuple[Any, Any]] = {}
    differing: list[str] = []
    try:
        config = config_of(model_dir)
        family = config.get_text_config(decoder=True).model_type
        agreed = 0
        for seed in seeds:
            with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
                changed, told = _tried(config, Path(folder), ranks, seed)
            differing += told
            agreed += not told
            if agreed > len(differing) or len(differing) > len(seeds) // 2:
                break
        is_right = agreed > len(differing)
        reason = None if is_right else differing[0]
    except IntarsiaError as error:
        is_right, reason = False, str(error)
    except Exception as error:  # noqa: BLE001  what cannot be tried, for whatever reason, cannot be proven
        is_right, reason = False, f"{type(error).__name__}: {clipped(str(error))}"
    reason = None if reason is None else COPY_PATH.sub("the small copy", reason)
    took_s = time.monotonic() - started_s
    return Verdict(family, is_right, tuple(ranks), took_s, reason, {name: list(both) for name, both in changed.items()})


def _tried(config: Any, folder: Path, ranks: Sequence[int], seed: int) -> tuple[dict[str, tuple[Any, Any]], list[str]]:
    """What was scaled, and where the engine first differs, in words."""
    from .copy import load_oracle, make_copy
    from .layers import first_layer
    from .trial import first_difference, prompts

    changed = make_copy(config, folder, seed, max(ranks))
    oracle = load_oracle(folder)
    for size in ranks:
        found = asyncio.run(first_difference(folder, oracle, size, seed))
        if found is None:
            continue
        prompt = next(each for each in prompts(seed) if len(each) == found.prompt_tokens)
        layer = asyncio.run(first_layer(folder, oracle, prompt))
        where = "" if layer is None else f"; the first layer that differs is {layer.layer} ({layer.kind})"
        return changed, [f"{found.told}{where} (seed {seed})"]
    return changed, []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("ranks", type=int, nargs="+")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["TQDM_DISABLE"] = "1"
    print(prove(args.model_dir, args.ranks, range(args.seeds)).to_json())


if __name__ == "__main__":
    main()
