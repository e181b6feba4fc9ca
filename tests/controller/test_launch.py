"""What is asked of the cluster before an engine starts in it."""

import pytest

from intarsia.controller.launch import INSECURE, check_cluster
from intarsia.errors import InvalidSetting


@pytest.mark.parametrize(
    ("addresses", "wants_token"),
    [(["127.0.0.1"], False), (["10.0.0.1", "10.0.0.1"], False), (["10.0.0.1", "10.0.0.2"], True)],
)
def test_one_machine_or_a_token_is_enough(addresses: list[str], wants_token: bool):
    check_cluster(addresses, wants_token)


def test_machines_that_anybody_could_run_code_on_are_refused_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InvalidSetting, match="spans 2 machines and asks for no token") as refusal:
        check_cluster(["10.0.0.1", "10.0.0.2"], False)
    assert refusal.value.field == "RAY_AUTH_MODE"
    monkeypatch.setenv(INSECURE, "1")
    check_cluster(["10.0.0.1", "10.0.0.2"], False)
