"""`torch.cuda.CUDAGraph` and `torch.cuda.graph` of a pretended device."""

from typing import Any

from .device import current_device
from .ledger import RECORDED, Kind
from .places import place
from .tape import Tape


class Pool:
    """Memory that graphs share: what one of them made is gone when another is replayed."""

    def __init__(self) -> None:
        self.latest: Tape | None = None


class Graph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False):
        self._tape: Tape | None = None
        self._pool = Pool()

    def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "global") -> None:
        self._pool = pool or self._pool
        device = current_device()
        assert device.tape is None, "a graph is being recorded already"
        device.tape = Tape()

    def capture_end(self) -> None:
        device = current_device()
        assert device.tape is not None, "no graph is being recorded"
        self._tape, device.tape = device.tape, None
        self._tape.finish()

    def pool(self) -> Pool:
        return self._pool

    def reset(self) -> None:
        self._tape = None

    def replay(self) -> None:
        device, tape = current_device(), self._tape
        assert tape is not None, "a graph is recorded before it is replayed"
        device.ledger.add(Kind.REPLAY, place())
        if self._pool.latest is not None and self._pool.latest is not tape:
            self._pool.latest.spoil()
        self._pool.latest = tape
        for read, written, at in tape.uses:
            device.streams.use(read, written, at)
        for node in tape.nodes:
            device.ledger.add(RECORDED[node.kind], node.place)
            node.run()


class Recording:
    """`torch.cuda.graph`: a context in which a graph is recorded."""

    def __init__(self, cuda_graph: Graph, pool: Pool | None = None, stream: object = None, **settings: Any):
        self._graph = cuda_graph
        self._pool = pool

    def __enter__(self) -> None:
        current_device().wait(place())
        self._graph.capture_begin(self._pool)

    def __exit__(self, *_: object) -> None:
        self._graph.capture_end()
