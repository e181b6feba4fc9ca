"""`intarsia plan`: the report for people or programs, and the drawing."""

import json
from pathlib import Path

from ...errors import InvalidSetting
from ...kvcache.plan import PlanSettings
from ..settings.sizes import parse_lengths
from .model_layers import model_layers
from .plan import make_report, print_report
from .plan_svg import draw_plan


def run(
    model: str,
    settings: PlanSettings,
    tensor_parallel_size: int,
    dtype: str,
    context: str | None,
    weights_format: str | None = None,
    *,
    as_json: bool,
    svg: Path | None,
) -> None:
    """Print what a plan brings a model.

    context: lengths of requests to report, as "2048,8192"
    weights_format: as which the weights are counted; None: as they are
    """
    layers = model_layers(model, tensor_parallel_size, dtype, weights_format)
    report = make_report(layers, settings, parse_lengths(context), tensor_parallel_size)
    if svg is not None:
        _write(svg, draw_plan(report))
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
        return
    print_report(report)
    if svg is not None:
        print(f"drawn: {svg}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise InvalidSetting(f"{path} cannot be written: {error.strerror}", field="svg") from None
