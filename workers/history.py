"""What a request has said, for penalties and forbidden rows of tokens."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from ..kernels.sampling import PENALTIES, Penalties
from ..proto.step import MAX_BAD_TOKENS, Sampling


class History:
    """The tokens of a request, and which of them it generated."""

    def __init__(self, tokens: Sequence[int], prompt_tokens: int):
        answer = tokens[prompt_tokens:]
        self._tokens = np.unique(np.array(tokens, dtype=np.int64))  # of prompt and answer
        self._counts = np.zeros(len(self._tokens), dtype=np.int64)  # in the answer
        said, counts = np.unique(np.array(answer, dtype=np.int64), return_counts=True)
        self._counts[np.searchsorted(self._tokens, said)] = counts
        self._last: deque[int] = deque(answer, maxlen=MAX_BAD_TOKENS)  # of the answer

    def add(self, token: int) -> None:
        place = np.searchsorted(self._tokens, token)
        if place == len(self._tokens) or self._tokens[place] != token:
            self._tokens = np.insert(self._tokens, place, token)
            self._counts = np.insert(self._counts, place, 0)
        self._counts[place] += 1
        self._last.append(token)

    def penalties(self, sampling: Sampling) -> Penalties | None:
        presence, frequency, repetition = (
            sampling.presence_penalty,
            sampling.frequency_penalty,
            sampling.repetition_penalty,
        )
        if not (presence or frequency or repetition != 1.0):
            return None
        least, most = PENALTIES
        return Penalties(self._tokens, self._counts, min(max(repetition, least), most), presence, frequency)

    def forbidden(self, sampling: Sampling) -> list[int]:
        """Tokens that would complete a forbidden row."""
        last = list(self._last) if sampling.bad_token_ids else []
        return [
            token
            for *first, token in sampling.bad_token_ids
            if len(first) <= len(last) and last[len(last) - len(first) :] == first
        ]
