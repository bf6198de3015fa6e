"""The HTTP intake: all protocols of one port, told apart by their paths.

Every request goes the same way (exchange.py).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import redis
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.errors import RedisUnavailable
from pipeline.settings.listeners import Listener
from pipeline.sources.protocols.answers import hec_answers
from pipeline.sources.protocols.answers.preamble import preamble
from pipeline.sources.protocols.contract import Undecodable
from pipeline.workers.intake.bodies import receive_body
from pipeline.workers.intake.dialects import (
    JSON,
    BulkDialect,
    HecDialect,
    JournalDialect,
    LinesDialect,
    LokiDialect,
    OtlpDialect,
    json_answer,
)
from pipeline.workers.intake.exchange import Exchange, Service
from pipeline.workers.intake.journal_stream import JournalExchange
from pipeline.workers.intake.refusals import Refusal, RequestRefused

WHERE: Final = (
    "/v1/logs (OTLP), /_bulk (Elasticsearch), /loki/api/v1/push, /services/collector (Splunk), "
    "/api/v1/lines and /upload (journald)"
)
HEC: Final = "/services/collector"
_OTLP: Final = ("/v1/logs",)
_BULK: Final = ("/_bulk", "/{index}/_bulk", "/es/_bulk", "/es/{index}/_bulk")
_LOKI: Final = ("/loki/api/v1/push", "/api/prom/push")
_HEC: Final = tuple(f"{HEC}{end}" for end in ("", "/event", "/event/1.0", "/raw", "/raw/1.0"))
_LINES: Final = ("/api/v1/lines", "/lines", "/ndjson")
_JOURNAL: Final = ("/upload",)
POSTED: Final = frozenset((*_OTLP, *_BULK, *_LOKI, *_HEC, *_LINES, *_JOURNAL))


class IntakeApp:
    """Hands a post to its exchange by its path. The routes of Starlette, which know every other request, take
    a fifth of the processor time of a small one."""

    def __init__(self, posts: Mapping[str, Exchange], others: ASGIApp) -> None:
        self.posts, self._others = posts, others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, as ASGI gives it."""
        posted = scope["type"] == "http" and scope["method"] in ("POST", "PUT")
        exchange = self.posts.get(scope["path"]) if posted else None
        if exchange is None:
            await self._others(scope, receive, send)
            return
        response = await exchange(Request(scope, receive))
        await response(scope, receive, send)


def intake_app(service: Service, listener: Listener) -> IntakeApp:
    """The application of one listener."""
    hec = Exchange(service, listener, HecDialect())
    posts: dict[str, Exchange] = dict.fromkeys(_HEC, hec)
    for paths, dialect in (
        (_OTLP, OtlpDialect()),
        (_BULK, BulkDialect()),
        (_LOKI, LokiDialect()),
        (_LINES, LinesDialect()),
    ):
        posts |= dict.fromkeys(paths, Exchange(service, listener, dialect))
    posts |= dict.fromkeys(_JOURNAL, JournalExchange(service, listener, JournalDialect()))

    async def readyz(_request: Request) -> Response:
        try:
            full = await asyncio.to_thread(service.door.producer.ledger.intake.full)
        except (RedisUnavailable, redis.RedisError):
            return PlainTextResponse("Redis does not answer\n", 503)
        return PlainTextResponse("ready\n" if full is None else f"{full}\n", 200 if full is None else 503)

    async def acks(request: Request) -> Response:
        try:
            with service.room.shared() as share:
                await hec._key(hec.hints_of(request.scope).headers)
                body = await receive_body(request.stream(), encoding="identity", share=share)
                return Response(hec_answers.hec_acks(body), media_type=JSON)
        except Undecodable as exc:
            return hec.dialect.refused(
                hec.hints_of(request.scope), RequestRefused(Refusal.UNDECODABLE, str(exc))
            )
        except RequestRefused as refused:
            return hec.dialect.refused(hec.hints_of(request.scope), refused)

    async def healthy(_request: Request) -> Response:
        status, text = hec_answers.hec_answer(hec_answers.HEALTHY)
        return Response(text, status, media_type=JSON)

    async def hec_options(_request: Request) -> Response:
        return Response(headers={"Allow": "POST, OPTIONS"})  # Docker does not start containers without it

    gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
        "/healthz": _alive,
        "/readyz": readyz,
        "/ready": readyz,
        **dict.fromkeys((f"{HEC}/health", f"{HEC}/health/1.0"), healthy),
    }
    others = Starlette(
        routes=[
            *(Route(path, _endpoint(exchange), methods=["POST", "PUT"]) for path, exchange in posts.items()),
            *(Route(path, ask, methods=["GET", "HEAD"]) for path, ask in gets.items()),
            Route(f"{HEC}/ack", acks, methods=["POST"]),
            *(Route(f"{HEC}{end}", hec_options, methods=["OPTIONS"]) for end in ("", "/event", "/event/1.0")),
            Route("/{path:path}", _elsewhere, methods=["GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS"]),
        ]
    )
    return IntakeApp(posts, others)


def _endpoint(exchange: Exchange) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await exchange(request)

    return endpoint


async def _alive(_request: Request) -> Response:
    return PlainTextResponse("it lives\n")


async def _elsewhere(request: Request) -> Response:
    """The questions of Elasticsearch's clients; the other signals of OpenTelemetry; nothing."""
    path = request.url.path
    if path in POSTED or path.endswith("/_bulk"):
        return json_answer({"error": f"lines come in at {path[:200]} by POST"}, 405, {"Allow": "POST"})
    fixed = preamble(request.method, path.removeprefix("/es"))
    if fixed is not None:
        return Response(fixed.body, fixed.status, dict(fixed.headers))
    if path in ("/v1/traces", "/v1/metrics"):
        signal = path.removeprefix("/v1/")
        return json_answer(
            {"error": f"the intake takes logs, no {signal}; turn the exporter of {signal} off"}, 404
        )
    return json_answer({"error": f"there is no {path[:200]} here; lines come in at {WHERE}"}, 404)
