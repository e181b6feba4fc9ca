"""How much is logged: by this process to standard error, by an engine's own processes to Ray's logs."""

import logging
import os

from ...environment import LOG_LEVEL
from ..settings.table import LogLevel as LogLevel


def log_from(level: LogLevel) -> None:
    """Set the log level of this process, and of those that it starts from now on. Other libraries log from warnings on.
    gRPC does so from errors on: it tells of each handshake of a stranger that fails."""
    os.environ[LOG_LEVEL] = level
    if level is not LogLevel.DEBUG:
        os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # read when its library is loaded
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger(__name__.partition(".")[0]).setLevel(level.upper())
