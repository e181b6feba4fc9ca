"""Attacks with a key: bodies of some megabytes that are cheap to make and dear to read."""

import base64
import json

from intarsia.proto import inference_pb2 as pb

from .attack_tools import Scene, attack, message_field, rpc

WORDS = b"The hacker said that the machine was once a bug. "


def _items(item: bytes, count: int) -> bytes:
    return b"[" + (item + b",") * (count - 1) + item + b"]"


def _text(count: int) -> bytes:
    """JSON of a text of so many bytes."""
    return b'"' + (WORDS * (count // len(WORDS) + 1))[:count] + b'"'


def _completion(**fields: bytes) -> bytes:
    """JSON from its fields; of a prompt unless there is one."""
    fields = {"prompt": b'"A bug is"', "max_tokens": b"1"} | fields
    return b"{" + b",".join(b'"%s":%s' % (name.encode(), value) for name, value in fields.items()) + b"}"


def _chat(**fields: bytes) -> bytes:
    fields = {"messages": b'[{"role":"user","content":"hi"}]', "max_tokens": b"1"} | fields
    return b"{" + b",".join(b'"%s":%s' % (name.encode(), value) for name, value in fields.items()) + b"}"


def _send(scene: Scene, path: str, *bodies: bytes) -> None:
    scene.go()
    scene.repeat(path, *bodies)


# -- templates -------------------------------------------------------------------------------------------------------


def _template_bodies(options: dict[str, object]) -> tuple[bytes, ...]:
    chat = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": options}
    return (json.dumps(chat | {"max_tokens": 1}).encode(), json.dumps(chat).encode())


def _template(scene: Scene, options: dict[str, object]) -> None:
    """Of a conversation, and of one that is only to be tokenised."""
    chat, tokenize = _template_bodies(options)
    scene.go()
    while scene.is_on():
        scene.note(*scene.post("/v1/chat/completions", chat))
        if scene.is_on():
            scene.note(*scene.post("/tokenize", tokenize))


@attack()
def template_loops(scene: Scene) -> None:
    """2. A chat template of the client's own that computes: 2e8 turns."""
    inner = scene.sized(10_000)
    loops = f"{{% for a in range(20000) %}}{{% for b in range({inner}) %}}{{% endfor %}}{{% endfor %}}"
    _template(scene, {"chat_template": loops})


@attack()
def template_memory(scene: Scene) -> None:
    """2. A chat template of the client's own that makes a text of 500 MB."""
    _template(scene, {"chat_template": f"{{% set x = 'x' * {scene.sized(500_000_000)} %}}"})


TEMPLATE_OPTIONS: tuple[dict[str, object], ...] = (
    {"return_tensors": "pt"}, {"return_tensors": "np"}, {"tokenizer_kwargs": {"no": 1}}, {"tokenizer_kwargs": 5},
    {"conversation": []}, {"conversation": "x"}, {"self": 1}, {"tools": 7}, {"documents": 7}, {"tokenize": False},
    {"return_dict": True}, {"return_assistant_tokens_mask": True}, {"continue_final_message": True},
    {"add_generation_prompt": "yes"}, {"padding": True, "max_length": 10**9}, {"truncation": "x"}, {"": 1},
    {"messages": 5}, {"raise_exception": 5}, {"strftime_now": 5}, {"bos_token": {"a": 1}}, {"loop": 1}, {"range": 3},
    {"__class__": 1}, {"a" * 5000: 1}, {"x": [[[[[[1]]]]]]}, {"chat_template": None}, {"chat_template": ""},
    {"chat_template": "{{ ''.__class__.__mro__ }}"}, {"chat_template": "{{ raise_exception('/home/x') }}"},
    {"chat_template": "nobody"}, {"chat_template": {"a": "b"}}, {"load_audio_from_video": True}, {"kwargs": {"a": 1}},
)  # fmt: skip


@attack()
def template_options(scene: Scene) -> None:
    """2. Other options of the tokenizer's own function: none may be an internal error, or tell a path."""
    bodies = [body for options in TEMPLATE_OPTIONS for body in _template_bodies(options)[:1]]
    scene.go()
    for body in bodies:
        scene.note(*scene.post("/v1/chat/completions", body))


@attack()
def template_big_options(scene: Scene) -> None:
    """2. Of the same class: a million values for the template."""
    _send(
        scene,
        "/v1/chat/completions",
        _chat(chat_template_kwargs=b'{"documents_":%s}' % _items(b'{"a":1}', scene.sized(1e6))),
    )


# -- the table of the adversary --------------------------------------------------------------------------------------


@attack()
def prompt_of_objects(scene: Scene) -> None:
    """3. A prompt of 1 million objects."""
    _send(scene, "/v1/completions", _completion(prompt=_items(b"{}", scene.sized(1e6))))


@attack()
def messages_of_numbers(scene: Scene) -> None:
    """3. A conversation of 1 million numbers."""
    _send(scene, "/v1/chat/completions", _chat(messages=_items(b"1", scene.sized(1e6))))


@attack()
def stop_ids_of_100_prompts(scene: Scene) -> None:
    """3. 100 prompts, and 1 million stop ids for each."""
    body = _completion(prompt=_items(b'"a"', 100), stop_token_ids=_items(b"5", scene.sized(1e6)))
    _send(scene, "/v1/completions", body)


@attack()
def stop_ids(scene: Scene) -> None:
    """3. 8 million stop ids."""
    _send(scene, "/v1/completions", _completion(stop_token_ids=_items(b"5", scene.sized(8e6))))


@attack()
def prompt_of_ids(scene: Scene) -> None:
    """3. A prompt of 10 million tokens."""
    _send(scene, "/v1/completions", _completion(prompt=_items(b"72", scene.sized(10e6))))


@attack()
def tokenize_text(scene: Scene) -> None:
    """3. 30 MB of text to be tokenised."""
    _send(scene, "/tokenize", b'{"prompt":%s}' % _text(scene.sized(30e6)))


@attack()
def completion_text(scene: Scene) -> None:
    """3. A prompt of 30 MB for a model of 2,048 tokens."""
    _send(scene, "/v1/completions", _completion(prompt=_text(scene.sized(30e6))))


@attack()
def token_texts(scene: Scene) -> None:
    """3. 3 MB of text whose tokens are wanted as texts, and 1 MB, which may be let in."""
    bodies = [b'{"prompt":%s,"return_token_strs":true}' % _text(scene.sized(size)) for size in (3e6, 1e6)]
    _send(scene, "/tokenize", *bodies)


@attack()
def detokenize(scene: Scene) -> None:
    """3. 8 million tokens to be turned into text, and 250,000, which may be let in."""
    bodies = [b'{"tokens":%s}' % _items(b"72", scene.sized(count)) for count in (8e6, 250e3)]
    _send(scene, "/detokenize", *bodies)


@attack()
def prompt_logprobs(scene: Scene) -> None:
    """3. 8 prompts of 2,000 tokens with the 20 most probable ones of each."""
    prompt = _items(_items(b"72", scene.sized(2000)), 8)
    _send(scene, "/v1/completions", _completion(prompt=prompt, prompt_logprobs=b"20"))


@attack()
def unknown_key(scene: Scene) -> None:
    """3. A field's name of 5 MB."""
    _send(scene, "/v1/completions", b'{"prompt":"a",%s:1}' % _text(scene.sized(5e6)))


@attack()
def grpc_detokenize(scene: Scene) -> None:
    """3. 15 million tokens over gRPC."""
    payload = message_field(1, b"\x48" * scene.sized(15e6))
    scene.go()
    scene.repeat_rpc("Detokenize", payload)


@attack()
def grpc_batch(scene: Scene) -> None:
    """3. GenerateBatch of 200,000."""
    one = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=1)).SerializeToString()
    payload = message_field(1, one) * scene.sized(200_000)
    scene.go()
    scene.repeat_rpc("GenerateBatch", payload)


@attack()
def grpc_stop_ids(scene: Scene) -> None:
    """3. 15 million stop ids over gRPC."""
    payload = message_field(2, b"a") + message_field(3, message_field(6, b"\x05" * scene.sized(15e6)))
    scene.go()
    scene.repeat_rpc("Generate", payload)


@attack()
def many_prompts(scene: Scene) -> None:
    """Low. 300,000 prompts, to be told that it may be 2,048."""
    _send(scene, "/v1/completions", _completion(prompt=_items(b'"a"', scene.sized(300_000))))


@attack()
def grpc_long_id(scene: Scene) -> None:
    """Medium. A request id of 4 MB, which comes back with each token."""
    sampling = pb.SamplingParams(max_tokens=50, ignore_eos=True)
    payload = pb.GenerateRequest(text="a", request_id="x" * scene.sized(4e6), sampling=sampling).SerializeToString()
    scene.go()
    scene.repeat_rpc("Generate", payload)
    if scene.outcome.got["OK"]:
        scene.problem("an id of megabytes was taken")


# -- more of the same class ------------------------------------------------------------------------------------------


@attack()
def other_lists(scene: Scene) -> None:
    """Of the same class: stops, biases, choices, tools, parts, metadata, unknown fields by the hundred thousand."""
    many = scene.sized(300_000)
    pairs = b"{" + b",".join(b'"%d":1' % n for n in range(many)) + b"}"
    tool = b'{"type":"function","function":{"name":"f"}}'
    part = b'[{"role":"user","content":%s}]' % _items(b'{"type":"text","text":"a"}', many)
    call = b'[{"role":"assistant","tool_calls":%s}]' % _items(b"{}", many)
    scene.go()
    while scene.is_on():
        for path, body in (
            ("/v1/completions", _completion(stop=_items(b'"a"', many))),
            ("/v1/completions", _completion(logit_bias=pairs)),
            ("/v1/completions", _completion(structured_outputs=b'{"choice":%s}' % _items(b'"ab"', many))),
            ("/v1/completions", _completion(structured_outputs=b'{"json":%s}' % pairs)),
            ("/v1/completions", pairs),
            ("/v1/chat/completions", _chat(tools=_items(tool, many // 4))),
            ("/v1/chat/completions", _chat(tools=_items(b"1", many))),
            ("/v1/chat/completions", _chat(messages=part)),
            ("/v1/chat/completions", _chat(messages=call)),
            ("/v1/chat/completions", _chat(metadata=pairs)),
            ("/v1/chat/completions", _chat(response_format=pairs)),
            ("/v1/responses", b'{"input":%s}' % _items(b"1", many)),
            ("/tokenize", b'{"messages":%s}' % _items(b"{}", many)),
        ):
            scene.note(*scene.post(path, body))


@attack()
def odd_json(scene: Scene) -> None:
    """Of the same class: deep, of long numbers, of escapes, of blanks, of the same field again and again."""
    deep, long, wide = scene.sized(1e6), scene.sized(4e6), scene.sized(2e6)
    escapes = b'"' + b"\\u0041" * wide + b'"'
    bodies = (
        b"[" * deep,
        b'{"a":' * deep,
        _completion(prompt=b"[" * deep + b"]" * deep),
        _completion(seed=b"9" * long),
        _completion(temperature=b"0." + b"1" * long),
        _completion(prompt=escapes),
        b" " * scene.sized(30e6) + _completion(),
        b'{"prompt":"a",' + b'"n":1,' * wide + b'"n":1}',
        b'"' + b"\\" * wide,
    )
    _send(scene, "/v1/completions", *bodies)


@attack()
def grpc_lists(scene: Scene) -> None:
    """Of the same class over gRPC: empty images, biases, stops and unknown fields, by the million."""
    many = scene.sized(1e6)
    bias = message_field(13, b"\x08\x05\x11" + bytes(8))
    payloads = (
        message_field(2, b"a") + b"\x2a\x00" * many,
        message_field(2, b"a") + message_field(3, bias * (many // 2)),
        message_field(2, b"a") + message_field(3, message_field(15, b"x") * many),
        message_field(2, b"a") + message_field(3, b"\xaa\x01\x01x" * many),  # choices
        message_field(2, b"a") + b"\x98\x06\x01" * many,
        message_field(2, (WORDS * (scene.sized(15e6) // len(WORDS)))),
    )
    scene.go()
    while scene.is_on():
        for payload in payloads:
            scene.note(*rpc(scene.target, "Generate", payload, scene.key))


@attack()
def image_bombs(scene: Scene) -> None:
    """Of the same class: 20 MB that are said to be images, for a model that takes none."""
    url = b"data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(scene.sized(15e6)))
    part = b'{"type":"image_url","image_url":{"url":"%s"}}' % url
    _send(scene, "/v1/chat/completions", _chat(messages=b'[{"role":"user","content":[%s]}]' % part))
