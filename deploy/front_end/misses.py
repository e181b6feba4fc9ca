"""Why tokens of a prompt were not found in the cache, in words for those who asked and for operators."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from ...kvcache import misses as causes
from ...kvcache.misses import Miss, merged


class Words(NamedTuple):
    what: str
    brief: str
    would_help: str | None = None  # what would have saved these tokens; None: nothing would


MEMORY = "more cache memory (--kv-cache-memory), or fewer conversations at once"

WORDS = {
    causes.EVICTED: Words("their blocks made room for others", "evicted", MEMORY),
    causes.NO_SNAPSHOT: Words(
        "no state was saved there", "no state saved", "a prompt that ends, or parts from others, at that length"
    ),
    causes.ALIGNMENT: Words(
        "what is known ends inside a block", "inside a block", "smaller blocks (--block-size), or an end at that token"
    ),
    causes.SALT: Words("known under another salt", "another salt", "the same tenant or cache salt"),
    causes.RESET: Words("the cache was forgotten", "forgotten", "workers that are not lost, and no reset"),
    causes.NEW: Words("never computed before", "new"),
    causes.LAST_TOKEN: Words("the last token is always computed", "last token"),
    causes.PROMPT_LOGPROBS: Words(
        "log-probabilities of the prompt are asked for", "prompt_logprobs", "a request without prompt_logprobs"
    ),
    causes.CACHING_OFF: Words("prefixes are not cached", "caching is off", "--enable-prefix-caching"),
}
"""By cause."""


def for_client(misses: Iterable[Miss]) -> tuple[Miss, ...]:
    """What a client may know. What other salts have counts as new: it would tell what others asked."""
    return merged(miss._replace(cause=causes.NEW) if miss.cause == causes.SALT else miss for miss in misses)


def told(misses: Iterable[Miss]) -> list[dict[str, Any]]:
    """As an answer's usage has it: of each, its cause, tokens, and where they are known the kind of layers that lacked
    them and what would have helped."""
    return [
        {
            "cause": miss.cause,
            "tokens": miss.tokens,
            **({"layers": miss.layers} if miss.layers else {}),
            **({"would_help": help_} if (help_ := WORDS[miss.cause].would_help) else {}),
        }
        for miss in for_client(misses)
    ]


def for_operator(misses: Iterable[Miss]) -> list[dict[str, Any]]:
    """As the console and `intarsia top` show it."""
    return [miss._asdict() | WORDS[miss.cause]._asdict() for miss in misses]
