"""A hub on the loopback interface that has one model: what `huggingface_hub` asks for to list and read it."""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MODEL = "org/original"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """fault: whether the request of that path fails."""

    folder: Path
    endpoint: str = ""
    fault: Callable[[str], bool] = lambda _: False
    requests: list[tuple[str, str]] = field(default_factory=list)


@contextmanager
def hub(folder: Path) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    found = Hub(folder, f"http://127.0.0.1:{server.server_port}")
    server.hub = found  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield found
    finally:
        server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        server: Any = self.server
        hub: Hub = server.hub
        path = self.path.partition("?")[0]
        hub.requests.append((path, self.headers.get("Range", "")))
        if hub.fault(path):
            self._answer(503, b"")
        elif path.startswith(f"/api/models/{MODEL}/tree/{COMMIT}"):
            self._answer(200, json.dumps([_entry(p) for p in sorted(hub.folder.iterdir())]).encode())
        elif re.fullmatch(rf"/api/models/{MODEL}(/revision/(main|{COMMIT}))?", path):
            self._answer(200, json.dumps({"id": MODEL, "sha": COMMIT}).encode())
        elif m := re.fullmatch(rf"/{MODEL}/resolve/{COMMIT}/([\w.-]+)", path):
            data = (hub.folder / m[1]).read_bytes()
            if span := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                self._answer(206, data[int(span[1]) : int(span[2]) + 1])
            else:
                self._answer(200, data)
        else:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _entry(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"type": "file", "path": path.name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
