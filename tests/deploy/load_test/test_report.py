import random
from xml.etree import ElementTree

import numpy
import pytest

from intarsia.deploy.load_test.client import Outcome
from intarsia.deploy.load_test.drive import DriveSettings, Measured, beginnings
from intarsia.deploy.load_test.picture import draw
from intarsia.deploy.load_test.report import PERCENTILES, as_text, parse_limits, report, spread
from intarsia.deploy.load_test.shapes import Session, Turn
from intarsia.errors import InvalidSetting

OUTCOMES = (
    Outcome(10.0, (10.5, 10.6, 10.8), prompt_tokens=20, cached_tokens=5, output_tokens=3),
    Outcome(11.0, (12.0,), prompt_tokens=10, output_tokens=1),
    Outcome(11.5, error="503: full"),
)
MEASURED = Measured(10.0, 14.0, OUTCOMES)


def test_percentiles_are_numpys():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    values = [random.Random(seed + n).random() for n in range(137)]
    found = spread(values)
    assert found.mean == pytest.approx(1000 * numpy.mean(values))
    for share in PERCENTILES:
        assert found.percentiles[share] == pytest.approx(1000 * numpy.percentile(values, share))


def test_a_report_counts_what_ended_well():
    found = report(MEASURED, {"ttft": 600.0}, {"shape": "random"})
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, {"503: full": 1})
    assert (found["total_input_tokens"], found["total_cached_tokens"], found["total_output_tokens"]) == (30, 5, 4)
    assert found["request_throughput"] == 0.5 and found["output_throughput"] == 1.0
    assert found["request_goodput"] == 0.25
    assert found["mean_ttft_ms"] == pytest.approx(750) and found["median_e2el_ms"] == pytest.approx(900)
    assert found["mean_tpot_ms"] == pytest.approx(150) and found["mean_itl_ms"] == pytest.approx(150)


def test_a_table_says_the_same():
    said = as_text(report(MEASURED, {"ttft": 600.0}, {}))
    assert "Requests that failed" in said and "1 x 503: full" in said and "16.7% of them cached" in said


def test_a_run_without_an_answer_is_reported_too():
    found = report(Measured(0.0, 1.0, OUTCOMES[2:]), {}, {})
    assert found["completed"] == 0 and found["mean_ttft_ms"] == 0.0 and as_text(found)


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:-1", "itl:5", "ttft:nan"])
def test_a_limit_that_cannot_be_is_refused(text: str):
    with pytest.raises(InvalidSetting, match="NAME:MILLISECONDS"):
        parse_limits([text])


def test_a_drawing_is_xml_with_a_dot_for_each_answer():
    found = report(MEASURED, {}, {})
    root = ElementTree.fromstring(draw(MEASURED, found, "a <title> & more"))  # noqa: S314  our own
    assert len(root.findall(".//{*}circle")) == 4 and len(root.findall(".//{*}polyline")) == 1


def test_sessions_begin_at_the_rate_or_at_their_own_times():
    sessions = [Session(number, (Turn(1, 1),)) for number in range(4000)]
    assert set(beginnings(sessions, DriveSettings())) == {0.0}
    at_s = beginnings(sessions, DriveSettings(rate=50.0))
    assert at_s == sorted(at_s) and at_s[-1] == pytest.approx(80, rel=0.1)
    even = numpy.diff(beginnings(sessions, DriveSettings(rate=50.0, burstiness=100.0)))
    assert numpy.std(even) < 0.2 * numpy.std(numpy.diff(at_s))
    own = [Session(0, (Turn(1, 1),), begins_s=7.5)]
    assert beginnings(own, DriveSettings(rate=1.0)) == [7.5]
