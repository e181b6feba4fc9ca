"""Attacks with a key: answers that are not read, watchers who do not watch, bodies that do not end."""

import contextlib
import json
import random
import selectors
import socket
import threading
import time
from typing import Any

import grpc

from intarsia.proto import inference_pb2 as pb

from .attack_heads import in_threads
from .attack_tools import Scene, attack

UNREAD = 40
UNREAD_S = 45.0
RECEIVE_BYTES = 2048

MIB = 2**20

# -- answers ---------------------------------------------------------------------------------------------------------


def _ask_much(scene: Scene) -> list[socket.socket]:
    """Streams of 16 answers, each with the 20 most probable tokens beside each of its own."""
    fields = {"prompt": "A bug is", "n": 16, "logprobs": 20, "max_tokens": 400, "stream": True, "ignore_eos": True}
    body = json.dumps(fields).encode()
    connections = [scene.connect(receive_bytes=RECEIVE_BYTES) for _ in range(scene.sized(UNREAD))]
    scene.go()
    for each in connections:
        each.sendall(scene.head("/v1/completions", len(body)) + body)
    return connections


def _close(scene: Scene, connections: list[socket.socket]) -> None:
    scene.outcome.got["streams"] += len(connections)
    for each in connections:
        each.close()


def read_streams(scene: Scene) -> None:
    """The same streams as of `unread_streams`, read as they come."""
    connections = _ask_much(scene)
    with selectors.DefaultSelector() as ready:
        for each in connections:
            each.setblocking(False)
            ready.register(each, selectors.EVENT_READ)
        while scene.is_on() and ready.get_map():
            for key, _ in ready.select(0.2):
                with contextlib.suppress(BlockingIOError):
                    if not key.fileobj.recv(262_144):  # type: ignore[union-attr]
                        ready.unregister(key.fileobj)
    time.sleep(max(0.0, scene.until_s - time.monotonic()))
    _close(scene, connections)


@attack(control=read_streams, least_s=UNREAD_S)
def unread_streams(scene: Scene) -> None:
    """5. 40 streams of 16 answers with 20 log-probabilities each, never read; compared with 40 that are."""
    connections = _ask_much(scene)
    while scene.is_on():
        time.sleep(0.2)
    _close(scene, connections)


def _grpc_streams(scene: Scene, *, read: bool) -> None:
    sampling = pb.SamplingParams(n=16, logprobs=20, max_tokens=400, ignore_eos=True)
    payload = pb.GenerateRequest(text="A bug is", sampling=sampling).SerializeToString()
    channel = _channel(scene)
    ask: Any = channel.unary_stream("/intarsia.v1.Inference/Generate")
    scene.go()
    calls = [ask(payload, metadata=_metadata(scene)) for _ in range(scene.sized(UNREAD))]

    def take(number: int) -> None:
        with contextlib.suppress(grpc.RpcError):
            for _ in calls[number]:
                pass

    if read:
        for number in range(len(calls)):
            threading.Thread(target=take, args=(number,), daemon=True).start()
    while scene.is_on():
        time.sleep(0.2)
    scene.outcome.got["streams"] += len(calls)
    scene.outcome.got["ended"] += sum(not call.is_active() for call in calls)
    for call in calls:
        call.cancel()
    channel.close()


def read_grpc(scene: Scene) -> None:
    """The same streams as of `unread_grpc`, read as they come."""
    _grpc_streams(scene, read=True)


@attack(control=read_grpc, least_s=UNREAD_S)
def unread_grpc(scene: Scene) -> None:
    """5. The same over gRPC."""
    _grpc_streams(scene, read=False)


# -- watchers --------------------------------------------------------------------------------------------------------

WATCHERS = 1000
WATCHERS_OF_A_CHANNEL = 50


def _channel(scene: Scene) -> grpc.Channel:
    return grpc.insecure_channel(scene.target.grpc, [("grpc.use_local_subchannel_pool", 1)])


def _metadata(scene: Scene) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {scene.key}")]


def _new_prompts(scene: Scene) -> None:
    """Four requests at a time of prompts that are new: their blocks are what watchers are told."""
    rng = random.Random(7)

    def ask(number: int) -> None:
        while scene.is_on():
            prompt = [rng.randrange(32, 127) for _ in range(500)]
            body = json.dumps({"prompt": prompt, "max_tokens": 50, "ignore_eos": True}).encode()
            scene.note(scene.post("/v1/completions", body)[0])

    in_threads(ask, 4)


def prompts_alone(scene: Scene) -> None:
    """The requests of `watchers`, without them."""
    scene.go()
    _new_prompts(scene)


@attack(control=prompts_alone, least_s=20.0)
def watchers(scene: Scene) -> None:
    """7. 1,000 watchers of the cache who do not read; compared with the same requests without them."""
    count = scene.sized(WATCHERS)
    channels = [_channel(scene) for _ in range(count // WATCHERS_OF_A_CHANNEL + 1)]
    scene.go()
    calls: list[Any] = []
    for number in range(count):
        channel: Any = channels[number % len(channels)]
        watch = channel.unary_stream("/intarsia.v1.Inference/WatchCacheEvents")
        calls.append(watch(b"", metadata=_metadata(scene)))
        if number % 100 == 99:
            time.sleep(0.1)
    _new_prompts(scene)
    ended = [call.code().name for call in calls if not call.is_active()]
    scene.outcome.got["watching to the end"] += count - len(ended)
    for code in ended:
        scene.note(f"watcher {code}")
    for call in calls:
        call.cancel()
    for each in channels:
        each.close()


# -- bodies ----------------------------------------------------------------------------------------------------------

HALF_BODIES = 60
BODY_BYTES = 32 * MIB

SEND_S = 1.0
"""For what a server does not take."""


def _half_bodies(scene: Scene, send_bytes: int, length: int, pause_s: float) -> None:
    """Connections that have sent so much of a body, and then wait, or go on with a byte now and then."""
    begun = b'{"prompt":"' + b"a" * (send_bytes - 11)
    head = scene.head("/v1/completions", length)
    held: list[socket.socket] = []
    scene.go()
    try:
        for _ in range(scene.sized(HALF_BODIES)):
            if not scene.is_on():
                break
            each = scene.connect()
            each.settimeout(SEND_S)
            held.append(each)
            with contextlib.suppress(OSError):
                each.sendall(head + begun)
        while scene.is_on():
            time.sleep(pause_s)
            for each in held:
                with contextlib.suppress(OSError):
                    each.send(b"a")
        for each in held:
            _note_end(scene, each)
    finally:
        for each in held:
            each.close()


def _note_end(scene: Scene, held: socket.socket) -> None:
    held.setblocking(False)
    try:
        said = held.recv(4096)
    except BlockingIOError:
        scene.note("held to the end")
    except OSError as error:
        scene.note(type(error).__name__)
    else:
        scene.note(said[9:12].decode("latin-1") or "closed", said.decode(errors="replace"))


@attack(least_s=16.0, most_peak_bytes=256 * MIB)
def half_bodies(scene: Scene) -> None:
    """8. 60 bodies of 32 MiB of which 31 have come, held; the server may keep 256 MiB of them."""
    _half_bodies(scene, 31 * MIB, BODY_BYTES, 1.0)


@attack(least_s=20.0)
def slow_bodies(scene: Scene) -> None:
    """8. 60 bodies that come by a byte each second: none may still be open at the end."""
    _half_bodies(scene, 100, 1000, 1.0)
    if open_ones := scene.outcome.got["held to the end"]:
        scene.problem(f"{open_ones} bodies of a byte each second were still being read after {scene.seconds:g} s")
