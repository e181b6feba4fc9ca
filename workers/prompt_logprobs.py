"""Log-probabilities of the tokens of prompts, for requests that ask for them."""

import numpy as np
import torch
from torch import Tensor

from ..kernels.sampling import SamplingBackend
from ..proto.step import Logprobs, PromptLogprobs
from .launched import Rows
from .slots import SlotTables


def prompt_logprobs(
    sampling: SamplingBackend, tables: SlotTables, rows: Rows, asked: np.ndarray, logits: Tensor
) -> tuple[PromptLogprobs, ...]:
    """Of the tokens that follow those computed in a step, as far as they are of the prompt. asked: which of the rows

    Shapes  logits [T or more, vocabulary]: first those of all tokens of these rows, row by row
    """
    found = []
    counts = rows.query_lens[asked].tolist()
    logits_of_rows = logits[: sum(counts)].split(counts)
    places = zip(rows.slots[asked].tolist(), rows.computed[asked].tolist(), counts, logits_of_rows, strict=True)
    for slot, start, count, logits_TV in places:
        request = tables[slot]
        sampled = request.sampling
        follow = torch.from_numpy(request.prompt[start + 1 : min(start + count + 1, sampled.prompt_tokens)])
        about = sampling.logprobs(logits_TV[: len(follow)], follow.to(logits_TV.device), sampled.prompt_logprobs)
        found.append(PromptLogprobs(slot, start + 1, tuple(Logprobs(*each) for each in about)))
    return tuple(found)
