"""Is a model's family computed here as transformers computes it? A program of its own, because it needs torch.

    python -m intarsia.deploy.proof.prove MODEL_DIR RANKS.. [--seeds 3]

Prints a verdict as JSON, its last line. A small copy of the model (`scaled.py`) with random weights is computed by
transformers, and by an engine in this process with each number of ranks (`trial.py`). The first difference is the end
of it: the family is refused. But weights can lead to a near tie between experts, where two right computations part. So
a difference counts if it is larger than those that transformers' own answer has when the last bits of its weights
change (`oracle.py`). Answers that pass by that alone are in doubt. If half of them are, other weights are drawn.
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
from typing import Any, NamedTuple

from ...errors import IntarsiaError
from ...workers.checkpoint.json_file import clipped
from ...workers.checkpoint.spellings import config_of
from ...workers.known_families import check_not_refused
from .verdict import Verdict

SEEDS = 3
PREFIX = "intarsia-proof-"
COPY_PATH = re.compile(rf"\S*{PREFIX}\w+(/config\.json)?")


IN_DOUBT = "whatever weights its small copy has, transformers' own answers change with their last bits"


class Found(NamedTuple):
    """What one draw of weights showed."""

    changed: dict[str, tuple[Any, Any]]  # what was scaled: from, to
    difference: str | None  # in words
    is_sure: bool


def prove(model_dir: Path, ranks: Sequence[int], seeds: Sequence[int] = range(SEEDS)) -> Verdict:
    """Stops when it knows: after one seed, unless half of its answers are in doubt."""
    started_s = time.monotonic()
    family = ""
    found = Found({}, None, is_sure=False)
    try:
        config = config_of(model_dir)
        family = config.get_text_config(decoder=True).model_type
        check_not_refused((config.model_type, family))
        for seed in seeds:
            with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
                found = _try(config, Path(folder), ranks, seed)
            if found.is_sure:
                break
        reason = found.difference if found.is_sure else IN_DOUBT
    except IntarsiaError as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001  what cannot be tried, for whatever reason, cannot be proven
        reason = f"{type(error).__name__}: {clipped(str(error))}"
    reason = None if reason is None else COPY_PATH.sub("the small copy", reason)
    took_s = time.monotonic() - started_s
    changed = {name: list(both) for name, both in found.changed.items()}
    return Verdict(family, reason is None, tuple(ranks), took_s, reason, changed)


def _try(config: Any, folder: Path, ranks: Sequence[int], seed: int) -> Found:
    from .copy import load_oracle, make_copy
    from .layers import first_layer
    from .trial import Trial

    changed = make_copy(config, folder, seed, max(ranks))
    oracle = load_oracle(folder)
    answers = doubtful = 0
    for size in ranks:
        trial = Trial(folder, oracle, size, seed)
        found = asyncio.run(trial.first_difference())
        if found is not None:
            layer = asyncio.run(first_layer(folder, oracle.model, found.text))
            where = "" if layer is None else f"; the first layer that differs is {layer.layer} ({layer.kind})"
            return Found(changed, f"{found.told}{where} (seed {seed})", is_sure=True)
        answers += trial.answers
        doubtful += trial.doubtful
    return Found(changed, None, is_sure=2 * doubtful < answers)


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
