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

from intarsia.proto import channel
from intarsia.proto.channel import (
    HANDSHAKE_TIMEOUT_S,
    MOST_STRANGERS,
    Address,
    Begun,
    BlockingListener,
    BlockingServer,
    ChannelClosed,
    Stream,
    StreamServer,
    connect_blocking,
    reading,
)
from intarsia.proto.codec import unpack


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
    answer = (lambda payload: Begun(lambda: payload[::-1])), (lambda: afterwards.append("sent"))
    thread = threading.Thread(target=server.serve_ahead, args=answer, daemon=True)
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


def test_closed_server_is_seen_by_a_client_that_waits():
    async def talk() -> None:
        server = StreamServer(echo)
        stream = await Stream.connect(await server.start("127.0.0.1"))
        stream.send_message("hello")
        await stream.receive_message()
        await server.close()
        await asyncio.wait_for(stream.receive(), 5)

    with pytest.raises(ChannelClosed):
        asyncio.run(talk())


def test_next_question_is_begun_before_an_answer_is_known_and_answers_keep_their_order():
    """Of three questions the second is begun while the first is computed, the third when one is answered."""
    server, events = BlockingServer("127.0.0.1"), []
    is_begun = threading.Event()  # the second one

    def begin(payload: bytes) -> Begun:
        name = payload.decode()
        events.append(f"begin {name}")
        if name == "b":
            is_begun.set()

        def read() -> bytes:
            events.append(f"read {name}")
            return payload

        return Begun(read, is_begun.is_set)

    threading.Thread(target=server.serve_ahead, args=(begin, lambda: None), daemon=True).start()

    async def ask() -> list[bytes]:
        stream = await Stream.connect(server.address)
        stream.send(b"a")
        await asyncio.sleep(0.01)
        stream.send(b"b")
        stream.send(b"c")
        answers = [await stream.receive() for _ in range(3)]
        await stream.close()
        return answers

    assert asyncio.run(ask()) == [b"a", b"b", b"c"]
    assert events == ["begin a", "begin b", "read a", "read b", "begin c", "read c"]


def test_empty_frame_ends_the_serving_after_all_is_answered():
    server = BlockingServer("127.0.0.1")
    begun = (lambda payload: Begun(lambda: payload, lambda: False)), (lambda: None)
    thread = threading.Thread(target=server.serve_ahead, args=begun, daemon=True)
    thread.start()

    async def ask() -> bytes:
        stream = await Stream.connect(server.address)
        stream.send(b"a")
        stream.send(b"")
        answer = await stream.receive()
        await stream.close()
        return answer

    assert asyncio.run(ask()) == b"a"
    thread.join(timeout=10)
    assert not thread.is_alive()


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
        pytest.skip(f"networks cannot be made here: {error}")
    try:
        ip(f"link add {name}a type veth peer name {name}b")
        ip(f"link set {name}b netns {name}")
        ip(f"addr add 10.77.0.1/24 dev {name}a")
        ip(f"link set {name}a up")
        ip(f"-n {name} addr add {FAR_HOST}/24 dev {name}b")
        ip(f"-n {name} link set {name}b up")
        yield name
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            ip(f"link del {name}a")  # at once, while that of a network takes its time
        ip(f"netns del {name}")


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
            steps.send(b"a step")  # on its way, so that neither side asks whether the connection lives
            await asyncio.wait_for(beside.wait_gone(), 30)
            assert not steps.is_gone

        asyncio.run(lose())


def connected(address: Address, number: int) -> list[socket.socket]:
    return [socket.create_connection(address[:2], timeout=5) for _ in range(number)]


def answers_at_once(server: BlockingServer) -> bool:
    """Whether one of ours is served within a second or so, whatever strangers are there."""
    threading.Thread(target=server.serve, args=(bytes,), daemon=True).start()
    begun_s = time.monotonic()

    async def ask() -> bytes:
        stream = await Stream.connect(server.address)
        stream.send(b"hello")
        answer = await asyncio.wait_for(stream.receive(), 30)
        await stream.close()
        return answer

    return asyncio.run(ask()) == b"hello" and time.monotonic() - begun_s < HANDSHAKE_TIMEOUT_S / 2


@pytest.mark.parametrize("said", [b"", b"\x20", b"\x20\0\0\0", b"\x20\0\0\0" + b"x" * 31, b"\x20\0\0\0" + b"x" * 40])
def test_strangers_who_hold_a_port_of_a_worker_delay_no_client(said: bytes):
    server = BlockingServer("127.0.0.1", 30.0)
    strangers = connected(server.address, 40)
    for stranger in strangers:
        stranger.sendall(said)
    assert answers_at_once(server)
    for stranger in strangers:
        stranger.close()


def test_more_strangers_than_are_heard_delay_no_client_either():
    server = BlockingServer("127.0.0.1", 30.0)
    strangers = connected(server.address, MOST_STRANGERS + 40)
    assert answers_at_once(server)
    for stranger in strangers:
        stranger.close()


def test_stranger_of_a_worker_is_shut_out_in_time_and_the_wait_for_ours_ends_in_time(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 0.2)
    listener = BlockingListener("127.0.0.1", timeout_s=1.0)
    (stranger,) = connected(listener.address, 1)
    with pytest.raises(TimeoutError, match="within 1 s"):
        listener.accept()
    assert stranger.recv(1) == b"", "it is closed"
    listener.close()


def test_connections_that_say_the_secret_together_are_all_accepted():
    listener = BlockingListener("127.0.0.1", timeout_s=10.0)
    ours = [connect_blocking(listener.address, 5.0, None) for _ in range(5)]
    slow = socket.create_connection(listener.address[:2])
    hello = b"\x20\0\0\0" + listener.address.secret
    for n in range(4):  # in pieces
        slow.sendall(hello[n * 9 : n * 9 + 9])
        time.sleep(0.01)
    accepted = [listener.accept() for _ in range(6)]
    assert all(connection.getblocking() for connection in accepted)
    for connection in (*ours, slow, *accepted):
        connection.close()
    listener.close()


def test_strangers_of_a_server_are_counted_and_have_little_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel, "MOST_STRANGERS", 10)
    monkeypatch.setattr(channel, "HANDSHAKE_TIMEOUT_S", 1.0)

    async def talk() -> None:
        server = StreamServer(echo)
        address = await server.start("127.0.0.1")
        strangers = [await asyncio.open_connection(*address[:2]) for _ in range(40)]
        while len(server._tasks) > 10:  # the oldest were closed
            await asyncio.sleep(0.01)
        stream = await Stream.connect(address)
        stream.send_message("hello")
        assert await asyncio.wait_for(stream.receive_message(), 10) == "hello"
        dripping, writer = await asyncio.open_connection(*address[:2])
        begun_s = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while not dripping.at_eof() and time.monotonic() - begun_s < 10:
                writer.write(b"\x20\0\0\0"[:1])
                await asyncio.sleep(0.3)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(dripping.read(1), 0.01)
        assert time.monotonic() - begun_s < 10, "a byte now and then does not keep a stranger in"
        await asyncio.gather(*(asyncio.wait_for(reader.read(), 10) for reader, _ in strangers))
        await stream.close()
        await server.close()

    asyncio.run(talk())


@pytest.mark.parametrize("frame", [b"\xc1", b"\x93\x01", b"\x81\x80\x01", b""])
def test_frame_that_is_no_message_closes_its_stream_with_one_line(frame: bytes, caplog: pytest.LogCaptureFixture):
    async def talk() -> None:
        server = StreamServer(echo)
        address = await server.start("127.0.0.1")
        bad, good = await Stream.connect(address), await Stream.connect(address)
        bad.send(frame)
        with pytest.raises(ChannelClosed):
            await asyncio.wait_for(bad.receive(), 10)
        good.send_message("hello")
        assert await good.receive_message() == "hello"
        await good.close()
        await server.close()

    asyncio.run(talk())
    assert len(caplog.records) == 1 and not caplog.records[0].exc_info


@pytest.mark.parametrize("frame", [b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1"])
def test_worker_closes_a_stream_that_says_what_ours_would_not(frame: bytes, caplog: pytest.LogCaptureFixture):
    server = BlockingServer("127.0.0.1", 10.0)

    def answer(payload: bytes) -> bytes:
        with reading("a step"):
            return bytes(unpack(payload))

    thread = threading.Thread(target=server.serve, args=(answer,), daemon=True)
    thread.start()
    with connect_blocking(server.address, 5.0, None) as connection:
        connection.sendall(frame)
        connection.settimeout(10)
        assert connection.recv(1) == b"", "it is closed"
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert len(caplog.records) == 1 and not caplog.records[0].exc_info


def test_stream_is_closed_though_the_other_side_reads_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(channel, "CLOSED_WITHIN_S", 0.2)

    async def talk() -> float:
        async def flood(stream: Stream) -> None:
            stream.send(bytes(50_000_000))
            await stream.receive()

        server = StreamServer(flood)
        address = await server.start("127.0.0.1")
        with socket.create_connection(address[:2]) as deaf:
            deaf.sendall(b"\x20\0\0\0" + address.secret)
            while not server._tasks:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            begun_s = time.monotonic()
            await server.close()
            return time.monotonic() - begun_s

    assert asyncio.run(talk()) < 10
