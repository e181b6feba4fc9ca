"""The Ray that a process starts for itself where there is none to join, and what is asked of one that it joins.

Who can speak to a Ray cluster runs code on it. One of our own listens on this machine's loopback only, wants a
token that is drawn for it and written nowhere, and ends with all its processes, whatever state they are in.

`ray>=2.59` in pyproject.toml is the first that asks for a token unless told otherwise: `enable_token_auth_by_default`
in its `ray/_private/authentication/authentication_token_setup.py`, called by `ray.init`. 2.58 starts without one.
"""

import atexit
import contextlib
import logging
import os
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import ray
from ray._private import ray_constants
from ray._private.node import Node
from ray.exceptions import AuthenticationError

from ...environment import OWNER, name_of_process
from ...errors import EngineUnavailable
from ...workers.process.fork_server import AHEAD, start_ahead
from .before_ray import OBJECT_STORE_BYTES, check_start
from .processes import end_processes, processes_of_ray
from .ray_address import CHECK_ALIVE, check_address

logger = logging.getLogger(__name__)

NAMESPACE = "intarsia"
"""The namespace of all our named actors within a Ray cluster."""

POLITE_S = 0.3
"""Time for Ray to end by itself. It needs no more: our workers have been left by then."""

STUCK_S = 2.0
"""Time for Ray to notice that its processes are gone. It does not when the GCS went before."""

ASK_TIMEOUT_S = 5.0

LONGEST_REASON_CHARS = 300


class OwnRay:
    """A local cluster of this process alone."""

    def __init__(self, workers: int):
        """workers: to have room for. Raises `EngineUnavailable`; nothing is left then."""
        self._workers = workers
        self._is_over = threading.Event()
        self._has_begun = threading.Event()
        self._error: BaseException | None = None
        self._undo = contextlib.ExitStack()
        # Ray's processes die with the *thread* that started them (PR_SET_PDEATHSIG), so it has one of its own; there,
        # it leaves the process's signals alone, too.
        self._thread = threading.Thread(target=self._live, name="ray", daemon=True)
        self._thread.start()
        self._has_begun.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End it, and all its processes: within seconds, also when they do not answer."""
        self._is_over.set()
        self._thread.join(POLITE_S)
        end_processes(processes_of_ray())
        self._thread.join(STUCK_S)
        self._undo.close()
        if not self._thread.is_alive():
            _forget_token()  # whatever cluster is next has another; a Ray that still runs would stumble
        else:
            logger.warning("Ray does not notice that its processes are gone; it is left alone")
            atexit.unregister(ray.shutdown)

    def _live(self) -> None:
        try:
            self._undo.enter_context(_own_environment())
            self._start()
        except BaseException as error:  # noqa: BLE001  raised where the thread was started
            self._error = _unstarted(error)
            end_processes(processes_of_ray())
            ray.shutdown()
            self._undo.close()
            return
        finally:
            self._has_begun.set()
        self._is_over.wait()
        ray.shutdown()

    def _start(self) -> None:
        ray.init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=max(len(os.sched_getaffinity(0)), self._workers),  # they share cores rather than wait
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            **QUIET,
        )


def _unstarted(error: BaseException) -> BaseException:
    """`ray.init` raises whatever went wrong, an `Exception` with a sentence included."""
    if not isinstance(error, Exception):
        return error
    where = os.environ.get("RAY_TMPDIR", "/tmp") + "/ray"
    why = " ".join(str(error).split())[:LONGEST_REASON_CHARS] or type(error).__name__
    return EngineUnavailable(
        f"Ray could not be started on this machine: {why.rstrip('.')}. Try again when the machine has less to do, and "
        f"see that {where} can be written and has room; Ray's logs are there."
    )


QUIET = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
"""Ray's start-up remarks are not for our users."""


def asks_for_token(gcs_address: str) -> bool:
    """Whether a cluster refuses who shows none: it is asked as a stranger would."""
    with grpc.insecure_channel(gcs_address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        try:
            channel.unary_unary(CHECK_ALIVE)(b"", timeout=ASK_TIMEOUT_S)
        except grpc.RpcError as error:
            status: grpc.Call = error  # type: ignore[assignment]
            if status.code() is grpc.StatusCode.UNAUTHENTICATED:
                return True
            if status.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return _is_token_mode()  # it speaks TLS, say
    return False


def _is_token_mode() -> bool:
    """Does this process use Ray's tokens? Ray has no public way to ask."""
    try:
        from ray._private.authentication.authentication_utils import is_token_auth_enabled
    except ImportError:
        return os.environ.get("RAY_AUTH_MODE") == "token"
    return is_token_auth_enabled()


@contextlib.contextmanager
def _own_environment() -> Iterator[None]:
    """Set the environment for Ray's processes, and restore it afterwards, for the next cluster."""
    before = {name: os.environ.get(name) for name in _OURS}
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray would let our workers yield to every other process
    # Ray's own metrics have no reader where it has no dashboard; to send them wakes all its processes again and again.
    os.environ.setdefault("RAY_enable_metrics_collection", "0")
    os.environ[OWNER] = name_of_process(os.getpid())
    os.environ[AHEAD] = start_ahead()
    if os.environ.get("RAY_AUTH_MODE", "token").lower() == "token":
        os.environ.pop("RAY_AUTH_MODE", None)  # Ray sets it itself then, and reads it anew
        if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # Ray's own file would be open to all who reach it
    _forget_token()
    try:
        with _on_loopback(), _without_onlookers():
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"

_OURS = (
    "RAY_worker_niceness",
    "RAY_enable_metrics_collection",
    OWNER,
    AHEAD,
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    _CLUSTERS,
)


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Ray replaces a loopback address by the machine's, but for where it knows no clusters: on Windows and macOS. GCS,
    raylet and workers that know themselves by a loopback address listen there only."""
    os.environ[_CLUSTERS] = "0"
    before = ray_constants.ENABLE_RAY_CLUSTER, ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER
    ray_constants.ENABLE_RAY_CLUSTER = False
    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True  # it would take SIGTERM from us
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER, ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = before


_ONLOOKERS = "start_monitor", "start_api_server", "start_log_monitor"
"""Of Ray's `Node`: what scales a cluster of many machines, counts usage for Ray's makers, and copies logs to a driver
that wants none. A Ray of one machine works without; to start them took 1.6 s of CPU time."""


@contextlib.contextmanager
def _without_onlookers() -> Iterator[None]:
    """`ray.init` starts them always, and has no parameter for that."""
    before = {name: getattr(Node, name) for name in _ONLOOKERS if hasattr(Node, name)}
    for name in before:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)


def _forget_token() -> None:
    """Ray keeps the mode and the token that it has read first."""
    with contextlib.suppress(ImportError, AttributeError):
        from ray import _raylet

        raylet: Any = _raylet
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def ensure_ray(workers: int, *, is_insecure_fine: bool = False) -> OwnRay | None:
    """Use the Ray this process is connected to, else the one RAY_ADDRESS names, else start one, which is returned.

    Raises `InvalidSetting` where no token is asked for, `EngineUnavailable` where the one to join is not to be had."""
    if ray.is_initialized():
        return None
    logging.getLogger("ray").setLevel(logging.ERROR)
    if os.environ.get("RAY_ADDRESS"):
        check_address()
        try:
            ray.init(namespace=NAMESPACE, **QUIET)
        except (ConnectionError, AuthenticationError, RuntimeError, ValueError) as error:
            why = str(error).strip().splitlines()[0]
            raise EngineUnavailable(f"the Ray cluster that RAY_ADDRESS names cannot be joined: {why}") from error
        return None
    check_start(is_insecure_fine=is_insecure_fine)
    return OwnRay(workers)
