"""Worker processes that start in a moment: forked from one that has imported all they need.

Importing torch and transformers takes ten seconds, a fork of a process that has done it takes milliseconds. So the
process that computes is not the actor's own:

    actor (Ray's) ──── asks for a worker ────►  fork server, one per node: imports, then forks; computes nothing
        │                                           │
        └──── calls, over a pipe ────► worker ◄─────┘

A worker that dies is replaced at once, and the ranks of a node, or another engine on it, import nothing again. The
server is started by the first process that needs it. It ends when it was not needed for a while, or, where its user
started a Ray of their own, with the last of them. Such a user starts it before Ray, so that both start side by side.
When an actor dies, its worker ends by itself; if the worker is stopped, the server kills it. When the server dies,
workers live on.

What travels over the pipe stays between an actor and its worker: settings and facts, pickled as Ray pickles them.
"""

import contextlib
import importlib
import json
import logging
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ...environment import (
    OWNER,
    PACKAGE_ROOT,
    freeze_startup_objects,
    is_running,
    log_as_asked,
    name_of_process,
    prepare_process,
    start_of_process,
)
from ...errors import EngineUnavailable, IntarsiaError

logger = logging.getLogger(__name__)

AHEAD = "INTARSIA_FORK_SERVER"
"""Environment variable in the processes of a Ray of our own: the name, without its first byte, of the server that was
started before it."""

LINGER_S = 30.0
"""After its last actor has gone, the server waits for another one for so long."""

LOOK_EVERY_S = 0.2
"""The server looks this often whether a process that may need it again is still there."""

START_TIMEOUT_S = 30.0
"""For a server to listen, which it does before it imports."""

MOST_TRIES = 3
"""Of reaching a server that may be about to go."""

MOST_REQUEST_BYTES = 128 * 1024
"""Environment variables, most of it."""

_PID = struct.Struct("<i")
_CREDENTIALS = struct.Struct("<3i")  # pid, uid, gid: see SO_PEERCRED in unix(7)
_SOURCES = ("environment.py", "errors.py", "kernels", "kvcache", "proto", "workers")


class ForkServer:
    """An actor's connection to the fork server of its node."""

    def __init__(self):
        ahead = os.environ.get(AHEAD)
        self._name = f"\0{ahead}" if ahead else _name()
        self._connection: socket.socket | None = self._connect()  # so that it begins to import

    def fork(self, rank: int, size: int, local_workers: int) -> "WorkerProcess":
        """A new worker process, in our environment, that writes where we do. Raises `EngineUnavailable`."""
        about = {"worker": (rank, size, local_workers), "environment": dict(os.environ), "folder": os.getcwd()}
        request = json.dumps(about).encode()
        for _ in range(MOST_TRIES):
            self._connection = self._connection or self._connect()
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    socket.send_fds(self._connection, [request], [theirs.fileno(), 1, 2])
                    answered = self._connection.recv(_PID.size)
                except OSError:
                    answered = b""
            if len(answered) == _PID.size:
                return WorkerProcess(Connection(ours.detach()), *_PID.unpack(answered))
            ours.close()
            self._connection.close()
            self._connection = None
        raise EngineUnavailable("workers cannot be forked: their server ends by itself; its log says why")

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + START_TIMEOUT_S
        is_started = False
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with contextlib.suppress(OSError):
                connection.connect(self._name)
                if _user_of(connection) == os.getuid():
                    return connection
            connection.close()
            if not is_started:
                _start(self._name)
                is_started = True
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f"the server that workers are forked from did not start in {START_TIMEOUT_S:g} s"
                )
            time.sleep(0.01)


class WorkerProcess:
    """A forked worker, called from its actor: one call at a time."""

    def __init__(self, connection: Connection, pid: int):
        self.pid = pid
        try:
            self.started = start_of_process(pid)
        except ProcessLookupError as error:
            raise EngineUnavailable(f"the worker process {pid} ended at once; its log says why") from error
        self._connection = connection

    def call(self, verb: str, *arguments: Any) -> Any:
        """Raises what the worker raised, or `EngineUnavailable` when it is gone."""
        try:
            self._connection.send((verb, arguments))
            result, error = self._connection.recv()
        except (EOFError, OSError) as gone:
            raise EngineUnavailable(f"the worker process {self.pid} is gone") from gone
        if error is not None:
            raise error
        return result

    @property
    def is_alive(self) -> bool:
        """Whether its pipe is open: between calls nothing comes over it but its end."""
        return not self._connection.poll(0)


_ahead: dict[int, str] = {}
"""By process: a fork of one that has a server has none."""


def start_ahead() -> str:
    """Have a server begin to import before there is an actor that asks for it, unless there is one: for a Ray of this
    process's own, with which it ends. Returns what those actors are to find in their environment as `AHEAD`."""
    name = _ahead.setdefault(os.getpid(), _name())  # which `sys.path` may have changed since
    if not _is_listening(name):
        environment = {**os.environ, OWNER: name_of_process(os.getpid())}
        # It may outlive this process, for another one of its owners: our output must come to its end all the same.
        arguments = (name, environment, subprocess.DEVNULL)
        threading.Thread(target=_try_to_start, args=arguments, name="fork server", daemon=True).start()
    return name.removeprefix("\0")


def _is_listening(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        return connection.connect_ex(name) == 0


def _name() -> str:
    """Of the server that has imported what we would, under the same conditions; in Linux's abstract namespace."""
    files = [path for source in _SOURCES for path in _python_files(PACKAGE_ROOT / source)]
    changed = max(path.stat().st_mtime_ns for path in files)
    conditions = [os.getuid(), os.nice(0), sorted(os.sched_getaffinity(0)), str(PACKAGE_ROOT), changed]
    text = json.dumps([sys.executable, sys.path, *conditions])
    return f"\0intarsia-{sha256(text.encode()).hexdigest()[:32]}"


def _python_files(source: Path) -> list[Path]:
    return [source] if source.is_file() else list(source.rglob("*.py"))


def _user_of(connection: socket.socket) -> int:
    """Whose process is at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1]


def _try_to_start(name: str, environment: Mapping[str, str], output: int) -> None:
    """A start that is interrupted, since this process ends, is no error. Any other one is tried again by an actor."""
    with contextlib.suppress(subprocess.CalledProcessError):
        _start(name, environment, output)


def _start(name: str, environment: Mapping[str, str] = os.environ, output: int | None = None) -> None:
    """output: of the server; None: ours."""
    subprocess.run(
        [sys.executable, "-c", f"from {__name__} import main; main({name!r})"],
        env={**environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,  # it is not only ours: nor is a Ctrl-C in our terminal
        check=True,
    )


def main(name: str) -> None:
    """The server's whole life, in a process that is no child of the actor: Ray ends an actor's children with it."""
    if os.fork():
        os._exit(0)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(name)
    except OSError:
        return  # another one was faster
    listener.listen()
    prepare_process()
    log_as_asked()
    owner = os.environ.get(OWNER)
    with _ending_with(owner):  # importing takes a while, in which its first user may go
        importlib.import_module("..worker", __package__)  # and torch, transformers, our kernels
    freeze_startup_objects()  # the collector writes to what it looks at; pages that are only read stay shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers that die are not waited for
    _Server(listener, owner).run()


@contextlib.contextmanager
def _ending_with(owner: str | None) -> Iterator[None]:
    """End this process when `owner` does, until the context ends: its thread must be gone before a fork."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(LOOK_EVERY_S):
            if owner is not None and not is_running(owner):
                os._exit(0)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        is_over.set()
        watching.join()


class _Server:
    """Forks workers for connected actors. It has one thread, since only that thread lives on in a fork."""

    def __init__(self, listener: socket.socket, owner: str | None):
        """owner: the process that started it, if it has a Ray of its own"""
        self._listener = listener
        self._owners = {owner}  # None: one whose end cannot be seen
        self._workers: dict[socket.socket, list[tuple[int, int]]] = {}  # of each actor: pid, and when it began

    def run(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._listener, selectors.EVENT_READ)
            while self._is_needed(ready):
                for key, _ in ready.select(0):
                    if key.fileobj is self._listener:
                        actor, _ = self._listener.accept()
                        if _user_of(actor) != os.getuid():
                            actor.close()
                            continue
                        self._workers[actor] = []
                        ready.register(actor, selectors.EVENT_READ)
                    elif not self._answer(key.fileobj):
                        ready.unregister(key.fileobj)
                        self._forget(key.fileobj)

    def _is_needed(self, ready: selectors.BaseSelector) -> bool:
        """Wait for something to do. False when there was nothing for a while, or no process is left that might ask."""
        if self._workers:
            return bool(ready.select(None))
        until_s = time.monotonic() + LINGER_S
        while not ready.select(LOOK_EVERY_S):
            may_come = None in self._owners or any(is_running(owner) for owner in self._owners if owner)
            if not may_come or time.monotonic() > until_s:
                return False
        return True

    def _answer(self, actor: Any) -> bool:
        """Fork a worker for an actor that asks. False if it has gone."""
        try:
            request, fds, _, _ = socket.recv_fds(actor, MOST_REQUEST_BYTES, 3)
        except OSError:
            return False
        if not request:
            return False
        about = json.loads(request)
        self._owners = {owner for owner in self._owners if owner is None or is_running(owner)}
        self._owners.add(about["environment"].get(OWNER))
        pid = os.fork()
        if pid == 0:
            for held in (self._listener, *self._workers):
                held.close()
            _work(about, *fds)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(ProcessLookupError):
            self._workers[actor].append((pid, start_of_process(pid)))
        with contextlib.suppress(OSError):  # its end is read next
            actor.send(_PID.pack(pid))
        return True

    def _forget(self, actor: Any) -> None:
        """An actor has gone: its workers have, too, if they can."""
        for pid, started in self._workers.pop(actor):
            with contextlib.suppress(ProcessLookupError):
                if start_of_process(pid) == started:
                    os.kill(pid, signal.SIGKILL)
        actor.close()


def _work(about: dict[str, Any], pipe: int, stdout: int, stderr: int) -> None:
    """A worker's whole life: calls of `Worker`'s methods, in the process's first thread."""
    # Be the process that the actor asked for, not the server.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.chdir(about["folder"])
    os.environ.clear()
    os.environ.update(about["environment"])
    threading.Thread(target=_end_with_actor, args=(pipe,), name="actor", daemon=True).start()
    rank, size, local_workers = about["worker"]

    from ..worker import Worker

    worker: Any = Worker(rank, size, local_workers)
    # Answer calls. An error is an answer, too.
    connection = Connection(pipe)
    with contextlib.suppress(EOFError, OSError):  # the actor is gone
        while True:
            verb, arguments = connection.recv()
            try:
                answer = getattr(worker, verb)(*arguments), None
            except IntarsiaError as error:
                answer = None, error
            except Exception:
                logger.exception("%s failed on rank %d", verb, rank)
                answer = None, RuntimeError(traceback.format_exc())
            connection.send(answer)
    os._exit(0)


def _end_with_actor(pipe: int) -> None:
    """Without the actor nothing would read what is being computed."""
    end = select.poll()
    end.register(pipe, select.POLLRDHUP)
    end.poll()
    os._exit(0)
