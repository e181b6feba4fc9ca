"""What is logged of others' libraries."""

import subprocess
import sys
from pathlib import Path

import pytest
import trustme

SERVER = """
import socket, sys
from pathlib import Path
from intarsia.deploy.start.log_level import LogLevel, log_from
log_from(LogLevel(sys.argv[1]))
import grpc
from concurrent import futures
server = grpc.server(futures.ThreadPoolExecutor(1))
chain, key = (Path(each).read_bytes() for each in sys.argv[2:])
port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, chain)]))
server.start()
with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
    stranger.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
    stranger.recv(1)  # it ends the connection
server.stop(None).wait()
"""


@pytest.mark.parametrize("level", ["warning", "debug"])
def test_a_strangers_failed_handshake_is_no_line_of_grpcs_unless_all_is_asked_for(level: str, tmp_path: Path):
    issued = trustme.CA().issue_cert("127.0.0.1")
    chain, key = tmp_path / "one.pem", tmp_path / "one.key"
    issued.cert_chain_pems[0].write_to_path(str(chain))
    issued.private_key_pem.write_to_path(str(key))
    command = [sys.executable, "-c", SERVER, level, str(chain), str(key)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd="/", check=True)
    assert ("Handshake failed" in done.stderr) is (level == "debug")
