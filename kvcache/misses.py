"""Why tokens of a prompt were not found in the cache. What was found and all misses together are the whole prompt."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

EVICTED = "evicted"
"""They were known once, and their blocks had to make room."""

NO_SNAPSHOT = "no_snapshot"
"""Entries per token were there, and no state was saved at that length."""

ALIGNMENT = "alignment"
"""What is known ends inside a block, and this prompt leaves it there."""

SALT = "salt"
"""A prompt of another salt begins so. One salt must not learn what another one has: tell it only to the operator."""

RESET = "reset"
"""They were known once, and the whole cache was forgotten: workers were lost, or the operator asked for it."""

NEW = "new"
"""No prompt had them, as far as is remembered; or less than a block of them."""

LAST_TOKEN = "last_token"
"""All before it was known. It is computed in any case, since its logits are what is asked for."""

PROMPT_LOGPROBS = "prompt_logprobs"
"""They are known, and are computed anew because their log-probabilities are asked for."""

CACHING_OFF = "caching_off"
"""Nothing is looked up."""

LOST = EVICTED, NO_SNAPSHOT, ALIGNMENT, SALT, RESET
"""Causes of tokens that were cached once and are computed again."""


class Miss(NamedTuple):
    """Tokens that were not found, for one cause."""

    cause: str
    tokens: int
    layers: str = ""  # the kind of layers that lacked them, as the plan names it; empty: it was not for one kind


def lost_tokens(misses: Iterable[Miss]) -> Mapping[str, int]:
    """Tokens that were cached once and will be computed again, by cause."""
    lost: dict[str, int] = {}
    for miss in misses:
        if miss.cause in LOST:
            lost[miss.cause] = lost.get(miss.cause, 0) + miss.tokens
    return lost


def merged(misses: Iterable[Miss]) -> tuple[Miss, ...]:
    """One for each cause and kind of layers, in the order in which they come, without those of no tokens."""
    tokens: dict[tuple[str, str], int] = {}
    for miss in misses:
        of = miss.cause, miss.layers
        tokens[of] = tokens.get(of, 0) + miss.tokens
    return tuple(Miss(cause, count, layers) for (cause, layers), count in tokens.items() if count)
