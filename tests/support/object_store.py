"""Object stores on the loopback interface (S3: moto's), behind a proxy that keeps books and fails on demand."""

import http.client
import logging
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import pytest

from trilobite.checkpoint.remote import store as remote

BUCKET = "s3://bucket"
HOP = {"connection", "transfer-encoding", "content-length", "server", "date"}
FORM = 2000
"""Google's uploads begin with as much that is not the object, at most half of it."""
SLEEP = 2.5
"""Longer than the client waits."""


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    range: str
    nbytes: int
    """Of the answer's body, or of the one that was sent."""


@dataclass
class ObjectStore:
    """fault: what to do to a request (method, path): "", 403, 500, slow, short, cut, or flip for bytes that are sent."""

    endpoint: str
    fault: Callable[[str, str], str] = lambda *_: ""
    requests: list[Request] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @cached_property
    def fs(self) -> Any:
        """The store as the tests see it, always as it is now."""
        import s3fs

        return s3fs.S3FileSystem(
            endpoint_url=self.endpoint,
            key="k",
            secret="s",
            use_listings_cache=False,
            skip_instance_cache=True,
        )

    @contextmanager
    def failing(self, fault: Callable[[str, str], str]) -> Iterator[None]:
        self.fault = fault
        try:
            yield
        finally:
            self.fault = lambda *_: ""

    def put(self, folder: Path, url: str) -> None:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.fs.put_file(str(path), f"{url}/{path.relative_to(folder)}")

    def get(self, url: str, folder: Path) -> Path:
        folder.mkdir()
        for name in self.fs.find(url):
            path = folder / name.removeprefix(f"{url.partition('://')[2]}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.fs.cat_file(name))
        return folder

    def names(self, url: str) -> list[str]:
        return sorted(name.removeprefix(f"{url.partition('://')[2]}/") for name in self.fs.find(url))

    def of(self, method: str, part: str = "") -> list[Request]:
        return [r for r in self.requests if r.method == method and part in r.path]


def point_at(store: ObjectStore, patch: pytest.MonkeyPatch) -> None:
    """Let s3:// mean that store, and lose patience with it soon."""
    import s3fs

    patch.setenv("AWS_ENDPOINT_URL", store.endpoint)
    patch.setenv("AWS_ACCESS_KEY_ID", "k")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    patch.setattr(remote, "PAUSE", 0.01)
    patience = {"connect_timeout": 2, "read_timeout": 1.5, "retries": {"total_max_attempts": 1}}
    patch.setattr(remote, "S3_PATIENCE", patience)
    patch.setattr(s3fs.S3FileSystem, "retries", 2)
    s3fs.S3FileSystem.clear_instance_cache()  # they keep the endpoint that they began with
    remote._filesystem.cache_clear()
    if not store.fs.exists(BUCKET):
        store.fs.mkdir(BUCKET)


def now_and_then(share: float, *kinds: str, seed: int = 0) -> Callable[[str, str], str]:
    """That share of all requests fails, in one of these ways."""
    chance, lock = random.Random(seed), threading.Lock()

    def fault(method: str, path: str) -> str:
        with lock:
            return chance.choice(kinds) if chance.random() < share else ""

    return fault


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    behind = server.get_host_and_port()
    reset = urllib.request.Request(f"http://{behind[0]}:{behind[1]}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset).close()  # all of moto's servers in a process hold the same objects
    try:
        with behind_proxy(ObjectStore, behind) as store:
            yield store
    finally:
        server.stop()


Store = TypeVar("Store", bound=ObjectStore)


@contextmanager
def behind_proxy(kind: type[Store], behind: tuple[str, int]) -> Iterator[Store]:
    """The store of a server at HOST, PORT."""
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    proxy.daemon_threads = True
    store = kind(f"http://127.0.0.1:{proxy.server_port}")
    proxy.store, proxy.behind = store, behind  # type: ignore[attr-defined]
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield store
    finally:
        proxy.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _pass(self) -> None:
        server: Any = self.server
        store: ObjectStore = server.store
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind = store.fault(self.command, self.path)
        if kind:
            store.faults.append(kind)
        if kind == "slow":
            time.sleep(SLEEP)
            self.close_connection = True
            return
        if kind in ("403", "500"):
            self._answer(
                int(kind), [], b"<Error><Code>InternalError</Code><Message>We broke</Message></Error>"
            )
            return
        headers = dict(self.headers.items())
        if kind == "flip" and (self.command == "PUT" or "/upload/" in self.path) and len(sent) > FORM:
            middle = len(sent) // 2
            sent = sent[:middle] + bytes([sent[middle] ^ 1]) + sent[middle + 1 :]
            headers = {
                k: v
                for k, v in headers.items()
                if not k.lower().startswith(("x-amz-checksum", "content-md5"))
            }
        connection = http.client.HTTPConnection(*server.behind)
        connection.request(self.command, self.path, sent, headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        store.requests.append(
            Request(self.command, self.path, self.headers.get("Range", ""), len(sent) or len(body))
        )
        heads = [(k, v) for k, v in answer.getheaders() if k.lower() not in HOP]
        length = int(answer.getheader("Content-Length") or 0) if self.command == "HEAD" else len(body)
        if self.command == "GET" and kind in ("short", "cut") and len(body) > 1:
            body = body[: len(body) // 2]
            length = length if kind == "cut" else len(body)
            self.close_connection = True
        self._answer(answer.status, heads, body, length)

    def _answer(
        self, status: int, headers: list[tuple[str, str]], body: bytes, length: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass
