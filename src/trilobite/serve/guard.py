"""Around the whole application: who may ask, how much, how long, and what becomes of those who hang up."""

import asyncio
import hmac
import json
from collections.abc import Callable, Iterable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trilobite.serve.call import CALL, Call
from trilobite.serve.metrics import Metrics
from trilobite.serve.settings import Settings

ANSWERING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
"""These take a slot."""
OPEN = ("/", "/health")
"""These tell nothing, and are open to everybody who reaches the server."""
LOCAL = ("localhost", "127.0.0.1", "::1")
BODY_SECONDS = 30.0
"""A body that comes more slowly is not waited for."""
LINGER_SECONDS = 2.0
"""The rest of a body that is refused is read, and dropped, for so long."""
RETRY_SECONDS = 2
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


class Refused(Exception):
    """A request that goes no further."""

    def __init__(self, status: int, message: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """status: of HTTP."""
        super().__init__(message)
        self.status, self.headers = status, tuple(headers)


class Guard:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp, settings: Settings, slots: int, metrics: Metrics) -> None:
        """slots: texts at a time."""
        self.app, self.settings, self.metrics = app, settings, metrics
        self.most = slots + settings.queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let one request through, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        known = path in ANSWERING or path in (*OPEN, "/metrics", "/v1/models")
        noted = _Noted(
            send, lambda status: self.metrics.requests.labels(path if known else "other", status).inc()
        )
        incoming = _Incoming(receive)
        try:
            self._check(scope)
            body = await self._body(scope, incoming)
            if path in ANSWERING and scope["method"] == "POST":
                await self._answer(scope, body, receive, noted)
            else:
                await self.app(scope, _Replay(body), noted)
        except Refused as e:
            await refuse(noted, e, incoming)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if self.settings.local and _name(host) not in (*LOCAL, self.settings.host):
            raise Refused(403, "this server answers under names of this machine only")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and origin not in self.settings.origins and origin.partition("://")[2] != host:
            raise Refused(403, "pages of other servers may not ask here")
        if scope["method"] == "OPTIONS" or scope["path"] in OPEN:
            return
        key = self.settings.api_key
        given = headers.get(b"authorization", b"")
        if key is not None and not hmac.compare_digest(given, b"Bearer " + key.encode()):
            raise Refused(401, "the API key is missing or wrong", [(b"www-authenticate", b"Bearer")])
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":
            raise Refused(415, "expected Content-Type: application/json")

    async def _body(self, scope: Scope, incoming: "_Incoming") -> bytes:
        length = dict(scope["headers"]).get(b"content-length", b"0")
        most = self.settings.body
        if length.isdigit() and int(length) > most:
            raise Refused(413, f"the body has {int(length)} bytes, this server takes {most}")
        try:
            return await asyncio.wait_for(incoming.read(most), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise Refused(408, f"the body did not come within {BODY_SECONDS:.0f} s") from None

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Run a request that takes a slot, for as long as its client waits."""
        if self.metrics.running >= self.most:
            raise Refused(
                429,
                f"{self.most} requests run or wait already; try again later",
                [(b"retry-after", str(RETRY_SECONDS).encode())],
            )
        call = Call()
        token = CALL.set(call)
        self.metrics.running += 1
        task = asyncio.ensure_future(self.app(scope, _Replay(body), send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        finally:
            gone.cancel()
            task.cancel()
            if call.answer is not None:
                call.answer.cancel()
            self.metrics.running -= 1
            self.metrics.answered(call)
            CALL.reset(token)


async def refuse(send: Send, error: Refused, incoming: "_Incoming") -> None:
    """Answer with an error as OpenAI's clients read it."""
    body = json.dumps(error_body(error.status, str(error))).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        *error.headers,
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await incoming.drop()
    await send({"type": "http.response.body", "body": b""})


def error_body(status: int, message: str) -> dict[str, dict[str, object]]:
    """What every error says."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "code": status, "param": None}}


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _name(host: str) -> str:
    """`localhost:8000` -> localhost, `[::1]:8000` -> ::1."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


class _Incoming:
    """A body as it comes."""

    def __init__(self, receive: Receive) -> None:
        self.receive, self.more = receive, True

    async def _part(self) -> bytes:
        message = await self.receive()
        self.more = message.get("more_body", False)
        if message["type"] == "http.disconnect":
            raise Refused(400, "the client went away")
        part: bytes = message.get("body", b"")
        return part

    async def read(self, most: int) -> bytes:
        """All of it. most: bytes; raises Refused for more."""
        parts: list[bytes] = []
        while self.more:
            parts.append(await self._part())
            if sum(map(len, parts)) > most:
                raise Refused(413, f"the body is larger than {most} bytes")
        return b"".join(parts)

    async def drop(self) -> None:
        """The rest, for a while: where unread bytes are left, closing resets the connection, and the answer is lost."""
        with suppress(asyncio.TimeoutError, Refused):
            await asyncio.wait_for(self._drop(), LINGER_SECONDS)

    async def _drop(self) -> None:
        while self.more:
            await self._part()


class _Replay:
    """A body that was read already, as an application receives it; nothing comes after it."""

    def __init__(self, body: bytes) -> None:
        self.body: bytes | None = body

    async def __call__(self) -> Message:
        if self.body is None:
            await asyncio.Event().wait()
        body, self.body = self.body, None
        return {"type": "http.request", "body": body, "more_body": False}


class _Noted:
    """Sends with our headers, and notes the status."""

    def __init__(self, send: Send, note: Callable[[str], None]) -> None:
        self.send, self.note = send, note

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.note(str(message["status"]))
            message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
        await self.send(message)
