import pytest

from intarsia.controller.scheduling.settings import SchedulerSettings
from intarsia.errors import InvalidSetting


def test_steps_too_small_for_every_request_to_decode_are_refused():
    with pytest.raises(InvalidSetting, match=r"max_num_batched_tokens \(3\) must be at least max_num_seqs \(4\)"):
        SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=3)


@pytest.mark.parametrize(
    ("device", "given", "seqs", "tokens"),
    [
        ("cpu", None, 64, 512),
        ("cuda:0", None, 64, 2048),
        ("cpu", None, 1000, 1000),
        ("cuda:0", None, 4096, 4096),
        ("cpu", 2048, 64, 2048),
        ("cuda:0", 256, 64, 256),
    ],
)
def test_a_step_holds_what_suits_the_device_unless_a_number_is_given(device: str, given: int | None, seqs: int, tokens):
    assert SchedulerSettings(max_num_seqs=seqs, max_num_batched_tokens=given).on(device).step_tokens == tokens
