"""How much of a step prompts may take while others decode.

Everybody who decodes waits for the whole step, prompts included. So a step's time is shared: prompts get as much of it
as they are many, and never less than `least_share`. What a step of so many decoding requests takes, and what prompts
add to it, is learnt from the steps themselves; nothing is limited before both are known.

Prompts add something for being there at all (their rows go other ways through the model), and something per token.
Taken for one, chunks would shrink: a small one seems dear by the token, so the next one is smaller still.
"""

LEARNING_RATE = 0.2
"""Weight of the newest step among those of so many decoding requests."""

FORGETTING = 0.05
"""How much less each step with prompts counts than the one after it."""

SURPRISE = 4.0
"""A step that takes so many times longer than expected counts only so much: it was a hiccup, or it comes again."""

LEAST_SPREAD = 0.3
"""Of chunk lengths, relative to their mean: with less, nothing can be said about what they cost at all."""


class Pace:
    """Times in microseconds, as the workers report them."""

    def __init__(self, least_share: float):
        self._least_share = least_share
        self._decode_us: dict[int, float] = {}  # of steps without prompts, by the binary logarithm of their requests
        self._prompts = Line()

    def learn(self, decoding: int, prompt_tokens: int, run_us: int) -> None:
        """A step of so many decoding requests and prompt tokens took `run_us`."""
        if run_us <= 0:
            return
        if prompt_tokens:
            alone_us = self._decode_step_us(decoding) or 0.0
            self._prompts.add(prompt_tokens, max(run_us - alone_us, run_us / 20))
            return
        level = decoding.bit_length()
        old = self._decode_us.get(level, run_us)
        self._decode_us[level] = old + LEARNING_RATE * (_unsurprising(run_us, old) - old)

    def prompt_tokens(self, decoding: int, prompts: int) -> float:
        """Tokens of prompts that a step may take beside so many who decode, when so many prompts are to be computed.

        At least as many as take as long as prompts' being there does.
        """
        step_us = self._decode_step_us(decoding)
        if not decoding or step_us is None or not self._prompts.is_known or self._least_share >= 1:
            return float("inf")
        share = max(self._least_share, prompts / (prompts + decoding))
        fixed_us, token_us = self._prompts.fixed_and_slope()
        return max(step_us * share / (1 - share) - fixed_us, fixed_us) / token_us

    def prefill_us(self, tokens: int) -> float:
        """What it takes to compute so many tokens of a prompt; 0 while that is not known."""
        return self._prompts.fixed_and_slope()[1] * tokens if self._prompts.is_known else 0.0

    def _decode_step_us(self, decoding: int) -> float | None:
        """Of the nearest number of requests that was seen."""
        if not self._decode_us or not decoding:
            return None
        level = decoding.bit_length()
        return self._decode_us[min(self._decode_us, key=lambda known: abs(known - level))]


class Line:
    """y = fixed + slope * x by least squares, newer points counting more. x and y are positive, and so is the slope."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0  # sums

    @property
    def is_known(self) -> bool:
        return self._weight > 0

    def add(self, x: float, y: float) -> None:
        if self.is_known:
            fixed, slope = self.fixed_and_slope()
            y = _unsurprising(y, fixed + slope * x)
        keep = 1 - FORGETTING
        self._weight = self._weight * keep + 1
        self._x = self._x * keep + x
        self._y = self._y * keep + y
        self._xx = self._xx * keep + x * x
        self._xy = self._xy * keep + x * y

    def fixed_and_slope(self) -> tuple[float, float]:
        """`fixed` is 0 while all x are much the same."""
        through_origin = self._y / self._x
        mean = self._x / self._weight
        variance = self._xx / self._weight - mean * mean
        if variance < (LEAST_SPREAD * mean) ** 2:
            return 0.0, through_origin
        slope = (self._xy / self._weight - mean * self._y / self._weight) / variance
        slope = min(max(slope, through_origin / 20), through_origin)
        return (self._y - slope * self._x) / self._weight, slope


def _unsurprising(value: float, expected: float) -> float:
    return min(max(value, expected / SURPRISE), expected * SURPRISE)
