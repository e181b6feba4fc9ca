"""What is added to the logits of near keys, and sinks: learnt for each query, so they are no constants of a layer.

Suffixes: T packed tokens    H query heads    R profiles    E distances
"""

from typing import Any, NamedTuple

from torch import Tensor


class Biases(NamedTuple):
    """What queries of a step add to the logits of their nearest keys (Inkling), [T,H,E] as a product of two: to that of
    the key at a distance of 0, 1, .. E - 1 tokens. To others nothing is added."""

    mixtures_THR: Tensor
    profiles_RE: Tensor
    sinks_TH: Tensor | None = None  # of each query, in place of a layer's own (Inkling 2)

    def of(self, tokens: Any) -> Tensor:
        """[..,H,E] float32, of some of the packed tokens."""
        return self.mixtures_THR[tokens].float() @ self.profiles_RE.float()


def sinks_of(sinks_H: Tensor | None, biases: Biases | None, tokens: Any) -> Tensor | None:
    """Float32, of some of the packed tokens, [..,H], or [H] where a layer has the same for all."""
    if sinks_H is not None:
        return sinks_H.float()
    return None if biases is None or biases.sinks_TH is None else biases.sinks_TH[tokens].float()
