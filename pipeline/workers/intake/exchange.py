"""One request of the HTTP intake: its key, its body within bounds, its records, the door, its answer.

Only the decoder and the words of the answer differ between protocols (dialects.py).
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import redis
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pipeline.errors import RedisUnavailable
from pipeline.logs import logger
from pipeline.observe import counters as metrics
from pipeline.records.delivery import Full, RequestIdentity
from pipeline.service.access.keys import KeyRing, SenderKey, SenderKeys
from pipeline.service.senders import SentBy
from pipeline.settings.listeners import Listener
from pipeline.sources.protocols.contract import Decoded, Hints, Undecodable
from pipeline.workers.bounds.connection_budget import ConnectionBudget
from pipeline.workers.intake import identity
from pipeline.workers.intake.access import check_access
from pipeline.workers.intake.bodies import Room, Share, receive_body
from pipeline.workers.intake.dialects import Dialect
from pipeline.workers.intake.door import Door, IdentityConflict
from pipeline.workers.intake.refusals import Refusal, RequestRefused
from pipeline.workers.intake.rule_book import RuleBook
from pipeline.workers.short_way.requests import WAITED

AWAY_WORDS: Final = "Redis does not answer or takes no writes; send again in a moment"
# Decoding a small body takes less than handing it to a thread.
INLINE_BYTES: Final = 32 << 10
DECODING: Final = 4  # bodies at a time; they share one interpreter
MAX_IDENTITY: Final = 512  # characters of a declared key
MOST_ADDRESS: Final = 64  # characters; an address of IPv6 with its zone has fewer
_DIGITS: Final = 9  # of the length of a body that is looked at


@dataclass(slots=True, kw_only=True)
class Service:
    """The parts that all requests of a process share."""

    door: Door
    keys: SenderKeys
    rules: RuleBook = field(default_factory=RuleBook)
    room: Room = field(default_factory=Room)
    budget: ConnectionBudget = field(init=False)
    decoding: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(DECODING))

    def __post_init__(self) -> None:
        self.budget = ConnectionBudget(self.room)

    async def ring(self) -> KeyRing:
        """The keys as they were lately. Raises RequestRefused."""
        try:
            return await self.keys.ring()
        except (RedisUnavailable, redis.RedisError):
            raise RequestRefused(Refusal.AWAY, AWAY_WORDS) from None


class Exchange:
    """One request of a protocol, from its key to its answer."""

    by_pieces: ClassVar[bool] = False  # a body is decoded while it arrives

    def __init__(self, service: Service, listener: Listener, dialect: Dialect) -> None:
        self.service, self.listener, self.dialect = service, listener, dialect

    async def __call__(self, request: Request) -> Response:
        since = asyncio.get_running_loop().time()
        if WAITED not in request.scope and (size := _small_size(request.scope["headers"])):
            await self.service.door.turns.begin(size)
        hints, name = self.hints_of(request.scope), ""
        try:
            with self.service.room.shared() as share:
                key = await self._key(hints.headers)
                name = key.name if key else ""
                if key is not None:
                    hints = hints_of_key(hints, key)
                encoding = self.encoding_of(hints)
                return await self._answered(request, hints, key, encoding, share, since=since)
        except ClientDisconnect:
            return Response(status_code=400)  # without a reader
        except Exception as exc:  # noqa: BLE001 - one request must not end the others
            return self.refusal(exc, hints, name)

    def refusal(self, exc: Exception, hints: Hints, key: str) -> Response:
        """The answer to a request that is not in. `key`: the name of the sender's key."""
        refused = as_refusal(exc)
        if refused.kind is Refusal.FAILED:
            logger().error("intake.failed", protocol=self.dialect.protocol, exc_info=exc)
        elif refused.kind not in (Refusal.FULL, Refusal.AWAY, Refusal.CONFLICT):
            metrics.request_refused(self.dialect.protocol)
            sender = SentBy(protocol=self.dialect.protocol, key=key, peer=hints.peer)
            self.service.door.senders.heard(sender, refused=True)
        return self.dialect.refused(hints, refused)

    def encoding_of(self, hints: Hints) -> str:
        """By which the body is to be decompressed."""
        encoding = hints.headers.get("content-encoding", "identity").strip().lower()
        # The decoder of Loki unpacks the block itself.
        return "identity" if encoding == "snappy" and self.dialect.protocol == "loki" else encoding

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
        try:
            decoded = await self._decoded(body, hints)
            self.check_workloads(decoded, key)
            await self._take(decoded, body, hints, key, since)
        except (Undecodable, IdentityConflict, RedisUnavailable) as exc:
            raise as_refusal(exc) from exc
        return decoded

    def hints_of(self, scope: Mapping[str, Any]) -> Hints:
        """Of a scope of ASGI."""
        query = dict(QueryParams(scope["query_string"])) if scope["query_string"] else {}
        headers: dict[str, str] = {}  # the first of each name; the headers of Starlette search for each
        for field_name, value in scope["headers"]:
            headers.setdefault(field_name.decode("latin-1"), value.decode("latin-1"))
        return Hints(
            path=scope["path"],
            content_type=headers.get("content-type", "").lower(),
            query=query,
            headers=headers,
            workload=query.get("workload", ""),
            peer=_address(scope["client"][0]) if scope["client"] else "",
            protocol=self.dialect.protocol,
            rules=self.service.rules.rules,
        )

    async def _key(self, headers: Mapping[str, str]) -> SenderKey | None:
        return self.key_of(headers, self.service.keys.recent() or await self.service.ring())

    def key_of(self, headers: Mapping[str, str], ring: KeyRing) -> SenderKey | None:
        """The sender's key, None where none is needed. Raises RequestRefused."""
        return check_access(headers, ring, host=self.listener.host, loopback=self.listener.loopback)

    async def _decoded(self, body: bytes, hints: Hints) -> Decoded:
        if len(body) <= INLINE_BYTES:
            return self.dialect.decode(body, hints)
        async with self.service.decoding:
            return await asyncio.to_thread(self.dialect.decode, body, hints)

    def check_workloads(self, decoded: Decoded, key: SenderKey | None) -> None:
        """Raises RequestRefused for a workload that the key may not send for."""
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
        answer = await self.service.door.take(
            decoded,
            identity=self.identity_of(decoded, body, hints),
            sender=SentBy(protocol=self.dialect.protocol, key=key.name if key else "", peer=hints.peer),
            since=since,
        )
        if isinstance(answer, Full):
            raise RequestRefused(Refusal.FULL, str(answer))

    def identity_of(self, decoded: Decoded, body: bytes, hints: Hints) -> RequestIdentity:
        """Raises RequestRefused."""
        declared = hints.headers.get("idempotency-key") or hints.query.get("batch_id", "")
        if len(declared) > MAX_IDENTITY:
            raise RequestRefused(
                Refusal.UNDECODABLE, f"the Idempotency-Key is too long; use at most {MAX_IDENTITY} characters"
            )
        if declared:
            return identity.declared(declared, body, key=hints.key, path=hints.path)
        return identity.of_request(decoded, body, key=hints.key, path=hints.path)


def _address(text: str) -> str:
    """Where a proxy says that a client is, or the client itself does. It is kept beside counts."""
    if len(text) <= MOST_ADDRESS and text.isprintable():
        return text
    return "".join(filter(str.isprintable, text[:MOST_ADDRESS]))


def hints_of_key(hints: Hints, key: SenderKey) -> Hints:
    """With the name and the workload of the sender's key."""
    return replace(hints, key=key.name, workload=key.workload or hints.workload)


def as_refusal(exc: Exception) -> RequestRefused:
    """Why a request is not in, for its sender."""
    match exc:
        case RequestRefused():
            return exc
        case IdentityConflict():
            refused = RequestRefused(Refusal.CONFLICT, str(exc))
        case Undecodable():
            refused = RequestRefused(Refusal.UNDECODABLE, str(exc))
        case RedisUnavailable():
            refused = RequestRefused(Refusal.AWAY, AWAY_WORDS)
        case _:
            refused = RequestRefused(Refusal.FAILED, "the intake failed; send it again")
    refused.__cause__ = exc
    return refused


def _small_size(headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Bytes of a body that may wait for its turn; 0 for any other, and for one that the sender holds back."""
    size = 0
    for name, value in headers:
        if name == b"expect":
            return 0
        if name == b"content-length" and value.isdigit() and len(value) <= _DIGITS:
            size = int(value)
    return size if size <= INLINE_BYTES else 0
