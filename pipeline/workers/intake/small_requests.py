"""Small requests on the short way of the HTTP server, decided in their turns one directly after the other.

They end as on the usual way (exchange.py): the same key, limits, records, identity, door and answer. The part
that follows from the head alone is kept with it. A request that needs a thread goes the usual way.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pipeline.logs import logger
from pipeline.records.delivery import Accepted, Full
from pipeline.service.access.keys import KeyRing, SenderKey
from pipeline.service.senders import SentBy
from pipeline.sources.protocols.contract import Decoded, Hints
from pipeline.upkeep import start_task
from pipeline.workers.intake.bodies import INLINE_BYTES as INFLATED_INLINE
from pipeline.workers.intake.bodies import Share, decompressed
from pipeline.workers.intake.dialects import CutResponse, PreparedResponse, wire_form
from pipeline.workers.intake.exchange import INLINE_BYTES, Exchange, Service, as_refusal, hints_of_key
from pipeline.workers.intake.refusals import Refusal, RequestRefused
from pipeline.workers.short_way.known_heads import KnownHead
from pipeline.workers.short_way.requests import ShortRequest

MOST_HEADS: Final = 1_024  # that connections share; each keeps one beside them


class SmallRequests:
    """The short way of one listener."""

    def __init__(self, service: Service, posts: Mapping[str, Exchange]) -> None:
        """`posts`: by path."""
        self._service, self._posts = service, posts
        self._heads: dict[tuple[bytes, bytes, str], KnownHead] = {}
        self._waiting: list[tuple[ShortRequest, float]] = []  # and when each came
        self._task: asyncio.Task[None] | None = None

    def head_of(self, before: bytes, after: bytes, scope: Mapping[str, Any]) -> KnownHead | None:
        """A head that names a protocol, by its bytes and the address of its client."""
        exchange = self._posts.get(scope["path"]) if scope["method"] in ("POST", "PUT") else None
        if exchange is None or exchange.by_pieces:
            return None
        hints = exchange.hints_of(scope)
        name = (before, after, hints.peer)
        if (head := self._heads.get(name)) is None:
            if len(self._heads) >= MOST_HEADS:
                self._heads.clear()
            head = self._heads[name] = KnownHead(before, after, _Repeated(exchange, hints))
        return head

    def begin(self, request: ShortRequest) -> bool:
        """Its turn comes. False for a body that takes a thread, or for none."""
        if not 0 < request.length <= request.facts.most_bytes:
            return False
        self._waiting.append((request, asyncio.get_running_loop().time()))
        self._service.door.turns.join(request.length, self._run)
        return True

    def _run(self) -> None:
        """The turn of all that wait."""
        ring = self._service.keys.recent()
        if ring is not None:
            self._decide(ring)
        elif self._task is None or self._task.done():
            self._task = start_task("intake-turn", self._ask())

    async def _ask(self) -> None:
        """As `_run`, once the keys are known again."""
        try:
            ring = await self._service.ring()
        except Exception as exc:  # noqa: BLE001 - all that wait are answered
            for request, since in self._emptied():
                _Undecided(request, since).refuse(exc)
        else:
            self._decide(ring)

    def _emptied(self) -> list[tuple[ShortRequest, float]]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def _decide(self, ring: KeyRing) -> None:
        for request, since in self._emptied():
            if request.missing:
                request.go_usual_way()
            elif not request.gone:
                _Undecided(request, since).begin(ring)


class _Repeated:
    """The part of requests that follows from their head, and from the keys and the rules of the moment."""

    __slots__ = ("_key", "_ring", "_said", "encoding", "exchange", "hints", "most_bytes", "sender")

    def __init__(self, exchange: Exchange, hints: Hints) -> None:
        self.exchange, self._said = exchange, hints
        self.encoding = exchange.encoding_of(hints)
        self.most_bytes = {"identity": INLINE_BYTES, "gzip": INFLATED_INLINE, "deflate": INFLATED_INLINE}.get(
            self.encoding, 0
        )
        self._ring: KeyRing | None = None
        self._admit(None)

    def key(self, ring: KeyRing) -> SenderKey | None:
        """The sender's key, None where none is needed. `hints` and `sender` are as it says from now on.

        Raises RequestRefused."""
        if ring is not self._ring or self.hints.rules is not self.exchange.service.rules.rules:
            self._ring = None
            self._admit(None)
            self._admit(self.exchange.key_of(self._said.headers, ring))
            # A key that expires is looked at each time.
            if self._key is None or self._key.expires is None:
                self._ring = ring
        return self._key

    def _admit(self, key: SenderKey | None) -> None:
        self._key = key
        hints = replace(self._said, rules=self.exchange.service.rules.rules)
        self.hints = hints if key is None else hints_of_key(hints, key)
        self.sender = SentBy(protocol=hints.protocol, key=self.hints.key, peer=hints.peer)


class _Undecided:
    """One request of a turn until it is answered, as the door replies to it."""

    __slots__ = (
        "_answered",
        "_body",
        "_decoded",
        "_head",
        "_hints",
        "_request",
        "_sender",
        "_share",
        "_since",
    )

    def __init__(self, request: ShortRequest, since: float) -> None:
        head: _Repeated = request.facts
        self._request, self._since, self._head = request, since, head
        self._hints, self._sender = head.hints, head.sender
        self._share = Share(head.exchange.service.room)
        self._body = b""
        self._decoded: Decoded
        self._answered = False

    def begin(self, ring: KeyRing) -> None:
        """Hands the records to the door. Answers at once where they cannot be in."""
        head, exchange = self._head, self._head.exchange
        try:
            try:
                key = head.key(ring)
            finally:
                self._hints, self._sender = head.hints, head.sender
            body = self._request.body
            self._share.take(len(body))
            if head.encoding != "identity":
                body = decompressed(body, head.encoding)
                self._share.take(len(body))
                if len(body) > INLINE_BYTES:
                    self._end()
                    self._request.go_usual_way()
                    return
            self._body = body
            self._decoded = exchange.dialect.decode(body, self._hints)
            exchange.check_workloads(self._decoded, key)
            exchange.service.door.put(
                self._decoded,
                identity=exchange.identity_of(self._decoded, body, self._hints),
                sender=self._sender,
                since=self._since,
                reply=self,
            )
        except Exception as exc:  # noqa: BLE001 - one request must not end the others
            self.refuse(exc)

    def done(self) -> bool:
        return self._answered

    def set_result(self, answer: Accepted | Full) -> None:
        if isinstance(answer, Full):
            self.refuse(RequestRefused(Refusal.FULL, str(answer)))
            return
        try:
            response = self._head.exchange.dialect.stored(self._body, self._hints, self._decoded)
        except Exception as exc:  # noqa: BLE001 - one request must not end its window
            self.refuse(exc)
            return
        wire = response.wire if isinstance(response, PreparedResponse) else wire_form(response)
        self._end()
        self._request.answer(response.status_code, wire)

    def set_exception(self, error: Exception) -> None:
        self.refuse(error)

    def refuse(self, error: Exception) -> None:
        """Answers why it is not in."""
        refused = as_refusal(error)
        if refused.kind is not Refusal.FAILED:
            refused.body = self._body
        try:
            response = self._head.exchange.refusal(refused, self._hints, self._sender.key)
        except Exception:  # noqa: BLE001 - one request must not end the others
            logger().exception("intake.failed", protocol=self._sender.protocol)
            response = CutResponse(status_code=500)
        self._end()
        cut = any(name == b"connection" for name, _ in response.raw_headers)
        self._request.answer(response.status_code, wire_form(response), cut=cut)

    def _end(self) -> None:
        self._answered = True
        self._share.give(self._share.size)
