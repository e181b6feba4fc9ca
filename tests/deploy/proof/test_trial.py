"""What counts as a difference, and what a proof must have shown."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from intarsia.deploy.proof.engines import Answer
from intarsia.deploy.proof.oracle import NEAR, Oracle
from intarsia.deploy.proof.trial import _check_reach, against
from intarsia.errors import UnsupportedModel
from intarsia.kvcache.reach import Full, Sliding, State
from intarsia.kvcache.spec import LayerSpec, StateTensor

VOCABULARY = 8


class Steep(nn.Module):
    """Says the same to each token: logits that grow with a weight, `steepness` times as fast."""

    def __init__(self, steepness: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(VOCABULARY))
        self._steepness = steepness

    def forward(self, tokens: Tensor, **_: Any) -> Any:
        logits = torch.arange(VOCABULARY) + self._steepness * (self.weight - 1)
        return type("Output", (), {"logits": logits.expand(1, tokens.shape[1], VOCABULARY)})


def answer(oracle: Oracle, token: int, off: float) -> Answer:
    """To a prompt of one token."""
    made = Answer()
    made.tokens = [token]
    made.logprobs = [float(oracle.logprobs([0, token])[0, token]) + off]
    return made


def test_an_answer_that_is_near_is_right_and_one_that_is_off_is_not():
    oracle, best = Oracle(Steep(0.0)), VOCABULARY - 1
    assert against(oracle, [0], answer(oracle, best, NEAR / 2)) is None
    assert against(oracle, [0], answer(oracle, best, 2 * NEAR)) == (1, pytest.approx(2 * NEAR))
    assert against(oracle, [0], answer(oracle, best - 1, 0.0)) == (1, float("inf")), "another one is likelier"


def test_a_difference_is_no_defect_where_the_oracle_wavers_by_as_much():
    off = 50 * NEAR
    for steepness, is_right in ((0.0, False), (2e5, True)):
        oracle = Oracle(Steep(steepness))
        given = answer(oracle, VOCABULARY - 1, off)
        assert against(oracle, [0], given) is not None
        assert (against(oracle, [0], given, wavers=True) is None) == is_right


def test_a_layer_that_looks_back_further_than_texts_reach_is_refused():
    state = LayerSpec(2, State(), state=(StateTensor((4,), 4),))
    _check_reach([LayerSpec(0, Full(), 1, 4, 4, 4), LayerSpec(1, Sliding(12), 1, 4, 4, 4), state])
    with pytest.raises(UnsupportedModel, match="looks back 4096 tokens, which no text of the proof passes"):
        _check_reach([LayerSpec(0, Sliding(4096), 1, 4, 4, 4)])
