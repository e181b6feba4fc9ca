"""dspy, whose adapters ask for fields in words and by schema."""

from typing import Literal

import dspy
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider
from probing import KEY, MODEL, URL, expect, probe, raises, run


def lm(provider: str = "openai", **fields) -> dspy.LM:
    usual = {"api_base": URL, "api_key": KEY, "max_tokens": 400, "cache": False, "num_retries": 0}
    return dspy.LM(f"{provider}/{MODEL}", **usual | fields)


access = AccessPolicy("joinery", base_url=URL)
declared = ProviderDefinition.chat(access, compat=OpenAIChatCompat.preset("openai"))
register_provider(declared, supports=ModelSupport(response_schema=True))
"""A provider that is said to hold schemas. dspy does not suppose so of a model that it does not know."""


class Choose(dspy.Signature):
    """Choose the wood."""

    question: str = dspy.InputField()
    wood: Literal["oak", "ash"] = dspy.OutputField()


def asked(adapter) -> str:
    """Fields asked for in words: a random model need not write them, and dspy says so in its way."""
    with dspy.context(lm=lm(), adapter=adapter):
        try:
            expect(dspy.Predict(Choose)(question="Which?").wood in ("oak", "ash"))
        except dspy.AdapterParseError:
            return "an answer, in which a random model does not name the fields"
    return "a wood"


@probe("plain call")
def _():
    expect(lm(max_tokens=16)("Which wood?"))
    return "text"


@probe("responses")
def _():
    expect(lm(max_tokens=16, model_type="responses")("Which wood?"))
    return "text"


@probe("completion")
def _():
    expect(
        dspy.LM(f"text-completion-openai/{MODEL}", model_type="text", api_base=URL, api_key=KEY, max_tokens=16)("The")
    )
    return "text"


@probe("JSONAdapter, held to a schema")
def _():
    with dspy.context(lm=lm("joinery"), adapter=dspy.JSONAdapter()):
        found = dspy.Predict(Choose)(question="Which?").wood
    expect(found in ("oak", "ash"), found)
    return "a wood"


@probe("JSONAdapter, held to JSON")
def _():
    return asked(dspy.JSONAdapter())


@probe("ChatAdapter")
def _():
    return asked(dspy.ChatAdapter(use_json_adapter_fallback=False))


@probe("ChatAdapter, which falls back to JSON")
def _():
    return asked(dspy.ChatAdapter())


@probe("prompt too long")
def _():
    return raises(dspy.ContextWindowExceededError, lambda: lm()("x" * 40_000))


run()
