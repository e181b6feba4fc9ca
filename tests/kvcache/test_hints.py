import pytest

from intarsia.errors import InvalidSetting
from intarsia.kvcache.hints import Retain


@pytest.mark.parametrize("ttl_s", [0, -1.0, float("nan")])
def test_a_time_that_is_none_is_refused(ttl_s: float):
    with pytest.raises(InvalidSetting, match="positive number of seconds"):
        Retain(ttl_s=ttl_s)
