"""How far Kafka is read: in Redis, in the metrics, in `logweir senders` and `logweir doctor`."""

import json
import os
import time

import pytest
import redis
from command_line import Verb
from kafka_broker import KafkaBroker
from prometheus_client import CollectorRegistry

from pipeline.redis.attach import state_file
from pipeline.settings import Settings
from pipeline.workers.kafka import progress
from pipeline.workers.kafka.progress import PartitionProgress, report, stored_partitions
from pipeline.workers.scrape import Scrape


def partition(number: int, *, end: int, at_ms: int | None = None, topic: str = "app") -> PartitionProgress:
    return PartitionProgress(
        topic=topic, partition=number, servers="b:9092", offset=10, end=end, lines=5, reader="one@host:1", token=3,
        at_ms=round(time.time() * 1000) if at_ms is None else at_ms,
    )  # fmt: skip


def sample(client: "redis.Redis", settings: Settings, topic: str, number: str) -> float | None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Scrape(client, settings))
    return registry.get_sample_value("logweir_kafka_lag_records", {"topic": topic, "partition": number})


def test_partitions_that_lag_most_come_first(client: "redis.Redis", settings: Settings) -> None:
    report(client, settings, {"a": partition(0, end=12), "b": partition(1, end=99)})
    report(client, settings, {"a": partition(0, end=20)})
    assert [(one.name, one.lag) for one in stored_partitions(client, settings)] == [
        ("app/1", 89),
        ("app/0", 10),
    ]


def test_a_partition_that_nobody_reads_is_forgotten_after_a_day(
    client: "redis.Redis", settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_CLEANED", 2)
    report(client, settings, {name: partition(0, end=12, at_ms=1) for name in "abc"})
    report(client, settings, {"d": partition(0, end=12)})
    assert len(stored_partitions(client, settings)) == 1


def test_the_metrics_have_the_lag_of_what_is_read_now(client: "redis.Redis", settings: Settings) -> None:
    report(client, settings, {"a": partition(0, end=12), "b": partition(1, end=99, at_ms=1)})
    report(client, settings, {"other-cluster": partition(0, end=15)})
    assert sample(client, settings, "app", "0") == 7
    assert sample(client, settings, "app", "1") is None
    client.hset(f"{{{settings.redis.key_prefix}}}:kafka", "x", "no json")
    assert sample(client, settings, "app", "0") == 7


def test_senders_shows_each_partition(client: "redis.Redis", settings: Settings, logweir: Verb) -> None:
    report(client, settings, {"a": partition(0, end=1_012)})
    shown = logweir("senders").out
    assert "app/0" in shown and "1,002" in shown and "one@host:1" in shown
    (facts,) = json.loads(logweir("senders", "--json").out)
    assert (facts["protocol"], facts["topic"], facts["partition"], facts["lag"]) == ("kafka", "app", 0, 1_002)


def test_senders_finds_the_stack_of_a_data_directory(
    client: "redis.Redis", settings: Settings, logweir: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    report(client, settings, {"a": partition(0, end=12)})
    state = {"pid": os.getpid(), "redis_url": settings.redis.url, "key_prefix": settings.redis.key_prefix}
    settings.data.dir.mkdir(parents=True, exist_ok=True)
    state_file(settings.data.dir).write_text(json.dumps(state))
    monkeypatch.delenv("REDIS_URL")
    monkeypatch.delenv("LOGWEIR_KEY_PREFIX", raising=False)
    assert "app/0" in logweir("senders").out


def test_doctor_tries_each_address(logweir: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.sources.kafka.client.ASK_S", 1.0)

    def rows(address: str) -> list[str]:
        monkeypatch.setenv("LOGWEIR_KAFKA_SOURCE", address)
        return [line for line in logweir("doctor").out.splitlines() if " Kafka at " in line]

    with KafkaBroker.running() as broker:
        broker.topic("app-logs", 3)
        good, bad = rows(f"{broker.url('app-*')} {broker.url('none')}")
    assert good.startswith("ok") and good.endswith("app-logs (3 partitions) can be read")
    assert bad.startswith("missing") and bad.endswith("no topic is called none")
    (gone,) = rows("kafka://127.0.0.1:1/app")
    assert gone.startswith("missing") and "cannot be read" in gone
