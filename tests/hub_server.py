"""A hub on this machine: just as much of its interface as loading a dataset needs, with a log of what was asked for.

A process reaches it through `HF_ENDPOINT`. Files lie in memory. A commit is the hash of all files, so that any change
makes another one; earlier commits stay, as on the hub.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

NO_SUCH_REPO, NO_SUCH_REVISION, NO_SUCH_ENTRY = "RepoNotFound", "RevisionNotFound", "EntryNotFound"


class HubServer:
    """Serves datasets until `stop`; a context manager."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, bytes]]] = {}
        """Files of each commit of each dataset."""
        self.heads: dict[str, str] = {}
        """The commit of each dataset's main branch."""
        self.requests: list[str] = []
        """`METHOD path`, in the order of arrival."""
        self.data_bytes = 0
        """Bytes of data files that were sent."""
        self.breaks_after_bytes: int | None = None
        """Once so many bytes of data files were sent, the line breaks off and stays dead."""
        self._lock = threading.Lock()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def publish(self, dataset: str, files: dict[str, bytes]) -> str:
        """Makes a commit the head of a dataset; returns its hash."""
        digest = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits.setdefault(dataset, {})[digest] = dict(files)
        self.heads[dataset] = digest
        return digest

    def files_sent(self) -> set[str]:
        """Returns the names of the data files of which something was sent."""
        found = (re.fullmatch(r"GET /datasets/[^/]+/[^/]+/resolve/[^/]+/(data/.*)", line) for line in self.requests)
        return {match[1] for match in found if match}

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> HubServer:
        return self

    def __exit__(self, *error: object) -> None:
        if self._thread.is_alive():
            self.stop()

    def take_budget(self, wanted: int) -> int:
        """Returns how many bytes of a data file may still be sent, and counts them."""
        with self._lock:
            left = wanted if self.breaks_after_bytes is None else max(0, self.breaks_after_bytes - self.data_bytes)
            self.data_bytes += min(wanted, left)
            return min(wanted, left)

    @property
    def is_broken(self) -> bool:
        return self.breaks_after_bytes is not None and self.data_bytes >= self.breaks_after_bytes


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: HubServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub


class _Handler(BaseHTTPRequestHandler):
    """Answers for the hub that is the server's `hub`."""

    protocol_version = "HTTP/1.1"

    @property
    def _hub(self) -> HubServer:
        assert isinstance(self.server, _Server)
        return self.server.hub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        return

    def _answer(self) -> None:
        hub, path = self._hub, unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if hub.is_broken:
            self.close_connection = True
            return
        api = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?", path)
        file = re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        if match is None or match[1] not in hub.commits:
            return self._fail(NO_SUCH_REPO)
        revision = (match[3] if api else match[2]) or "main"
        commit = hub.heads[match[1]] if revision == "main" else revision
        files = hub.commits[match[1]].get(commit)
        if files is None:
            return self._fail(NO_SUCH_REVISION)
        if file:
            return self._file(files, file[3], commit)
        if match[2] in (None, "revision"):
            siblings = [{"rfilename": name} for name in files]
            return self._json({"id": match[1], "sha": commit, "siblings": siblings, "private": False, "tags": []})
        names = list(files) + sorted({name.rpartition("/")[0] for name in files if "/" in name})
        if match[2] == "paths-info":
            wanted = self._wanted(body)
            return self._json([_entry(name, files) for name in names if name in wanted])
        self._tree(files, names, below=(match[4] or "").strip("/"))

    def _tree(self, files: dict[str, bytes], names: list[str], *, below: str) -> None:
        is_recursive = "recursive=true" in self.path.lower()
        if below and not any(name.startswith(below + "/") for name in names):
            return self._fail(NO_SUCH_ENTRY)
        inside = [name for name in names if not below or name.startswith(below + "/")]
        depth = below.count("/") + 1 if below else 0
        self._json([_entry(name, files) for name in inside if is_recursive or name.count("/") == depth])

    def _wanted(self, body: bytes) -> list[str]:
        if "json" in (self.headers.get("Content-Type") or ""):
            return json.loads(body)["paths"]
        return [unquote(value.replace("+", " ")) for value in re.findall(r"paths=([^&]*)", body.decode())]

    def _file(self, files: dict[str, bytes], name: str, commit: str) -> None:
        if name not in files:
            return self._fail(NO_SUCH_ENTRY, commit=commit)
        data, status, headers = files[name], 200, {}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if asked:
            start, end = int(asked[1]), min(int(asked[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            data, status = data[start : end + 1], 206
        headers |= {"X-Repo-Commit": commit, "ETag": f'"{_oid(files[name])}"', "Accept-Ranges": "bytes"}
        is_data = self.command == "GET" and name.startswith("data/")
        sent = self._hub.take_budget(len(data)) if is_data else len(data)
        self._send(status, data, headers, sent=sent)

    def _fail(self, code: str, *, commit: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code} | ({"X-Repo-Commit": commit} if commit else {})
        self._send(404, b"{}", headers, sent=2)

    def _json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self._send(200, data, {"Content-Type": "application/json"}, sent=len(data))

    def _send(self, status: int, data: bytes, headers: dict[str, str], *, sent: int) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:sent])
        if sent < len(data):
            self.close_connection = True


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _entry(name: str, files: dict[str, bytes]) -> dict[str, Any]:
    if name not in files:
        return {"type": "directory", "oid": _oid(name.encode()), "size": 0, "path": name}
    return {"type": "file", "oid": _oid(files[name]), "size": len(files[name]), "path": name}
