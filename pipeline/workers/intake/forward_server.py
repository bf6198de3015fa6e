"""Fluentd's forward protocol over TCP or TLS.

A message with a chunk is answered when the door has accepted it. While the door is full, the answer waits,
and the client sends the message again after its own deadline. Chunk and content are the identity of a
message, so the second one is a duplicate. A message without a chunk has no answer, as in syslog over TCP.
"""

import asyncio
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from pipeline.records.delivery import NO_IDENTITY, RequestIdentity
from pipeline.sources.protocols.contract import Decoded, Undecodable
from pipeline.sources.protocols.streams.forward import (
    ForwardFraming,
    ForwardMessage,
    acknowledgement,
    forward_lines,
    forward_message,
    forward_records,
    greeting,
    is_trusted,
    welcome,
)
from pipeline.workers.bounds.connection_budget import ConnectionBudget
from pipeline.workers.intake.connections import Connection, StreamServer
from pipeline.workers.intake.door import Door
from pipeline.workers.intake.identity import of_body
from pipeline.workers.intake.rule_book import RuleBook

# Bytes of the answer to a greeting, which comes before the client has shown the shared key.
MOST_PING: Final = 4 * 1024
# Longer than this, decoding would delay the other connections.
_IN_A_THREAD: Final = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    decoded: Decoded
    identity: RequestIdentity
    chunk: bytes


class ForwardServer(StreamServer):
    """`shared_key`: a secret that clients show to have; "" asks for none."""

    protocol: ClassVar[str] = "forward"

    def __init__(
        self,
        door: Door,
        *,
        key: str = "",
        rules: RuleBook | None = None,
        shared_key: str = "",
        budget: ConnectionBudget | None = None,
    ) -> None:
        super().__init__(door, key=key, rules=rules, budget=budget)
        self._shared_key = shared_key
        self._decoding = asyncio.Lock()

    async def converse(self, connection: Connection) -> None:
        framing = ForwardFraming()
        try:
            if not self._shared_key or await self._greet(connection, framing):
                await self._receive(connection, framing)
        finally:
            framing.close()

    async def _receive(self, connection: Connection, framing: ForwardFraming) -> None:
        while data := await connection.read(partial=framing.partial):
            values = framing.feed(data)
            if values:
                connection.message_ended()
                messages = [message for value in values if (message := forward_message(value))]
                if not await self._store(connection, messages):
                    return
            connection.keep(framing.size)

    async def _greet(self, connection: Connection, framing: ForwardFraming) -> bool:
        nonce = secrets.token_hex(16).encode()
        await connection.write(greeting(nonce))
        pings: list[Any] = []
        while not pings:
            # A client that does not answer is slow.
            if not (data := await connection.read(partial=True)):
                return False
            pings = framing.feed(data)
            if framing.size > MOST_PING:
                raise Undecodable(
                    "the client does not answer HELO; set the shared key of this listener there"
                )
        connection.message_ended()
        trusted = is_trusted(pings[0], nonce=nonce, shared_key=self._shared_key)
        await connection.write(
            welcome(
                pings[0],
                name=socket.gethostname(),
                nonce=nonce,
                shared_key=self._shared_key,
                trusted=trusted,
            )
        )
        if not trusted:
            raise Undecodable("the client has another shared key")
        return True

    async def _store(self, connection: Connection, messages: Sequence[ForwardMessage]) -> bool:
        """False when the connection ended before the messages were in."""
        if sum(message.size for message in messages) > _IN_A_THREAD:
            async with self._decoding:  # one after another, because decoding takes memory
                requests = await asyncio.to_thread(self._requests, messages, connection.peer)
        else:
            requests = self._requests(messages, connection.peer)
        outcomes = await asyncio.gather(
            *(
                self.take(
                    connection,
                    request.decoded,
                    identity=request.identity,
                    repeats=bool(request.chunk),
                )
                for request in requests
            )
        )
        answers = [
            acknowledgement(request.chunk)
            for request, stored in zip(requests, outcomes, strict=True)
            if stored and request.chunk
        ]
        if answers:
            await connection.write(b"".join(answers))
        return all(outcomes)

    def _requests(self, messages: Sequence[ForwardMessage], peer: str) -> list[_Request]:
        """One for each chunk, and one for the messages without."""
        hints = self.hints(peer)
        requests: list[_Request] = []
        together: list[tuple[str, list[str]]] = []
        for message in messages:
            lines = forward_lines(message)
            if not message.chunk:
                together.append((message.tag, lines))
                continue
            body = "\n".join((message.tag, *lines)).encode()
            requests.append(
                _Request(
                    decoded=forward_records([(message.tag, lines)], hints),
                    # Not a declared key, which conflicts where Fluent Bit's chunk is of other content.
                    identity=of_body(
                        message.chunk + b"\n" + body, distinct=True, key=self.key, path="forward"
                    ),
                    chunk=message.chunk,
                )
            )
        if together:
            requests.append(
                _Request(decoded=forward_records(together, hints), identity=NO_IDENTITY, chunk=b"")
            )
        return requests
