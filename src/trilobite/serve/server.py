"""A server from its socket to its end."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from trilobite.errors import SettingError
from trilobite.serve.app import make_app
from trilobite.serve.batching import Batching
from trilobite.serve.pages import Pages
from trilobite.serve.settings import Settings

GRACE_SECONDS = 30
"""How long requests may go on after SIGTERM."""


def listen(settings: Settings) -> socket.socket:
    """A socket at the address. Raises SettingError where it is taken, or nobody's."""
    host = settings.host.strip("[]")
    try:
        family = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM)[0][0]
        found = socket.socket(family)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, settings.port))
        found.listen(128)
    except (OSError, OverflowError) as e:
        raise SettingError(
            f"{settings.host}:{settings.port}: {getattr(e, 'strerror', None) or e}; choose another --port or --host"
        ) from e
    return found


def serve(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pages: Pages,
    settings: Settings,
    listening: socket.socket,
    about: dict[str, Any],
    on_start: Callable[[], None],
) -> None:
    """Answer until SIGTERM or Ctrl-C: requests that run are finished, within `GRACE_SECONDS`.

    about: what /v1/models says of the model beside what is known here    on_start: called once requests are taken
    """
    batching = Batching(model, tokenizer, pages, settings.seconds)
    app = make_app(model, tokenizer, batching, pages, settings, about)
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    batching.start()
    try:
        asyncio.run(_Server(config, on_start).serve(sockets=[listening]))
    finally:
        batching.stop()


class _Server(uvicorn.Server):
    """Says when it starts; signals end it, and it does not pass them on."""

    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self.on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_start()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, self.handle_exit) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)
