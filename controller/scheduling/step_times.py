"""What steps take, learnt from the steps themselves.

Two things are learnt: the time of a step in which a given number of requests decode, and what prompts add to it.
Prompts add something for being there at all (their rows go other ways through the model), and something per token. With
one figure for both, chunks would shrink: a small chunk seems dear by the token, so the next one is smaller still.
"""

LEARNING_RATE = 0.2
"""Weight of the newest step among those in which about as many requests decode."""

FORGETTING = 0.05
"""How much less each step with prompts counts than the one after it."""

SURPRISE = 4.0
"""A step that takes longer than expected counts as so many times the expected at most. A slow step may be a hiccup, and
if it is not, it comes again."""

LEAST_SPREAD = 0.3
"""Of chunk lengths, relative to their mean. With less, the two costs cannot be told from each other."""

MOST_UNLEARNT = 64
"""Steps that wait to be learnt from."""


class StepTimes:
    """Times in microseconds, as the workers report them.

    Steps that ran are noted in `ran`. What they teach is worked out before the next answer, or for many at once.
    """

    def __init__(self) -> None:
        self.ran: list[tuple[int, int, int]] = []  # (requests that decoded, tokens of prompts, time)
        self._decode_us: dict[int, float] = {}  # of steps without prompts, by the binary logarithm of their requests
        self._prompts = Line()  # from tokens of prompts to what they add

    def learn(self) -> None:
        """Work out what the noted steps teach, in their order."""
        ran, self.ran = self.ran, []
        for decoding, prompt_tokens, run_us in ran:
            if run_us > 0:
                self._learn_one(decoding, prompt_tokens, run_us)

    def decode_us(self, decoding: int) -> float | None:
        """The time of a step in which so many requests decode; of the nearest number that was seen. None: not known."""
        self.learn()
        return self._decode_us_of(decoding)

    def prompts_us(self) -> tuple[float, float] | None:
        """What prompts add to a step: for being there, and for each token. None: not known."""
        self.learn()
        return self._prompts.fixed_and_slope() if self._prompts.is_known else None

    def prefill_us(self, tokens: int) -> float:
        """What so many tokens of a prompt add to a step that holds prompts anyway; 0 while that is not known."""
        self.learn()
        return self._prompts.fixed_and_slope()[1] * tokens if self._prompts.is_known else 0.0

    def _learn_one(self, decoding: int, prompt_tokens: int, run_us: int) -> None:
        if prompt_tokens:
            alone_us = self._decode_us_of(decoding) or 0.0
            self._prompts.add(prompt_tokens, max(run_us - alone_us, run_us / 20))
            return
        level = decoding.bit_length()
        old = self._decode_us.get(level, run_us)
        self._decode_us[level] = old + LEARNING_RATE * (_unsurprising(run_us, old) - old)

    def _decode_us_of(self, decoding: int) -> float | None:
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
        assert x > 0 and y > 0, f"the point ({x}, {y}) lies on no such line"
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
