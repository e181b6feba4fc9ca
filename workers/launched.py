"""A step on its way: what has been asked of the device, and what it will have drawn."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..proto.step import Logprobs, PromptLogprobs


class Rows(NamedTuple):
    """The requests of one step, those of one token first. Index arrays over slots; R rows."""

    slots: np.ndarray  # [R]
    places: np.ndarray  # [R] in the order of the step
    query_lens: np.ndarray  # [R] int32: tokens to compute
    computed: np.ndarray  # [R] int32: tokens computed before this step
    finishes: np.ndarray  # [R] bool: the last known token is computed, so a new one is sampled


class Drawn(NamedTuple):
    """What a step drew: see `StepResult`."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[tuple[int, Logprobs], ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    failures: tuple[tuple[int, str], ...] = ()


class Launched(NamedTuple):
    """A step that a device may still be at, while the next one is prepared."""

    finish: Callable[[], Drawn]  # waits for the device; the same each time. Steps are finished in their order
    has_ended: Callable[[], bool] = lambda: True  # so `finish` need not wait
