"""The HTTP intake: all protocols of one port, told apart by their paths.

Every request goes the same way: its key, its body within bounds, its records, the door. Only the decoder and
the words of the answer differ (dialects.py).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import redis
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from pipeline.errors import RedisUnavailable
from pipeline.logs import logger
from pipeline.observe import counters as metrics
from pipeline.records.delivery import Full
from pipeline.service.access.keys import KeyRing, SenderKey, SenderKeys
from pipeline.service.senders import SentBy
from pipeline.settings.listeners import Listener
from pipeline.sources.protocols.answers import hec_answers
from pipeline.sources.protocols.answers.preamble import preamble
from pipeline.sources.protocols.contract import Decoded, Hints, Undecodable
from pipeline.workers.intake import identity
from pipeline.workers.intake.access import check_access
from pipeline.workers.intake.bodies import Room, receive_body
from pipeline.workers.intake.dialects import (
    JSON,
    BulkDialect,
    Dialect,
    HecDialect,
    JournalDialect,
    LinesDialect,
    LokiDialect,
    OtlpDialect,
    json_answer,
)
from pipeline.workers.intake.door import Door, IdentityConflict
from pipeline.workers.intake.refusals import Refusal, RequestRefused
from pipeline.workers.intake.rule_book import RuleBook

WHERE: Final = (
    "/v1/logs (OTLP), /_bulk (Elasticsearch), /loki/api/v1/push, /services/collector (Splunk), "
    "/api/v1/lines and /upload (journald)"
)
# Decoding a small body takes less than handing it to a thread.
INLINE_BYTES: Final = 32 << 10
DECODING: Final = 4  # bodies at a time; they share one interpreter
MAX_IDENTITY: Final = 512  # characters of a declared key
HEC: Final = "/services/collector"
_OTLP: Final = ("/v1/logs",)
_BULK: Final = ("/_bulk", "/{index}/_bulk", "/es/_bulk", "/es/{index}/_bulk")
_LOKI: Final = ("/loki/api/v1/push", "/api/prom/push")
_HEC: Final = tuple(f"{HEC}{end}" for end in ("", "/event", "/event/1.0", "/raw", "/raw/1.0"))
_LINES: Final = ("/api/v1/lines", "/lines", "/ndjson")
_JOURNAL: Final = ("/upload",)
POSTED: Final = frozenset((*_OTLP, *_BULK, *_LOKI, *_HEC, *_LINES, *_JOURNAL))


@dataclass(slots=True, kw_only=True)
class Service:
    """The parts that all requests of a process share."""

    door: Door
    keys: SenderKeys
    rules: RuleBook = field(default_factory=RuleBook)
    room: Room = field(default_factory=Room)
    decoding: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(DECODING))

    async def ring(self) -> KeyRing:
        """The keys as they were lately. Raises RequestRefused."""
        try:
            return await self.keys.ring()
        except (RedisUnavailable, redis.RedisError):
            raise RequestRefused(Refusal.AWAY, "Redis does not answer; send again in a moment") from None


class Exchange:
    """One request of a protocol, from its key to its answer."""

    def __init__(self, service: Service, listener: Listener, dialect: Dialect) -> None:
        self.service, self.listener, self.dialect = service, listener, dialect

    async def __call__(self, request: Request) -> Response:
        hints, name = self._hints(request), ""
        try:
            with self.service.room.shared() as share:
                key = await self._key(hints.headers)
                name = key.name if key else ""
                if key is not None:
                    hints = replace(hints, key=name, workload=key.workload or hints.workload)
                encoding = hints.headers.get("content-encoding", "identity").strip().lower()
                if encoding == "snappy" and self.dialect.protocol == "loki":
                    encoding = "identity"  # the decoder unpacks the block
                body = await receive_body(request.stream(), encoding=encoding, share=share)
                decoded = await self._decoded(body, hints)
                self._check_workloads(decoded, key)
                await self._take(decoded, body, hints, key)
                return self.dialect.stored(body, hints, decoded)
        except RequestRefused as refused:
            if refused.kind not in (Refusal.FULL, Refusal.AWAY, Refusal.CONFLICT):
                metrics.request_refused(self.dialect.protocol)
                sender = SentBy(protocol=self.dialect.protocol, key=name, peer=hints.peer)
                self.service.door.senders.heard(sender, refused=True)
            return self.dialect.refused(hints, refused)
        except ClientDisconnect:
            return Response(status_code=400)  # without a reader
        except Exception:  # noqa: BLE001 - one request must not end the others
            logger().exception("intake.failed", protocol=self.dialect.protocol)
            return self.dialect.refused(
                hints, RequestRefused(Refusal.FAILED, "the intake failed; send it again")
            )

    def _hints(self, request: Request) -> Hints:
        query = dict(request.query_params)
        return Hints(
            path=request.url.path,
            content_type=request.headers.get("content-type", "").lower(),
            query=query,
            headers=dict(request.headers),
            workload=query.get("workload", ""),
            peer=request.client.host if request.client else "",
            protocol=self.dialect.protocol,
            rules=self.service.rules.rules,
        )

    async def _key(self, headers: Mapping[str, str]) -> SenderKey | None:
        ring = await self.service.ring()
        return check_access(headers, ring, host=self.listener.host, loopback=self.listener.loopback)

    async def _decoded(self, body: bytes, hints: Hints) -> Decoded:
        try:
            if len(body) <= INLINE_BYTES:
                return self.dialect.decode(body, hints)
            async with self.service.decoding:
                return await asyncio.to_thread(self.dialect.decode, body, hints)
        except Undecodable as exc:
            raise RequestRefused(Refusal.UNDECODABLE, str(exc)) from exc

    def _check_workloads(self, decoded: Decoded, key: SenderKey | None) -> None:
        wrong = key and key.forbids(decoded.records.workloads or ())
        if key and wrong:
            raise RequestRefused(
                Refusal.FORBIDDEN,
                f"the key {key.name!r} may not send for the workload {wrong!r}, only for "
                f"{', '.join(key.patterns)}",
            )

    async def _take(self, decoded: Decoded, body: bytes, hints: Hints, key: SenderKey | None) -> None:
        name = key.name if key else ""
        declared = hints.headers.get("idempotency-key") or hints.query.get("batch_id", "")
        if len(declared) > MAX_IDENTITY:
            raise RequestRefused(
                Refusal.UNDECODABLE, f"the Idempotency-Key is too long; use at most {MAX_IDENTITY} characters"
            )
        path = hints.path
        request_identity = (
            identity.declared(declared, body, key=name, path=path)
            if declared
            else identity.of_request(decoded, body, key=name, path=path)
        )
        sender = SentBy(protocol=self.dialect.protocol, key=name, peer=hints.peer)
        try:
            answer = await self.service.door.take(decoded, identity=request_identity, sender=sender)
        except IdentityConflict as exc:
            raise RequestRefused(Refusal.CONFLICT, str(exc)) from exc
        except Undecodable as exc:
            raise RequestRefused(Refusal.UNDECODABLE, str(exc)) from exc
        except RedisUnavailable:
            raise RequestRefused(Refusal.AWAY, "Redis does not answer; send again in a moment") from None
        if isinstance(answer, Full):
            raise RequestRefused(Refusal.FULL, str(answer))


def intake_app(service: Service, listener: Listener) -> Starlette:
    """The application of one listener."""
    hec = Exchange(service, listener, HecDialect())
    posts: dict[str, Exchange] = dict.fromkeys(_HEC, hec)
    for paths, dialect in (
        (_OTLP, OtlpDialect()),
        (_BULK, BulkDialect()),
        (_LOKI, LokiDialect()),
        (_LINES, LinesDialect()),
        (_JOURNAL, JournalDialect()),
    ):
        posts |= dict.fromkeys(paths, Exchange(service, listener, dialect))

    async def readyz(_request: Request) -> Response:
        try:
            full = await asyncio.to_thread(service.door.producer.ledger.intake.full)
        except (RedisUnavailable, redis.RedisError):
            return PlainTextResponse("Redis does not answer\n", 503)
        return PlainTextResponse("ready\n" if full is None else f"{full}\n", 200 if full is None else 503)

    async def acks(request: Request) -> Response:
        try:
            with service.room.shared() as share:
                await hec._key(hec._hints(request).headers)
                body = await receive_body(request.stream(), encoding="identity", share=share)
                return Response(hec_answers.hec_acks(body), media_type=JSON)
        except Undecodable as exc:
            return hec.dialect.refused(hec._hints(request), RequestRefused(Refusal.UNDECODABLE, str(exc)))
        except RequestRefused as refused:
            return hec.dialect.refused(hec._hints(request), refused)

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
    return Starlette(
        routes=[
            *(Route(path, _endpoint(exchange), methods=["POST", "PUT"]) for path, exchange in posts.items()),
            *(Route(path, ask, methods=["GET", "HEAD"]) for path, ask in gets.items()),
            Route(f"{HEC}/ack", acks, methods=["POST"]),
            *(Route(f"{HEC}{end}", hec_options, methods=["OPTIONS"]) for end in ("", "/event", "/event/1.0")),
            Route("/{path:path}", _elsewhere, methods=["GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS"]),
        ]
    )


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
