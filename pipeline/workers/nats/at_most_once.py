"""Reads log subjects of core NATS, without a stream: a message is taken at most once.

A message that is sent while this process or the server is away is lost, and cannot be counted. A message that
is taken is in the ledger once: a batch that Redis did not acknowledge is sent again under its id. Messages
wait in bounded memory, and those without room are dropped and counted.
"""

import threading
import time
import uuid
from collections.abc import Callable
from typing import Final

import redis
from nats.aio.client import Client
from nats.aio.msg import Msg

from pipeline.errors import RedisUnavailable, SourceUnavailable
from pipeline.logs import logger
from pipeline.nats.connection import NatsConnection
from pipeline.nats.streams import StreamMessage
from pipeline.nats.subjects import WORKERS
from pipeline.observe import counters as metrics
from pipeline.observe.presence import Presence
from pipeline.producer import Producer
from pipeline.records.batch import digest
from pipeline.records.delivery import Full
from pipeline.records.held import HeldRecords
from pipeline.units import plural
from pipeline.workers.nats.progress import StreamProgress, report_stream
from pipeline.workers.nats.window import message_bytes, prepare_window

STAGE: Final = "source"
WAIT_S: Final = 0.25  # of messages for others
ROUND_S: Final = 0.02
RETRY_S: Final = 2.0
REPORT_S: Final = 2.0
TEND_S: Final = 5.0
HELD_BYTES: Final = 64 << 20
DROPPED_SAID_S: Final = 60.0


class AtMostOnceReader:
    """The loop. Several processes share the messages, as Opni's services do. `run` returns after `stop`."""

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
        self.connection = connection
        self.source = connection.source
        self.producer = producer
        self.settings = producer.settings
        self.holder = holder
        self.stop = stop
        self.pulse = pulse
        self.beside = beside
        self.presence = Presence(producer.ledger.client, self.settings)
        self.log = logger(role="nats", source=str(self.source))
        self.lines = 0
        self._place = uuid.uuid4().hex  # numbers of messages are of this process alone
        self._subscribed: Client | None = None
        self._lock = threading.Lock()
        self._held: HeldRecords[StreamMessage] = HeldRecords(message_bytes)
        self._number = self._dropped = 0
        self._full_until = self._report_at = self._tend_at = self._dropped_until = 0.0
        self._trouble = ""

    def run(self) -> None:
        """Read until `stop` is set, whatever fails meanwhile."""
        self.log.info("nats.at_most_once")
        while not self.stop.is_set():
            self.pulse()
            try:
                self._round()
                self.stop.wait(ROUND_S)
            except SourceUnavailable as exc:
                self._troubled("source.away", str(exc))
            except (RedisUnavailable, redis.ConnectionError, redis.TimeoutError) as exc:
                self._say("redis.away", str(exc))
                self.stop.wait(RETRY_S)
            except Exception as exc:
                self.log.exception("source.failed")
                self._troubled("source.failed", f"reading {self.source} failed ({exc}); it is tried again")

    def _round(self) -> None:
        client = self.connection.client
        if client is not self._subscribed:
            self.connection.call(self._subscribe(client))
            self._subscribed = client
            self.log.info("nats.reads", subjects=self.source.subjects)
        now = time.monotonic()
        due = self._held and (
            now - self._held.since >= WAIT_S or self._held.size >= self.settings.internal.batch_kib << 10
        )
        if due and now >= self._full_until:
            self._accept()
        if now >= self._report_at:
            self._report_at = now + REPORT_S
            self._report()
        if now >= self._tend_at:
            self._tend_at = now + TEND_S
            self.beside()

    async def _subscribe(self, client: Client) -> None:
        for subject in self.source.subjects:
            for name in (subject, f"{subject}.*"):
                await client.subscribe(name, queue=WORKERS, cb=self._on_message)
        await client.flush(timeout=5)

    async def _on_message(self, message: Msg) -> None:
        with self._lock:
            number = self._number + 1
            taken = StreamMessage(message.subject, message.data, number, time.time_ns(), 0, {})
            if self._held.size + message_bytes(taken) > HELD_BYTES:
                self._dropped += 1
                return
            self._number = number
            self._held.add(taken)

    def _accept(self) -> None:
        with self._lock:
            messages = self._held.offer()
        prepared = prepare_window(
            messages,
            self._place,
            self.settings,
            arrived=self.producer.clock(),
            alone=self.producer.skips,
            is_past=self.producer.is_past,
        )
        if prepared.batches:
            answer = self.producer.accept_all(
                prepared.batches, (), dead=prepared.dead, backfill=prepared.backfill
            )
            if isinstance(answer, Full):
                if answer.refused == 1:
                    self.log.warning("source.waits", why=str(answer))
                self._full_until = time.monotonic() + answer.retry_after_s
                return
        with self._lock:
            self._held.accepted()
        self.lines += prepared.lines
        metrics.nats_read(
            prepared.lines - prepared.unreadable, empty=prepared.empty, unreadable=prepared.unreadable
        )
        for why in prepared.dead.values():
            self.log.warning("nats.unreadable", why=why)

    def _report(self) -> None:
        report_stream(
            self.producer.ledger.client,
            self.settings,
            digest("cursor", "nats", self.holder),
            StreamProgress(
                stream="",
                subjects=",".join(self.source.subjects),
                servers=",".join(self.source.servers),
                sequence=self._number + 1,
                end=self._number + 1,
                lines=self.lines,
                reader=self.holder,
                at_ms=int(self.producer.clock().timestamp() * 1000),
            ),
        )
        with self._lock:
            dropped, self._dropped = self._dropped, 0
        if dropped:
            metrics.nats_dropped(dropped)
            self._dropped_until = time.monotonic() + DROPPED_SAID_S
            self.log.error("nats.dropped", messages=dropped)
        if time.monotonic() < self._dropped_until:
            why = (
                "messages of NATS were dropped, because the pipeline is full; read from a stream "
                "(mode=jetstream)"
            )
            self.presence.complain(STAGE, f"{why}, {plural(dropped, 'message')} lately" if dropped else why)
        elif self.connection.fault:
            raise self.connection.unavailable("the connection broke")
        else:
            self._say("", "")

    def _troubled(self, event: str, why: str) -> None:
        try:
            self._say(event, why)
            self.presence.complain(STAGE, why)
        except RedisUnavailable as exc:
            self._say("redis.away", str(exc))
        self.stop.wait(RETRY_S)

    def _say(self, event: str, why: str) -> None:
        """Log a change once, not every try. `event` "": all is well."""
        if event == self._trouble:
            return
        was, self._trouble = self._trouble, event
        if event:
            self.log.warning(event, why=why)
        elif was:
            self.log.info("source.back")
