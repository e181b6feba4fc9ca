"""What a run comes to, under the names by which the field knows it."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...errors import InvalidSetting
from .client import Outcome
from .drive import Measured

PERCENTILES = 50, 90, 95, 99

TIMES = {"ttft": "Time to first token", "tpot": "Time per output token", "itl": "Inter-token latency",
         "e2el": "End-to-end latency"}  # fmt: skip
"""As other tools abbreviate them."""

LIMITS = ("ttft", "tpot", "e2el")
"""Of which goodput may ask."""


class Spread(NamedTuple):
    """Of many values, in milliseconds."""

    mean: float
    percentiles: Mapping[int, float]


def spread(values_s: Sequence[float]) -> Spread:
    ordered = sorted(1000 * value for value in values_s)
    if not ordered:
        return Spread(0.0, dict.fromkeys(PERCENTILES, 0.0))
    return Spread(sum(ordered) / len(ordered), {share: percentile(ordered, share) for share in PERCENTILES})


def percentile(ordered: Sequence[float], share: float) -> float:
    """Between the two values that are nearest, as numpy has it."""
    at = (len(ordered) - 1) * share / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def parse_limits(texts: Sequence[str]) -> dict[str, float]:
    """`ttft:500` is milliseconds by name. Raises `InvalidSetting`."""
    limits: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if name not in LIMITS or not limits[name] > 0:
            raise InvalidSetting(
                f"goodput wants NAME:MILLISECONDS, NAME one of {', '.join(LIMITS)}; got {text!r}", field="goodput"
            )
    return limits


def is_good(outcome: Outcome, limits_ms: Mapping[str, float]) -> bool:
    found = {"ttft": outcome.first_token_s, "tpot": outcome.per_token_s or 0.0, "e2el": outcome.total_s}
    return all(1000 * found[name] <= limit for name, limit in limits_ms.items())


def report(measured: Measured, limits_ms: Mapping[str, float], about: Mapping[str, Any]) -> dict[str, Any]:
    """One flat object. Times in ms, rates per second. about: what was asked, which comes first."""
    done = [outcome for outcome in measured.outcomes if outcome.error is None]
    took_s = max(1e-9, measured.ended_s - measured.began_s)
    prompt, output = sum(one.prompt_tokens for one in done), sum(one.output_tokens for one in done)
    cached = sum(one.cached_tokens for one in done)
    times = {
        "ttft": spread([one.first_token_s for one in done]),
        "tpot": spread([one.per_token_s for one in done if one.per_token_s is not None]),
        "itl": spread([gap for one in done for gap in one.gaps_s]),
        "e2el": spread([one.total_s for one in done]),
    }
    found: dict[str, Any] = {
        **about,
        "duration": took_s,
        "completed": len(done),
        "failed": len(measured.outcomes) - len(done),
        "errors": dict(Counter(one.error for one in measured.outcomes if one.error is not None).most_common(10)),
        "total_input_tokens": prompt,
        "total_cached_tokens": cached,
        "total_output_tokens": output,
        "request_throughput": len(done) / took_s,
        "output_throughput": output / took_s,
        "total_token_throughput": (prompt + output) / took_s,
    }
    if limits_ms:
        found["goodput_limits_ms"] = dict(limits_ms)
        found["request_goodput"] = sum(is_good(one, limits_ms) for one in done) / took_s
    for name, values in times.items():
        found[f"mean_{name}_ms"] = values.mean
        found |= {f"{'median' if share == 50 else f'p{share}'}_{name}_ms": values.percentiles[share]
                  for share in PERCENTILES}  # fmt: skip
    return found


def as_text(found: Mapping[str, Any]) -> str:
    """The same as a table for people."""
    share = found["total_cached_tokens"] / found["total_input_tokens"] if found["total_input_tokens"] else 0.0
    rows: list[tuple[str, str]] = [
        ("Requests that ended well", f"{found['completed']:,}"),
        ("Requests that failed", f"{found['failed']:,}"),
        ("Duration", f"{found['duration']:.2f} s"),
        ("Prompt tokens", f"{found['total_input_tokens']:,}, {share:.1%} of them cached"),
        ("Output tokens", f"{found['total_output_tokens']:,}"),
        ("Requests per second", f"{found['request_throughput']:.2f}"),
        ("Output tokens per second", f"{found['output_throughput']:.2f}"),
        ("All tokens per second", f"{found['total_token_throughput']:.2f}"),
    ]
    if "request_goodput" in found:
        limits = " ".join(f"{name}:{limit:g}" for name, limit in found["goodput_limits_ms"].items())
        rows.append((f"Good requests per second ({limits})", f"{found['request_goodput']:.2f}"))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    heads = ("mean", "median", *(f"p{share}" for share in PERCENTILES if share != 50))
    lines += ["", f"{'milliseconds':<26}" + "".join(f"{head:>10}" for head in heads)]
    for name, words in TIMES.items():
        values = [found[f"{head}_{name}_ms"] for head in heads]
        lines.append(f"{f'{words} ({name})':<26.26}" + "".join(f"{value:>10.2f}" for value in values))
    lines += [f"{count} x {error}" for error, count in found["errors"].items()]
    return "\n".join(lines)
