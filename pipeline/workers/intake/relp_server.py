"""Syslog over RELP: the only syslog whose sender learns that a message is stored.

A transaction is answered when the door has accepted it. While the door is full, the answer waits: rsyslog
sends at most a window of unanswered messages (128 by default) and sends them again over a new connection,
together with others. A message with a time in microseconds is known then. Messages with coarser times may be
stored twice, unless all that came together have a fraction and come together again. One group of a connection
is underway at a time, so a larger `windowSize` of omrelp sends faster.
"""

from typing import ClassVar, Final

from pipeline.observe import counters as metrics
from pipeline.sources.protocols.contract import Undecodable
from pipeline.sources.protocols.streams.relp import OK, Frame, RelpFraming, open_response, response
from pipeline.sources.protocols.streams.syslog import syslog_records
from pipeline.workers.intake.connections import Connection, StreamServer
from pipeline.workers.intake.identity import of_request

# After an answer, a client sends its window message by message; they are worth one request to the door.
_GATHER_S: Final = 0.01
_GOODBYE: Final = b"0 serverclose 0\n"


class RelpServer(StreamServer):
    """RELP over TCP, or over TLS where `start` is given files."""

    protocol: ClassVar[str] = "relp"

    async def converse(self, connection: Connection) -> None:
        framing = RelpFraming()
        is_open = False
        while data := await connection.read(partial=framing.partial, gather_s=_GATHER_S):
            frames = framing.feed(data)
            connection.keep(framing.size)
            if frames:
                connection.message_ended()
            metrics.messages_shortened(self.protocol, framing.shortened)
            framing.shortened = 0
            messages: list[Frame] = []
            for frame in frames:
                match frame.command:
                    case b"syslog" if is_open:
                        messages.append(frame)
                    case b"open" if not is_open:
                        is_open = True
                        await connection.write(response(frame.number, open_response(frame.data)))
                    case b"close":
                        if await self._store(connection, messages):
                            await connection.write(response(frame.number, b"") + _GOODBYE)
                        return
                    case _:
                        await connection.write(response(frame.number, b"500 command not known here"))
                        name = frame.command.decode()
                        raise Undecodable(f"the command {name!r} comes out of turn, or is unknown")
            if not await self._store(connection, messages):
                return

    async def _store(self, connection: Connection, frames: list[Frame]) -> bool:
        """False when the connection ended before the messages were in."""
        messages = [
            (message, connection.peer) for frame in frames if (message := frame.data.rstrip(b"\r\n\0"))
        ]
        if messages:
            decoded = syslog_records(messages, self.hints())
            body = b"".join(b"%d %s" % (len(message), message) for message, _ in messages)
            identity = of_request(decoded, body, key=self.key, path="relp")
            if not await self.take(connection, decoded, identity=identity, repeats=True):
                return False
        if frames:
            await connection.write(b"".join(response(frame.number, OK) for frame in frames))
        return True
