"""litellm: its SDK by two routes, and its proxy in front of the server."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import httpx
import litellm
import openai
from probing import KEY, MODEL, ONLY_C, URL, expect, probe, raises, run
from pydantic import BaseModel

litellm.suppress_debug_info = True
ASK = [{"role": "user", "content": "Which wood?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "order",
            "parameters": {"type": "object", "properties": {"wood": {"enum": ["oak", "ash"]}}, "required": ["wood"]},
        },
    }
]


class Order(BaseModel):
    wood: Literal["oak", "ash"]


def ask(route: str, **fields):
    told = {"model": f"{route}/{MODEL}", "messages": ASK, "api_base": URL, "api_key": KEY, "max_tokens": 24}
    return litellm.completion(**told | fields)


def chat(route: str):
    answer = ask(route)
    expect(answer.choices[0].message.content and answer.usage.completion_tokens, answer)
    return f"{answer.usage.prompt_tokens} tokens in, {answer.usage.completion_tokens} out"


def stream(route: str):
    chunks = list(ask(route, stream=True, stream_options={"include_usage": True}, logit_bias=ONLY_C))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expect(len(chunks) > 3 and text == "c" * 24 and chunks[-1].usage.completion_tokens == 24, chunks[-1], text)
    return "pieces, then usage"


def tool(route: str):
    answer = ask(route, tools=TOOLS, tool_choice="required", max_tokens=300, parallel_tool_calls=False)
    [call] = answer.choices[0].message.tool_calls
    expect(call.function.name == "order" and "wood" in call.function.arguments, call)
    return "calls order"


def schema(route: str):
    answer = ask(route, response_format=Order, max_tokens=100)
    return f"a {type(Order.model_validate_json(answer.choices[0].message.content)).__name__}"


def too_long(route: str):
    long = [{"role": "user", "content": "x" * 40_000}]
    return raises(litellm.ContextWindowExceededError, lambda: ask(route, messages=long))


def wrong_model(route: str):
    return raises(litellm.NotFoundError, lambda: ask(route, model=f"{route}/no"))


def wrong_key(route: str):
    return raises(litellm.AuthenticationError, lambda: ask(route, api_key="wrong"))


def falls_back(route: str):
    def named(name: str, model: str):
        return {"model_name": name, "litellm_params": {"model": model, "api_base": URL, "api_key": KEY}}

    router = litellm.Router(
        [named("small", f"{route}/{MODEL}"), named("large", f"{route}/{MODEL}")],
        context_window_fallbacks=[{"small": ["large"]}], num_retries=0,
    )  # fmt: skip
    long = [{"role": "user", "content": "x" * 40_000}]
    return raises(litellm.ContextWindowExceededError, lambda: router.completion("small", long), "large")


for route in ("openai", "hosted_vllm"):
    for each in (chat, stream, tool, schema, too_long, wrong_model, wrong_key, falls_back):
        probe(f"{route}/: {each.__name__.replace('_', ' ')}")(lambda each=each, route=route: each(route))


@probe("text-completion-openai/: a completion")
def _():
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="The inlay", api_base=URL, api_key=KEY, max_tokens=8
    )
    expect(answer.choices[0].text, answer)
    return "text"


@probe("openai/: responses")
def _():
    answer = litellm.responses(
        model=f"openai/{MODEL}", input="Which wood?", api_base=URL, api_key=KEY, max_output_tokens=16
    )
    expect(answer.output, answer)
    return "an answer"


CONFIG = """
model_list:
  - model_name: wood
    litellm_params: {model: "openai/%s", api_base: "%s", api_key: "%s"}
  - model_name: vllm-wood
    litellm_params: {model: "hosted_vllm/%s", api_base: "%s", api_key: "%s"}
"""
PROXY_START_S = 120
PROXY_KEY = "sk-of-the-proxy"


class Proxy:
    """`litellm --config`, for the probes after it."""

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        config = Path("proxy.yaml")
        config.write_text(CONFIG % (MODEL, URL, KEY, MODEL, URL, KEY))
        program = Path(sys.executable).with_name("litellm")
        command = [program, "--config", config, "--host", "127.0.0.1", "--port", str(self.port)]
        variables = os.environ | {"LITELLM_MASTER_KEY": PROXY_KEY}
        with Path("proxy.log").open("w") as log:
            self.process = subprocess.Popen([*map(str, command)], env=variables, stdout=log, stderr=log)
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=PROXY_KEY, max_retries=0)

    def wait(self):
        until = time.monotonic() + PROXY_START_S
        while time.monotonic() < until:
            expect(self.process.poll() is None, Path("proxy.log").read_text()[-500:])
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/health/liveliness").is_success:
                    return
            except httpx.TransportError:
                time.sleep(0.5)
        raise AssertionError(Path("proxy.log").read_text()[-500:])


proxy: list[Proxy] = []


@probe("proxy: starts and lists the models")
def _():
    proxy.append(Proxy())
    proxy[0].wait()
    return ", ".join(sorted(model.id for model in proxy[0].client.models.list()))


def through(name: str, **fields):
    return proxy[0].client.chat.completions.create(**{"model": name, "messages": ASK, "max_tokens": 24} | fields)


for name in ("wood", "vllm-wood"):

    @probe(f"proxy: chat of {name}")
    def _(name=name):
        expect(through(name).choices[0].message.content)
        return "text"

    @probe(f"proxy: stream of {name}")
    def _(name=name):
        chunks = list(through(name, stream=True, stream_options={"include_usage": True}))
        expect(chunks[-1].usage.completion_tokens, chunks[-1])
        return "pieces, then usage"

    @probe(f"proxy: tool of {name}")
    def _(name=name):
        [call, *_] = through(name, tools=TOOLS, tool_choice="required", max_tokens=300).choices[0].message.tool_calls
        return f"calls {call.function.name}"

    @probe(f"proxy: prompt too long for {name}")
    def _(name=name):
        long = [{"role": "user", "content": "x" * 40_000}]
        return raises(openai.BadRequestError, lambda: through(name, messages=long), "ContextWindowExceededError")


try:
    run()
finally:
    for each in proxy:
        each.process.terminate()
        each.process.wait(30)
