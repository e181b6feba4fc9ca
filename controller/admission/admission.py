"""Admission control: of the requests that come, which are taken.

Refused are requests that can never be served (`validation.py`), and new ones that could not be served in time
(`overload.py`). A request that an engine had taken before it was lost is not new.
"""

import secrets
from collections.abc import Sequence
from itertools import count

from ...kvcache.ids import RequestId
from ...kvcache.manager import CacheManager
from ...proto.request import GenerateRequest, RequestOptions, SamplingParams
from ...proto.status import EngineInfo
from ..leases.leases import leases_of
from ..leases.wishes import check_lease
from ..request import Request
from .overload import OverloadGuard
from .validation import check, lay_out_images


class Admission:
    """Makes the requests of the engine from those of front ends."""

    def __init__(self, info: EngineInfo, manager: CacheManager, overload: OverloadGuard):
        self._info = info
        self._manager = manager
        self._plan = manager.plan
        self._overload = overload
        self._ids = map(RequestId, count(1))

    def admit(self, asked: GenerateRequest) -> list[Request]:
        """One request for each answer, in their order; they are not queued, and have no subscriber yet.

        Raises `InvalidRequest` if it cannot be served as asked, `Overloaded` if it cannot be in time.
        """
        sampling, prompt_tokens = asked.sampling, asked.prompt_tokens
        max_total_tokens = check(asked.tokens, prompt_tokens, sampling, self._info, self._plan)
        gallery = lay_out_images(asked.tokens[:prompt_tokens], asked.images, self._info, self._plan)
        if not asked.is_known:
            image_bytes = sum(len(image.data) for image in asked.images)
            self._overload.check(asked.options.tenant, prompt_tokens, image_bytes, sampling.n, asked.options.timeout_s)
        lease = None
        if asked.options.keep_s is not None:
            lease = check_lease(asked, max_total_tokens, leases_of(self._manager))
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= frozenset(self._info.eos_token_ids)
        return [
            Request(
                id=next(self._ids),
                tokens=list(asked.tokens),
                prompt_tokens=prompt_tokens,
                sampling=sampling,
                seed=(seed + answer) % 2**63,
                stop_token_ids=ends,
                max_total_tokens=max_total_tokens,
                options=asked.options,
                gallery=gallery,
                lease=lease,
                # They are the same for all answers, and are told with the first one.
                prompt_logprobs=[] if sampling.prompt_logprobs is not None and not answer else None,
            )
            for answer in range(sampling.n)
        ]

    def prepared(self, tokens: Sequence[int], sampling: SamplingParams, options: RequestOptions) -> Request:
        """A request that no client has made yet. It has no subscriber, and others never wait for it. Raises
        `InvalidRequest`."""
        return Request(
            id=next(self._ids),
            tokens=list(tokens),
            prompt_tokens=len(tokens),
            sampling=sampling,
            seed=0,
            stop_token_ids=frozenset(),
            max_total_tokens=check(tokens, len(tokens), sampling, self._info, self._plan),
            options=options,
            is_prepared=True,
        )
