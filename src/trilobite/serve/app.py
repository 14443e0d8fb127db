"""The application: transformers' routes that are offered here, and those that it lacks."""

import base64
import hashlib
import logging
import re
from importlib import resources
from pathlib import Path
from time import time
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from transformers import PreTrainedModel
from transformers.cli.serving.server import build_server
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from trilobite.errors import TrilobiteError
from trilobite.serve.batching import Batching
from trilobite.serve.guard import Guard, error_body
from trilobite.serve.handlers import Chat, Completion, OneBatch, OneModel, Responses
from trilobite.serve.metrics import Metrics
from trilobite.serve.pages import Pages
from trilobite.serve.prompts import Prompter
from trilobite.serve.settings import Settings

OFFERED = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health"}
"""Of transformers' routes. Others load models, drop the one there is, or show pages that load scripts from elsewhere."""


def make_app(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batching: Batching,
    pages: Pages,
    settings: Settings,
    about: dict[str, Any],
) -> Guard:
    """Everything between a socket and the batch. about: more for /v1/models to say of the model."""
    prompter = Prompter(tokenizer, pages.context, int(model.config.get_text_config().vocab_size))
    name = Path(str(model.name_or_path)).resolve().name
    meta = {
        "context": pages.context,
        "slots": pages.slots,
        "chat": prompter.has_template,
        "tools": prompter.takes_tools,
        **about,
    }
    entry = {"id": name, "object": "model", "created": int(time()), "owned_by": "trilobite", "meta": meta}
    one, state = OneModel(name=name, model=model, prompter=prompter, entry=entry), OneBatch(batching)
    metrics = Metrics(model, batching, pages.slots)
    app = build_server(
        one,
        Chat(one, state),
        completion_handler=Completion(one, state),
        response_handler=Responses(one, state),
        transcription_handler=None,
        systemone_handler=None,
        generation_state=state,
    )
    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", "") in OFFERED]
    _add_routes(app, entry, metrics)
    _add_errors(app)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return Guard(app, settings, pages.slots, metrics)


def _add_routes(app: FastAPI, entry: dict[str, Any], metrics: Metrics) -> None:
    page, policy = read_page()

    @app.get("/")
    def show_page() -> Response:
        return HTMLResponse(page, headers={"content-security-policy": policy})

    @app.get("/v1/models/{name}")
    def show_model(name: str) -> Response:
        if name != entry["id"]:
            raise HTTPException(404, f"the model {name[:80]!r} is not here, only {entry['id']!r}")
        return JSONResponse(entry)

    @app.get("/metrics")
    def show_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(TrilobiteError)
    async def ours(request: Request, error: TrilobiteError) -> Response:
        return JSONResponse(error_body(400, str(error)), 400)

    @app.exception_handler(StarletteHTTPException)
    async def theirs(request: Request, error: StarletteHTTPException) -> Response:
        return JSONResponse(
            error_body(error.status_code, str(error.detail)), error.status_code, error.headers
        )

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        return JSONResponse(error_body(400, "the body is no JSON object"), 400)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        logging.getLogger(__name__).error("%s failed", request.url.path, exc_info=error)
        return JSONResponse(error_body(500, "an error of this server; its log says more"), 500)


def read_page() -> tuple[str, str]:
    """The page, and the policy by which browsers run its own script and style and load nothing else."""
    page = resources.files("trilobite.serve").joinpath("page.html").read_text(encoding="utf-8")
    script, style = (
        " ".join(
            f"'sha256-{_digest(part)}'" for part in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        )
        for tag in ("script", "style")
    )
    return page, (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
