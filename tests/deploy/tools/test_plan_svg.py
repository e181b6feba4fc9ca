import re
from xml.etree import ElementTree

import pytest

from intarsia.deploy.terminal.drawing import COLOURS, DARK
from intarsia.deploy.tools.model_layers import model_layers
from intarsia.deploy.tools.plan import make_report
from intarsia.deploy.tools.plan_svg import draw_plan
from intarsia.kvcache.plan import PlanSettings

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("gemma-3-27b", "packed"),
        ("ministral-8b", "layered"),
        ("gemma-3-27b", "partitioned"),
        ("llama-3.1-8b", "uniform"),
        ("bamba-9b", "packed"),
        ("deepseek-v4-flash", "packed"),
    ],
)
def test_drawing_is_valid_names_every_group_and_stays_inside(model: str, strategy: str):
    report = make_report(model_layers(model), PlanSettings(40 << 30, strategy=strategy))
    root = ElementTree.fromstring(draw_plan(report))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    for g in range(len(report.plan.groups)):
        assert any(text.startswith(f"Group {g}:") for text in texts)
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height


def test_drawing_names_all_layers_alike_and_has_a_dark_shade_for_each_colour():
    drawn = draw_plan(make_report(model_layers("gemma-3-27b"), PlanSettings(40 << 30)))
    root = ElementTree.fromstring(drawn)
    assert not [element.text for element in root.iter(f"{SVG}text") if re.match(r"L\d", element.text or "")]
    assert "prefers-color-scheme: dark" in drawn and set(COLOURS) <= set(DARK)
    fills = {element.get("fill") for element in root.iter() if element.get("fill")}
    assert fills <= set(DARK)
