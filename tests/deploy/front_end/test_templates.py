"""Chat templates: rendered as transformers renders them, in a process that ends when one takes too much."""

import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import SandboxedEnvironment

from intarsia.deploy.front_end.templates import Question, Templates
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.deploy.settings.limits import Limits
from intarsia.errors import InvalidRequest, RequestTooLarge

AGENTS = Path(__file__).parents[3].parent / "shared" / "data" / "agents"

QUICK = Limits(template_timeout_s=1.0, max_template_memory=128 << 20)

REFUSED_BY_TRANSFORMERS = ("attribute 'append'", "No filter named 'from_json'")

HI = ({"role": "user", "content": "hi"},)

MOST_BYTES = 1 << 20


@pytest.fixture(scope="module")
def templates() -> Iterator[Templates]:
    made = Templates()
    yield made
    made.close()


def question(template: str, messages: Any = HI, tools: Any = None, **variables: Any) -> Question:
    options = {name: bool(variables.pop(name, False)) for name in ("add_generation_prompt", "continue_final_message")}
    return Question(template, messages, tools, variables, **options)


def by_transformers(asked: Question) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    [text], _ = render_jinja_template(
        conversations=[[{name: value for name, value in each.items() if value is not None} for each in asked.messages]],
        tools=copy.deepcopy(asked.tools),  # type: ignore[arg-type]
        chat_template=asked.template,
        continue_final_message=asked.continue_final_message,
        add_generation_prompt=asked.add_generation_prompt,
        **asked.variables,
    )
    return text


def by_a_looser_transformers(asked: Question) -> str:
    """The same, where templates may change lists and read JSON."""
    from transformers.utils import chat_template_utils as theirs

    class Loose(SandboxedEnvironment):
        def __init__(self, **options: Any):
            super().__init__(**options)
            self.filters["from_json"] = lambda value: json.loads(value) if isinstance(value, str) else value

    theirs._compile_jinja_template.cache_clear()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(theirs, "ImmutableSandboxedEnvironment", Loose)
        try:
            return by_transformers(asked)
        finally:
            theirs._compile_jinja_template.cache_clear()


def said(render: Any) -> tuple[str, str]:
    """What came of it: its text, or that it was refused."""
    try:
        return "text", render()
    except InvalidRequest as refused:
        return "refused", refused.message
    except Exception as error:  # noqa: BLE001  transformers raises what templates raise
        return "refused", f"the chat template refuses these messages: {str(error)[:300]}"


def conversations() -> Iterator[dict[str, Any]]:
    """Ways to ask, over the conversation that the templates come with."""
    fixed = json.loads((AGENTS / "conversation.json").read_text())
    special = {name: fixed.get(name, f"<{name}>") for name in ("bos_token", "eos_token")}
    plain = [message for message in fixed["messages"] if message["role"] in ("system", "user")]
    as_text = json.loads(json.dumps(fixed["messages"]))
    for message in as_text:
        for each in message.get("tool_calls", ()):
            each["function"]["arguments"] = json.dumps(each["function"]["arguments"])
    for messages in (fixed["messages"], as_text, fixed["messages"][:3], fixed["messages"][:2], plain, list(HI)):
        for tools in (None, fixed["tools"]):
            yield {"messages": messages, "tools": tools, "add_generation_prompt": True, **special}
    yield {"messages": plain, "enable_thinking": False, "add_generation_prompt": True, **special}
    yield {"messages": fixed["messages"][:6], "tools": fixed["tools"], "continue_final_message": True, **special}
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b "}]}]
    yield {"messages": parts, "add_generation_prompt": True, **special}
    yield {"messages": parts, "continue_final_message": True, **special}


@pytest.mark.skipif(not AGENTS.is_dir(), reason="the templates of real models are not here")
def test_every_template_of_a_real_model_renders_as_transformers_renders_it(templates: Templates):
    count = texts = looser = 0
    for path in sorted((AGENTS / "templates").glob("*.jinja")):
        for given in conversations():
            asked = question(path.read_text(), **given)
            ours = said(lambda asked=asked: templates.render(asked, Limits(), MOST_BYTES))
            theirs = said(lambda asked=asked: by_transformers(asked))
            if any(why in theirs[1] for why in REFUSED_BY_TRANSFORMERS):
                theirs, looser = said(lambda asked=asked: by_a_looser_transformers(asked)), looser + 1
            if not asked.continue_final_message or theirs[0] == "text":
                assert ours == theirs, (path.name, given)
            else:  # refused in words of our own
                assert ours[0] == "refused", (path.name, given)
            count, texts = count + 1, texts + (ours[0] == "text")
    assert count >= 800 and texts > count // 2 and looser >= 16, (count, texts, looser)


WRITTEN = {
    "loops": "{% for m in messages %}\n {{ m.role }}: \n{% if loop.last %}{% break %}{% endif %}{% endfor %}\n",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "json": "{{ messages | tojson }}{{ {'b': '<ä>', 'a': 1.0} | tojson(indent=2, sort_keys=True) }}",
    "namespace": "{% set n = namespace(a=1) %}{% set n.a = 2 %}{{ n.a }}{{ dict(a=1) }}{{ dict.fromkeys(['x']) }}",
    "day": "{{ strftime_now('%Y-%m-%d') }}",
    "tools": "{{ tools }} {{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}",
    "documents": "{% for each in documents %}{{ each.title }}{% endfor %}",
    "reasoning": "{{ messages[0].thinking }} {{ messages[0].reasoning_content }} {{ messages[0] }}",
    "raises": "{{ raise_exception('only one system message') }}",
    "insides": "{{ ''.__class__.__mro__ }}",
    "underscores": "{% set n = namespace(__class__=1) %}{{ n }}",
    "unchangeable": "{{ messages.append(1) }}",
    "given in a part": "{% set mine = messages[:] %}{{ mine[0].pop('role') }}",
    "given variable": "{{ documents.clear() }}",
    "undefined": "{{ nothing.at.all }}",
    "filters": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}"
    "{{ {'b': 1, 'a': 2} | dictsort }}{{ ['x', 'x'] | unique | join(',') }}{{ {'a': 1} | items | list }}"
    "{{ ' a ' | trim | capitalize }}{{ '3' | int + 1 }}{{ [1, 2] | sum }}{{ 'ab' | string | replace('a', 'b') }}",
    "methods": "{{ ' <a>b '.strip().split('>')[-1].rstrip('b').upper() }}{{ 'ab'.startswith('a') }}{{ 'a'.title() }}"
    "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ {'a': 1}.get('b', 2) }}{{ '%s' % 3 }}"
    "{{ '{} {a}'.format(1, a=2) }}",
    "tests": "{{ 'a' is string }}{{ {} is mapping }}{{ [] is iterable }}{{ 1 is number }}{{ x is defined }}"
    "{{ none is none }}{{ true is boolean }}{{ [] is sequence }}{{ 1.0 is float }}{{ 'a' in 'ab' }}",
    "macros": "{% macro m(a, b=2) -%} {{ a }}{{ b }}{{ caller() if caller }} {%- endmacro %}{{ m(1) }}"
    "{% call m(3) %}within{% endcall %}{% set block %}set {{ m(4) }}{% endset %}{{ block }}"
    "{% filter upper %}a{% endfilter %}",
    "json options": "{{ {'ä': [1, 2]} | tojson(ensure_ascii=True, separators=(',', ':')) }}"
    "{{ 'é' | tojson(true) }}"
    "{{ [1] | tojson(indent=4) }}{{ nothing | default('x') | tojson | safe }}",
    "loop controls": "{% for a in range(9) %}{% if a % 2 %}{% continue %}{% endif %}{% if a > 5 %}{% break %}"
    "{% endif %}{{ a }}{{ loop.index0 }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('x', 'y') }}{% else %}none"
    "{% endfor %}",
    "blanks": "  {%- if true -%}  a  {%- endif %}\n  {# no #}\n{%+ if true %} b{% endif +%}\n\n",
    "no template": "{% for %}",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_templates_can_say_is_what_transformers_makes_of_it(templates: Templates, name: str):
    messages = [{"role": "user", "content": "hi \u2028ä\0", "reasoning": "because", "name": None}]
    asked = question(WRITTEN[name], messages, documents=[{"title": "x"}], voice="low", bos_token="<s>")
    ours, theirs = said(lambda: templates.render(asked, Limits(), MOST_BYTES)), said(lambda: by_transformers(asked))
    if name == "underscores":  # refused in words of our own
        assert (ours[0], theirs[0]) == ("refused", "refused")
    else:
        assert ours == theirs


OWN = {
    "append": ("{% set a = [] %}{% set _ = a.append(1) %}{{ a }}", "[1]"),
    "queue": ("{% set n = namespace(ids=['x', 'y']) %}{{ n.ids.pop(0) }}{{ n.ids }}", "x['y']"),
    "extend": ("{% set a = messages[:0] %}{% do a.extend([2, 1]) %}{% do a.sort() %}{{ a }}", "[1, 2]"),
    "update": ("{% set d = dict(a=1) %}{% do d.update(b=2) %}{% do d.pop('a') %}{{ d }}", "{'b': 2}"),
    "default of a macro": ("{% macro m(a=[]) %}{% do a.append(1) %}{{ a }}{% endmacro %}{{ m() }}{{ m() }}", "[1][1]"),
    "from_json": ("{% for k, v in '{\"a\": [1]}' | from_json | items %}{{ k }}{{ v }}{% endfor %}", "a[1]"),
    "from_json of an object": ("{{ {'a': 1} | fromjson }}", "{'a': 1}"),
}
"""What transformers refuses, and what comes of it here."""


@pytest.mark.parametrize("name", OWN)
def test_a_template_changes_what_it_made_and_finds_it_anew_the_next_time(templates: Templates, name: str):
    template, text = OWN[name]
    assert said(lambda: by_transformers(question(template)))[0] == "refused"
    for _ in range(2):
        assert templates.render(question(template), Limits(), MOST_BYTES) == text


@pytest.mark.parametrize("text", ["no JSON", "[" * 10**5, "9" * 10**5, ""])
def test_a_text_that_is_no_json_is_refused_by_the_filter(templates: Templates, text: str):
    asked = question("{{ text | from_json }}", text=text)
    with pytest.raises(InvalidRequest):
        templates.render(asked, Limits(), MOST_BYTES)


LOOPS = "{% for a in range(20000) %}{% for b in range(20000) %}BODY{% endfor %}{% endfor %}"

HOSTILE = {
    "loops": LOOPS.replace("BODY", LOOPS).replace("BODY", ""),
    "one string": "{% set x = 'x' * 900000000 %}{{ x | length }}",
    "doubling": "{% set n = namespace(x='x') %}{% for a in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "macro within itself": "{% macro m(a) %}{{ m(a) }}{% endmacro %}{{ m(1) }}",
    "deep list": "{% set n = namespace(x=[]) %}{% for a in range(99999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x }}",
    "deep expression": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "list that grows in its own loop": "{% set a = [1] %}{% for x in a %}{% do a.append(x) %}{% endfor %}",
    "list within itself": "{% set a = [] %}{% do a.append(a) %}{% for b in a recursive %}{{ loop(b) }}{% endfor %}",
    "long range": "{{ range(1000000000) | list }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "pattern": "{{ 'x'.rjust(3000000000) }}",
    "format": "{{ '%0999999999d' % 1 }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_takes_too_much_is_refused_in_time_and_the_next_is_rendered(templates: Templates, name: str):
    started = time.monotonic()
    with pytest.raises(InvalidRequest) as refused:
        templates.render(question(HOSTILE[name]), QUICK, MOST_BYTES)
    assert time.monotonic() - started < QUICK.template_timeout_s + 10
    assert refused.value.field == "messages" and len(refused.value.message) < 400
    assert "/" not in refused.value.message and "Traceback" not in refused.value.message
    assert templates.render(question("{{ messages[0].content }}"), QUICK, MOST_BYTES) == "hi"


def test_more_text_than_was_asked_for_is_refused_with_the_number(templates: Templates):
    endless = "{% for a in range(90000) %}{% for b in range(90000) %}{{ 'x' * 1000 }}{% endfor %}{% endfor %}"
    for template in (endless, "{{ 'ä' * 600 }}"):
        with pytest.raises(RequestTooLarge, match="more than 1000 bytes"):
            templates.render(question(template), QUICK, 1000)


@pytest.mark.parametrize("messages", [["hi"], [{"role": "user", "content": object()}], [{"role": {1, 2}}]])
def test_messages_that_are_no_json_are_refused(templates: Templates, messages: Any):
    with pytest.raises(InvalidRequest, match="not as JSON has them"):
        templates.render(question("{{ 1 }}", messages), QUICK, 100)


def test_a_long_conversation_goes_in_and_comes_out_whole(templates: Templates):
    messages = [{"role": "user", "content": f"{n} ä🎉\n" * 200} for n in range(1000)]
    text = templates.render(question("{% for m in messages %}{{ m.content }}{% endfor %}", messages), Limits(), 1 << 24)
    assert text == "".join(message["content"] for message in messages)


def test_a_slow_template_holds_up_no_other_request_and_its_killed_child_ends_only_its_own(templates: Templates):
    others = children_of(os.getpid())
    ended: list[tuple[str, str]] = []
    asked = question(HOSTILE["loops"])
    own = Templates()
    slow = threading.Thread(
        target=lambda: ended.append(said(lambda: own.render(asked, Limits(template_timeout_s=60), MOST_BYTES)))
    )
    slow.start()
    while not (born := children_of(os.getpid()) - others):
        time.sleep(0.01)
    for _ in range(20):
        assert own.render(question("{{ messages[0].content }}"), QUICK, 1000) == "hi"
    assert slow.is_alive()
    for pid in born:
        os.kill(pid, signal.SIGKILL)
    slow.join(30)
    assert [outcome for outcome, _ in ended] == ["refused"]
    assert own.render(question("{{ messages[0].content }}"), QUICK, 1000) == "hi"
    own.close()


def test_a_child_that_was_killed_meanwhile_is_replaced(templates: Templates):
    for _ in range(3):
        assert templates.render(question("{{ messages[0].content }}"), QUICK, 1000) == "hi"
        for child in templates._free:
            child._process.kill()
            child._process.wait()


def children_of(pid: int) -> set[int]:
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        found |= {int(each) for each in (task / "children").read_text().split()}
    return found


def test_no_child_outlives_a_server_that_is_killed():
    program = (
        "import sys, time\n"
        "from intarsia.tests.deploy.front_end.test_templates import *\n"
        "made = Templates()\n"
        "print(made.render(question('{{ 1 }}'), QUICK, 100), made._free[0]._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    server = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    rendered, pid = server.stdout.readline().split()
    assert rendered == "1" and Path(f"/proc/{pid}").exists()
    server.kill()
    server.communicate()
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_child_knows_nothing_of_our_environment(templates: Templates, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("INTARSIA_API_KEY", "secret")
    own = Templates()
    own.render(question("{{ 1 }}"), QUICK, 100)
    assert b"secret" not in Path(f"/proc/{own._free[0]._process.pid}/environ").read_bytes()
    own.close()


@pytest.mark.parametrize(
    "name",
    ["chat_template", "tokenize", "tools", "padding", "truncation", "max_length", "return_tensors", "return_dict",
     "tokenizer_kwargs", "conversation", "return_assistant_tokens_mask", "sanitize_control_tokens", "self", "messages",
     "add_generation_prompt", "continue_final_message"],
)  # fmt: skip
def test_no_template_option_is_an_option_of_the_tokenizers_function(byte_tokenizer: Tokenizer, name: str):
    with pytest.raises(InvalidRequest, match=f"may not set {name}, which") as refused:
        byte_tokenizer.chat(list(HI), variables={name: "{{ 1 }}"})
    assert refused.value.field == "chat_template_kwargs"


def test_any_other_template_option_goes_in(byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    template = "{{ voice }}{{ enable_thinking }}{{ kwargs }}{{ conversations }}{{ bos_token }}{{ documents[0].title }}"
    monkeypatch.setattr(byte_tokenizer._fast, "chat_template", template)
    variables = {"voice": "low", "enable_thinking": False, "kwargs": 1, "conversations": 2, "bos_token": "<b>"}
    ids = byte_tokenizer.chat(list(HI), variables=variables | {"documents": [{"title": "x"}]})
    assert byte_tokenizer.decode(ids) == "lowFalse12<b>x"
    with pytest.raises(InvalidRequest, match=r"documents .* must be a list of objects"):
        byte_tokenizer.chat(list(HI), variables={"documents": "x"})


def test_of_several_templates_the_one_for_tools_is_taken_with_tools(
    byte_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(byte_tokenizer._fast, "chat_template", {"default": "plain", "tool_use": "tools"})
    assert byte_tokenizer.decode(byte_tokenizer.chat(list(HI))) == "plain"
    assert byte_tokenizer.decode(byte_tokenizer.chat(list(HI), [{"type": "function"}])) == "tools"
    monkeypatch.setattr(byte_tokenizer._fast, "chat_template", {"tool_use": "tools"})
    with pytest.raises(InvalidRequest, match="refuses these messages: This model has multiple chat templates"):
        byte_tokenizer.chat(list(HI))


def test_a_tokenizer_with_a_function_of_its_own_is_asked_itself(byte_tokenizer: Tokenizer):
    class Own(type(byte_tokenizer._fast)):
        def apply_chat_template(self, conversation: Any, mood: str = "", tokenize: bool = True, **options: Any):
            if mood:
                raise ValueError(f"no moods in {self.name_or_path}")
            return {"input_ids": [len(conversation)]}

    fast = copy.copy(byte_tokenizer._fast)
    fast.__class__ = Own
    own = Tokenizer(fast)
    assert own.chat(list(HI)) == [1]
    with pytest.raises(InvalidRequest, match="may not set mood"):
        own.chat(list(HI), variables={"mood": "good"})


def test_a_template_that_takes_arguments_as_text_alone_gets_them_so(byte_tokenizer: Tokenizer):
    calls = [{"type": "function", "function": {"name": "saw", "arguments": {"cm": 3, "wood": "Eibe ü"}}}]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    made = Tokenizer(copy.deepcopy(byte_tokenizer._fast))
    made._fast.chat_template = "{{ 'call ' + messages[0].tool_calls[0].function.arguments }}"
    assert made.decode(made.chat(messages)) == 'call {"cm": 3, "wood": "Eibe ü"}'
    made._fast.chat_template = "{{ raise_exception('no ' ~ messages[0].tool_calls[0].function.arguments.cm) }}"
    with pytest.raises(InvalidRequest, match="no 3"):
        made.chat(messages)
