"""Programs that know nothing of us, unmodified, against a running server: LangChain, GuideLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from intarsia.tests.deploy.openai.conftest import Api


@pytest.fixture
def chat(api: Api) -> ChatOpenAI:
    settings: dict[str, Any] = {"model": "talker", "base_url": f"{api.url}/v1", "api_key": "none", "max_tokens": 24}
    return ChatOpenAI(temperature=0, **settings)


class Order(BaseModel):
    """An order of timber."""

    wood: Literal["oak", "ash"]
    boards: Literal[1, 2]


def test_langchain_asks_and_streams_the_same(chat: ChatOpenAI):
    whole = chat.invoke([("system", "You are a joiner."), ("human", "wood?")])
    assert isinstance(whole, AIMessage) and isinstance(whole.content, str) and whole.content
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] == 24
    pieces = list(chat.stream([("system", "You are a joiner."), ("human", "wood?")]))
    assert "".join(str(piece.content) for piece in pieces) == whole.content
    assert len(pieces) > 5
    assert [answer.content for answer in chat.batch(["oak", "ash"])] == [
        chat.invoke(wood).content for wood in ("oak", "ash")
    ]


def test_langchain_gets_an_object_by_schema_and_by_tool(chat: ChatOpenAI):
    long = chat.model_copy(update={"max_tokens": 200})
    ordered = long.with_structured_output(Order, method="json_schema").invoke("two boards of oak")
    assert isinstance(ordered, Order)
    [call] = long.bind_tools([Order], tool_choice="Order").invoke("two boards of oak").tool_calls
    assert call["name"] == "Order" and set(call["args"]) == {"wood", "boards"}


def test_langchain_speaks_responses_too(chat: ChatOpenAI):
    answer = chat.model_copy(update={"use_responses_api": True}).invoke("wood?")
    assert answer.text


@pytest.mark.slow
def test_guidellm_measures_every_request(api: Api, talker: Path, tmp_path: Path):
    report = tmp_path / "report.json"
    command = [
        str(Path(sys.executable).with_name("guidellm")), "run", "--disable-progress",
        "--backend", f"kind=openai_http,target={api.url},model=talker",
        "--profile", "kind=concurrent,streams=8", "--constraint", "kind=max_requests,count=24",
        "--tokenizer", f"kind=huggingface_auto,model={talker}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=24",
        "--output", f"kind=json,path={report}",
    ]  # fmt: skip
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    [measured] = json.loads(report.read_text())["benchmarks"]
    totals = measured["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (24, 0, 0)
