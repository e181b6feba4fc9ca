"""What an engine is asked on a pretended device. Small, since Triton's interpreter takes milliseconds for a program."""

from dataclasses import dataclass, replace
from pathlib import Path

from intarsia.tests import models


@dataclass(frozen=True, slots=True)
class Scene:
    """A checkpoint, and prompts for it, with the images of each."""

    family: str
    path: Path
    prompts: list[list[int]]
    images: list[list[bytes]]
    tokens: int  # of each answer
    ranks: int = 1

    def of_prompts(self, *which: int) -> "Scene":
        return replace(self, prompts=[self.prompts[n] for n in which], images=[self.images[n] for n in which])


def scene_of(family: str, path: Path, tokens: int, ranks: int = 1) -> Scene:
    """Three of the usual prompts: a row more than a frame of two, so that a row is filled up."""
    prompts, images = models.prompts_of(family)
    return Scene(family, path, prompts, images, tokens, ranks).of_prompts(0, 1, 2)


def oracle(scene: Scene) -> list[list[int]]:
    """The tokens that transformers gives. Before torch is changed."""
    asked = zip(scene.prompts, scene.images, strict=True)
    return [models.greedy(models.load_oracle(scene.path, images), prompt, scene.tokens) for prompt, images in asked]
