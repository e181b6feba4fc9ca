"""How much one has to read to follow a decode step from the client and back: here, and in other servers.

    python bench/reading.py                                      # this project, and transformers as it is installed
    python bench/reading.py --vllm DIR --nano-vllm DIR --mini-sglang DIR

DIR holds the package as it is published: `pip download --no-deps vllm`, unpacked. Prints one JSON object. All are
counted the same way. A file counts whole, generated code and the model's own layers do not. For other servers the
files are named by hand below: the loop, the scheduler, the cache, what travels, the worker, attention and its backend,
the sampler, and the way of a token back to its client. For this project they are those that `tests/test_route.py`
holds it to. Lines are all lines.
"""

import argparse
import ast
import json
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from intarsia.tests.test_route import LEAVES, ROOT, SPINE

ROUTES: dict[str, tuple[str, ...]] = {
    "transformers": (
        *(f"generation/continuous_batching/{name}.py" for name in (
            "cache", "cb_logits_processors", "continuous_api", "distributed", "input_outputs", "model_runner",
            "requests", "scheduler", "utils",
        )),
        "integrations/sdpa_paged.py",
    ),
    "vllm": (
        *(f"vllm/v1/engine/{name}.py" for name in (
            "async_llm", "core", "core_client", "detokenizer", "output_processor",
        )),
        *(f"vllm/v1/core/{name}.py" for name in (
            "block_pool", "kv_cache_coordinator", "kv_cache_manager", "kv_cache_utils", "single_type_kv_cache_manager",
        )),
        *(f"vllm/v1/core/sched/{name}.py" for name in ("async_scheduler", "output", "request_queue", "scheduler")),
        *(f"vllm/v1/worker/{name}.py" for name in ("block_table", "gpu_input_batch", "gpu_model_runner", "gpu_worker")),
        "vllm/v1/executor/abstract.py",
        "vllm/v1/executor/multiproc_executor.py",
        "vllm/v1/attention/backends/flash_attn.py",
        "vllm/model_executor/layers/attention/attention.py",
        "vllm/v1/sample/sampler.py",
        "vllm/v1/outputs.py",
        "vllm/v1/request.py",
        "vllm/v1/serial_utils.py",
        "vllm/entrypoints/openai/completion/serving.py",
    ),
    "nano-vllm": (
        *(f"nanovllm/engine/{name}.py" for name in (
            "block_manager", "llm_engine", "model_runner", "scheduler", "sequence",
        )),
        "nanovllm/layers/attention.py",
        "nanovllm/layers/sampler.py",
        "nanovllm/utils/context.py",
        "nanovllm/llm.py",
    ),
    "mini-sglang": tuple(
        f"python/minisgl/{name}.py"
        for name in (
            "core", "attention/fa", "engine/engine", "engine/graph", "engine/sample", "kvcache/mha_pool",
            "layers/attention", "message/backend", "message/frontend", "scheduler/cache", "scheduler/decode",
            "scheduler/prefill", "scheduler/scheduler", "server/api_server", "tokenizer/server",
        )
    ),
}  # fmt: skip
"""The files of a decode step of others. A file that a version does not have is told, not counted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ROUTES:
        parser.add_argument(f"--{name}", type=Path, metavar="DIR")
    asked = vars(parser.parse_args())
    ours = {
        "intarsia, the spine": counted(ROOT, SPINE),
        "intarsia, a quiet step": counted(ROOT, entered("quiet")),
        "intarsia, a step in which blocks move": counted(ROOT, entered("blocks move")),
    }
    others = {
        name: counted(where, ROUTES[name])
        for name in ROUTES
        if (where := asked[name.replace("-", "_")] or installed(name)) is not None
    }
    print(json.dumps({"benchmark": "reading", **ours, **others}, indent=2))


def entered(step: str) -> list[str]:
    """The files that such a step may enter."""
    return sorted({*SPINE, *LEAVES[step]})


def installed(name: str) -> Path | None:
    spec = find_spec(name) if name == "transformers" else None
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def counted(root: Path, names: Iterable[str]) -> dict[str, Any]:
    files = [root / name for name in names]
    there = [file for file in files if file.exists()]
    trees = [ast.parse(file.read_text()) for file in there]
    functions = sorted(_lines(node) for node in _nodes(trees, ast.FunctionDef, ast.AsyncFunctionDef))
    classes = [_lines(node) for node in _nodes(trees, ast.ClassDef)]
    return {
        "files": len(there),
        "lines": sum(len(file.read_text().splitlines()) for file in there),
        "functions": len(functions),
        "median_function_lines": median(functions),
        "p90_function_lines": quantiles(functions, n=10)[-1],
        "largest_function_lines": functions[-1],
        "largest_class_lines": max(classes),
        "not_there": [str(file.relative_to(root)) for file in files if file not in there],
    }


def _nodes(trees: Iterable[ast.AST], *kinds: type[ast.AST]) -> list[Any]:
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]


def _lines(node: Any) -> int:
    return node.end_lineno - node.lineno + 1


if __name__ == "__main__":
    main()
