"""The formats that are known. Each is a description; its first entry of calls is what the template writes, and the
others are what models write as well.

The facts are those of the models' chat templates. A new family is a new description here, with cases in
`tests/deploy/formats/`.
"""

from dataclasses import replace

from .described import (
    Braced,
    Calls,
    Format,
    JsonCall,
    KeyedCall,
    NamedJson,
    Pythonic,
    Tagged,
    Thoughts,
    Wrapper,
)

THINK = Thoughts("<think>", "</think>")
IM_END = ("<|im_end|>", "<|endoftext|>")

HERMES_CALLS = Calls(JsonCall(), open="<tool_call>", close="</tool_call>", inner="\n")
JSON_LIST = JsonCall(is_list=True)

XML_PARAMETERS = Tagged(
    name_end=">", key_open="<parameter=", key_end=">", value_close="</parameter>", gap="\n", is_lined=True
)

XML_CALLS = Calls(
    XML_PARAMETERS,
    section_open="<tool_call>",
    open="<function=",
    close="</function>",
    section_close="</tool_call>",
)
LLAMA_JSON = JsonCall(arguments_key="parameters", is_list=True, needs_arguments=True)
BARE_JSON = Calls(LLAMA_JSON, is_known_only=True)
BARE_PYTHONIC = Calls(Pythonic(), is_known_only=True)

GPT_OSS = Format(
    "harmony",
    kind="channels",
    stops=("<|call|>", "<|return|>"),
    signs=("<|channel|>", "<|message|>", "<|start|>"),
    aliases=("openai", "gpt-oss", "gpt_oss"),
    thought_aliases=("openai_gptoss", "gptoss", "openai", "gpt-oss"),
)

HERMES = Format(
    "hermes",
    (HERMES_CALLS, XML_CALLS),
    (THINK,),
    stops=IM_END,
    signs=("<tool_call>", '"arguments"'),
    aliases=("qwen", "qwen25", "qwen3", "exaone4", "smollm3", "k_exaone", "ling", "trinity"),
    thought_aliases=("qwen3", "exaone4", "smollm3", "hermes", "holo2", "ernie"),
)

QWEN_XML = Format(
    "qwen3_coder",
    (XML_CALLS, HERMES_CALLS),
    (THINK,),
    stops=IM_END,
    signs=("<function=", "<parameter="),
    aliases=("qwen3_xml", "qwen-xml", "qwen3_5", "mimo", "mimo_v2", "step3p5", "step3p7", "nemotron_v3", "nemotron3"),
    thought_aliases=("qwen3_coder", "nemotron_v3", "mimo", "step3p5", "qwen3_5"),
)

LLAMA3_JSON = Format(
    "llama3_json",
    (
        Calls(LLAMA_JSON),
        Calls(LLAMA_JSON, open="<|python_tag|>"),
        Calls(NamedJson(ends=(">",)), open="<function=", close="</function>"),
    ),
    (THINK,),
    stops=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    signs=("<|start_header_id|>", '"parameters"'),
    aliases=("llama3", "llama3-json"),
)

LLAMA4 = Format(
    "llama4_pythonic",
    (
        Calls(Pythonic(), open="<|python_start|>", close="<|python_end|>"),
        Calls(LLAMA_JSON, open="<|python_start|>", close="<|python_end|>"),
        BARE_PYTHONIC,
        BARE_JSON,
    ),
    (THINK,),
    stops=("<|eot|>", "<|eom|>"),
    signs=("<|header_start|>",),
    aliases=("llama4", "llama4_json", "llama4-json"),
)

PYTHONIC = Format(
    "pythonic",
    (*LLAMA4.calls, Calls(Pythonic(), open="<|python_tag|>")),
    (THINK,),
    stops=("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|im_end|>", "<end_of_turn>"),
    signs=("[func_name1(params_name1=params_value1",),
    aliases=("llama3_pythonic",),
)

MISTRAL = Format(
    "mistral",
    (
        Calls(
            NamedJson(ends=("[ARGS]",), id_mark="[CALL_ID]"),
            open="[TOOL_CALLS]",
            is_known_only=False,
            has_own_ids=True,
        ),
        Calls(JSON_LIST, open="[TOOL_CALLS]", has_own_ids=True),
    ),
    (Thoughts("[THINK]", "[/THINK]", is_anywhere=True), THINK),
    stops=("</s>",),
    id_chars=9,
    signs=("[TOOL_CALLS]",),
    aliases=("mistral-v3", "mistral-v11", "mistral_v11", "ministral", "magistral"),
    thought_aliases=("mistral", "magistral"),
)


def _deepseek(call: NamedJson) -> Calls:
    return Calls(
        call,
        section_open="<｜tool▁calls▁begin｜>",
        open="<｜tool▁call▁begin｜>",
        close="<｜tool▁call▁end｜>",
        section_close="<｜tool▁calls▁end｜>",
    )


def _named_parameters(mark: str = "") -> Tagged:
    """Names of calls and of parameters in quotes. mark: in front of the tags' own names"""
    return Tagged(
        name_end='"',
        attributes_end=">",
        key_open=f'<{mark}parameter name="',
        key_end='"',
        value_open=">",
        value_close=f"</{mark}parameter>",
    )


DEEPSEEK_V3 = Format(
    "deepseek_v3",
    (_deepseek(NamedJson(lead="function", before="<｜tool▁sep｜>", ends=("\n```json",), fence="```")),),
    (THINK,),
    stops=("<｜end▁of▁sentence｜>",),
    signs=("<｜tool▁call▁begin｜>", "```json"),
    aliases=("deepseek-v3", "deepseek_r1"),
    thought_aliases=("deepseek_r1", "deepseek-r1", "deepseek_v3"),
)

DEEPSEEK_V31 = Format(
    "deepseek_v31",
    (
        _deepseek(NamedJson(ends=("<｜tool▁sep｜>",))),
        *DEEPSEEK_V3.calls,
    ),
    (THINK,),
    stops=("<｜end▁of▁sentence｜>",),
    signs=("<｜tool▁call▁begin｜>",),
    aliases=("deepseek_v3.1", "deepseek-v3.1"),
    thought_aliases=("deepseek_v31",),
)


def _dsml(section: str) -> Calls:
    return Calls(
        replace(_named_parameters("｜DSML｜"), gap="\n", type_mark="string"),
        section_open=f"<｜DSML｜{section}>",
        open='<｜DSML｜invoke name="',
        close="</｜DSML｜invoke>",
        section_close=f"</｜DSML｜{section}>",
    )


DEEPSEEK_V32 = Format(
    "deepseek_v32",
    (_dsml("function_calls"), _dsml("tool_calls")),
    (THINK,),
    stops=("<｜end▁of▁sentence｜>",),
    signs=("DSML", "function_calls"),
    aliases=("deepseek_v3.2", "deepseek-v3.2"),
    thought_aliases=("deepseek_v32",),
)

DEEPSEEK_V4 = Format(
    "deepseek_v4",
    (_dsml("tool_calls"), _dsml("function_calls")),
    (THINK,),
    stops=("<｜end▁of▁sentence｜>",),
    signs=("DSML",),
    aliases=("deepseek-v4",),
    thought_aliases=("deepseek_v4",),
)

GEMMA4 = Format(
    "gemma4",
    (Calls(Braced(quote='<|"|>'), open="<|tool_call>", close="<tool_call|>"),),
    (Thoughts("<|channel>", "<channel|>", label="thought", is_anywhere=True),),
    stops=("<turn|>", "<|tool_response>", "<eos>"),
    signs=("<|tool_call>",),
    thought_aliases=("gemma4",),
)

FUNCTION_GEMMA = Format(
    "functiongemma",
    (Calls(Braced(quote="<escape>"), open="<start_function_call>", close="<end_function_call>"),),
    stops=("<end_of_turn>", "<start_function_response>", "<eos>"),
    signs=("<start_function_call>",),
)

GRANITE_SENTENCES = Thoughts(
    "Here is my thought process:",
    "Here is my response:",
    also_open=("Here's my thought process:",),
    also_close=("Here's my response:",),
)

GRANITE3 = Format(
    "granite",
    (
        Calls(JSON_LIST, open="<|tool_call|>", also_open=("<tool_call>",), close="</tool_call>"),
        Calls(JsonCall(), open="<function_call>"),
    ),
    (THINK, GRANITE_SENTENCES),
    wrappers=(Wrapper("<response>", "</response>"),),
    stops=("<|end_of_text|>",),
    signs=("<|start_of_role|>", "<|tool_call|>"),
    aliases=("granite3", "granite-20b-fc"),
    thought_aliases=("granite",),
)

GRANITE4 = Format(
    "granite4",
    (HERMES_CALLS, Calls(JSON_LIST, open="<|tool_call|>"), XML_CALLS),
    (THINK,),
    stops=("<|end_of_text|>",),
    signs=("<|start_of_role|>", "<tool_call>"),
    thought_aliases=("granite4",),
)

NEMOTRON = Format(
    "nemotron_json",
    (Calls(JSON_LIST, open="<TOOLCALL>", close="</TOOLCALL>"),),
    (THINK,),
    stops=("<SPECIAL_12>", "<|eot_id|>"),
    signs=("<TOOLCALL>",),
    aliases=("nemotron", "nemotron-toolcall", "nemotron_v2"),
    thought_aliases=("nemotron",),
)


def _kimi(section: str) -> Calls:
    return Calls(
        NamedJson(ends=("<|tool_call_argument_begin|>",), id_pattern=r"(?:functions\.)?(.+):\d+"),
        section_open=f"<|{section}_begin|>",
        open="<|tool_call_begin|>",
        close="<|tool_call_end|>",
        section_close=f"<|{section}_end|>",
        has_own_ids=True,
    )


KIMI_K2 = Format(
    "kimi_k2",
    (_kimi("tool_calls_section"), _kimi("tool_call_section")),
    (THINK, Thoughts("◁think▷", "◁/think▷")),
    stops=("<|im_end|>",),
    has_named_ids=True,
    signs=("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    aliases=("kimi-k2", "kimi_k25"),
    thought_aliases=("kimi_k2",),
)

KIMI_K3 = Format(
    "kimi_k3",
    (
        Calls(
            Tagged(
                name_end='"',
                attributes_end="<|sep|>",
                key_open='<|open|>argument key="',
                key_end='"',
                value_open="<|sep|>",
                value_close="<|close|>argument<|sep|>",
                type_mark="type",
                whole_open="<|open|>json",
                whole_close="<|close|>json<|sep|>",
                has_entities=True,
            ),
            section_open="<|open|>tools<|sep|>",
            open='<|open|>call tool="',
            close="<|close|>call<|sep|>",
            section_close="<|close|>tools<|sep|>",
        ),
    ),
    (Thoughts("<|open|>think<|sep|>", "<|close|>think<|sep|>"),),
    wrappers=(Wrapper("<|open|>response<|sep|>", "<|close|>response<|sep|>", is_always=True),),
    stops=("<|close|>message<|sep|>", "<|end_of_msg|>"),
    signs=("<|open|>", "<|close|>"),
    aliases=("kimi-k3",),
    thought_aliases=("kimi_k3",),
)

_GLM_BODY = Tagged(key_open="<arg_key>", key_end="</arg_key>", value_open="<arg_value>", value_close="</arg_value>")

GLM = Format(
    "glm47",
    (Calls(_GLM_BODY, open="<tool_call>", close="</tool_call>"),),
    (THINK,),
    stops=("<|user|>", "<|observation|>", "<|endoftext|>"),
    signs=("<arg_key>", "<tool_call>"),
    aliases=("glm", "glm45", "glm-4.5", "glm-4.7", "glm4_moe", "glm47_moe", "glm5", "glm51", "glm53"),
    thought_aliases=("glm45", "glm47", "glm4_moe", "glm"),
)

MINIMAX_M2 = Format(
    "minimax_m2",
    (
        Calls(
            replace(_named_parameters(), gap="\n"),
            section_open="<minimax:tool_call>",
            open='<invoke name="',
            close="</invoke>",
            section_close="</minimax:tool_call>",
        ),
    ),
    (THINK,),
    stops=("[e~[",),
    signs=("<minimax:tool_call>",),
    aliases=("minimax-m2",),
    thought_aliases=("minimax_m2", "minimax_m2_append_think"),
)

MINIMAX_M1 = Format(
    "minimax",
    (Calls(JSON_LIST, open="<tool_calls>", close="</tool_calls>"),),
    (THINK,),
    stops=("[e~[", "<end_of_sentence>"),
    signs=("<tool_calls>", "<beginning_of_sentence>"),
)

SEED_OSS = Format(
    "seed_oss",
    (
        Calls(
            XML_PARAMETERS,
            section_open="<seed:tool_call>",
            open="<function=",
            close="</function>",
            section_close="</seed:tool_call>",
        ),
    ),
    (Thoughts("<seed:think>", "</seed:think>"),),
    stops=("<seed:eos>",),
    signs=("<seed:",),
    aliases=("seed-oss", "seed"),
    thought_aliases=("seed_oss",),
)

STEP3 = Format(
    "step3",
    (
        Calls(
            replace(
                _named_parameters("steptml:"),
                lead="function<｜tool_sep｜>",
                before='<steptml:invoke name="',
                end="</steptml:invoke>",
            ),
            section_open="<｜tool_calls_begin｜>",
            open="<｜tool_call_begin｜>",
            close="<｜tool_call_end｜>",
            section_close="<｜tool_calls_end｜>",
        ),
    ),
    (THINK,),
    stops=("<｜EOT｜>", "<｜end▁of▁sentence｜>"),
    signs=("steptml:",),
    aliases=("step-3",),
    thought_aliases=("step3",),
)

HUNYUAN = Format(
    "hunyuan_a13b",
    (Calls(JSON_LIST, open="<tool_calls>", close="</tool_calls>"), HERMES_CALLS),
    (THINK,),
    wrappers=(Wrapper("<answer>", "</answer>"),),
    stops=("<|eos|>", "<|hy_place▁holder▁no▁2｜>", "<｜hy_place▁holder▁no▁2｜>", "<|endoftext|>"),
    signs=("<tool_calls>", "<answer>"),
    aliases=("hunyuan", "hunyuan-a13b", "hunyuan_v1"),
    thought_aliases=("hunyuan_a13b",),
)

HUNYUAN_TAGGED = Format(
    "hy_v3",
    (
        Calls(
            Tagged(
                name_end="<tool_sep>",
                key_open="<arg_key>",
                key_end="</arg_key>",
                value_open="<arg_value>",
                value_close="</arg_value>",
            ),
            section_open="<tool_calls>",
            open="<tool_call>",
            close="</tool_call>",
            section_close="</tool_calls>",
        ),
        Calls(_GLM_BODY, open="<tool_call>", close="</tool_call>"),
    ),
    (THINK,),
    wrappers=(Wrapper("<answer>", "</answer>"),),
    stops=("<|eos|>", "<｜hy_eos｜>"),
    signs=("<tool_calls>", "<tool_sep>"),
    thought_aliases=("hy_v3",),
)

ERNIE = Format(
    "ernie45",
    (HERMES_CALLS,),
    (THINK,),
    wrappers=(Wrapper("<response>", "</response>"),),
    stops=("<|im_end|>", "</s>", "<|end_of_sentence|>"),
    signs=("<tool_call>", "<response>"),
    aliases=("ernie", "ernie-4.5"),
    thought_aliases=("ernie45",),
)

OLMO3 = Format(
    "olmo3",
    (
        Calls(Pythonic(is_bracketed=False), open="<function_calls>", close="</function_calls>", between=",;"),
        Calls(Pythonic(), open="<function_calls>", close="</function_calls>"),
    ),
    (THINK,),
    stops=("<|im_end|>", "<|endoftext|>"),
    signs=("<function_calls>",),
    aliases=("olmo-3",),
    thought_aliases=("olmo3",),
)

PHI4_MINI = Format(
    "phi4_mini_json",
    (
        Calls(JSON_LIST, open="<|tool_call|>", close="<|/tool_call|>"),
        Calls(JSON_LIST, open="functools"),
    ),
    (THINK,),
    stops=("<|end|>", "<|endoftext|>"),
    signs=("<|tool|>", "<|/tool|>"),
    aliases=("phi4", "phi-4-mini", "phi4_mini"),
)

INTERNLM = Format(
    "internlm",
    (
        Calls(
            JsonCall(arguments_key="parameters"),
            open="<|action_start|><|plugin|>",
            also_open=("<|action_start|> <|plugin|>",),
            close="<|action_end|>",
            inner="\n",
        ),
    ),
    (THINK,),
    stops=("<|im_end|>", "</s>"),
    signs=("<|action_start|>",),
    aliases=("internlm2", "internlm3"),
)

JAMBA = Format(
    "jamba",
    (Calls(JSON_LIST, open="<tool_calls>", close="</tool_calls>"),),
    (THINK,),
    stops=("<|eom|>", "<|endoftext|>"),
    signs=("<tool_calls>",),
)

APRIEL = Format(
    "apriel",
    JAMBA.calls,
    (Thoughts("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),),
    wrappers=(Wrapper("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),),
    stops=("<|end|>",),
    signs=("<tool_calls>", "[BEGIN FINAL RESPONSE]"),
    thought_aliases=("apriel",),
)

COHERE = Format(
    "cohere",
    (
        Calls(
            JsonCall(name_key="tool_name", arguments_key="parameters", is_list=True),
            open="<|START_ACTION|>",
            close="<|END_ACTION|>",
        ),
        Calls(
            JsonCall(name_key="tool_name", arguments_key="parameters", is_list=True),
            open="Action: ```json",
            also_open=("Action:```json",),
            close="```",
        ),
    ),
    (Thoughts("<|START_THINKING|>", "<|END_THINKING|>", is_anywhere=True),),
    wrappers=(
        Wrapper("<|START_RESPONSE|>", "<|END_RESPONSE|>", is_always=True),
        Wrapper("<|START_TEXT|>", "<|END_TEXT|>", is_always=True),
    ),
    stops=("<|END_OF_TURN_TOKEN|>",),
    signs=("<|START_ACTION|>",),
    aliases=("cohere_command3", "cohere_command4", "command_a", "command-r7b"),
    thought_aliases=("cohere_command3", "cohere_command4", "cohere"),
)

COMMAND_R = Format(
    "command_r",
    COHERE.calls[1:],
    stops=("<|END_OF_TURN_TOKEN|>",),
    signs=("Action:", "tool_name"),
    aliases=("cohere_command2",),
)

XLAM = Format(
    "xlam",
    (
        Calls(JSON_LIST, is_first_only=True, is_known_only=True),
        Calls(JSON_LIST, open="```json", close="```", is_known_only=True),
        Calls(JSON_LIST, open="```", close="```", is_known_only=True),
        Calls(JSON_LIST, open="[TOOL_CALLS]"),
        Calls(JSON_LIST, open="<tool_call>", close="</tool_call>"),
    ),
    (THINK,),
    stops=("<|im_end|>", "<|eot_id|>", "<|endoftext|>"),
    signs=("You are an AI assistant for function calling",),
    aliases=("xlam2",),
)

LFM2 = Format(
    "lfm2",
    (
        Calls(Pythonic(), open="<|tool_call_start|>", close="<|tool_call_end|>"),
        Calls(JSON_LIST, open="<|tool_call_start|>", close="<|tool_call_end|>"),
    ),
    (THINK,),
    stops=("<|im_end|>",),
    signs=("<|tool_call_start|>",),
    aliases=("lfm2.5", "lfm25"),
    thought_aliases=("lfm2",),
)

APERTUS = Format(
    "apertus",
    (
        Calls(KeyedCall(), open="<|tools_prefix|>", close="<|tools_suffix|>"),
        Calls(JSON_LIST, open="<|tools_prefix|>", close="<|tools_suffix|>"),
    ),
    (Thoughts("<|inner_prefix|>", "<|inner_suffix|>", is_anywhere=True),),
    stops=("<|assistant_end|>",),
    signs=("<|tools_prefix|>",),
    thought_aliases=("apertus",),
)

LONGCAT = Format(
    "longcat",
    (
        Calls(JsonCall(), open="<longcat_tool_call>", close="</longcat_tool_call>", inner="\n"),
        Calls(
            Tagged(
                key_open="<longcat_arg_key>",
                key_end="</longcat_arg_key>",
                value_open="<longcat_arg_value>",
                value_close="</longcat_arg_value>",
            ),
            open="<longcat_tool_call>",
            close="</longcat_tool_call>",
        ),
    ),
    (Thoughts("<longcat_think>", "</longcat_think>"), THINK),
    stops=("</longcat_s>", "<longcat_s>"),
    signs=("<longcat_tool_call>",),
    aliases=("longcat_flash",),
    thought_aliases=("longcat",),
)

GIGACHAT3 = Format(
    "gigachat3",
    (
        Calls(JsonCall(), open="<|function_call|>"),
        Calls(JsonCall(), open="function call<|role_sep|>"),
    ),
    (THINK,),
    stops=("</s>", "<|message_sep|>"),
    signs=("<|role_sep|>", "function"),
)

SOLAR = Format(
    "solar_open",
    (
        Calls(
            NamedJson(lead="call", before="<|tool_call:name|>", ends=("<|tool_call:args|>",)),
            section_open="<|tool_calls|>",
            open="<|tool_call:begin|>",
            close="<|tool_call:end|>",
        ),
    ),
    (Thoughts("<|think|>", "<|end|>"),),
    wrappers=(
        Wrapper("<|begin|>assistant", "<|end|>", is_always=True),
        Wrapper("<|content|>", "<|end|>", is_always=True),
    ),
    stops=("<|calls|>", "<|flush|>"),
    signs=("<|tool_call:begin|>",),
    thought_aliases=("solar_open",),
)

FUNCTIONARY = Format(
    "functionary",
    (Calls(NamedJson(ends=(">",)), open="<function=", close="</function>"),),
    (THINK,),
    stops=("<|eot_id|>", "<|eom_id|>"),
    signs=("<function=", "</function>"),
    aliases=("functionary_v3", "llama3_function"),
)

THINK_ONLY = Format(
    "think",
    (),
    (THINK,),
    signs=("</think>",),
    thought_aliases=("think",),
)

FORMATS: tuple[Format, ...] = (
    GPT_OSS,
    KIMI_K3,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    GEMMA4,
    FUNCTION_GEMMA,
    MINIMAX_M2,
    SEED_OSS,
    STEP3,
    HUNYUAN_TAGGED,
    LONGCAT,
    GLM,
    APERTUS,
    COHERE,
    SOLAR,
    INTERNLM,
    LFM2,
    OLMO3,
    NEMOTRON,
    MISTRAL,
    PHI4_MINI,
    GRANITE4,
    GRANITE3,
    QWEN_XML,
    FUNCTIONARY,
    HUNYUAN,
    MINIMAX_M1,
    APRIEL,
    JAMBA,
    ERNIE,
    XLAM,
    HERMES,
    LLAMA4,
    PYTHONIC,
    GIGACHAT3,
    COMMAND_R,
    LLAMA3_JSON,
    THINK_ONLY,
)
"""In the order in which a template's signs are looked for: what is special before what it resembles."""
