"""Reads topics of one Kafka cluster into the ledger: each record once.

A batch and the offset behind its last record are accepted by one script. A reader, a broker or Redis that is
killed therefore neither loses nor doubles a record. Readers divide the partitions by leases
(redis/partition_leases.py). Two of them may read one partition for a moment; the cursor lets one of them in.
Offsets are told to a consumer group of Kafka too, for its own tools. Nothing here reads them back.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

import redis

from pipeline.errors import CursorMoved, RedisUnavailable, SourceUnavailable
from pipeline.ledger.intake import CursorStep
from pipeline.logs import logger
from pipeline.observe import counters as metrics
from pipeline.observe.presence import Presence
from pipeline.producer import Producer
from pipeline.records.batch import digest
from pipeline.records.delivery import Accepted, Full
from pipeline.redis.partition_leases import PartitionLeases
from pipeline.settings.kafka import KafkaSource
from pipeline.sources.flush_policy import MOST_S, delay_s
from pipeline.sources.kafka.client import KafkaCluster, Place, Topic
from pipeline.sources.kafka.cursor import PartitionCursor
from pipeline.sources.kafka.values import KafkaRecord
from pipeline.units import plural
from pipeline.workers.kafka.partition import Partition, cursor_key
from pipeline.workers.kafka.progress import PartitionProgress, report

STAGE: Final = "source"
LOOK_S: Final = 10.0  # between two looks for new topics and partitions
REPORT_S: Final = 2.0
RETRY_S: Final = 2.0  # after a failure; a complaint is forgotten after 15 s, so it has to be repeated sooner
POLL_S: Final = 0.1
AT_ONCE: Final = 1_000  # records of a poll
HELD_BYTES: Final = 32 << 20  # of records that no batch has yet, over all partitions
# A batch costs stage ingest 22 ms, and each partition makes its own. So many of them wait longer for records.
PARTITION_S: Final = 0.02
LONGEST_S: Final = 5.0
LOST_SAID_S: Final = 60.0  # how long `logweir status` tells of removed records


class KafkaReader:
    """The loop of one source. `run` returns after `stop` was set."""

    def __init__(
        self,
        source: KafkaSource,
        producer: Producer,
        *,
        holder: str,
        stop: threading.Event,
        pulse: Callable[[], None] = lambda: None,
    ) -> None:
        self.source = source
        self.producer = producer
        self.settings = producer.settings
        self.intake = producer.ledger.intake
        self.holder = holder
        self.stop = stop
        self.pulse = pulse
        self.presence = Presence(producer.ledger.client, self.settings)
        self.log = logger(role="kafka", source=str(source))
        self.partitions: dict[Place, Partition] = {}
        self._topics: dict[str, Topic] = {}
        self._cluster_id = ""
        self._shares: PartitionLeases | None = None
        self._look_at = self._share_at = self._report_at = self._full_until = 0.0
        self._pending = 0  # batches in the pipeline at the last accept
        self._untold: dict[Place, int] = {}
        self._trouble = ("", "")
        self._lost = ("", 0.0)  # the sentence on records that were removed unread, and until when it is said

    def run(self) -> None:
        """Read until `stop` is set, whatever fails meanwhile."""
        while not self.stop.is_set():
            self.pulse()
            try:
                self._while_connected()
            except SourceUnavailable as exc:
                self._troubled("source.away", str(exc))
            except (RedisUnavailable, redis.ConnectionError, redis.TimeoutError) as exc:
                self._say("redis.away", str(exc))
                self.stop.wait(RETRY_S)
            except Exception as exc:  # the next try begins at the ledger's cursors
                self.log.exception("source.failed")
                self._troubled(
                    "source.failed",
                    f"reading {self.source} failed ({type(exc).__name__}: {exc}); it is tried again",
                )

    def _while_connected(self) -> None:
        cluster = KafkaCluster(self.source)
        self._look_at = self._share_at = 0.0
        try:
            while not self.stop.is_set():
                self.pulse()
                self._round(cluster)
            self._report(cluster)
            self._leave()
        finally:
            self.partitions.clear()
            cluster.close()

    def _round(self, cluster: KafkaCluster) -> None:
        now = time.monotonic()
        if now >= self._look_at:
            self._look(cluster)
            self._look_at = now + LOOK_S
        if now >= self._share_at and self._shares is not None:
            self._share_at = now + self._shares.ttl_ms / 3000
            self._share(cluster, self._shares)
        if self._full_until > now:
            self.stop.wait(min(POLL_S, self._full_until - now))
        elif not self.partitions:
            self.stop.wait(POLL_S)
        elif sum(partition.held.size for partition in self.partitions.values()) < HELD_BYTES:
            self._poll(cluster)
        if self._full_until <= time.monotonic():
            self._take_in(cluster)
        if now >= self._report_at:
            self._report_at = now + REPORT_S
            self._report(cluster)

    # ---- which partitions ------------------------------------------------------------------------

    def _look(self, cluster: KafkaCluster) -> None:
        """Topics and partitions, and a cursor for each partition that has none."""
        self._cluster_id, topics = cluster.look()
        found = {topic.name: topic for topic in topics}
        for topic in topics:
            self._pin(cluster, topic)
        for place, end in cluster.ends(self.partitions).items():
            self.partitions[place].end = end
        if self._shares is None:
            name = digest("kafka", self._cluster_id, *sorted(self.source.topics))
            self._shares = PartitionLeases(
                self.producer.ledger.client, self.settings, source=name, holder=self.holder
            )
        if found != self._topics:
            counts = {topic.name: topic.partitions for topic in topics}
            self.log.info("kafka.topics", partitions=counts)
            self._topics, self._share_at = found, 0.0
        if not found:
            raise SourceUnavailable(
                f"no topic is called {' or '.join(self.source.topics)} at {self.source.servers} yet; it is "
                "read as soon as there is one, or correct kafka_source"
            )

    def _pin(self, cluster: KafkaCluster, topic: Topic) -> None:
        """Where the partitions of this topic begin that were never read.

        All begin at once, whoever reads them later. A partition that comes to a known topic is read from its
        first record, because its records came after `start`. A topic is known if its partition 0 has a
        cursor, which comes last: several readers may begin together, and one may be killed meanwhile."""
        places = [(topic.name, number) for number in range(topic.partitions)]
        standing = self.intake.cursors([cursor_key(self._cluster_id, place) for place in places])
        is_new = not standing[0]
        steps: list[CursorStep] = []
        for place, text in zip(places, standing, strict=True):
            cursor = PartitionCursor.parse(text) if text else None
            if cursor is not None and cursor.topic_id == topic.id:
                continue
            if cursor is None:
                offset = self._start(cluster, place) if is_new else cluster.span(place)[0]
            elif cursor.topic_id and topic.id:
                offset = cluster.span(place)[0]
                self.log.warning("kafka.topic_made_anew", topic=topic.name, partition=place[1], offset=offset)
            else:  # ids came with a newer broker
                offset = cursor.offset
            begin = str(PartitionCursor(topic.id, offset))
            steps.append(CursorStep(key=cursor_key(self._cluster_id, place), cursor=begin, after=text or ""))
        for step in reversed(steps):
            self.intake.move_cursor(step)
        if steps:
            self._share_at = 0.0
            self._drop(cluster, [place for place in self.partitions if place[0] == topic.name])

    def _start(self, cluster: KafkaCluster, place: Place) -> int:
        low, high = cluster.span(place)
        if self.source.start == "earliest":
            return low
        if isinstance(self.source.start, str):
            return high
        first = cluster.first_since(place, self.source.start)
        return high if first < 0 else first

    def _share(self, cluster: KafkaCluster, shares: PartitionLeases) -> None:
        """Renews the leases; opens what this reader has new, and leaves what it has no more."""
        names = {
            f"{t.name}/{number}": (t.name, number)
            for t in self._topics.values()
            for number in range(t.partitions)
        }
        tokens = {names[name]: token for name, token in shares.renew(names).items()}
        self._drop(cluster, [place for place in self.partitions if place not in tokens])
        # A Redis that went back stands behind what this reader had accepted, though no record comes any more.
        places = list(self.partitions)
        texts = self.intake.cursors([cursor_key(self._cluster_id, place) for place in places])
        moved = [
            place
            for place, text in zip(places, texts, strict=True)
            if text != str(self.partitions[place].cursor)
        ]
        self._drop(cluster, moved)
        self._open(cluster, {place: token for place, token in tokens.items() if place not in self.partitions})

    def _open(self, cluster: KafkaCluster, tokens: Mapping[Place, int]) -> None:
        """Begins at the ledger's cursors."""
        places = list(tokens)
        texts = self.intake.cursors([cursor_key(self._cluster_id, place) for place in places])
        offsets: dict[Place, int] = {}
        for place, text in zip(places, texts, strict=True):
            if not text:
                self._look_at = 0.0  # Redis forgot it
                continue
            cursor = PartitionCursor.parse(text)
            self.partitions[place] = Partition(
                cluster=self._cluster_id, place=place, cursor=cursor, token=tokens[place]
            )
            offsets[place] = cursor.offset
        if offsets:
            cluster.read_from(offsets)
            self.log.info("kafka.reads", partitions=len(self.partitions), new=len(offsets))

    def _drop(self, cluster: KafkaCluster, places: list[Place]) -> None:
        cluster.leave(places)
        for place in places:
            del self.partitions[place]

    def _leave(self) -> None:
        """The end of this reader: others take its partitions at once."""
        if self._shares is not None:
            self._shares.leave()

    # ---- records ---------------------------------------------------------------------------------

    def _poll(self, cluster: KafkaCluster) -> None:
        messages, lost = cluster.poll(AT_ONCE, POLL_S)
        for message in messages:
            place = (message.topic() or "", message.partition() or 0)
            if (partition := self.partitions.get(place)) is None:
                continue
            kind, millis = message.timestamp()
            partition.add(
                KafkaRecord(
                    offset=message.offset() or 0,
                    value=message.value(),
                    key=message.key(),
                    headers=list(message.headers() or ()),  # type: ignore[arg-type] # pairs, never a dict
                    millis=millis if kind else 0,
                )
            )
        for place in lost:
            if place in self.partitions:
                self.partitions[place].out_of_range = True

    def _take_in(self, cluster: KafkaCluster) -> None:
        """Accepts what has waited long enough, or is a whole batch."""
        filled = [partition for partition in self.partitions.values() if partition.held]
        several_s = min(LONGEST_S, PARTITION_S * len(filled))
        wait_s = max(delay_s(self._pending, most_s=MOST_S), several_s)
        total = sum(partition.held.size for partition in filled)
        due_since = time.monotonic() - wait_s
        for partition in sorted(filled, key=lambda one: one.held.since):
            full = partition.is_full(self.settings) or total >= HELD_BYTES or partition.out_of_range
            if (full or partition.held.since <= due_since) and not self._accept(cluster, partition):
                return
        for partition in list(self.partitions.values()):
            if partition.out_of_range and not partition.held:
                self._find_place(cluster, partition)

    def _accept(self, cluster: KafkaCluster, partition: Partition) -> bool:
        """False where the pipeline is full."""
        prepared = partition.prepare(
            self.source,
            self.settings,
            arrived=self.producer.clock(),
            alone=self.producer.skips,
            is_past=self.producer.is_past,
        )
        try:
            if prepared.batches:
                answer = self.producer.accept_all(
                    prepared.batches, (), dead=prepared.dead, backfill=prepared.backfill, step=prepared.step
                )
            else:
                standing = self.intake.move_cursor(prepared.step)
                if standing != prepared.step.cursor:
                    raise CursorMoved(f"{partition.name} goes on from another place", standing)
                answer = Accepted(batch_id="")
        except CursorMoved as moved:
            # Redis lost its last moments, or another reader was quicker.
            self.log.info(
                "kafka.cursor_moved", partition=partition.name, cursor=moved.cursor, was=prepared.step.after
            )
            self._drop(cluster, [partition.place])
            self._open(cluster, {partition.place: partition.token})
            return True
        if isinstance(answer, Full):
            if answer.refused == 1:
                self.log.warning("source.waits", why=str(answer))
            self._full_until = time.monotonic() + answer.retry_after_s
            return False
        self._pending = answer.pending_batches if isinstance(answer, Accepted) else 0
        partition.accepted(prepared)
        self._untold[partition.place] = partition.cursor.offset
        metrics.kafka_read(
            prepared.records - prepared.tombstones - prepared.unreadable,
            tombstones=prepared.tombstones,
            unreadable=prepared.unreadable,
        )
        if prepared.dead:
            for why in prepared.dead.values():
                self.log.warning("kafka.unreadable", why=why)
        return True

    def _find_place(self, cluster: KafkaCluster, partition: Partition) -> None:
        """Kafka has no record at the cursor: they were removed before they were read, or the log was cut."""
        low, high = cluster.span(partition.place)
        was, partition.out_of_range = partition.cursor, False
        now = min(max(was.offset, low), high)
        lost = max(0, low - was.offset)
        step = CursorStep(
            key=cursor_key(self._cluster_id, partition.place),
            cursor=str(PartitionCursor(was.topic_id, now)),
            after=str(was),
        )
        if now != was.offset and self.intake.move_cursor(step, lost=lost) == step.cursor:
            if lost:
                why = (
                    f"Kafka removed up to {plural(lost, 'record')} of {partition.name} before they were read "
                    f"(offsets {was.offset} to {low - 1}); read sooner, or let the topic keep them for longer"
                )
                self._lost = (why, time.monotonic() + LOST_SAID_S)
                self.log.error("kafka.records_lost", partition=partition.name, first=was.offset, records=lost)
            else:
                self.log.error("kafka.log_was_cut", partition=partition.name, cursor=was.offset, end=high)
        self._drop(cluster, [partition.place])
        self._open(cluster, {partition.place: partition.token})

    # ---- what is said ----------------------------------------------------------------------------

    def _report(self, cluster: KafkaCluster) -> None:
        """Says how far each partition is, and what is wrong."""
        cluster.tell(self._untold)
        self._untold.clear()
        now_ms = math.floor(self.producer.clock().timestamp() * 1000)
        report(
            self.producer.ledger.client,
            self.settings,
            {
                cursor_key(self._cluster_id, place): PartitionProgress(
                    topic=place[0],
                    partition=place[1],
                    servers=self.source.servers,
                    offset=partition.cursor.offset,
                    end=max(cluster.end(place), partition.end, partition.cursor.offset),
                    lines=partition.lines,
                    reader=self.holder,
                    token=partition.token,
                    at_ms=now_ms,
                )
                for place, partition in self.partitions.items()
            },
        )
        why, until = self._lost
        if cluster.fault:
            self._complain("source.away", f"{self.source} cannot be read: {cluster.fault}")
        elif until > time.monotonic():
            self.presence.complain(STAGE, why)
        else:
            self._say("", "")

    def _troubled(self, event: str, why: str) -> None:
        try:
            self._complain(event, why)
        except RedisUnavailable as exc:
            self._say("redis.away", str(exc))
        self.stop.wait(RETRY_S)

    def _complain(self, event: str, why: str) -> None:
        self._say(event, why)
        self.presence.complain(STAGE, why)

    def _say(self, event: str, why: str) -> None:
        """Log a change once, not every try. `event` "": all is well."""
        if (event, why) == self._trouble:
            return
        was, self._trouble = self._trouble, (event, why)
        if event:
            self.log.warning(event, why=why)
        elif was[0]:
            self.log.info("source.back")
