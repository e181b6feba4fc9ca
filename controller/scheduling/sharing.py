"""Requests that share a prompt, or the beginning of one: it is computed once.

Several answers to one prompt are forks of the first. They wait until the prompt is computed but for its last token, and
go on from there with the same blocks. Requests that happen to begin alike find the common prefix in the cache, and wait
for it while another request computes it.
"""

from collections.abc import Sequence

from ...errors import PoolExhausted
from ...kvcache.manager import CacheManager
from ...kvcache.prefix import shared_blocks
from ..request import Request
from .prefixes import lookup
from .step_draft import StepDraft

MOST_DEFERRED = 8
"""Requests that may be passed over in one step because another one computes their prompt."""

MOST_KEPT_FOR = 4
"""Waiting requests whose cached prefixes are kept for them while prompts are computed."""


class Sharing:
    """Forks that wait for a prompt, and prompts that are computed for others.

    Invariant: a request in `parents` has forks, and a fork has a parent for as long as it waits for the prompt.
    """

    def __init__(self, manager: CacheManager):
        self._manager = manager
        self.parents: list[Request] = []  # of forks that wait for a prompt

    # -- forks -------------------------------------------------------------------------------------------------------

    def add(self, parent: Request, forks: Sequence[Request]) -> None:
        """Requests that ask the same as `parent` and differ in what is drawn."""
        assert forks and not parent.forks, f"request {parent.id} gets its forks once"
        parent.forks = list(forks)
        for fork in forks:
            fork.parent = parent
        self.parents.append(parent)

    def ready(self) -> list[Request]:
        """Running requests from which forks can go on now."""
        return [each for each in self.parents if each.slot is not None and each.is_at_fork]

    def fork(self, parent: Request, draft: StepDraft) -> Request | None:
        """Open the blocks of the next fork of `parent`. None, with nothing taken, if there is none, or no block."""
        if not parent.forks:
            return None
        fork = parent.forks[0]
        try:
            growth = self._manager.fork(parent.id, fork.id, fork.tokens)
        except PoolExhausted:
            return None
        draft.copies += growth.copies
        self.leave(fork)
        assert parent.seniority is not None, f"request {parent.id} runs without seniority"
        fork.seniority = parent.seniority[0], fork.id
        fork.admitted_s = parent.admitted_s
        fork.cached_tokens, fork.misses = parent.cached_tokens, parent.misses
        return fork

    def leave(self, fork: Request) -> None:
        """A fork does not wait for the prompt any more."""
        parent = fork.parent
        assert parent is not None, f"request {fork.id} is no fork that waits"
        parent.forks.remove(fork)
        fork.parent = None
        if not parent.forks:
            self.parents.remove(parent)

    def release(self, parent: Request) -> list[Request]:
        """The forks of `parent` that wait for it, which have to do without it from now on."""
        forks = list(parent.forks)
        for fork in forks:
            self.leave(fork)
        return forks

    # -- prompts that begin alike ------------------------------------------------------------------------------------

    def defer(self, request: Request, running: Sequence[Request]) -> bool:
        """Have a request wait for a running one that computes most of its prompt: that is cheaper than to compute it
        twice. The running one keeps what it needs. False if there is no such request."""
        if not self._manager.is_caching or request.lacks_prompt_logprobs or request.preemptions:
            return False
        hit = lookup(request, self._manager)
        assert request.chain is not None
        size = self._manager.plan.block_tokens
        lacking = len(request.tokens) - hit.tokens
        for other in running:
            if other.chain is None or other.computed_tokens >= other.prompt_tokens:
                continue
            common = min(shared_blocks(request.chain.names, other.chain.names) * size, other.prompt_tokens)
            if other.computed_tokens < common and common - hit.tokens >= max(lacking / 2, size):
                self._manager.expect(other.id, common)
                return True
        return False

    def keep_for(self, waiting: Sequence[Request]) -> None:
        """Cached prefixes that these requests will take up are evicted last."""
        for request in waiting:
            if not request.lacks_prompt_logprobs:
                self._manager.touch(lookup(request, self._manager))
