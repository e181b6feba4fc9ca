"""What a device was asked to do, counted by kind and by place."""

from collections import Counter
from enum import StrEnum


class Kind(StrEnum):
    """What costs time, or makes the host wait."""

    SYNC = "sync"  # the host waits until all that was asked for is done
    UPLOAD_PINNED = "upload, pinned"  # goes on beside the host
    UPLOAD_PAGEABLE = "upload, pageable"  # the driver copies it aside first
    UPLOADED_BYTES = "bytes uploaded"
    DOWNLOAD = "download"
    TORCH_KERNEL = "torch kernel"  # an operator that computes counts as one, though some launch several
    LAUNCH = "launch"  # of a Triton kernel
    COLLECTIVE = "collective"
    RECORDED_TORCH_KERNEL = "recorded torch kernel"  # inside a graph that was replayed
    RECORDED_LAUNCH = "recorded launch"
    RECORDED_COLLECTIVE = "recorded collective"
    REPLAY = "replay"


RECORDED = {
    Kind.TORCH_KERNEL: Kind.RECORDED_TORCH_KERNEL,
    Kind.LAUNCH: Kind.RECORDED_LAUNCH,
    Kind.COLLECTIVE: Kind.RECORDED_COLLECTIVE,
}

UPLOADS = (Kind.UPLOAD_PINNED, Kind.UPLOAD_PAGEABLE)


class Costs:
    """Counts by kind and by place."""

    def __init__(self, counts: Counter[tuple[Kind, str]]):
        self._counts = counts

    def __add__(self, other: "Costs") -> "Costs":
        return Costs(self._counts + other._counts)

    def totals(self) -> dict[Kind, int]:
        totals: Counter[Kind] = Counter()
        for (kind, _), count in self._counts.items():
            totals[kind] += count
        return dict(totals)

    def places(self, *kinds: Kind) -> dict[str, int]:
        """How often at which place, the most frequent first."""
        found: Counter[str] = Counter()
        for (kind, place), count in self._counts.items():
            if kind in kinds:
                found[place] += count
        return dict(found.most_common())


class Ledger:
    """Counts since the latest `take`."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[Kind, str]] = Counter()

    def add(self, kind: Kind, place: str, count: int = 1) -> None:
        self._counts[kind, place] += count

    def take(self) -> Costs:
        taken, self._counts = self._counts, Counter()
        return Costs(taken)
