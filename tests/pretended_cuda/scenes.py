"""What an engine is asked on a pretended device. Small, since Triton's interpreter takes milliseconds for a program."""

from dataclasses import dataclass, replace
from pathlib import Path

from intarsia.proto.request import SamplingParams
from intarsia.tests import models

VARIED = (
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.0, top_k=5, min_p=0.05, seed=2, repetition_penalty=1.2, presence_penalty=0.5),
    SamplingParams(
        temperature=0.0, frequency_penalty=0.3, logit_bias={7: 1.5}, bad_token_ids=((3,), (5, 9)), logprobs=0
    ),
)
"""Every way in which a token is chosen, of three requests in one batch."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A checkpoint, and prompts for it, with the images of each."""

    family: str
    path: Path
    prompts: list[list[int]]
    images: list[list[bytes]]
    tokens: int  # of each answer
    is_varied: bool = False  # else all answers are greedy
    ranks: int = 1
    is_asked_again: bool = True
    meets_anew: bool = False  # the ranks, before all is asked again

    def of_prompts(self, *which: int) -> "Scene":
        return replace(self, prompts=[self.prompts[n] for n in which], images=[self.images[n] for n in which])

    @property
    def sampling(self) -> list[SamplingParams]:
        greedy = SamplingParams(temperature=0)
        params = VARIED if self.is_varied else [greedy] * len(self.prompts)
        return [replace(each, max_tokens=self.tokens) for each in params]


def scene_of(family: str, path: Path, count: int, tokens: int) -> Scene:
    """The first `count` of the usual prompts. Of three rows one more is filled up: frames have 1, 2, 4, 8, .. rows."""
    prompts, images = models.prompts_of(family)
    return Scene(family, path, prompts[:count], images[:count], tokens)


def oracle(scene: Scene) -> list[list[int]]:
    """The tokens that transformers gives. Before torch is changed."""
    asked = zip(scene.prompts, scene.images, strict=True)
    return [models.greedy(models.load_oracle(scene.path, images), prompt, scene.tokens) for prompt, images in asked]
