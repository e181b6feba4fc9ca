"""Images in an engine: encoded once, kept by content, seen only by the text behind them."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from intarsia.controller.engine import Engine
from intarsia.errors import InvalidRequest
from intarsia.proto.request import SamplingParams
from intarsia.proto.step import Step, StepResult
from intarsia.tests.conftest import TinyModel
from intarsia.tests.local import Completion, LocalWorkers, asking, complete, make_engine
from intarsia.tests.models import greedy, load_oracle, picture
from intarsia.tests.tiny_configs import IMAGE

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = [IMAGE, *range(1, 33)]


class Watched(LocalWorkers):
    """Counts the images that workers are asked to encode."""

    def __init__(self):
        super().__init__()
        self.encoded = 0

    async def start_step(self, step: Step) -> StepResult:
        self.encoded += sum(len(entry.images) for entry in step.admit)
        return await super().start_step(step)


def run(path: Path, work: Callable, **settings: Any) -> tuple[Engine, Watched, list[Completion]]:
    async def go() -> tuple[Engine, Watched, list[Completion]]:
        workers = Watched()
        engine = await make_engine(path, workers, **settings)
        return engine, workers, await work(engine)

    return asyncio.run(go())


def truth(path: Path, prompt: list[int], *images: bytes) -> list[int]:
    return greedy(load_oracle(path, images), prompt, GREEDY.max_tokens)


def test_another_image_gives_other_tokens_and_no_hit(tiny: Callable):
    """The prompt is the same to the token; only the picture differs."""
    path = tiny("mllama").path
    one, other = picture(60, 25, 1), picture(60, 25, 2)

    async def work(engine: Engine) -> list[Completion]:
        first = await complete(engine, [PROMPT], GREEDY, [[one]])
        return first + await complete(engine, [PROMPT], GREEDY, [[other]])

    engine, workers, (first, second) = run(path, work)
    assert first.token_ids == truth(path, PROMPT, one)
    assert second.token_ids == truth(path, PROMPT, other)
    assert first.token_ids != second.token_ids
    assert (second.num_cached_tokens, workers.encoded) == (0, 2)
    assert engine.recount().all_free


def test_the_same_image_under_other_text_is_encoded_once(tiny: Callable):
    path = tiny("mllama").path
    image = picture(60, 25, 1)
    other_text = [IMAGE, *range(50, 80)]

    async def work(engine: Engine) -> list[Completion]:
        first = await complete(engine, [PROMPT], GREEDY, [[image]])
        return first + await complete(engine, [other_text, PROMPT], GREEDY, [[image], [image]])

    _, workers, (first, second, third) = run(path, work)
    assert second.token_ids == truth(path, other_text, image)
    assert third.token_ids == first.token_ids == truth(path, PROMPT, image)
    assert third.num_cached_tokens == len(PROMPT) - 1
    assert workers.encoded == 1


def test_without_a_prefix_cache_every_request_encodes_its_image(tiny: Callable):
    path = tiny("mllama").path
    image = picture(20, 20, 1)

    async def work(engine: Engine) -> list[Completion]:
        first = await complete(engine, [PROMPT], GREEDY, [[image]])
        return first + await complete(engine, [PROMPT], GREEDY, [[image]])

    _, workers, completions = run(path, work, enable_prefix_caching=False)
    assert {tuple(c.token_ids) for c in completions} == {tuple(truth(path, PROMPT, image))}
    assert workers.encoded == 2


def test_text_before_an_image_does_not_see_it(tiny: Callable):
    """Its keys and values are those of text alone: with the image or without, the same layers ran."""
    path = tiny("mllama").path
    before = list(range(1, 9))
    text = [*before, 7, 8, 9]
    shown = [*before, IMAGE, 8, 9]

    async def work(engine: Engine) -> list[Completion]:
        return await complete(engine, [text, shown], GREEDY, [[], [picture(20, 20, 3)]])

    _, _, (plain, seeing) = run(path, work)
    assert plain.token_ids == truth(path, text)
    assert seeing.token_ids == truth(path, shown, picture(20, 20, 3))


@pytest.mark.parametrize(
    ("prompt", "images", "why"),
    [
        (PROMPT, 0, r"has 1 image tokens \(id 128\) and the request 0 images"),
        ([1, 2], 1, "has 0 image tokens .* and the request 1 images"),
        ([IMAGE] * 4, 4, "has 4 images; max_images_per_request is 3"),
    ],
)
def test_images_that_do_not_match_the_prompt_are_refused_with_the_numbers(
    prompt: list[int], images: int, why: str, tiny: Callable
):
    async def work(engine: Engine) -> list[Completion]:
        with pytest.raises(InvalidRequest, match=why) as caught:
            await complete(engine, [prompt], GREEDY, [[picture(20, 20, 1)] * images])
        assert caught.value.field == "images"
        return await complete(engine, [[1, 2, 3]], GREEDY)

    _, _, (after,) = run(tiny("mllama").path, work)
    assert len(after.token_ids) == 12


def test_a_model_without_images_refuses_them(tiny: Callable):
    async def work(engine: Engine) -> list[Completion]:
        completion = Completion()
        from intarsia.proto.request import Image

        with pytest.raises(InvalidRequest, match="llama takes no images, and the request has 1"):
            engine.submit(asking([1, 2], GREEDY, [Image(b"", 5)]), 0, completion.sink)
        return []

    run(tiny("llama").path, work)


def test_the_plan_keeps_room_for_the_images_of_a_request(tiny: Callable):
    model: TinyModel = tiny("mllama")
    engine, _, _ = run(model.path, lambda engine: complete(engine, [[1, 2]], GREEDY), max_images_per_request=2)
    group = next(group for group in engine._manager.plan.groups if group.reach.kind == "cross")
    assert group.encoder_tokens == 2 * 32  # 4 tiles of 5 tokens, in blocks of 16
