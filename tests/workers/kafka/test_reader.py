"""Topics of a broker on TCP into a real ledger: every record once, whatever is killed or removed."""

import threading
import uuid
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis
from kafka_broker import KafkaBroker
from killed_intake import producer_of
from killed_kafka import run_until_killed
from polling import wait_until
from power_cut import power
from tls_redis import Certificates, tls_door

from pipeline.ledger.ledger import Ledger
from pipeline.observe.presence import Presence
from pipeline.redis.connection import connect
from pipeline.redis.partition_leases import PartitionLeases
from pipeline.settings import Settings
from pipeline.settings.kafka import KafkaSource
from pipeline.sources.kafka.client import KafkaCluster, Place
from pipeline.sources.pushed import framed
from pipeline.workers.kafka import reader as reader_module
from pipeline.workers.kafka.partition import cursor_key
from pipeline.workers.kafka.progress import stored_partitions
from pipeline.workers.kafka.reader import KafkaReader

LIMIT_S = 30


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaBroker]:
    with KafkaBroker.running() as one:
        yield one


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A name of this try of this test alone."""
    name = request.node.name[:80].replace("[", "-").replace("]", "")
    return f"{name}-{uuid.uuid4().hex[:8]}"


class Readers:
    """Readers as threads."""

    def __init__(self, settings: Settings, broker: KafkaBroker) -> None:
        self.settings = settings
        self.broker = broker
        self._running: list[tuple[KafkaReader, threading.Thread]] = []

    def start(
        self, path: str, holder: str = "one", *, settings: Settings | None = None, **query: str
    ) -> KafkaReader:
        source = KafkaSource.parse(self.broker.url(path, query))
        reader = KafkaReader(
            source, producer_of(settings or self.settings), holder=holder, stop=threading.Event()
        )
        thread = threading.Thread(target=reader.run, daemon=True)
        thread.start()
        self._running.append((reader, thread))
        return reader

    def stop(self) -> None:
        for reader, _ in self._running:
            reader.stop.set()
        for _, thread in self._running:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        self._running.clear()


@pytest.fixture
def own(settings: Settings) -> Settings:
    """Small batches, so that a topic makes many, and short leases."""
    return settings.replace(batch_records=100, lease_ttl_ms=2_000)


@pytest.fixture
def readers(own: Settings, broker: KafkaBroker) -> Iterator[Readers]:
    some = Readers(own, broker)
    yield some
    some.stop()


@pytest.fixture
def ledger(own: Settings, client: "redis.Redis") -> Ledger:
    return Ledger(client, own)


def rows(ledger: Ledger) -> list[dict[str, Any]]:
    """Every record that was accepted, with its batch."""
    found = []
    for key in ledger.client.scan_iter(ledger.keys.batch("*")):
        batch_id = key.decode().rpartition(":")[2]
        for row in framed(ledger.payload(batch_id))[0].to_dicts():
            found.append(row | {"id": (batch_id.partition("-")[0], row["line"])})
    return found


def texts(ledger: Ledger) -> list[str]:
    return sorted(row["raw"] for row in rows(ledger))


def accepted(ledger: Ledger) -> int:
    return sum(int(totals["accepted"]) for totals in ledger.backlog.totals().values())


def all_in(ledger: Ledger, expected: list[str]) -> None:
    """Each of them once, under an id of its own."""
    assert wait_until(lambda: accepted(ledger) >= len(expected), timeout_s=LIMIT_S), accepted(ledger)
    assert texts(ledger) == sorted(expected)
    assert len({row["id"] for row in rows(ledger)}) == len(expected)


def lines(count: int, word: str = "line") -> list[str]:
    return [f"{word} {n}" for n in range(count)]


def lost(ledger: Ledger) -> int:
    return int(ledger.client.hget(ledger.keys.counts, "source_lost") or 0)  # type: ignore[arg-type]


def trouble(own: Settings, ledger: Ledger) -> str:
    found = Presence(ledger.client, own).trouble()
    return found.reason if found else ""


# ---- what is read --------------------------------------------------------------------------------


def test_all_partitions_are_read_once_and_a_later_reader_goes_on(
    broker: KafkaBroker, readers: Readers, ledger: Ledger, topic: str
) -> None:
    broker.topic(topic, 3)
    for n in range(3):
        broker.send(topic, lines(150, f"p{n}"), partition=n)
    expected = [text for n in range(3) for text in lines(150, f"p{n}")]
    readers.start(topic)
    all_in(ledger, expected)
    readers.stop()
    broker.send(topic, lines(20, "more"), partition=1)
    readers.start(topic, "two")
    all_in(ledger, expected + lines(20, "more"))
    assert {row["line"] for row in rows(ledger) if row["raw"].startswith("more")} == set(range(150, 170))


def test_every_codec_of_kafka_is_read(
    broker: KafkaBroker, readers: Readers, ledger: Ledger, topic: str
) -> None:
    broker.topic(topic)
    codecs = ("none", "gzip", "snappy", "lz4", "zstd")
    for codec in codecs:
        broker.send(topic, lines(40, codec * 9), compression=codec)
    readers.start(topic)
    all_in(ledger, [text for codec in codecs for text in lines(40, codec * 9)])


def test_a_pattern_names_topics_that_come_later(
    broker: KafkaBroker, readers: Readers, ledger: Ledger, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "LOOK_S", 0.2)
    broker.topic(f"{topic}-a")
    broker.topic(f"other-{topic}-a")
    broker.send(f"{topic}-a", lines(5, "a"))
    broker.send(f"other-{topic}-a", lines(5, "other"))
    readers.start(f"{topic}-*", start="latest")
    assert wait_until(lambda: len(stored_partitions(ledger.client, readers.settings)) == 1, timeout_s=LIMIT_S)
    broker.topic(f"{topic}-b")
    broker.send(f"{topic}-b", lines(5, "b"))
    broker.send(f"{topic}-a", lines(5, "more"))
    assert wait_until(lambda: accepted(ledger) >= 5, timeout_s=LIMIT_S)
    # A topic that is new to Logweir begins at `start`; whether b's lines came before the look is chance.
    assert wait_until(lambda: set(lines(5, "more")) <= set(texts(ledger)), timeout_s=LIMIT_S)
    assert not {"a 0", "other 0"} & set(texts(ledger))


def test_a_partition_that_comes_to_a_known_topic_is_read_from_its_first_record(
    broker: KafkaBroker, readers: Readers, ledger: Ledger, topic: str
) -> None:
    broker.topic(topic, 2)
    readers.start(topic, start="latest")
    assert wait_until(lambda: len(stored_partitions(ledger.client, readers.settings)) == 2, timeout_s=LIMIT_S)
    readers.stop()
    with closing(KafkaCluster(KafkaSource.parse(broker.url(topic)))) as cluster:
        name, _ = cluster.look()
    ledger.intake.forget_cursor(cursor_key(name, (topic, 1)))  # as before it was added
    for n in range(2):
        broker.send(topic, lines(5, f"p{n}"), partition=n)
    readers.start(topic, start="latest")
    all_in(ledger, lines(5, "p0") + lines(5, "p1"))


def test_a_topic_begins_at_the_first_record_of_a_time(
    broker: KafkaBroker, readers: Readers, ledger: Ledger, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mock cluster has no index of times, so its answer is made up here."""
    asked: list[object] = []

    def first_since(_: KafkaCluster, place: Place, moment: datetime) -> int:
        asked.append(moment)
        return 7 if place[1] == 0 else -1  # -1: all records of the partition are older

    monkeypatch.setattr(KafkaCluster, "first_since", first_since)
    broker.topic(topic, 2)
    for n in range(2):
        broker.send(topic, lines(10, f"p{n}"), partition=n)
    readers.start(topic, start="2026-11-20T00:00:00Z")
    all_in(ledger, ["p0 7", "p0 8", "p0 9"])
    broker.send(topic, ["new"], partition=1)
    all_in(ledger, ["p0 7", "p0 8", "p0 9", "new"])
    assert asked == [datetime(2026, 11, 20, tzinfo=UTC)] * 2


def test_the_latest_start_is_kept_though_nothing_came_before_the_next_reader(
    broker: KafkaBroker, readers: Readers, ledger: Ledger, topic: str
) -> None:
    broker.topic(topic)
    broker.send(topic, lines(10, "old"))
    readers.start(topic, start="latest")
    assert wait_until(lambda: len(stored_partitions(ledger.client, readers.settings)) == 1, timeout_s=LIMIT_S)
    readers.stop()
    broker.send(topic, lines(10, "meanwhile"))
    readers.start(topic, start="latest")
    all_in(ledger, lines(10, "meanwhile"))


def test_values_that_cannot_be_read_are_dead_letters_and_reading_goes_on(
    broker: KafkaBroker, readers: Readers, ledger: Ledger, topic: str
) -> None:
    broker.topic(topic)
    broker.send(topic, ["first", None, b"\0\xff", "last"], headers=[("app", b"till")])
    readers.start(topic)
    assert wait_until(lambda: accepted(ledger) == 3, timeout_s=LIMIT_S)
    (letter,) = ledger.dead_letters.newest()
    assert letter.reason.startswith(f"{topic}/0 offset 2: the value is binary")
    assert (letter.source, letter.first_line, letter.lines) == (f"kafka:{topic}/0", 2, 1)
    totals = ledger.backlog.totals()
    assert (totals["till"]["accepted"], totals[topic]["dead"]) == (2, 1)
    assert ledger.dead_letters.retry(letter.batch_id)
    assert ledger.backlog.totals()[topic]["dead"] == 0
    readers.stop()
    assert stored_partitions(ledger.client, readers.settings)[0].offset == 4


def test_a_topic_of_tombstones_moves_its_cursor(
    broker: KafkaBroker, readers: Readers, ledger: Ledger, topic: str
) -> None:
    broker.topic(topic)
    broker.send(topic, [None] * 30, key=b"k")
    readers.start(topic)

    def offset() -> int:
        found = stored_partitions(ledger.client, readers.settings)
        return found[0].offset if found else 0

    assert wait_until(lambda: offset() == 30, timeout_s=LIMIT_S)
    assert accepted(ledger) == 0


def test_a_topic_made_anew_is_read_from_its_beginning(
    broker: KafkaBroker, readers: Readers, ledger: Ledger, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "LOOK_S", 0.2)
    broker.topic(topic)
    broker.send(topic, lines(30, "old"))
    readers.start(topic)
    all_in(ledger, lines(30, "old"))
    broker.call("topic_delete", topic)
    broker.topic(topic)
    broker.send(topic, lines(40, "new"))
    all_in(ledger, lines(30, "old") + lines(40, "new"))


# ---- kills and rollbacks -------------------------------------------------------------------------


def test_a_killed_reader_loses_and_doubles_nothing(
    broker: KafkaBroker, readers: Readers, own: Settings, ledger: Ledger, topic: str
) -> None:
    """Killed between the script that takes the batches in and its answer."""
    broker.topic(topic, 2)
    for n in range(2):
        broker.send(topic, lines(4_000, f"p{n}"), partition=n)
    for accepts in (1, 3):
        run_until_killed(broker.url(topic), own, accepts=accepts)
    assert 0 < accepted(ledger) < 8_000
    readers.start(topic)
    all_in(ledger, lines(4_000, "p0") + lines(4_000, "p1"))


def test_a_redis_that_went_back_is_read_into_again(broker: KafkaBroker, topic: str) -> None:
    broker.topic(topic)
    broker.send(topic, lines(300, "before"))
    with power() as current:
        own = current.settings.replace(batch_records=50, lease_ttl_ms=2_000)
        readers, ledger = Readers(own, broker), Ledger(connect(own), own)
        try:
            readers.start(topic)
            all_in(ledger, lines(300, "before"))
            moment = current.now()
            broker.send(topic, lines(300, "after"))
            all_in(ledger, lines(300, "before") + lines(300, "after"))
            current.cut(back_to=moment)
            assert accepted(ledger) < 600
            all_in(ledger, lines(300, "before") + lines(300, "after"))  # though no record comes
            broker.send(topic, lines(100, "later"))
            all_in(ledger, lines(300, "before") + lines(300, "after") + lines(100, "later"))
        finally:
            readers.stop()
            ledger.client.close()


def test_an_idle_reader_notices_a_cursor_that_went_back(
    broker: KafkaBroker, readers: Readers, ledger: Ledger, topic: str
) -> None:
    broker.topic(topic)
    broker.send(topic, lines(30))
    readers.start(topic)
    all_in(ledger, lines(30))
    (key,) = ledger.client.hkeys(ledger.keys.cursors)  # type: ignore[misc]
    end = ledger.intake.cursor(key.decode())
    assert end is not None
    ledger.client.hset(ledger.keys.cursors, key, end.replace(":30", ":10"))
    assert wait_until(lambda: ledger.intake.cursor(key.decode()) == end, timeout_s=LIMIT_S)


def test_a_broker_that_is_away_is_waited_for_and_said(
    broker: KafkaBroker, readers: Readers, own: Settings, ledger: Ledger, topic: str
) -> None:
    broker.topic(topic)
    broker.send(topic, lines(50, "before"))
    readers.start(topic)
    all_in(ledger, lines(50, "before"))
    broker.go_away()
    try:
        assert wait_until(lambda: "cannot be read" in trouble(own, ledger), timeout_s=LIMIT_S)
    finally:
        broker.come_back()
    broker.send(topic, lines(50, "after"))
    all_in(ledger, lines(50, "before") + lines(50, "after"))


def test_a_broker_with_tls_is_read_and_shown_our_certificate(
    own: Settings, ledger: Ledger, topic: str, tmp_path: Path
) -> None:
    """The TLS is that of a proxy in front of the broker."""
    made = Certificates.make(tmp_path)
    with KafkaBroker.running() as broker:
        host, _, port = broker.servers.rpartition(":")
        broker.topic(topic)
        broker.send(topic, lines(50))
        with tls_door((host, int(port)), made, ask=True) as door:
            broker.is_found_at("127.0.0.1", door)
            files = f"ca={made.ca}&cert={made.client}&key={made.folder}/client.key"
            stop = threading.Event()
            url = f"kafkas://127.0.0.1:{door}/{topic}?{files}"
            reader = KafkaReader(KafkaSource.parse(url), producer_of(own), holder="one", stop=stop)
            thread = threading.Thread(target=reader.run, daemon=True)
            thread.start()
            all_in(ledger, lines(50))
            stop.set()
            thread.join(LIMIT_S)


# ---- several readers -----------------------------------------------------------------------------


def test_two_readers_divide_the_partitions_and_one_takes_over(
    broker: KafkaBroker, readers: Readers, ledger: Ledger, topic: str
) -> None:
    broker.topic(topic, 4)
    first, second = readers.start(topic, "one"), readers.start(topic, "two")
    assert wait_until(lambda: len(first.partitions) == len(second.partitions) == 2, timeout_s=LIMIT_S)
    for n in range(4):
        broker.send(topic, lines(100, f"p{n}"), partition=n)
    expected = [text for n in range(4) for text in lines(100, f"p{n}")]
    all_in(ledger, expected)

    def who() -> set[str]:
        return {one.reader for one in stored_partitions(ledger.client, readers.settings)}

    assert wait_until(lambda: who() == {"one", "two"}, timeout_s=LIMIT_S)
    first.stop.set()
    assert wait_until(lambda: len(second.partitions) == 4, timeout_s=LIMIT_S)
    for n in range(4):
        broker.send(topic, lines(10, f"q{n}"), partition=n)
    all_in(ledger, expected + [text for n in range(4) for text in lines(10, f"q{n}")])


def test_two_readers_of_one_partition_double_nothing(
    broker: KafkaBroker, readers: Readers, ledger: Ledger, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a Redis that forgot its leases."""
    monkeypatch.setattr(PartitionLeases, "renew", lambda _, resources: dict.fromkeys(resources, 1))
    broker.topic(topic)
    first, second = readers.start(topic, "one"), readers.start(topic, "two")
    for n in range(10):
        broker.send(topic, lines(100, f"round {n}"))
    all_in(ledger, [text for n in range(10) for text in lines(100, f"round {n}")])
    assert wait_until(lambda: len(first.partitions) == len(second.partitions) == 1, timeout_s=LIMIT_S)


# ---- retention, back-pressure --------------------------------------------------------------------


def test_records_that_were_removed_unread_are_counted_and_said(
    broker: KafkaBroker, readers: Readers, own: Settings, ledger: Ledger, topic: str
) -> None:
    broker.topic(topic)
    for start in range(0, 100, 10):
        broker.send(topic, [f"line {n}" for n in range(start, start + 10)])
        if start == 10:
            readers.start(topic)
            all_in(ledger, lines(20))
            readers.stop()
    broker.remove_before(topic, 0, 60)
    readers.start(topic)
    all_in(ledger, lines(20) + [f"line {n}" for n in range(60, 100)])
    assert lost(ledger) == 40
    assert wait_until(lambda: "removed up to 40 records" in trouble(own, ledger), timeout_s=LIMIT_S)
    assert f"{topic}/0" in trouble(own, ledger) and "offsets 20 to 59" in trouble(own, ledger)


def test_a_full_pipeline_pauses_the_reading_in_bounded_memory(
    broker: KafkaBroker,
    readers: Readers,
    ledger: Ledger,
    topic: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = readers.settings
    monkeypatch.setattr(reader_module, "LOOK_S", 0.2)
    monkeypatch.setattr("pipeline.sources.kafka.client.AHEAD_RECORDS", 2_000)
    broker.topic(topic)
    broker.send(topic, lines(4_000))
    ledger.intake.pause("a test")
    reader = readers.start(topic)

    def lags(records: int) -> bool:
        found = stored_partitions(ledger.client, own)
        return bool(found) and found[0].lag == records

    assert wait_until(lambda: lags(4_000), timeout_s=LIMIT_S)
    broker.send(topic, [f"line {n}" for n in range(4_000, 5_000)])
    assert wait_until(lambda: lags(5_000), timeout_s=LIMIT_S)  # though nothing is fetched
    (partition,) = reader.partitions.values()
    assert 0 < len(partition.held) <= own.internal.batch_records + reader_module.AT_ONCE
    assert accepted(ledger) == 0
    ledger.intake.resume()
    all_in(ledger, lines(5_000))


# ---- what cannot be read -------------------------------------------------------------------------


ABSENT = {
    "no-such-topic": "no topic is called no-such-topic at",
    "kafka://127.0.0.1:1/app": "kafka://127.0.0.1:1/app cannot be read",
    "kafkas://127.0.0.1:1/app?ca=/no/such/file": "the file /no/such/file of kafka_source is not there",
}


@pytest.mark.parametrize("place", ABSENT)
def test_what_keeps_a_reader_from_reading_is_said(
    broker: KafkaBroker, own: Settings, ledger: Ledger, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.sources.kafka.client.ASK_S", 1.0)
    stop, url = threading.Event(), place if "://" in place else broker.url(place)
    reader = KafkaReader(KafkaSource.parse(url), producer_of(own), holder="one", stop=stop)
    thread = threading.Thread(target=reader.run, daemon=True)
    thread.start()
    said = wait_until(lambda: ABSENT[place] in trouble(own, ledger), timeout_s=LIMIT_S)
    stop.set()
    thread.join(LIMIT_S)
    assert said
