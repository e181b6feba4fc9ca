"""genai-bench, which measures servers."""

import json
from pathlib import Path

from commands import command
from probing import KEY, MODEL, ROOT_URL, TOKENIZER, expect, probe, run

Path("lines.txt").write_text("".join(f"Which wood is number {n}?\n" for n in range(200)))


@probe("text-to-text")
def _():
    command(
        "genai-bench", "benchmark", "--api-backend", "openai", "--api-base", ROOT_URL, "--api-key", KEY,
        "--api-model-name", MODEL, "--model-tokenizer", TOKENIZER, "--task", "text-to-text", "--max-time-per-run", "1",
        "--max-requests-per-run", "12", "--num-concurrency", "4", "--traffic-scenario", "D(64,16)",
        "--dataset-path", "lines.txt", "--experiment-base-dir", "found", "--experiment-folder-name", "one",
    )  # fmt: skip
    [found] = [path for path in Path("found/one").glob("*.json") if "metadata" not in path.name]
    totals = json.loads(found.read_text())["aggregated_metrics"]
    expect(totals["num_completed_requests"] >= 12 and not totals["num_error_requests"], totals)
    return "12 requests, none failed"


run()
