"""The application of the API: routes below /api/v1, the console beside them, and bounds on every request."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline import __version__
from pipeline.errors import RedisUnavailable
from pipeline.redis.connection import answering
from pipeline.workers.api import acting, beside, exporting, facts, notes, stored
from pipeline.workers.api.answering import problem_schema
from pipeline.workers.api.asking import Api
from pipeline.workers.api.console.app import install_console
from pipeline.workers.api.problems import AskRefused, install_problems, problem

PREFIX: Final = "/api/v1"
MAX_BODY: Final = 256 << 10
_TOO_LARGE: Final = f"the body has more than {MAX_BODY:,} bytes; send less"
MAX_QUERY: Final = 16 << 10  # bytes
SEND_S: Final = 60.0  # a client that reads nothing for so long is let go
TEXT: Final = (
    "Every answer is JSON. Errors are problems (RFC 9457). Pages have a `next`, which is the `cursor` of the "
    "page behind. A key goes into `Authorization: Bearer KEY`. Texts of log lines are data of whoever wrote "
    "them: show them as text."
)
Message = MutableMapping[str, Any]


def api_app(api: Api) -> FastAPI:
    """The application of one listener."""
    app = specified_app()
    app.state.api = api
    app.add_middleware(Bounds, api=api)

    @app.get("/healthz", include_in_schema=False)
    async def alive() -> Response:
        return PlainTextResponse("it lives\n")

    @app.get("/readyz", include_in_schema=False)
    async def ready() -> Response:
        def ask() -> None:
            with answering():
                api.client.ping()

        try:
            await api.facts(ask)
        except RedisUnavailable:  # nobody has shown a key, so the address of Redis stays here
            return PlainTextResponse("Redis does not answer\n", 503)
        return PlainTextResponse("ready\n")

    install_console(app)
    return app


def specified_app() -> FastAPI:
    """The routes and their specification, without a pipeline behind them."""
    app = FastAPI(
        title="Logweir",
        version=__version__,
        description=TEXT,
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,  # its page loads scripts of another host
        redoc_url=None,
    )
    # A note has a path of its own among the decisions about an incident, so it comes first.
    for routes in (stored.router, exporting.router, beside.router, facts.router, notes.router, acting.router):
        app.include_router(routes, prefix=PREFIX)
    install_problems(app)
    made = app.openapi

    def openapi() -> dict[str, Any]:
        found = made()
        parts = found.setdefault("components", {})
        parts.setdefault("schemas", {})["Problem"] = problem_schema()
        parts["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
        return found

    app.openapi = openapi  # type: ignore[method-assign] # as FastAPI documents it
    return app


class Bounds:
    """Checks the origin, bounds query and body, and lets go of clients that do not read."""

    def __init__(self, app: ASGIApp, api: Api) -> None:
        self.app, self.api = app, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        refusal = self._refusal(request)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self.app(scope, _bounded(receive), _patient(send))

    def _refusal(self, request: Request) -> Response | None:
        if len(request.scope["query_string"]) > MAX_QUERY:
            return problem(
                414, f"the query has more than {MAX_QUERY:,} bytes; ask for less", request.url.path
            )
        try:
            self.api.doorkeeper.check_host(request)
        except AskRefused as exc:
            return problem(exc.status, exc, request.url.path)
        length = Headers(scope=request.scope).get("content-length", "0")
        if length.isdecimal() and int(length) > MAX_BODY:
            return problem(413, _TOO_LARGE, request.url.path)
        return None


def _bounded(receive: Receive) -> Receive:
    size = 0

    async def bounded() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > MAX_BODY:
            # FastAPI passes on this class only, and answers 400 for any other error while it reads a body.
            raise HTTPException(413, _TOO_LARGE)
        return message

    return bounded


def _patient(send: Send) -> Callable[[Message], Awaitable[None]]:
    async def patient(message: Message) -> None:
        async with asyncio.timeout(SEND_S):
            await send(message)

    return patient
