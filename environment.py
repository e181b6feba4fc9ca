"""What a process of ours must set up before it imports torch. Imports nothing heavy itself."""

import ctypes
import gc
import logging
import os
import sys
from pathlib import Path

MIB = 2**20

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
"""Options of glibc's mallopt(3)."""

OTHER_THREADS = 8
"""Of a process, beside those that compute."""

PACKAGE_ROOT = Path(__file__).resolve().parent

OWNER = "INTARSIA_RAY_OWNER"
"""Environment variable in all processes of a Ray that a process of ours started for itself: that process's name."""


LOG_LEVEL = "INTARSIA_LOG_LEVEL"
"""Environment variable: what our processes log at the least, as `info`, which is usual."""


def log_as_asked() -> None:
    """In a process of an engine's own."""
    level = logging.getLevelNamesMapping().get(os.environ.get(LOG_LEVEL, "").upper(), logging.INFO)
    logging.basicConfig(level=level)


def prepare_process(local_workers: int = 1) -> None:
    """First thing in every actor: whose modules are found, and how many threads compute.

    Call it before torch is imported: OpenMP reads its waiting policy once.
    """
    forget_package_root()
    # A waiting OpenMP thread may spin for as long as lies between two operators, and must sleep then: with a neighbour
    # on the same cores, unlimited spinning was measured to turn 2 ms into 430 ms. 32 requests on two cores, controller
    # and front end beside: 1,700 tokens/s without, 1,980 with 1,000 turns, 2,260 with 5,000, 1,900 with 20,000. Beside
    # a busy process a step takes 18 ms without, 24 with 1,000, 48 with 5,000, 116 with 20,000.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    threads = threads_per_worker(local_workers)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    # oneDNN keeps 0.57 MB of code for each shape of a product, 1,024 of them by its own choice. Where nothing can be
    # compiled, `kernels/products/onednn.py` asks for some 60 for each size of layer; those that do not fit would be
    # compiled again and again, and leave holes in the heap that no tensor fits in.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "512")
    _keep_freed_memory(arenas=threads + OTHER_THREADS)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # an actor is given a folder: what is fetched, its owner has fetched


def _keep_freed_memory(arenas: int) -> None:
    """Let the allocator keep what was freed for the next tensor of that size instead of giving it back and having every
    page zeroed again: a norm of 2,048 tokens of 256 numbers takes 0.11 ms so, not 1.3.

    arenas: of which each thread takes one. Threads that compute must not wait for each other's: with one arena for two
    of them, each slept 80 times in a step of SmolLM2, which took 12.8 ms in 4 bits; with one for each it takes 6.9.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc
        return
    for option, value in (
        (_TRIM_THRESHOLD, 2**31 - 1),
        (_TOP_PAD, 64 * MIB),
        (_MMAP_THRESHOLD, 32 * MIB),
        (_ARENA_MAX, arenas),
    ):
        mallopt(option, value)


def give_back_large_blocks() -> None:
    """For a process that reads what others send: a body of 30 MB goes back to the system when it has been read. Left to
    itself, the allocator learns from the first one to keep them, in each thread's own heap."""
    try:
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, MIB)
    except (OSError, AttributeError):
        return  # not glibc


def give_back_freed_memory() -> None:
    """Holes between what lives, too: what large steps needed is not kept through an hour of small ones."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return  # not glibc


def freeze_startup_objects() -> None:
    """For a process that has built up what it serves with: the garbage collector need not look at all that again.

    A full collection stops everything else in its process: for 0.2 s over the 291,000 objects that transformers, Ray
    and gRPC leave in a front end, for 0.07 s over the controller's 84,000.
    """
    gc.collect()
    gc.freeze()


def forget_package_root() -> None:
    """Take our own folder off the module search path.

    Ray puts the driver's working directory there. When that is the repository root, `import proto` (as google-api-core
    does) and `import kernels` would find our folders instead of the libraries of those names.
    """
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != PACKAGE_ROOT]


def threads_per_worker(local_workers: int, spared_cores: int = 0) -> int:
    """An equal share of the cores this process may use, but for some that others are to have."""
    return max(1, (len(os.sched_getaffinity(0)) - spared_cores) // max(1, local_workers))


def start_of_process(pid: int) -> int:
    """When it began, in ticks since the machine did: two processes of one number differ in it. Raises
    `ProcessLookupError` if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError as error:
        raise ProcessLookupError(pid) from error
    return int(stat.rpartition(")")[2].split()[19])


def name_of_process(pid: int) -> str:
    """That no other process has, before or after. Raises `ProcessLookupError` if there is none."""
    return f"{pid}.{start_of_process(pid)}"


def is_running(name: str) -> bool:
    """Whether the process of this name is there, and no corpse that its parent has not looked at."""
    try:
        stat = Path(f"/proc/{name.partition('.')[0]}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return stat[19] == name.partition(".")[2] and stat[0] not in "ZX"


def resident_bytes(pid: int | str = "self") -> int:
    """What a process holds of the host's memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
