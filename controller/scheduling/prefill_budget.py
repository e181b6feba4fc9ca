"""How many tokens of prompts a step may hold.

A request that decodes waits for the whole step, the prompts in it included. So a step's time is shared. Prompts get the
share that they have by number among all requests of the step, and never less than `prefill_share`; or, with
`token_interval_ms`, what is left of that time after the tokens of answers. Nothing is limited before it is known what
steps take (`step_times.py`). A prompt that ends with twice its share borrows that from the next step, since two steps
would take longer than one.

Prompts of one tenant leave up to half of what a step holds to those of other tenants. After a step that did not fit in
memory, steps hold fewer tokens of prompts, and more again after a while.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from ..request import Request
from .settings import SchedulerSettings
from .step_times import StepTimes

logger = logging.getLogger(__name__)

SHRINK = 4
"""By how much steps get smaller after one that did not fit in memory."""

GROW_AFTER_STEPS = 1000
"""Steps without such a fault before twice as much is tried."""

SPARE_SHARE, LONGEST_SPARE_US = 0.1, 50_000
"""What prompts that no client waits for may add, of the time of a step in which requests decode; and how long a step of
such prompts alone may take. A request that comes waits for that."""

UNLEARNT_TOKENS = 256
"""Of such prompts, before it is known what they take."""

MOST_WAITING = 16
"""Waiting requests that room is kept for beside another tenant's prompts."""


class Allowance(NamedTuple):
    """Tokens of its prompt that a request may compute in a step."""

    tokens: int
    to_end: int = 0  # so many more, if its prompt ends with them

    def of(self, remaining: int) -> int:
        """remaining: tokens that it lacks"""
        return remaining if self.tokens > 0 and remaining <= self.tokens + self.to_end else min(remaining, self.tokens)


class StepBudget:
    """Tokens of prompts that one step may still take. Made anew for each plan."""

    __slots__ = ("_first_tenant", "_left_for_first", "_lendable", "borrowed", "left")

    def __init__(self, tokens: int, lendable: int = 0):
        """lendable: tokens that prompts may borrow to end in this step"""
        self.left = tokens
        self.borrowed = 0  # of the next step's
        self._lendable = lendable
        self._first_tenant: str | None = None  # the tenant that leaves something to others
        self._left_for_first = tokens

    def share(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        """Leave up to half to prompts of other tenants than the most senior one's, if they need so much. Short ones
        would else wait until all long prompts of that tenant are computed.

        running: those whose prompts are under way, most senior first; waiting: those that may begin in this step
        """
        first = running[0].options.tenant
        needed = sum(each.remaining_tokens for each in running if each.options.tenant != first)
        needed += sum(len(each.tokens) for each in waiting if each.options.tenant != first)
        self._first_tenant, self._left_for_first = first, self.left - min(self.left // 2, needed)

    def left_for(self, tenant: str) -> Allowance:
        if tenant == self._first_tenant and self._left_for_first < self.left:
            return Allowance(self._left_for_first)
        return self.left_for_waiting

    @property
    def left_for_waiting(self) -> Allowance:
        """Of a request that begins, of any tenant."""
        return Allowance(self.left, self._lendable - self.borrowed)

    def spend(self, tenant: str, tokens: int) -> None:
        lent = max(0, tokens - self.left)
        assert lent <= self._lendable - self.borrowed, f"{tokens} tokens are planned, and the step has {self.left} left"
        self.left -= tokens - lent
        self.borrowed += lent
        if tenant == self._first_tenant:
            self._left_for_first -= tokens


class PrefillBudget:
    """What steps may hold of prompts, beside requests that decode."""

    def __init__(self, settings: SchedulerSettings, block_tokens: int, times: StepTimes):
        """block_tokens: that many are always worth computing, however long the step takes."""
        self._most_tokens = settings.step_tokens
        self._least_share = settings.prefill_share
        self._interval_us = None if settings.token_interval_ms is None else settings.token_interval_ms * 1000
        self._block_tokens = block_tokens
        self._times = times
        self._max_tokens = self._most_tokens  # less, after a step that did not fit in memory
        self._grow_at = 0  # the step from which more is tried again
        self._last, self._last_step = StepBudget(0), 0  # that was limited

    def open(self, step: int, decoding: int, prompts: int) -> StepBudget:
        """The budget of a step in which so many requests decode, and so many prompts can be computed.

        step: how many were planned before it
        """
        self._grow(step)
        room = max(0, self._max_tokens - decoding)
        fair = self.fair_tokens(decoding, prompts) if decoding and prompts else float("inf")
        if fair >= room:
            return StepBudget(room)
        # What an earlier step has borrowed is given back by each step since, with prompts or without.
        steps_since = max(0, step - self._last_step - 1)
        owed = max(0, self._last.borrowed - fair * steps_since)
        left = min(room, int(max(fair - owed, self._block_tokens)))
        lendable = 0 if owed or self._interval_us is not None else min(left, room - left)
        self._last, self._last_step = StepBudget(left, lendable), step
        return self._last

    def fair_tokens(self, decoding: int, prompts: int) -> float:
        """Tokens of prompts that take no more of a step's time than is fair to so many requests that decode.

        At least so many that they take as long as prompts take for being there, or what the wanted interval leaves.
        Infinite while times are not known.
        """
        step_us, added_us = self._times.decode_us(decoding), self._times.prompts_us()
        if step_us is None or added_us is None:
            return float("inf")
        fixed_us, token_us = added_us
        if self._interval_us is not None:
            return (self._interval_us - step_us - fixed_us) / token_us
        if self._least_share >= 1:
            return float("inf")
        share = max(self._least_share, prompts / (prompts + decoding))
        return max(step_us * share / (1 - share) - fixed_us, fixed_us) / token_us

    def spare_tokens(self, step: int, decoding: int) -> int:
        """Tokens of a prompt that no client waits for, in a step in which so many requests decode and no prompt is
        computed. With none that decodes, a block at least."""
        self._grow(step)
        left, added_us = max(0, self._max_tokens - decoding), self._times.prompts_us()
        least = min(left, self._block_tokens)
        if not decoding:
            return min(left, UNLEARNT_TOKENS) if added_us is None else _within(LONGEST_SPARE_US, added_us, least, left)
        step_us = self._times.decode_us(decoding)
        if step_us is None or added_us is None:
            return 0
        return _within(SPARE_SHARE * step_us, added_us, 0, left)

    def shrink(self, step: int) -> None:
        """A step did not fit in memory: the next ones hold less, and more again after a while."""
        least = min(self._block_tokens, self._most_tokens)
        self._max_tokens = max(least, self._max_tokens // SHRINK)
        self._grow_at = step + GROW_AFTER_STEPS
        logger.warning("steps hold at most %d tokens of prompts for a while", self._max_tokens)

    def _grow(self, step: int) -> None:
        while self._max_tokens < self._most_tokens and step >= self._grow_at:
            self._max_tokens = min(self._most_tokens, 2 * self._max_tokens)
            self._grow_at += GROW_AFTER_STEPS


def _within(time_us: float, added_us: tuple[float, float], least: int, most: int) -> int:
    """Tokens of prompts that add so much time to a step. added_us: for being there, and for each token."""
    fixed_us, token_us = added_us
    return min(most, max(least, int((time_us - fixed_us) / token_us)))
