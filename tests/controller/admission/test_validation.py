"""What can never be served, and how it is said."""

from typing import Any

import pytest

from intarsia.controller.admission.validation import check, lay_out_images
from intarsia.errors import ContextTooLong, InvalidRequest, RequestTooLarge
from intarsia.kvcache.reach import Full
from intarsia.proto.request import Image, SamplingParams
from intarsia.proto.status import EngineInfo, GroupInfo
from intarsia.tests.kvcache.plans import plan_of

PLAN = plan_of(Full(), blocks=21)
"""20 blocks of 4 tokens that requests can have."""

INFO = EngineInfo(
    model="simulated", model_dir="", architecture="", dtype="", device="", tensor_parallel_size=1, weight_bytes=0,
    vocab_size=50, max_model_len=100, max_num_seqs=4, max_num_batched_tokens=16, eos_token_ids=(), strategy="layered",
    groups=(GroupInfo("full", (0,), 4, 64),), num_blocks=20, num_buffers=1, kv_cache_bytes=0, max_len_concurrency=1.0,
    enable_prefix_caching=True,
)  # fmt: skip
SEEING = INFO._replace(image_token_id=7, max_images_per_request=2)


def sampling(**params: Any) -> SamplingParams:
    return SamplingParams(**dict[str, Any]({"max_tokens": 8}) | params)


@pytest.mark.parametrize(
    ("tokens", "prompt", "max_tokens", "ends_at"),
    [(5, 5, 8, 13), (90, 90, 50, 100), (8, 5, 8, 13), (12, 5, 8, 13)],
    ids=["prompt and answer", "the model's length", "it goes on", "one token is left"],
)
def test_a_request_that_can_be_served_ends_at(tokens: int, prompt: int, max_tokens: int, ends_at: int):
    big = plan_of(Full(), blocks=64)
    assert check([1] * tokens, prompt, sampling(max_tokens=max_tokens), INFO, big) == ends_at


@pytest.mark.parametrize(
    ("tokens", "prompt", "params", "error", "field", "message"),
    [
        ([], 0, {}, InvalidRequest, "prompt", "the prompt is empty"),
        ([1] * 100, 100, {}, ContextTooLong, "prompt", "it has 100 tokens"),
        ([1, True], 2, {}, InvalidRequest, "prompt", "True at position 1 is no whole number"),
        ([1, 50], 2, {}, InvalidRequest, "prompt", "50 at position 1 is not in the vocabulary of 50"),
        ([1], 1, {"regex": "a"}, InvalidRequest, "regex", "has no end token"),
        ([1], 1, {"logit_bias": {50: 1.0}}, InvalidRequest, "logit_bias", "names token 50"),
        ([1], 1, {"bad_token_ids": ((1,), (2, 60))}, InvalidRequest, "bad_token_ids", "names token 60"),
        ([1] * 13, 5, {}, InvalidRequest, "prompt", "5 tokens cannot go on from 13 of 13 tokens"),
        ([1] * 4, 5, {}, InvalidRequest, "prompt", "5 tokens cannot go on from 4 of 13 tokens"),
        ([1], 0, {}, InvalidRequest, "prompt", "0 tokens cannot go on from 1 of 8 tokens"),
        ([1] * 60, 60, {"max_tokens": 30}, RequestTooLarge, "max_tokens", "60 .* 30 .* 23 blocks; .* has 20"),
    ],
)  # fmt: skip
def test_a_request_that_can_never_be_served_is_refused_with_the_numbers(
    tokens: list[int], prompt: int, params: dict[str, Any], error: type[InvalidRequest], field: str, message: str
):
    with pytest.raises(error, match=message) as refusal:
        check(tokens, prompt, sampling(**params), INFO, PLAN)
    assert refusal.value.field == field


def test_a_request_without_images_has_nothing_to_lay_out():
    assert lay_out_images([1, 7], [], INFO, PLAN) is None  # 7 is an ordinary token of this model
    assert lay_out_images([1, 2], [], SEEING, PLAN) is None


@pytest.mark.parametrize(
    ("info", "prompt", "images", "message"),
    [
        (INFO, [1, 7], 1, "simulated takes no images, and the request has 1"),
        (SEEING, [7, 7, 7], 3, "3 images; max_images_per_request is 2"),
        (SEEING, [1, 7], 2, "1 image tokens .id 7. and the request 2"),
        (SEEING, [1, 7], 0, "1 image tokens .id 7. and the request 0"),
    ],
)
def test_images_that_do_not_match_the_prompt_are_refused(
    info: EngineInfo, prompt: list[int], images: int, message: str
):
    with pytest.raises(InvalidRequest, match=message) as refusal:
        lay_out_images(prompt, [Image(b"", 3)] * images, info, PLAN)
    assert refusal.value.field == "images"


def test_images_are_laid_out_in_their_order():
    gallery = lay_out_images([1, 7, 7], [Image(b"a", 3), Image(b"b", 2)], SEEING, PLAN)
    assert gallery is not None and [each.data for each in gallery.inputs] == [b"a", b"b"]
