"""Where a server listens, and what is said when it cannot."""

import socket

import pytest

from intarsia.deploy.settings.ports import check_ports, listening
from intarsia.errors import InvalidSetting


def test_free_ports_pass_and_stay_free():
    with listening("127.0.0.1", 0) as opened:
        port = opened.getsockname()[1]
    check_ports("127.0.0.1", {"port": port, "grpc_port": 0})
    listening("127.0.0.1", port).close()


@pytest.mark.parametrize("field", ["port", "grpc_port"])
def test_port_in_use_names_its_flag(field: str):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(InvalidSetting, match=r"in use.*0 for a free one") as caught:
            check_ports("127.0.0.1", {field: port})
    assert f"--{field.replace('_', '-')}" in str(caught.value)
    assert (caught.value.field, caught.value.details["asked"]) == (field, port)


def test_two_servers_on_any_free_port_are_fine_and_on_one_port_are_not():
    check_ports("127.0.0.1", {"port": 0, "grpc_port": 0})
    with pytest.raises(InvalidSetting, match="both 8123"):
        check_ports("127.0.0.1", {"port": 8123, "grpc_port": 8123})


@pytest.mark.parametrize("host", ["nowhere.invalid", "192.0.2.1"])
def test_host_that_is_no_address_of_this_machine_is_refused(host: str):
    with pytest.raises(InvalidSetting, match=host):
        check_ports(host, {"port": 0})
