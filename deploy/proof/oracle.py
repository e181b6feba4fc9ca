"""What transformers says to a text, and whether it would say the same with weights that are a hair different."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

NEAR = 2e-3
"""Log-probabilities that differ by less are the same. Sums in another order differ by 1e-5 and less."""

HAIR = 1e-5
"""What weights are changed by, as a share of each: some ten times what sums in another order differ by."""

TRIES = 4


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

    def wavers(self, tokens: Sequence[int], position: int) -> bool:
        """Whether what it says up to that position depends on the last bits of its weights.

        It does where two experts are chosen by scores that are all but equal: either choice is right then, and what
        follows differs by far."""
        true = self.logprobs(tokens)[:position]
        for other in self._made_others():
            if float((_logprobs(other, tokens)[:position] - true).abs().max()) > NEAR:
                return True
        return False

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
