"""A Hugging Face Hub on loopback: the parts of its protocol that a download uses, with faults on demand."""

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """A model on the Hub."""

    commits: dict[str, Mapping[str, bytes]]  # commit -> its files
    refs: dict[str, str]  # branch or tag -> commit
    token: str | None = None  # who has none, or another, is refused
    is_gated: bool = False
    gguf: Mapping[str, Any] | None = None  # what the Hub read out of a GGUF file


@dataclass
class Hub:
    """Serves repositories, and remembers what it was asked."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)  # "GET path"
    cut_after: dict[str, list[int]] = field(
        default_factory=dict
    )  # file -> bytes after which its next connections break
    ranges: list[str] = field(default_factory=list)
    has_ranges: bool = True  # else it sends each file from its front
    url: str = ""

    def add(self, name: str, files: Mapping[str, bytes], **more: Any) -> str:
        """Returns the commit, which main is."""
        commit = commit_of(files)
        self.repositories[name] = Repository({commit: files}, {"main": commit}, **more)
        return commit

    def got(self) -> set[str]:
        """The files that were fetched."""
        return {unquote(each.partition("/resolve/")[2].split("/", 1)[1]) for each in self.asked
                if each.startswith("GET") and "/resolve/" in each}  # fmt: skip


def commit_of(files: Mapping[str, bytes]) -> str:
    return hashlib.sha1(b"".join(name.encode() + files[name] for name in sorted(files))).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: ClassVar[Hub]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.hub.asked.append(f"{self.command} {path}")
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._info(found[1], unquote(found[2] or "main"))
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(found[1], unquote(found[2]), unquote(found[3]))
        else:
            self._refuse(404, "")

    def _info(self, name: str, revision: str) -> None:
        found = self._found(name, revision, is_info=True)
        if found is not None:
            commit, files = found
            siblings = [{"rfilename": each, "size": len(data)} for each, data in files.items()]
            said = {"id": name, "sha": commit, "siblings": siblings}
            if (gguf := self.hub.repositories[name].gguf) is not None:
                said["gguf"] = dict(gguf)
            self._send(json.dumps(said).encode(), {})

    def _file(self, name: str, revision: str, file: str) -> None:
        found = self._found(name, revision)
        if found is None:
            return
        commit, files = found
        if file not in files:
            self._refuse(404, "EntryNotFound")
            return
        tag = hashlib.sha256(files[file]).hexdigest()
        cuts = self.hub.cut_after.get(file, []) if self.command == "GET" else []
        self._send(files[file], {"ETag": f'"{tag}"', "X-Repo-Commit": commit}, cuts.pop(0) if cuts else None)

    def _found(self, name: str, revision: str, *, is_info: bool = False) -> tuple[str, Mapping[str, bytes]] | None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._refuse(401, "RepoNotFound")
        has_leave = repository.token is None or self.headers.get("Authorization") == f"Bearer {repository.token}"
        if not has_leave and not (repository.is_gated and is_info):  # what is in a gated one may be read by all
            code = "GatedRepo" if repository.is_gated else "RepoNotFound"
            return self._refuse(403 if repository.is_gated and "Authorization" in self.headers else 401, code)
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return self._refuse(404, "RevisionNotFound")
        return commit, repository.commits[commit]

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, data: bytes, headers: Mapping[str, str], cut_after: int | None = None) -> None:
        """cut_after: bytes of the answer after which the connection breaks"""
        start, asked = 0, self.headers.get("Range")
        if asked is not None and self.command == "GET" and self.hub.has_ranges:
            self.hub.ranges.append(asked)
            start = int(asked.removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(data[start:] if cut_after is None else data[start : start + cut_after])
        if cut_after is not None:
            self.close_connection = True


class HubServer:
    """with HubServer() as hub: ..."""

    def __enter__(self) -> Hub:
        hub = Hub()
        handler = type("HandlerOfHub", (Handler,), {"hub": hub})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        hub.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return hub

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
