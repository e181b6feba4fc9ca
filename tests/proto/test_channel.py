import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from intarsia.proto.channel import Address, BlockingServer, ChannelClosed, Stream, StreamServer


async def echo(stream: Stream) -> None:
    while True:
        stream.send_message(await stream.receive_message())


def test_messages_come_back_in_order_and_unchanged():
    async def talk() -> list:
        server = StreamServer(echo)
        stream = await Stream.connect(await server.start("127.0.0.1"))
        messages = [("a", 1, None, b"\x00\xff", ((1, 2), {"k": 0.5})), (), "x" * 100_000]
        for message in messages:
            stream.send_message(message)
        answers = [await stream.receive_message() for _ in messages]
        await stream.close()
        await server.close()
        return answers

    assert asyncio.run(talk()) == [("a", 1, None, b"\x00\xff", ((1, 2), {"k": 0.5})), (), "x" * 100_000]


@pytest.mark.parametrize("secret", [b"", b"x" * 32, b"x" * 31, b"x" * 5000])
def test_stranger_without_the_secret_is_shut_out(secret: bytes):
    async def knock() -> None:
        server = StreamServer(echo)
        address = await server.start("127.0.0.1")
        stream = await Stream.connect(Address(address.host, address.port, secret))
        stream.send_message("let me in")
        try:
            await asyncio.wait_for(stream.receive(), 5)
        finally:
            await server.close()

    with pytest.raises(ChannelClosed):
        asyncio.run(knock())


def test_blocking_server_serves_the_one_who_knows_the_secret_after_strangers():
    server = BlockingServer("127.0.0.1")
    afterwards: list[str] = []
    answer = (lambda payload: payload[::-1]), (lambda: afterwards.append("sent"))
    thread = threading.Thread(target=server.serve, args=answer, daemon=True)
    thread.start()
    with socket.create_connection(server.address[:2]) as stranger:
        stranger.sendall(b"\xff\xff\xff\xff")  # announces four gigabytes

    async def ask() -> bytes:
        stream = await Stream.connect(server.address)
        stream.send(b"abc")
        answer = await stream.receive()
        await stream.close()
        return answer

    assert asyncio.run(ask()) == b"cba"
    thread.join(timeout=5)
    assert not thread.is_alive(), "the server ends when its stream closes"
    assert afterwards == ["sent"]


def test_announcement_of_a_huge_frame_closes_the_stream():
    async def talk() -> None:
        async def shout(stream: Stream) -> None:
            stream._writer.write(b"\xff\xff\xff\xff")
            await asyncio.sleep(5)

        server = StreamServer(shout)
        stream = await Stream.connect(await server.start("127.0.0.1"))
        try:
            await stream.receive()
        finally:
            await server.close()

    with pytest.raises(ChannelClosed, match="4294967295 bytes"):
        asyncio.run(talk())


def test_closed_server_is_seen_by_whoever_waits():
    async def talk() -> None:
        server = StreamServer(echo)
        stream = await Stream.connect(await server.start("127.0.0.1"))
        stream.send_message("hello")
        await stream.receive_message()
        await server.close()
        await asyncio.wait_for(stream.receive(), 5)

    with pytest.raises(ChannelClosed):
        asyncio.run(talk())


def test_what_is_sent_to_one_that_computes_for_long_arrives():
    server = BlockingServer("127.0.0.1")

    def compute(payload: bytes) -> bytes:
        time.sleep(len(payload) % 10)
        return str(len(payload)).encode()

    threading.Thread(target=server.serve, args=(compute,), daemon=True).start()

    async def ask() -> list[bytes]:
        stream = await Stream.connect(server.address, taken_within_s=None)
        for size in (4, 20_000_000):  # more than the kernel takes in for it
            stream.send(b"x" * size)
        answers = [await stream.receive() for _ in range(2)]
        await stream.close()
        return answers

    assert asyncio.run(ask()) == [b"4", b"20000000"]


FAR_HOST, FAR_SERVERS = (
    "10.77.0.2",
    """
import sys, threading, time
from intarsia.proto.channel import BlockingServer
steps, beside = servers = [BlockingServer(sys.argv[1]) for _ in range(2)]
print(*(part for each in servers for part in (each.address.port, each.address.secret.hex())), flush=True)
threading.Thread(target=beside.serve, args=(bytes,), daemon=True).start()
steps.serve(lambda payload: time.sleep(60) or payload)
""",
)


@pytest.fixture
def far() -> Iterator[str]:
    """A network of its own on the other end of a cable; its name."""
    name = f"far{os.getpid()}"

    def ip(command: str) -> None:
        subprocess.run(["ip", *command.split()], check=True, capture_output=True)

    try:
        ip(f"netns add {name}")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"networks can not be made here: {error}")
    try:
        ip(f"link add {name}a type veth peer name {name}b")
        ip(f"link set {name}b netns {name}")
        ip(f"addr add 10.77.0.1/24 dev {name}a")
        ip(f"link set {name}a up")
        ip(f"-n {name} addr add {FAR_HOST}/24 dev {name}b")
        ip(f"-n {name} link set {name}b up")
        yield name
    finally:
        ip(f"netns del {name}")  # and with it both ends of the cable


def test_machine_that_is_gone_without_a_word_is_heard_of_while_a_step_is_on_its_way(far: str):
    command = ["ip", "netns", "exec", far, sys.executable, "-c", FAR_SERVERS, FAR_HOST]
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(process.kill)
        assert process.stdout
        port, secret, port_beside, secret_beside = process.stdout.readline().split()

        async def lose() -> None:
            def at(port: str, secret: str) -> Any:
                return Address(FAR_HOST, int(port), bytes.fromhex(secret))

            steps = await Stream.connect(at(port, secret), taken_within_s=None)
            beside = await Stream.connect(at(port_beside, secret_beside), taken_within_s=3.0)
            beside.send(b"alive?")
            await beside.receive()
            subprocess.run(["ip", "-n", far, "link", "set", f"{far}b", "down"], check=True)
            steps.send(b"a step")  # on its way, so that nobody asks whether the connection lives
            await asyncio.wait_for(beside.wait_gone(), 30)
            assert not steps.is_gone

        asyncio.run(lose())
