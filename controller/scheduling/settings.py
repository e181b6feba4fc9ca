"""How the scheduler is set up."""

from dataclasses import dataclass, replace

from ...errors import InvalidSetting

STEP_TOKENS, STEP_TOKENS_ON_CPU = 2048, 512
"""In one step, unless said. A GPU is busy with many at once only. A CPU is busy with few: there a token takes less time
in a step of 512 than in a larger one, whose results between layers leave the caches; and of prompts that come together
the first ones are answered while the others wait."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """How large a step may be, and which requests are served first."""

    max_num_seqs: int = 64  # requests that run at once; slots on the workers
    max_num_batched_tokens: int | None = None  # tokens of one step, over all requests; None: what suits the device
    max_prefill_chunk_tokens: int | None = None  # prompt tokens of one request in one step; None: what the step holds
    prefill_share: float = 0.5  # of a step's time, at least, for prompts while others decode; 1: all they need
    token_interval_ms: float | None = None  # wanted between the tokens of an answer; None: as prefill_share has it
    ageing_s: float = 30.0  # seconds of waiting that make up for one level of priority
    longest_prefix_first: bool = False  # of the next few, the one with the longest cached prefix
    swap_bytes: int = 0  # of host memory per worker, for preempted requests that are dear to compute anew

    def __post_init__(self):
        for field in ("max_num_seqs", "max_num_batched_tokens", "max_prefill_chunk_tokens"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise InvalidSetting(f"{field} must be at least 1, got {value}", field=field)
        if self.step_tokens < self.max_num_seqs:
            raise InvalidSetting(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running request can decode one token in a step",
                field="max_num_batched_tokens",
            )
        if not 0 < self.prefill_share <= 1:
            raise InvalidSetting(f"prefill_share must lie in (0, 1], got {self.prefill_share}", field="prefill_share")
        if self.token_interval_ms is not None and not self.token_interval_ms > 0:
            raise InvalidSetting(
                f"token_interval_ms must be more than 0 milliseconds, got {self.token_interval_ms}",
                field="token_interval_ms",
            )
        if self.swap_bytes < 0:
            raise InvalidSetting(f"swap_space must be at least 0 bytes, got {self.swap_bytes}", field="swap_space")
        if not self.ageing_s > 0:
            raise InvalidSetting(
                f"priority_ageing_s must be more than 0 seconds, got {self.ageing_s}", field="priority_ageing_s"
            )

    @property
    def step_tokens(self) -> int:
        """Most tokens of one step: at least one for each running request."""
        return self.max_num_batched_tokens or max(STEP_TOKENS, self.max_num_seqs)

    def on(self, device: str) -> "SchedulerSettings":
        """With what is left to the device. device: as torch names it"""
        if self.max_num_batched_tokens is not None or device != "cpu":
            return self
        return replace(self, max_num_batched_tokens=max(STEP_TOKENS_ON_CPU, self.max_num_seqs))
