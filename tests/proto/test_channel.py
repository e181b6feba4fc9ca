import asyncio
import socket
import threading

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
