"""Lines as rows of a Ray Data pipeline, on the cluster at hand."""

import json
from pathlib import Path

import pytest
import ray

from intarsia.deploy.batch.ray_data import BatchLines


@pytest.mark.slow
def test_every_row_gets_its_result(ray_cluster: None, talker: Path):
    def line(n: int) -> str:
        body = {"prompt": f"Panel {n}", "max_tokens": n % 7 + 1}
        return json.dumps({"custom_id": f"row-{n}", "url": "/v1/completions", "body": body})

    rows = [{"text": line(n)} for n in (*range(40), 3, 3)] + [{"text": "no JSON"}]
    made = {"model": str(talker), "kv_cache_memory": "1MiB"}
    lines = ray.data.from_items(rows)
    results = lines.map_batches(BatchLines, fn_constructor_kwargs=made, concurrency=1, batch_size=16).take_all()
    assert len(results) == 43
    told = {row["text"]: json.loads(row["result"]) for row in results}
    assert len(told) == 41 and told["no JSON"]["error"]["code"] == "invalid_line"
    for n in range(40):
        body = told[line(n)]["response"]["body"]
        assert body["usage"]["completion_tokens"] <= n % 7 + 1 and body["choices"]
