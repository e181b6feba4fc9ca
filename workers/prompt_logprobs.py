"""Log-probabilities of the tokens of prompts, for requests that ask for them."""

import numpy as np
import torch
from torch import Tensor

from ..proto.step import PromptLogprobs
from .sampler import logprobs
from .slots import SlotTables


def prompt_logprobs(
    tables: SlotTables, slots: np.ndarray, computed: np.ndarray, counts: np.ndarray, logits: Tensor
) -> tuple[PromptLogprobs, ...]:
    """Of the tokens that follow those computed in a step, as far as they are of the prompt.

    Shapes  slots, computed, counts [R]: of R rows, tokens computed before the step and in it
            logits [sum of counts, vocabulary], row by row
    """
    found = []
    rows = zip(slots.tolist(), computed.tolist(), counts.tolist(), logits.split(counts.tolist()), strict=True)
    for slot, start, count, logits_TV in rows:
        request = tables[slot]
        sampling = request.sampling
        follow = torch.from_numpy(request.prompt[start + 1 : min(start + count + 1, sampling.prompt_tokens)])
        about = logprobs(logits_TV[: len(follow)], follow.to(logits_TV.device), sampling.prompt_logprobs)
        found.append(PromptLogprobs(slot, start + 1, tuple(about)))
    return tuple(found)
