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
    is_asked_again: bool = True
    meets_anew: bool = False  # the ranks, before all is asked again

    def of_prompts(self, *which: int) -> "Scene":
        return replace(self, prompts=[self.prompts[n] for n in which], images=[self.images[n] for n in which])


def scene_of(family: str, path: Path, count: int, tokens: int) -> Scene:
    """The first `count` of the usual prompts. Of three rows one more is filled up: frames have 1, 2, 4, 8, .. rows."""
    prompts, images = models.prompts_of(family)
    return Scene(family, path, prompts[:count], images[:count], tokens)


def oracle(scene: Scene) -> list[list[int]]:
    """The tokens that transformers gives. Before torch is changed."""
    asked = zip(scene.prompts, scene.images, strict=True)
    return [models.greedy(models.load_oracle(scene.path, images), prompt, scene.tokens) for prompt, images in asked]
