import math

import pytest

from intarsia.errors import InvalidRequest
from intarsia.proto.codec import decode, pack
from intarsia.proto.request import SamplingParams


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
        ("logprobs", 21, r"logprobs must lie in \[-1, 20\], got 21"),
        ("stop_token_ids", 5, "stop_token_ids must be a list"),
        ("stop_token_ids", [1, -1], "stop_token_ids must lie in"),
        ("ignore_eos", 1, "ignore_eos must be true or false"),
        ("min_p", 1.5, r"min_p must lie in \[0, 1\], got 1.5"),
        ("presence_penalty", 2.5, r"presence_penalty must lie in \[-2, 2\], got 2.5"),
        ("frequency_penalty", -3, r"frequency_penalty must lie in \[-2, 2\], got -3"),
        ("repetition_penalty", 0.0, r"repetition_penalty must lie in \(0, inf\), got 0.0"),
        ("min_tokens", 17, "min_tokens is 17 and max_tokens 16"),
        ("logit_bias", 5, "logit_bias must map token ids to numbers, got 5"),
        ("logit_bias", {-1: 1.0}, r"logit_bias must lie in \[0, \d+\], got -1"),
        ("logit_bias", {1: 101.0}, r"logit_bias must lie in \[-100, 100\], got 101"),
        ("logit_bias", {n: 1.0 for n in range(1025)}, "logit_bias has 1025 tokens; the limit is 1024"),
        ("stop", 5, "stop must be a text or a list of texts, got 5"),
        ("stop", ["a", ""], "stop may have up to 16 texts of 1 to 256 characters; it has 2, .* the shortest of 0"),
        ("stop", ["x"] * 17, "it has 17"),
        ("include_stop_str_in_output", 1, "include_stop_str_in_output must be true or false"),
    ],
)
def test_impossible_value_names_its_field_and_the_range(field: str, value: object, message: str):
    with pytest.raises(InvalidRequest, match=message) as refusal:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert refusal.value.field == field


def test_params_survive_the_wire():
    params = SamplingParams(
        temperature=0.5, top_k=3, seed=7, stop_token_ids=(1, 2), logprobs=0, logit_bias={3: 1, 2: -1.5}, stop="end"
    )
    assert decode(pack(params), SamplingParams) == params
