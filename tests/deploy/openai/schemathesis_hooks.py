"""What a schema cannot say of a request, for schemathesis: each rule makes a request that breaks it one that keeps it.

Rules between fields (`min_tokens` and `max_tokens`), rules of other languages (a regular expression that is one), and
what the served model can do: talker takes no images, knows no text of no characters, and at most 2,048 tokens. Requests
that break the schema itself (the negative ones) are left as they are.
"""

import re
import uuid
from typing import Any

import schemathesis

LONGEST_TEXT = 20
A_SCHEMA = {"type": "object", "properties": {"wood": {"enum": ["oak", "ash"]}}, "required": ["wood"]}


@schemathesis.hook
def map_case(context: Any, case: Any) -> Any:
    if case.query and case.meta is not None and case.meta.generation.mode.is_positive:
        case.query.pop("starting_after", None)  # which is of a stream
        case.query.pop("after", None)  # an item that is there
    if isinstance(case.body, dict) and case.meta is not None and case.meta.generation.mode.is_positive:
        is_anthropics = case.path.startswith("/v1/messages")
        case.body = keep_rules_of_messages(case.body) if is_anthropics else keep_rules(case.body)
        if case.headers and "X-Request-Id" in case.headers:
            case.headers["X-Request-Id"] = uuid.uuid4().hex
    return case


def keep_rules(body: dict[str, Any]) -> dict[str, Any]:
    body = _short({name: value for name, value in body.items() if name != "model"})
    _keep_rules_of_leases(body)
    if body.get("max_tokens") == 0:
        body["echo"] = True
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if body.get(name):
            body[name] = min(body[name], 8)  # for speed alone
    if "messages" in body and not (body.get("max_tokens") or body.get("max_completion_tokens")):
        body["max_completion_tokens"] = 8
    if "input" in body and not body.get("max_output_tokens"):
        body["max_output_tokens"] = 8
    if isinstance(body.get("input"), list):
        body["input"] = [item for item in body["input"] if item.get("type") != "item_reference"]  # to what is kept
        body["input"].append({"role": "user", "content": "oak"})  # thoughts alone are no question
    if body.get("min_tokens"):
        body["min_tokens"] = 0
    if body.get("n"):
        body["n"] = min(body["n"], 4)  # for speed alone
    if body.get("best_of") is not None:
        body["best_of"] = body.get("n") or 1
    if body.get("request_id"):
        body["request_id"] = uuid.uuid4().hex  # two at a time may not have the same
    if body.get("logit_bias"):
        body["logit_bias"] = {
            str(int(token) % 320) if token.isdigit() else token: bias for token, bias in body["logit_bias"].items()
        }
    if body.get("top_logprobs") is not None:
        body["logprobs"] = True
    if body.get("max_tokens") is not None and body.get("max_completion_tokens") is not None:
        body["max_tokens"] = body["max_completion_tokens"]
    if "messages" in body and body.get("stream"):
        body["prompt_logprobs"] = None
    if body.get("stream_options") is not None and not body.get("stream"):
        body["stream_options"] = None
    if body.get("continue_final_message"):
        body["add_generation_prompt"] = False
    body.pop("previous_response_id", None)  # of a response that is there
    body.pop("conversation", None)
    if isinstance(body.get("items"), list):
        own = [item for item in body["items"] if item.get("type") != "item_reference"]
        body["items"] = own or [{"role": "user", "content": "oak"}]
    if body.get("background"):
        body["store"] = True
    body.pop("chat_template_kwargs", None)  # variables of a template, which may be of any kind
    _keep_rules_of_forms(body)
    _keep_rules_of_tools(body)
    return body


def _keep_rules_of_leases(body: dict[str, Any]) -> None:
    """There are none here, and one is of one conversation."""
    body.pop("keep_required", None)
    prompt, answers = body.get("prompt"), body.get("n") or 1
    if answers > 1 or (isinstance(prompt, list) and not all(isinstance(each, int) for each in prompt)):
        body.pop("keep_s", None)


def keep_rules_of_messages(body: dict[str, Any]) -> dict[str, Any]:
    """The same of Anthropic's requests. They end with the user, and have one form, which can be compiled."""
    left_out = ("model", "thread", "chat_template_kwargs")
    body = _short({name: value for name, value in body.items() if name not in left_out})
    _keep_rules_of_leases(body)
    if "max_tokens" in body:
        body["max_tokens"] = min(body["max_tokens"], 8)  # for speed alone
    body["messages"].append({"role": "user", "content": "oak"})
    if body.get("request_id"):
        body["request_id"] = uuid.uuid4().hex
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    for tool in tools:
        tool["input_schema"] = A_SCHEMA
        tool.pop("input_examples", None)
        tool.pop("defer_loading", None)
    if not tools:
        body.pop("tool_choice", None)
    elif choice and choice["type"] == "tool":
        choice["name"] = tools[0]["name"]
    wanted = (body.get("output_config") or {}).get("format")
    if wanted:
        wanted["schema"] = A_SCHEMA
    if tools:
        body.pop("output_config", None)
    return body


def _keep_rules_of_forms(body: dict[str, Any]) -> None:
    """A form is said once, and can be compiled."""
    wanted = body.get("structured_outputs")
    if wanted is not None and all(form is None for form in wanted.values()):
        body["structured_outputs"] = None
    elif wanted:
        body["response_format"] = None
        if wanted.get("json") is not None:
            body["structured_outputs"] = {"json": A_SCHEMA}
        elif wanted.get("regex") is not None:
            body["structured_outputs"] = {"regex": re.escape(wanted["regex"]) if wanted["regex"].isalnum() else "a+"}
        elif wanted.get("choice") is not None:
            body["structured_outputs"] = {"choice": ["oak", "ash"]}
    said = body.get("response_format")
    if said and said.get("type") == "json_object" and said.get("schema") is not None:
        said["schema"] = A_SCHEMA
    if said and said.get("type") == "json_schema" and said["json_schema"].get("schema") is not None:
        said["json_schema"]["schema"] = A_SCHEMA
    said = (body.get("text") or {}).get("format")
    if said and said.get("schema") is not None:
        said["schema"] = A_SCHEMA


def _keep_rules_of_tools(body: dict[str, Any]) -> None:
    """A tool that must be called is there, and its parameters can be compiled. Its answer has no other form."""
    asked = [tool for tool in body.get("tools") or [] if not tool["type"].startswith("web_search")]
    tools = [tool for tool in asked if tool["type"] != "namespace" or tool["tools"]]
    if "tool_choice" in body and body.get("tools"):
        body["tools"] = tools  # searches are left out, a namespace may be empty: none may be left to choose
    within = [tool for space in tools for tool in space.get("tools") or ()]
    for tool in (*tools, *within):
        place = tool.get("function", tool)
        if place.get("parameters") is not None:
            place["parameters"] = A_SCHEMA
    if "tool_choice" in body and not tools:
        body["tool_choice"] = "none"
    chosen = body.get("tool_choice")
    if isinstance(chosen, dict):
        chosen.get("function", chosen)["name"] = _name_of(tools[0])
    if tools:
        body.pop("structured_outputs", None)
        body.pop("response_format", None)


def _name_of(tool: dict[str, Any]) -> str:
    """Of a function, which may lie in a namespace."""
    if tool["type"] == "namespace":
        return f"{tool['name']}.{tool['tools'][0]['name']}"
    return tool.get("function", tool)["name"]


def _short(value: Any, name: str | None = None) -> Any:
    """Texts and lists that together stay within the model's length, no text of nothing, and no images."""
    if isinstance(value, dict):
        if value.get("type") == "image_url":
            return {"type": "text", "text": "a picture of oak"}
        if value.get("type") in ("tool_reference", "tool_removal"):  # to tools that are there
            return {"type": "text", "text": "oak"}
        if value.get("type") == "tool_addition":
            definition = {"name": "plane", "input_schema": A_SCHEMA}
            return {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": definition}}
        if value.get("type") == "tool_use":
            value = value | {"input": {"wood": "oak"}}
        if value.get("type") == "image":
            return {"type": "text", "text": "a picture of oak"}
        if value.get("type") == "input_image":
            return {"type": "input_text", "text": "a picture of oak"}
        return {inner: _short(held, inner) for inner, held in value.items()}
    if isinstance(value, list):
        return [_short(held, name) for held in value[:2]]
    if isinstance(value, str):
        return value[:LONGEST_TEXT].encode("utf-8", "ignore").decode() or ("oak" if name == "prompt" else "")
    return value
