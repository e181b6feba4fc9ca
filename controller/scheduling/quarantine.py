"""Requests that the workers may have died of run alone, one after another, until each has got a token.

The workers may be lost for reasons of their own, so a request is suspected only after some losses in a row. When it has
run alone and they were lost again, the engine gives it up (`losses.py`).
"""

import time
from collections import deque
from collections.abc import Iterable

from ..losses import SUSPICIOUS_LOSSES
from ..request import Request


class Quarantine:
    """The suspects, in the order in which they are tried. The scheduler admits no other request while there are any.

    Invariant: each suspect stands in the order once.
    """

    def __init__(self) -> None:
        self.suspects: deque[Request] = deque()

    def note_loss(self, ran: Iterable[Request]) -> None:
        """The workers were lost while these requests ran."""
        for request in ran:
            has_new_token = len(request.tokens) != request.tokens_at_loss
            request.losses = 1 if has_new_token else request.losses + 1
            request.tokens_at_loss = len(request.tokens)
            if request.losses == 1:
                request.first_loss_s = time.monotonic()
            if is_suspect(request) and request not in self.suspects:
                self.suspects.append(request)

    def clear(self) -> list[Request]:
        """Let suspects go that have got a token, or have ended. Returns those that must make room for the next one."""
        in_the_way: list[Request] = []
        while self.suspects and not (self.suspects[0].is_live and is_suspect(self.suspects[0])):
            cleared = self.suspects.popleft()
            if cleared.slot is not None and self.suspects:
                in_the_way.append(cleared)
        return in_the_way


def is_suspect(request: Request) -> bool:
    """The workers may have died of it."""
    return request.losses >= SUSPICIOUS_LOSSES and len(request.tokens) == request.tokens_at_loss
