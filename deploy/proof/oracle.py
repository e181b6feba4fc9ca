"""What transformers says to a text, and whether it would say the same with weights that are a hair different."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

NEAR = 2e-3
"""Log-probabilities that differ by less are the same. Sums in another order differ by 1e-5 and less."""

HAIR = 1e-6
"""What weights are changed by, as a share of each: about what sums in another order differ by."""

TRIES = 8


class Oracle:
    """transformers' model of a copy. Each text is computed once, as a whole and without a cache."""

    def __init__(self, model: Any):
        self.model = model
        self._known: dict[tuple[int, ...], Tensor] = {}
        self._others: list[Any] = []

    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """[T-1,V] float64: row t is about token t + 1."""
        key = tuple(tokens)
        if key not in self._known:
            self._known[key] = _logprobs(self.model, key)
        return self._known[key]

    def wavering(self, tokens: Sequence[int]) -> Tensor:
        """[T-1]: by how much each row of `logprobs` changes with the last bits of the weights.

        By far, where two experts are chosen by scores that are all but equal: either choice is right then. What is
        magnified on its way, as steps of time are, changes too."""
        key = tuple(tokens)
        others = [(_logprobs(other, key) - self.logprobs(key)).abs().amax(-1) for other in self._made_others()]
        return torch.stack(others).amax(0)

    def _made_others(self) -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        while len(self._others) < TRIES:
            other = deepcopy(self.model)
            with torch.no_grad():
                for weight in other.parameters():
                    weight.mul_(1 + HAIR * torch.randn(weight.shape, generator=generator))
            self._others.append(other)
        return self._others


@torch.inference_mode()
def _logprobs(model: Any, tokens: Sequence[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits
    return logits[0, :-1].double().log_softmax(-1)
