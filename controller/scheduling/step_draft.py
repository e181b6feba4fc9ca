"""The next step, while it is being planned. The scheduler seals it.

A draft begins when the step before it is sealed, not when the next plan begins. So slots that are retired and tickets
that are forgotten between two plans are in it already. A plan that computes nothing leaves its draft to the next plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...kvcache.group_table import Copy, Growth
from ...proto.step import ALL, Admit, Advance, Sampling
from ..request import Request


@dataclass(slots=True, eq=False)
class StepDraft:
    """What the workers will be told with the next step. Made anew for each step.

    Invariant: a slot is admitted at most once, and each request in `decode` and `work` has a slot when it is sealed.
    """

    retired: list[int] = field(default_factory=list)  # slots
    forget: list[int] = field(default_factory=list)  # tickets of blocks in host memory
    swap_out: list[tuple[int, int, int]] = field(default_factory=list)  # (group, block, ticket)
    swap_in: list[tuple[int, int, int]] = field(default_factory=list)  # (group, ticket, block)
    copies: list[Copy] = field(default_factory=list)  # of blocks
    saves: list[tuple[int, int, int, int]] = field(default_factory=list)  # of states: (slot, group, tokens, block)
    admits: list[Admit] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)  # compute one token each, and need no block
    work: list[tuple[Request, Advance]] = field(default_factory=list)  # all others that compute something

    def admit(self, request: Request, blocks: Sequence[Sequence[int]], *, has_encoded: bool) -> None:
        """Tell the workers of a request that has taken a slot.

        blocks: its whole tables, [group][block of the sequence]
        has_encoded: the output of the encoder for its images is in the cache
        """
        assert request.slot is not None, f"request {request.id} is admitted without a slot"
        gallery = request.gallery
        self.admits.append(
            Admit(
                slot=request.slot,
                tokens=tuple(request.tokens),
                computed_tokens=request.computed_tokens,
                blocks=tuple(map(tuple, blocks)),
                sampling=_sampling(request),
                views=gallery.views if gallery is not None else (),
                images=gallery.inputs if gallery is not None and not has_encoded else (),
            )
        )

    def is_admitting(self, slot: int) -> bool:
        """Will the workers hear of the request in this slot with this step only?"""
        return any(admit.slot == slot for admit in self.admits)

    @property
    def has_prompts(self) -> bool:
        """Does a request compute more than the token it decodes?"""
        return any(not request.is_decoding for request, _ in self.work)

    def retire(self, slot: int) -> None:
        """The request in `slot` leaves it. If the workers were to hear of it with this step, they never do."""
        for admit in self.admits:
            if admit.slot == slot:
                self.admits.remove(admit)
                return
        self.retired.append(slot)

    def advance(self, request: Request, tokens: int, growth: Growth, *, is_new: bool) -> None:
        """Have the workers compute so many tokens of a request, with the blocks in `growth`.

        is_new: the request is admitted in this step, and its blocks come with its table
        """
        assert request.slot is not None, f"request {request.id} is to compute without a slot"
        self.copies += growth.copies
        self.saves += [(request.slot, save.group, save.length, save.block) for save in growth.saves]
        blocks = tuple(map(tuple, growth.blocks)) if growth and not is_new else ()
        self.work.append((request, Advance(request.slot, tokens, blocks)))

    def leave_out_preempted(self) -> None:
        """Requests that were to decode may have lost their slot since."""
        self.decode = [request for request in self.decode if request.slot is not None]


def _sampling(request: Request) -> Sampling:
    params = request.sampling
    wants_prompt = params.prompt_logprobs is not None and request.lacks_prompt_logprobs
    return Sampling(
        temperature=params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        seed=request.seed,
        logprobs=_count(params.logprobs),
        min_p=params.min_p,
        prompt_tokens=request.prompt_tokens,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.biases,
        ends=tuple(request.stop_token_ids) if params.min_tokens else (),
        min_tokens=params.min_tokens,
        prompt_logprobs=_count(params.prompt_logprobs) if wants_prompt else -1,
        form=params.form or (),
        bad_token_ids=params.bad_token_ids,
    )


def _count(logprobs: int | None) -> int:
    """As `Sampling` has it."""
    return -1 if logprobs is None else ALL if logprobs == -1 else logprobs
