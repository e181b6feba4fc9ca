"""The offline API, on the Ray cluster at hand."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from intarsia import LLM, SamplingParams
from intarsia.errors import CorruptCheckpoint, EngineUnavailable, InvalidRequest, InvalidSetting, ModelNotFound

TEXT = "In the beginning there was a computer which was used by people who liked it. " * 3

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def demo_llm(ray_cluster: None) -> Iterator[LLM]:
    """The model that comes along, on one worker."""
    with LLM("demo", kv_cache_memory="4MiB") as llm:
        yield llm


def test_texts_are_completed_in_their_order(demo_llm: LLM):
    prompts = ["The inlay of many woods", "Walnut and maple", "a craftsman"]
    together = demo_llm.generate(prompts, GREEDY)
    alone = [demo_llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert [len(output.prompt_token_ids) for output in together] == [len(prompt) for prompt in prompts]
    for output in together:
        assert len(output.token_ids) == len(output.text) == 12
        assert output.finish_reason == "length"
        assert output.logprobs is None


def test_token_ids_and_texts_mix_each_with_its_own_params(demo_llm: LLM):
    tokens = demo_llm.generate("Walnut and maple", GREEDY)[0].prompt_token_ids
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=3, logprobs=2)]
    text, ids = demo_llm.generate(["Walnut and maple", list(tokens)], params)
    assert ids.token_ids == text.token_ids[:3]
    assert ids.logprobs is not None
    assert [len(row.top) for row in ids.logprobs] == [2, 2, 2]


def test_repeated_prompt_says_how_much_was_cached(demo_llm: LLM):
    demo_llm.reset_prefix_cache()
    first, second = (demo_llm.generate(TEXT, GREEDY)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (len(second.prompt_token_ids) - 1) // 16 * 16
    assert first.token_ids == second.token_ids
    assert demo_llm.recount().all_free


def test_no_prompts_give_no_outputs(demo_llm: LLM):
    assert demo_llm.generate([], GREEDY) == []


@pytest.mark.parametrize("prompts", ["", [[]], ["fine", []], [["a", "b"]], [[1.5]]])
def test_impossible_prompt_is_refused_and_the_next_call_works(demo_llm: LLM, prompts):
    with pytest.raises(InvalidRequest) as refusal:
        demo_llm.generate(prompts, GREEDY)
    assert refusal.value.field == "prompt"
    assert len(demo_llm.generate("fine", GREEDY)[0].token_ids) == 12


def test_params_that_do_not_match_the_prompts_are_refused(demo_llm: LLM):
    with pytest.raises(InvalidRequest, match="there are 1 prompts and 2 sampling_params"):
        demo_llm.generate("fine", [GREEDY, GREEDY])


def test_checkpoint_without_tokenizer_takes_token_ids_only(ray_cluster: None, tiny: Callable):
    model = tiny("gpt_oss")
    with LLM(str(model.path), kv_cache_memory="2MiB") as llm:
        outputs = llm.generate(model.prompts, SamplingParams(temperature=0, max_tokens=24))
        assert [list(output.token_ids) for output in outputs] == model.expected
        assert outputs[0].text == ""
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            llm.generate("some text", GREEDY)
    with pytest.raises(EngineUnavailable, match="was shut down"):
        llm.generate([1], GREEDY)
    llm.shutdown()


def test_model_that_is_not_there_is_told_before_anything_starts(tmp_path: Path):
    with pytest.raises(ModelNotFound, match="no model directory"):
        LLM(str(tmp_path / "nowhere"))


def test_setting_found_wrong_by_the_workers_comes_back_typed(ray_cluster: None, tiny: Callable):
    with pytest.raises(InvalidSetting, match="exceeds the 512 positions") as refusal:
        LLM(str(tiny("llama").path), max_model_len=1000)
    assert refusal.value.field == "max_model_len"


def test_memory_for_less_than_a_block_per_group_comes_back_typed(ray_cluster: None, tiny: Callable):
    with pytest.raises(InvalidSetting, match="kv_cache_memory of 1024 bytes holds 0 blocks"):
        LLM(str(tiny("gemma3").path), kv_cache_memory=1024)


def test_weights_that_lack_tensors_come_back_typed(ray_cluster: None, tiny: Callable, tmp_path: Path):
    import json
    import shutil

    broken = Path(shutil.copytree(tiny("llama").path, tmp_path / "broken"))
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    with pytest.raises(CorruptCheckpoint, match="lacks 54 of the model's tensors"):
        LLM(str(broken))


def test_unknown_argument_is_a_type_error_of_python(tiny: Callable):
    misspelt: Any = {"tensor_paralel_size": 2}
    with pytest.raises(TypeError, match="tensor_paralel_size"):
        LLM(str(tiny("llama").path), **misspelt)
