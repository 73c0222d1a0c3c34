"""A small server that speaks the Hugging Face Hub's protocol, on the loopback address."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Handler(BaseHTTPRequestHandler):
    """Repositories are folders, owner/name, in the server's root. "gated" ones are refused."""

    server: HubServer

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        path = urlsplit(self.path).path.strip("/").split("/")
        self.server.asked.append("/".join(path))
        if path[:2] == ["api", "models"]:
            return self._describe("/".join(path[2:4]), path[4:], with_body)
        repository, verb, revision = "/".join(path[:2]), *path[2:4]
        file = self.server.root / repository / "/".join(path[4:])
        if verb != "resolve" or self._refused(repository, revision):
            return None
        if not file.is_file():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
        data = file.read_bytes()
        tag = hashlib.sha1(data).hexdigest()
        return self._send(200, data, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT}, with_body)

    def _describe(self, repository: str, rest: list[str], with_body: bool) -> None:
        if self._refused(repository, rest[1] if len(rest) > 1 else "main"):
            return
        files = [file for file in (self.server.root / repository).rglob("*") if file.is_file()]
        names = [str(file.relative_to(self.server.root / repository)) for file in files]
        sizes = [file.stat().st_size for file in files]
        if rest[:1] == ["tree"]:
            found: object = [
                {"type": "file", "path": name, "size": size, "oid": "0" * 40}
                for name, size in zip(names, sizes, strict=True)
            ]
        else:
            siblings = [{"rfilename": name} for name in names]
            found = {"id": repository, "sha": COMMIT, "siblings": siblings}
        self._send(200, json.dumps(found).encode(), {"Content-Type": "application/json"}, with_body)

    def _refused(self, repository: str, revision: str) -> bool:
        if not (self.server.root / repository).is_dir():
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"}, True)
        elif "gated" in repository:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"}, True)
        elif revision not in ("main", COMMIT):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, True)
        else:
            return False
        return True

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing."""


class HubServer(ThreadingHTTPServer):
    """Serves the repositories below `root`. `asked` lists the paths of all requests."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root, self.asked = root, list[str]()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def hub(root: Path) -> Iterator[HubServer]:
    """A running server."""
    with HubServer(root) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
