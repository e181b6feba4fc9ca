"""What a process of ours must set up before it imports torch. Imports nothing heavy itself."""

import os
import sys
from pathlib import Path

PACKAGE_ROOT = Path(__file__).resolve().parent.parent


def prepare_process(local_workers: int = 1) -> None:
    """First thing in every actor: whose modules are found, and how many threads compute.

    Call it before torch is imported: OpenMP reads its waiting policy once.
    """
    forget_package_root()
    # A waiting OpenMP thread may spin for a few microseconds, which is what lies between two operators, and must sleep
    # then: with a neighbour on the same cores, unlimited spinning was measured to turn 2 ms into 430 ms. A decode step
    # of 32 requests takes 17.4 ms without spinning, 12.6 with this much, 11.4 with twenty times as much; beside a busy
    # process on one of two cores 18, 24 and 116 ms.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ["OMP_NUM_THREADS"] = str(threads_per_worker(local_workers))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # checkpoints are local folders; nothing is ever fetched


def forget_package_root() -> None:
    """Take our own folder off the module search path.

    Ray puts the driver's working directory there. When that is the repository root, `import proto` (as google-api-core
    does) and `import kernels` would find our folders instead of the libraries of those names.
    """
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != PACKAGE_ROOT]


def threads_per_worker(local_workers: int) -> int:
    """An equal share of the cores this process may use."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, local_workers))
