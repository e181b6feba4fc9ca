"""Everything worth knowing about our kernels and engines on a GPU, in two commands of under ten minutes each.

    python bench/gpu_battery.py --first -o battery.jsonl      ceilings, kernels and their peers, errors
    python bench/gpu_battery.py --second -o battery.jsonl     ceilings again, engines with random weights

It needs torch, triton, transformers and numpy, and neither Ray nor a network nor any file of weights. Every part runs
in processes of its own, every case is a line of JSON as soon as it is known, and what no time is left for is said.

    ceilings    what this device copies, reads and multiplies, of random numbers; every other part is compared with it
    families    tiny models of every family, tokens compared with those of transformers
    compile     every kernel, in several processes at once, so that no later part waits for a compiler
    attention   each backend and torch's own attention: checked, then timed; us, GB/s, TFLOP/s, over the floor
    states      recurrences in place, beside plain torch
    sampling    tokens drawn from logits of 262,144 tokens and fewer
    tokenwise   norms, rotary positions and gates, alone and in the chain of a layer; the choice of experts
    products    with constant weights, of few rows and of many, and whole layers of experts
    packed      products with weights in fewer bits, beside torch's of 16
    pages       copies of pages, and swaps to host memory and back
    errors      every backend against float64 over pages of NaN: bfloat16, then float32 and float16
    engine      whole engines in this process: step times with and without graphs, prompts, mixed load, profiles

A time is the median over replays of 20 turns that are recorded in one graph and take turns over inputs that no cache
holds. Where a turn cannot be recorded, the line says so: "timed": "launched".

--parts a,b    only these, in the order above, or single jobs of them: engine/llama-3.1-8b
--list         every case of every part                        --tables FILE   what a file holds, for people
--only TEXT    only cases whose name has it          --minutes    when to end
--rehearse     everything in its smallest form on a pretended GPU: shows that it works, its times are played
"""

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    # The package need not be installed: a folder with a link by its name is where it is found.
    with tempfile.TemporaryDirectory(prefix="gpu-battery-") as site:
        Path(site, "intarsia").symlink_to(ROOT, target_is_directory=True)
        sys.path[0] = site  # in place of the folder of this file, whose names would hide others
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (site, os.environ.get("PYTHONPATH"))))
        from intarsia.bench.gpu.run import run

        return run(__doc__ or "", Path(site))


if __name__ == "__main__":
    sys.exit(main())
