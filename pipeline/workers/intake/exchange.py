"""One request of the HTTP intake: its key, its body within bounds, its records, the door, its answer.

Only the decoder and the words of the answer differ between protocols (dialects.py).
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import redis
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pipeline.errors import RedisUnavailable
from pipeline.logs import logger
from pipeline.observe import counters as metrics
from pipeline.records.delivery import Full
from pipeline.service.access.keys import KeyRing, SenderKey, SenderKeys
from pipeline.service.senders import SentBy
from pipeline.settings.listeners import Listener
from pipeline.sources.protocols.contract import Decoded, Hints, Undecodable
from pipeline.workers.intake import identity
from pipeline.workers.intake.access import check_access
from pipeline.workers.intake.bodies import Room, Share, receive_body
from pipeline.workers.intake.dialects import Dialect
from pipeline.workers.intake.door import Door, IdentityConflict
from pipeline.workers.intake.refusals import Refusal, RequestRefused
from pipeline.workers.intake.rule_book import RuleBook

# Decoding a small body takes less than handing it to a thread.
INLINE_BYTES: Final = 32 << 10
DECODING: Final = 4  # bodies at a time; they share one interpreter
MAX_IDENTITY: Final = 512  # characters of a declared key
_DIGITS: Final = 9  # of the length of a body that is looked at


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
        since = asyncio.get_running_loop().time()
        if size := _small_size(request.scope["headers"]):
            await self.service.door.turns.begin(size)
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
                return await self._answered(request, hints, key, encoding, share, since=since)
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

    async def _answered(
        self,
        request: Request,
        hints: Hints,
        key: SenderKey | None,
        encoding: str,
        share: Share,
        *,
        since: float,
    ) -> Response:
        body = await receive_body(request.stream(), encoding=encoding, share=share)
        try:
            decoded = await self.taken(body, hints, key, since)
        except RequestRefused as refused:
            refused.body = body
            raise
        return self.dialect.stored(body, hints, decoded)

    async def taken(
        self, body: bytes, hints: Hints, key: SenderKey | None, since: float | None = None
    ) -> Decoded:
        """The records of a body, once they are in. `since`: as of `Door.take`. Raises RequestRefused."""
        decoded = await self._decoded(body, hints)
        self._check_workloads(decoded, key)
        await self._take(decoded, body, hints, key, since)
        return decoded

    def _hints(self, request: Request) -> Hints:
        scope = request.scope
        query = dict(request.query_params) if scope["query_string"] else {}
        headers: dict[str, str] = {}  # the first of each name; the headers of Starlette search for each
        for field_name, value in scope["headers"]:
            headers.setdefault(field_name.decode("latin-1"), value.decode("latin-1"))
        return Hints(
            path=scope["path"],
            content_type=headers.get("content-type", "").lower(),
            query=query,
            headers=headers,
            workload=query.get("workload", ""),
            peer=scope["client"][0] if scope["client"] else "",
            protocol=self.dialect.protocol,
            rules=self.service.rules.rules,
        )

    async def _key(self, headers: Mapping[str, str]) -> SenderKey | None:
        ring = self.service.keys.recent() or await self.service.ring()
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

    async def _take(
        self, decoded: Decoded, body: bytes, hints: Hints, key: SenderKey | None, since: float | None
    ) -> None:
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
            answer = await self.service.door.take(
                decoded, identity=request_identity, sender=sender, since=since
            )
        except IdentityConflict as exc:
            raise RequestRefused(Refusal.CONFLICT, str(exc)) from exc
        except Undecodable as exc:
            raise RequestRefused(Refusal.UNDECODABLE, str(exc)) from exc
        except RedisUnavailable:
            raise RequestRefused(Refusal.AWAY, "Redis does not answer; send again in a moment") from None
        if isinstance(answer, Full):
            raise RequestRefused(Refusal.FULL, str(answer))


def _small_size(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Bytes of a body that may wait for its turn; 0 for any other, and for one that the sender holds back."""
    size = 0
    for name, value in headers:
        if name == b"expect":
            return 0
        if name == b"content-length" and value.isdigit() and len(value) <= _DIGITS:
            size = int(value)
    return size if size <= INLINE_BYTES else 0
