"""The home of confluent-kafka: a cluster of Kafka as the reader sees it.

Partitions are assigned by hand, at offsets of the ledger; Kafka's consumer groups decide nothing here. The
library connects again for ever with growing pauses, and fetches ahead into a bounded queue.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined] # of its manual

from pipeline.errors import SourceUnavailable
from pipeline.settings.kafka import KafkaSource

ASK_S: Final = 5.0  # for answers about topics
AHEAD_KIB: Final = 16_384  # fetched before it is read
AHEAD_RECORDS: Final = 20_000
BACK_OFF_MAX_MS: Final = 10_000
NO_ID: Final = "AAAAAAAAAAAAAAAAAAAAAA"  # the topic id of brokers that have none
# The cursor is behind the first record or beyond the last one.
_OUT_OF_RANGE: Final = (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)
_UNKNOWN: Final = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC)
# Without a further word these only say that a connection broke, which the library mends.
_UNREACHABLE: Final = (
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._AUTHENTICATION,
    KafkaError._SSL,
    KafkaError._RESOLVE,
)

Place = tuple[str, int]  # topic and partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic that is read. `id` tells it from another one of its name, "" where the broker has none."""

    name: str
    id: str
    partitions: int


class KafkaCluster:
    """The topics of one `KafkaSource`. Not thread-safe."""

    def __init__(self, source: KafkaSource) -> None:
        self.source = source
        self.fault = ""  # the last word of the library on why no broker answers
        for file in (source.ca, source.cert, source.key):
            if file is not None and not file.is_file():
                raise SourceUnavailable(
                    f"{source} cannot be read: the file {file} of kafka_source is not there"
                )
        options = _options(source) | {"error_cb": self._on_error}
        with self._asking():
            self._admin = AdminClient(options)
            self._consumer = Consumer(options | _reading(source))

    def close(self) -> None:
        self._consumer.close()

    def look(self) -> tuple[str, list[Topic]]:
        """The id of the cluster, and the topics that the source names. Raises SourceUnavailable."""
        with self._asking():
            found = self._consumer.list_topics(timeout=ASK_S)
        wanted = {
            name: len(topic.partitions)
            for name, topic in found.topics.items()
            if any(_names(pattern, name) for pattern in self.source.topics)
        }
        ids = self._ids(sorted(wanted))
        self.fault = ""
        topics = [
            Topic(name=name, id=ids[name], partitions=count)
            for name, count in sorted(wanted.items())
            if name in ids and count
        ]
        return found.cluster_id or self.source.servers, topics

    def _ids(self, names: Sequence[str]) -> Mapping[str, str]:
        """Without topics that have gone meanwhile."""
        if not names:
            return {}
        found = {}
        for name, future in self._admin.describe_topics(
            TopicCollection(list(names)), request_timeout=ASK_S
        ).items():
            try:
                with self._asking():
                    id_ = str(future.result().topic_id or NO_ID)
            except _NoTopic:
                continue
            found[name] = "" if id_ == NO_ID else id_
        return found

    def span(self, place: Place) -> tuple[int, int]:
        """The offsets of the first record and behind the last one. Raises SourceUnavailable."""
        with self._asking():
            low, high = self._consumer.get_watermark_offsets(TopicPartition(*place), timeout=ASK_S)
        return low, high

    def end(self, place: Place) -> int:
        """The offset behind the last record as of the last fetch, -1 if there was none."""
        span = self._consumer.get_watermark_offsets(TopicPartition(*place), cached=True)
        return span[1] if span else -1

    def ends(self, places: Collection[Place]) -> Mapping[Place, int]:
        """The offsets behind the last records, now. Without partitions that do not tell.

        A reader that pauses fetches nothing, so `end` would say that nothing more came."""
        latest = {TopicPartition(*place): OffsetSpec.latest() for place in places}  # type: ignore[no-untyped-call]
        if not latest:
            return {}
        found = {}
        for place, future in self._admin.list_offsets(latest, request_timeout=ASK_S).items():
            with suppress(KafkaException):
                found[place.topic, place.partition] = int(future.result().offset)
        return found

    def first_since(self, place: Place, moment: datetime) -> int:
        """The offset of the first record of this time or later, -1 where there is none. Raises
        SourceUnavailable."""
        question = TopicPartition(*place, int(moment.timestamp() * 1000))
        with self._asking():
            (found,) = self._consumer.offsets_for_times([question], timeout=ASK_S)
        return int(found.offset)

    def read_from(self, offsets: Mapping[Place, int]) -> None:
        """Begins to read these partitions there, those that are read already too."""
        self.leave(offsets.keys())
        if offsets:
            self._consumer.incremental_assign(
                [TopicPartition(*place, offset) for place, offset in offsets.items()]
            )

    def leave(self, places: Collection[Place]) -> None:
        """Reads these partitions no more."""
        read = {(one.topic, one.partition) for one in self._consumer.assignment()}
        if given_up := [TopicPartition(*place) for place in places if place in read]:
            self._consumer.incremental_unassign(given_up)

    def poll(self, records: int, seconds: float) -> tuple[list[Message], list[Place]]:
        """At most so many records, and the partitions whose next offset is out of range."""
        found: list[Message] = []
        lost: list[Place] = []
        for message in self._consumer.consume(records, seconds):
            error = message.error()
            if error is None:
                found.append(message)
            elif error.code() in _OUT_OF_RANGE:
                lost.append((message.topic() or "", message.partition() or 0))
            elif error.code() not in _UNKNOWN:  # the next look notices what has gone
                self.fault = f"{message.topic()} cannot be read: {error.str()}"
        if found:
            self.fault = ""
        return found, lost

    def tell(self, offsets: Mapping[Place, int]) -> None:
        """Commits these offsets to the consumer group, for the tools of Kafka alone: errors are ignored."""
        if offsets:
            places = [TopicPartition(*place, offset) for place, offset in offsets.items()]
            try:
                self._consumer.commit(offsets=places, asynchronous=True)
            except KafkaException:
                return

    def _on_error(self, error: KafkaError) -> None:
        if error.code() in _UNREACHABLE:
            self.fault = error.str()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except KafkaException as exc:
            error = exc.args[0]
            if error.code() in _UNKNOWN:
                raise _NoTopic(f"{self.source}: {error.str()}") from exc
            why = f"{error.str()}; {self.fault}" if self.fault else error.str()
            raise SourceUnavailable(f"{self.source} cannot be read: {why}") from exc


class _NoTopic(SourceUnavailable):
    """A topic or partition that does not exist any more."""


def _names(pattern: str, topic: str) -> bool:
    """A pattern never names topics of Kafka itself."""
    if "*" in pattern or "?" in pattern:
        return not topic.startswith("__") and fnmatchcase(topic, pattern)
    return pattern == topic


def _reading(source: KafkaSource) -> dict[str, Any]:
    return {
        "group.id": source.group,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "allow.auto.create.topics": False,
        "queued.max.messages.kbytes": AHEAD_KIB,
        "queued.min.messages": AHEAD_RECORDS,
        "fetch.max.bytes": AHEAD_KIB * 1024,
    }


def _options(source: KafkaSource) -> dict[str, Any]:
    quiet = logging.getLogger("logweir.kafka")
    quiet.addHandler(logging.NullHandler())
    quiet.propagate = False  # the library repeats each failed try; the reader says it once
    options: dict[str, Any] = {
        "bootstrap.servers": source.servers,
        "client.id": "logweir",
        "reconnect.backoff.max.ms": BACK_OFF_MAX_MS,
        "socket.keepalive.enable": True,
        "logger": quiet,
        "security.protocol": ("SASL_" if source.user else "") + ("SSL" if source.tls else "PLAINTEXT"),
    }
    if source.user:
        options |= {
            "sasl.mechanism": source.mechanism,
            "sasl.username": source.user,
            "sasl.password": source.password,
        }
    files = {
        "ssl.ca.location": source.ca,
        "ssl.certificate.location": source.cert,
        "ssl.key.location": source.key,
    }
    return options | {name: str(path) for name, path in files.items() if path is not None}
