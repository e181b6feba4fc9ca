"""Log-probabilities of the tokens of prompts, for requests that ask for them."""

import numpy as np
import torch
from torch import Tensor

from ..kernels.sampling import SamplingBackend
from ..proto.step import Logprobs, PromptLogprobs
from .slots import SlotTables


def prompt_logprobs(
    sampling: SamplingBackend,
    tables: SlotTables,
    slots: np.ndarray,
    computed: np.ndarray,
    counts: np.ndarray,
    logits: Tensor,
) -> tuple[PromptLogprobs, ...]:
    """Of the tokens that follow those computed in a step, as far as they are of the prompt.

    Shapes  slots, computed, counts [R]: of R rows, tokens computed before the step and in it
            logits [sum of counts, vocabulary], row by row
    """
    found = []
    rows = zip(slots.tolist(), computed.tolist(), counts.tolist(), logits.split(counts.tolist()), strict=True)
    for slot, start, count, logits_TV in rows:
        request = tables[slot]
        asked = request.sampling
        follow = torch.from_numpy(request.prompt[start + 1 : min(start + count + 1, asked.prompt_tokens)])
        about = sampling.logprobs(logits_TV[: len(follow)], follow.to(logits_TV.device), asked.prompt_logprobs)
        found.append(PromptLogprobs(slot, start + 1, tuple(Logprobs(*each) for each in about)))
    return tuple(found)
