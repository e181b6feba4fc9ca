import math

import pytest

from intarsia.controller.request import SamplingParams
from intarsia.errors import InvalidRequest


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, r"temperature must lie in \[0, inf\), got -0.1"),
        ("temperature", math.nan, r"temperature must lie in \[0, inf\), got nan"),
        ("temperature", math.inf, r"temperature must lie in \[0, inf\), got inf"),
        ("temperature", "hot", "temperature must be a number in .* got 'hot'"),
        ("temperature", True, "temperature must be a number"),
        ("top_p", 0.0, r"top_p must lie in \(0, 1\], got 0.0"),
        ("top_p", 1.5, r"top_p must lie in \(0, 1\], got 1.5"),
        ("top_p", math.nan, "top_p must lie in .* got nan"),
        ("top_k", -2, r"top_k must lie in \[-1, \d+\], got -2"),
        ("top_k", 1.5, "top_k must be a whole number, got 1.5"),
        ("max_tokens", 0, r"max_tokens must lie in \[1, \d+\], got 0"),
        ("max_tokens", -5, "max_tokens must lie in .* got -5"),
        ("seed", -1, "seed must lie in .* got -1"),
        ("seed", 2**63, "seed must lie in"),
        ("logprobs", 21, r"logprobs must lie in \[0, 20\], got 21"),
        ("stop_token_ids", 5, "stop_token_ids must be a list"),
        ("stop_token_ids", [1, -1], "stop_token_ids must lie in"),
        ("ignore_eos", 1, "ignore_eos must be true or false"),
    ],
)
def test_impossible_value_names_its_field_and_the_range(field: str, value: object, message: str):
    with pytest.raises(InvalidRequest, match=message) as refusal:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert refusal.value.field == field


def test_params_survive_the_wire():
    params = SamplingParams(temperature=0.5, top_k=3, seed=7, stop_token_ids=(1, 2), logprobs=0)
    assert SamplingParams(**params.to_wire()) == params
