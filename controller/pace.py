"""How much of a step prompts may take while others decode.

Everybody who decodes waits for the whole step, prompts included. So a step's time is shared: prompts get as much of it
as they are many, and never less than `least_share`. What a token of a prompt costs, and a step of so many decoding
requests, is learnt from the steps themselves; nothing is limited before both are known.
"""

LEARNING_RATE = 0.2
"""Weight of the newest step."""

SURPRISE = 4.0
"""A step that takes so many times longer than expected counts only so much: it was a hiccup, or it comes again."""


class Pace:
    """Times in microseconds, as the workers report them."""

    def __init__(self, least_share: float):
        self._least_share = least_share
        self._decode_us: dict[int, float] = {}  # of steps without prompts, by the binary logarithm of their requests
        self._token_us: float | None = None  # of a token of a prompt

    def learn(self, decoding: int, prompt_tokens: int, run_us: int) -> None:
        """A step of so many decoding requests and prompt tokens took `run_us`."""
        if run_us <= 0:
            return
        if not prompt_tokens:
            level = decoding.bit_length()
            self._decode_us[level] = _blend(self._decode_us.get(level), run_us)
            return
        alone_us = self._decode_step_us(decoding) or 0.0
        self._token_us = _blend(self._token_us, max(run_us - alone_us, run_us / 20) / prompt_tokens)

    def prompt_tokens(self, decoding: int, prompts: int) -> float:
        """Tokens of prompts that a step may take beside so many who decode, when so many prompts are to be computed."""
        step_us = self._decode_step_us(decoding)
        if not decoding or step_us is None or self._token_us is None or self._least_share >= 1:
            return float("inf")
        share = max(self._least_share, prompts / (prompts + decoding))
        return step_us * share / (1 - share) / self._token_us

    def prefill_us(self, tokens: int) -> float:
        """What it takes to compute so many tokens of a prompt; 0 while that is not known."""
        return (self._token_us or 0.0) * tokens

    def _decode_step_us(self, decoding: int) -> float | None:
        """Of the nearest number of requests that was seen."""
        if not self._decode_us or not decoding:
            return None
        level = decoding.bit_length()
        return self._decode_us[min(self._decode_us, key=lambda known: abs(known - level))]


def _blend(old: float | None, new: float) -> float:
    if old is None:
        return new
    return old + LEARNING_RATE * (min(max(new, old / SURPRISE), old * SURPRISE) - old)
