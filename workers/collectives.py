"""What the ranks do together: add up, gather, share. NCCL between GPUs, and for small sums a kernel that reads the
others' memory (`one_shot.py`); plain sockets between CPUs.

Why not gloo: tensors are small in decode, and what counts is the latency of one exchange. Between two processes of a
quiet 2-core machine an all-reduce of 512 bytes takes 24 µs over sockets and 365 µs in gloo; with another process busy
on the same cores 111 and 320 (`python bench/collectives.py`). A model of 12 layers has 25 of them in each step.
"""

import contextlib
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..proto.channel import (
    Address,
    BlockingListener,
    connect_blocking,
    fill,
    receive_blocking,
    send_blocking,
)
from .one_shot import OneShot

JOIN_TIMEOUT_S = 60.0

SMALL_BYTES = 32 * 1024
"""What a socket takes in without the other side reading: then all may send first and receive after."""


class Collectives(Protocol):
    """Every rank calls the same methods in the same order, with tensors of the same shape."""

    def meeting_point(self, host: str) -> Address:
        """Where the others find this rank."""
        ...

    def join(self, addresses: Sequence[Address]) -> None:
        """Meet all ranks, given the meeting points of all. Blocks until all have come."""
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace `tensor` by the sum over the ranks, the same bits on all of them."""
        ...

    def gather_to_first(self, tensor: Tensor) -> list[Tensor] | None:
        """Rank 0 gets the tensors of all, in rank order; the others None."""
        ...

    def share_from_first(self, tensor: Tensor) -> None:
        """Fill `tensor` with rank 0's values."""
        ...

    def breaker(self) -> Callable[[], None]:
        """Breaks off what the ranks that have met now do together, be it from another thread: it raises
        `ConnectionError` on all of them. They may meet again."""
        ...

    def close(self) -> None: ...


def make_collectives(rank: int, size: int, device: torch.device) -> Collectives:
    """The fastest between devices of this kind."""
    return NcclCollectives(rank, size) if device.type == "cuda" else SocketCollectives(rank, size)


class SocketCollectives:
    """A full mesh of TCP connections. Each rank sends its whole tensor to each other one: right for a few CPU ranks.

    A rank waits for another as long as that computes. Whether it is still there, the controller knows: see `breaker`.
    """

    def __init__(self, rank: int, size: int):
        self._rank = rank
        self._size = size
        self._listener: BlockingListener | None = None
        self._peers: dict[int, socket.socket] = {}
        self._senders = ThreadPoolExecutor(max_workers=max(1, size - 1), thread_name_prefix="send")
        self._inboxes: dict[int, Tensor] = {}

    def meeting_point(self, host: str) -> Address:
        self._listener = BlockingListener(host, JOIN_TIMEOUT_S, taken_within_s=None)
        return self._listener.address

    def join(self, addresses: Sequence[Address]) -> None:
        """Connect to the ranks before this one, accept those behind it. Raises `TimeoutError`."""
        for left in self._peers.values():
            left.close()
        self._peers = {}
        for peer, address in enumerate(addresses[: self._rank]):
            self._peers[peer] = connect_blocking(address, JOIN_TIMEOUT_S, taken_within_s=None)
            send_blocking(self._peers[peer], self._rank.to_bytes(4))
        assert self._listener is not None, "open a meeting point first"
        while len(self._peers) < self._size - 1:
            connection = self._listener.accept()
            self._peers[int.from_bytes(receive_blocking(connection))] = connection
        self._listener.close()

    def all_reduce(self, tensor: Tensor) -> None:
        mine = tensor if tensor.is_contiguous() else tensor.contiguous()
        theirs = self._exchange(mine)
        parts = [mine if rank == self._rank else theirs[rank] for rank in range(self._size)]
        total = parts[0] + parts[1]  # in rank order, so that all ranks round alike
        for part in parts[2:]:
            total += part
        tensor.copy_(total)

    def gather_to_first(self, tensor: Tensor) -> list[Tensor] | None:
        tensor = tensor.contiguous()
        if self._rank > 0:
            self._peers[0].sendall(_bytes(tensor))
            return None
        return [tensor] + [self._receive(peer, tensor) for peer in range(1, self._size)]

    def share_from_first(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        if self._rank > 0:
            fill(self._peers[0], _bytes(tensor))
        else:
            for peer in self._peers.values():
                peer.sendall(_bytes(tensor))

    def breaker(self) -> Callable[[], None]:
        connections = list(self._peers.values())

        def break_off() -> None:
            for connection in connections:
                with contextlib.suppress(OSError):  # it is closed
                    connection.shutdown(socket.SHUT_RDWR)

        return break_off

    def close(self) -> None:
        for open_socket in (*self._peers.values(), self._listener):
            if open_socket:
                open_socket.close()
        self._senders.shutdown(wait=False)

    def _exchange(self, mine: Tensor) -> dict[int, Tensor]:
        """Send `mine` to all, receive theirs. Threads send large tensors, since a rank that sends does not read."""
        outgoing = _bytes(mine)
        if len(outgoing) <= SMALL_BYTES:
            for peer in self._peers.values():
                peer.sendall(outgoing)
            return {peer: self._receive(peer, mine) for peer in self._peers}
        sending = [self._senders.submit(peer.sendall, outgoing) for peer in self._peers.values()]
        theirs = {peer: self._receive(peer, mine) for peer in self._peers}
        for done in sending:
            done.result()
        return theirs

    def _receive(self, peer: int, like: Tensor) -> Tensor:
        """A peer's tensor of the shape of `like`. Valid until the next receive from that peer."""
        count = like.numel() * like.element_size()
        inbox = self._inboxes.get(peer)
        if inbox is None or inbox.numel() < count:
            inbox = self._inboxes[peer] = torch.empty(count, dtype=torch.uint8)
        received = inbox[:count].view(like.dtype).view(like.shape)
        fill(self._peers[peer], _bytes(received))
        return received


class NcclCollectives:
    """torch.distributed over NCCL."""

    def __init__(self, rank: int, size: int):
        self._rank = rank
        self._size = size
        self._store: dist.TCPStore | None = None
        self._one_shot: OneShot | None = None  # for small sums, where it works

    def meeting_point(self, host: str) -> Address:
        if self._rank > 0:
            return Address(host, 0, b"")
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return Address(host, self._store.port, b"")

    def join(self, addresses: Sequence[Address]) -> None:
        self._one_shot = None
        if dist.is_initialized():
            dist.destroy_process_group()
        first = addresses[0]
        store = self._store or dist.TCPStore(first.host, first.port, is_master=False)
        dist.init_process_group("nccl", store=store, rank=self._rank, world_size=self._size)
        if len({address.host for address in addresses}) == 1:
            device = torch.device("cuda", torch.cuda.current_device())
            self._one_shot = OneShot.where_it_works(self._rank, self._size, device)

    def all_reduce(self, tensor: Tensor) -> None:
        if self._one_shot is not None and self._one_shot.takes(tensor) and tensor.is_contiguous():
            self._one_shot.add_up(tensor)
        else:
            dist.all_reduce(tensor)

    def gather_to_first(self, tensor: Tensor) -> list[Tensor] | None:
        parts = [torch.empty_like(tensor) for _ in range(self._size)] if self._rank == 0 else None
        dist.gather(tensor.contiguous(), parts)
        return parts

    def share_from_first(self, tensor: Tensor) -> None:
        dist.broadcast(tensor, src=0)

    def breaker(self) -> Callable[[], None]:
        """Nothing can be done from here: a rank whose peer is gone is replaced with it."""
        return lambda: None

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.view(-1).view(torch.uint8).numpy().data
