"""Reads a stream of JetStream into the ledger: each message once.

A window of messages and the sequence behind its last one are accepted by one script. A reader, a server or
Redis that is killed therefore neither loses nor doubles a message. Nothing is acknowledged, so nothing comes
twice. One process reads under a lease; should two read for a moment, the cursor lets one of them in.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import redis

from pipeline.errors import CursorMoved, RedisUnavailable, SourceUnavailable
from pipeline.ledger.intake import CursorStep
from pipeline.logs import logger
from pipeline.nats.connection import NatsConnection
from pipeline.nats.streams import StreamFacts, StreamMessage, StreamReader, ensure_in, ensure_out, facts_of
from pipeline.observe import counters as metrics
from pipeline.observe.presence import Presence
from pipeline.producer import Producer
from pipeline.records.batch import digest
from pipeline.records.delivery import Accepted, Full
from pipeline.records.held import HeldRecords
from pipeline.redis.leases import NATS, HeldLease, Leases, Refused
from pipeline.settings.nats import NatsSource
from pipeline.sources.nats.cursor import StreamCursor
from pipeline.units import plural
from pipeline.workers.nats.progress import StreamProgress, report_stream
from pipeline.workers.nats.window import OPEN_S, message_bytes, prepare_window, window_length

STAGE: Final = "source"
LOOK_S: Final = 5.0  # between two looks at the state of the stream
REPORT_S: Final = 2.0
RETRY_S: Final = 2.0  # after a failure; a complaint is forgotten after 15 s, so it has to be repeated sooner
AGAIN_S: Final = 0.5  # after a broken connection: the server is often back at once
WAIT_S: Final = 0.1  # of a request for messages; at the end of the stream it returns then
AT_ONCE: Final = 2_000  # messages of a request
AT_ONCE_BYTES: Final = 8 << 20
HELD_BYTES: Final = 32 << 20  # of messages that are not accepted yet
LOST_SAID_S: Final = 60.0  # how long `logweir status` tells of removed messages


class NatsReader:
    """The loop of one stream. `run` returns after `stop` was set."""

    def __init__(
        self,
        connection: NatsConnection,
        producer: Producer,
        *,
        holder: str,
        stop: threading.Event,
        pulse: Callable[[], None] = lambda: None,
        beside: Callable[[], None] = lambda: None,
    ) -> None:
        """`beside`: called every few seconds by the process that has the lease."""
        self.connection = connection
        self.source: NatsSource = connection.source
        self.producer = producer
        self.settings = producer.settings
        self.intake = producer.ledger.intake
        self.holder = holder
        self.stop = stop
        self.pulse = pulse
        self.beside = beside
        self.leases = Leases(producer.ledger.client, self.settings)
        self.presence = Presence(producer.ledger.client, self.settings)
        self.log = logger(role="nats", source=str(self.source), stream=self.source.stream)
        self.cursor_key = digest("cursor", "nats", self.source.stream)
        self.cursor = StreamCursor("", 0)
        self.lines = 0
        self._reader: StreamReader | None = None
        self._held: HeldRecords[StreamMessage] = HeldRecords(
            message_bytes
        )  # from the cursor on without a gap
        self._end = 0  # behind the last message of the stream, as of the last look
        self._look_at = self._report_at = self._full_until = 0.0
        self._trouble = ("", "")
        self._lost = ("", 0.0)  # the sentence on messages that were removed unread, and until when it is said

    def run(self) -> None:
        """Read until `stop` is set, whatever fails meanwhile."""
        while not self.stop.is_set():
            self.pulse()
            try:
                answer = self.leases.request(NATS, self.holder)
                if isinstance(answer, Refused):
                    self.stop.wait(min(max(answer.wait_ms, 50), 1000) / 1000)
                    continue
                with self.leases.holding(answer) as lease:
                    self._while_held(lease)
            except SourceUnavailable as exc:
                self._troubled("source.away", str(exc))
            except (RedisUnavailable, redis.ConnectionError, redis.TimeoutError) as exc:
                self._say("redis.away", str(exc))
                self.stop.wait(AGAIN_S)
            except Exception as exc:  # the next try begins at the ledger's cursor
                self.log.exception("source.failed")
                self._troubled(
                    "source.failed",
                    f"reading {self.source} failed ({type(exc).__name__}: {exc}); it is tried again",
                )

    def _while_held(self, lease: HeldLease) -> None:
        self._open()
        try:
            while not self.stop.is_set() and not lease.lost.is_set():
                self.pulse()
                try:
                    self._round()
                except CursorMoved as moved:
                    # Redis lost its last moments, or another reader was quicker.
                    self.log.info("nats.cursor_moved", cursor=moved.cursor, was=str(self.cursor))
                    self._reopen()
            self._report()
        finally:
            self._leave()

    def _round(self) -> None:
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._look()
            self.beside()
        if self._full_until > now:
            self.stop.wait(min(WAIT_S, self._full_until - now))
        elif self._held.size < HELD_BYTES:
            self._fetch()
        if self._full_until <= time.monotonic():
            self._take_in()
        if now >= self._report_at:
            self._report_at = now + REPORT_S
            self._report()

    # ---- where ------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Begins at the ledger's cursor."""
        facts = ensure_in(self.connection, self.source)
        ensure_out(self.connection, self.source)
        self._held.clear()
        text = self.intake.cursor(self.cursor_key)
        standing = StreamCursor.parse(text) if text else None
        self.cursor = (
            standing if standing and standing.stream_id == facts.id else self._begin(facts, standing)
        )
        if self.cursor.sequence > facts.last + 1:
            self.log.error("nats.stream_was_cut", cursor=self.cursor.sequence, end=facts.last)
            self._move(facts.last + 1)
        if self.cursor.sequence < facts.first:
            self._skip(facts.first)
        self._end = facts.last + 1
        client, js = self.connection.client, self.connection.jetstream
        self._reader = StreamReader(client, js, self.source.stream)
        self.connection.call(self._reader.open(sequence=self.cursor.sequence))
        self._look_at = time.monotonic() + LOOK_S
        self.log.info("nats.reads", sequence=self.cursor.sequence, end=facts.last)

    def _begin(self, facts: StreamFacts, standing: StreamCursor | None) -> StreamCursor:
        """Where a stream begins that was never read."""
        if standing is not None:
            self.log.warning("nats.stream_made_anew", was=str(standing), sequence=facts.first)
        fresh = standing is None and self.source.start == "latest"
        begin = StreamCursor(facts.id, facts.last + 1 if fresh else facts.first)
        step = CursorStep(key=self.cursor_key, cursor=str(begin), after=str(standing) if standing else "")
        now = self.intake.move_cursor(step)
        if now != step.cursor:
            raise CursorMoved(f"another process began to read {self.source.stream}", now)
        return begin

    def _look(self) -> None:
        """Messages may be removed where none comes any more, and Redis may have gone back."""
        facts = facts_of(self.connection, self.source.stream)
        if facts.id != self.cursor.stream_id:
            raise SourceUnavailable(
                f"the stream {self.source.stream} was made anew; it is read from its begin"
            )
        self._end = facts.last + 1
        if not self._held and facts.first > self.cursor.sequence:
            self._skip(facts.first)
            self._reopen()
        if self.intake.cursor(self.cursor_key) != str(self.cursor):
            self.log.info("nats.cursor_moved", was=str(self.cursor))
            self._reopen()

    def _reopen(self) -> None:
        self._leave()
        self._open()

    def _leave(self) -> None:
        reader, self._reader = self._reader, None
        if reader is None:
            return
        with suppress(SourceUnavailable):  # the server forgets the consumer by itself
            self.connection.call(reader.close(), 2.0)

    def _move(self, sequence: int, *, lost: int = 0) -> None:
        step = CursorStep(
            key=self.cursor_key,
            cursor=str(StreamCursor(self.cursor.stream_id, sequence)),
            after=str(self.cursor),
        )
        now = self.intake.move_cursor(step, lost=lost)
        if now != step.cursor:
            raise CursorMoved(f"{self.source.stream} goes on from another place", now)
        self.cursor = StreamCursor(self.cursor.stream_id, sequence)

    def _skip(self, first: int) -> None:
        """The stream has no message between the cursor and this one: it removed them unread."""
        was, lost = self.cursor.sequence, first - self.cursor.sequence
        self._move(first, lost=lost)
        why = (
            f"NATS removed {plural(lost, 'message')} of the stream {self.source.stream} before they were read "
            f"(sequences {was} to {first - 1}); read sooner, or let the stream keep them for longer"
        )
        self._lost = (why, time.monotonic() + LOST_SAID_S)
        self.log.error("nats.messages_lost", first=was, messages=lost)

    # ---- messages -----------------------------------------------------------------------------------

    def _fetch(self) -> None:
        assert self._reader is not None  # noqa: S101 - it is open
        # A message may be as large as the server allows; a request for fewer bytes would never get it.
        most = max(AT_ONCE_BYTES, 2 * self.connection.max_payload)
        for message in self.connection.call(self._reader.fetch(AT_ONCE, most, WAIT_S), WAIT_S + 5.0):
            self._add(message)

    def _add(self, message: StreamMessage) -> None:
        expected = self._held.records[-1].sequence + 1 if self._held else self.cursor.sequence
        if message.sequence < expected:
            return
        if message.sequence > expected:
            while self._held:  # the messages before the gap first
                if not self._accept():
                    raise SourceUnavailable(
                        f"{self.source.stream} has a gap at {expected}, and the pipeline is full before it"
                    )
            self._skip(message.sequence)
        self._held.add(message)

    def _take_in(self) -> None:
        """Accepts the windows that have ended."""
        while self._held:
            has_ended = window_length(self._held.records, self.settings) < len(self._held)
            if not has_ended and self._held.since > time.monotonic() - OPEN_S:
                return
            if not self._accept():
                return

    def _accept(self) -> bool:
        """The first window. False where the pipeline is full."""
        messages = self._held.offer(window_length(self._held.records, self.settings))
        prepared = prepare_window(
            messages,
            f"{self.source.stream} {self.cursor.stream_id}",
            self.settings,
            arrived=self.producer.clock(),
            alone=self.producer.skips,
            is_past=self.producer.is_past,
        )
        end = StreamCursor(self.cursor.stream_id, messages[-1].sequence + 1)
        step = CursorStep(key=self.cursor_key, cursor=str(end), after=str(self.cursor))
        if prepared.batches:
            answer = self.producer.accept_all(
                prepared.batches, (), dead=prepared.dead, backfill=prepared.backfill, step=step
            )
            if isinstance(answer, Full):
                if answer.refused == 1:
                    self.log.warning("source.waits", why=str(answer))
                self._full_until = time.monotonic() + answer.retry_after_s
                return False
            assert isinstance(answer, Accepted)  # noqa: S101 - there is no request that could be known
            self.cursor = end
        else:
            self._move(end.sequence)
        self._held.accepted()
        self.lines += prepared.lines
        metrics.nats_read(
            prepared.lines - prepared.unreadable, empty=prepared.empty, unreadable=prepared.unreadable
        )
        for why in prepared.dead.values():
            self.log.warning("nats.unreadable", why=why)
        return True

    # ---- what is said -------------------------------------------------------------------------------

    def _report(self) -> None:
        """Says how far the stream is read, and what is wrong."""
        report_stream(
            self.producer.ledger.client,
            self.settings,
            self.cursor_key,
            StreamProgress(
                stream=self.source.stream,
                subjects=",".join(self.source.subjects),
                servers=",".join(self.source.servers),
                sequence=self.cursor.sequence,
                end=max(self._end, self.cursor.sequence),
                lines=self.lines,
                reader=self.holder,
                at_ms=int(self.producer.clock().timestamp() * 1000),
            ),
        )
        why, until = self._lost
        if until > time.monotonic():
            self.presence.complain(STAGE, why)
        else:
            self._say("", "")

    def _troubled(self, event: str, why: str) -> None:
        try:
            self._say(event, why)
            self.presence.complain(STAGE, why)
        except RedisUnavailable as exc:
            self._say("redis.away", str(exc))
        self.stop.wait(AGAIN_S if event == "source.away" else RETRY_S)

    def _say(self, event: str, why: str) -> None:
        """Log a change once, not every try. `event` "": all is well."""
        if event == self._trouble[0]:
            return
        was, self._trouble = self._trouble, (event, why)
        if event:
            self.log.warning(event, why=why)
        elif was[0]:
            self.log.info("source.back")
