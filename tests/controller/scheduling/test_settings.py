import pytest

from intarsia.controller.scheduling.settings import SchedulerSettings
from intarsia.errors import InvalidSetting


def test_steps_too_small_for_every_request_to_decode_are_refused():
    with pytest.raises(InvalidSetting, match=r"max_num_batched_tokens \(3\) must be at least max_num_seqs \(4\)"):
        SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=3)
