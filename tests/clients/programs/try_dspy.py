"""dspy, whose adapters ask for fields in words and by schema."""

from typing import Literal

import dspy
from probing import KEY, MODEL, URL, expect, probe, raises, run


def lm(**fields) -> dspy.LM:
    usual = {"api_base": URL, "api_key": KEY, "max_tokens": 400, "cache": False, "num_retries": 0}
    return dspy.LM(f"openai/{MODEL}", **usual | fields)


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


@probe("JSONAdapter (a schema)")
def _():
    return asked(dspy.JSONAdapter())


@probe("ChatAdapter")
def _():
    return asked(dspy.ChatAdapter(use_json_adapter_fallback=False))


@probe("ChatAdapter, which falls back to a schema")
def _():
    return asked(dspy.ChatAdapter())


@probe("prompt too long")
def _():
    return raises(dspy.ContextWindowExceededError, lambda: lm()("x" * 40_000))


run()
