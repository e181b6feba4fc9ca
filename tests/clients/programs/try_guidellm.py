"""GuideLLM, which measures servers."""

import json
from pathlib import Path

from commands import command
from probing import KEY, MODEL, ROOT_URL, TOKENIZER, expect, probe, run


def measured(path: str) -> str:
    report = Path(f"report{path.replace('/', '-')}.json")
    command(
        "guidellm", "run", "--disable-progress",
        "--backend", f"kind=openai_http,target={ROOT_URL},model={MODEL},api_key={KEY},request_format={path}",
        "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=12",
        "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        "--output", f"kind=json,path={report}",
    )  # fmt: skip
    [found] = json.loads(report.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    expect((totals["successful"], totals["errored"], totals["incomplete"]) == (12, 0, 0), totals)
    return "12 requests, none failed"


for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
    probe(path)(lambda path=path: measured(path))

run()
