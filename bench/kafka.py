"""A topic of Kafka into the ledger: lines a second of one reader, and its processor time a line.

The broker is the mock cluster of librdkafka in a process of its own; its topics lie in memory, packed with
zstd. Redis is a real one. No worker runs, so the figures are of the reader alone: to fetch, decode, pack and
accept. `lines` are plain text, `documents` JSON as Filebeat writes it."""

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from bench._running import scratch
from bench.watching import own_redis
from pipeline.ledger.ledger import Ledger
from pipeline.messages.submit import Submit
from pipeline.producer import Producer
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.settings.kafka import KafkaSource
from pipeline.workers.kafka.reader import KafkaReader

LINES: Final = 400_000
PARTITIONS: Final = 4
MOST_S: Final = 120.0
ROOMY: Final = {"redis_max_mib": 4_096, "max_pending_mib": 4_096, "max_pending_batches": 1_000_000}
FORMS: Final = {
    "lines": "2026-11-20T10:00:{:02d}.123Z INFO request {} of user {} done in {} ms, 200 OK, cache hit, "
    "upstream web-{}",
    "documents": '{{"@timestamp":"2026-11-20T10:00:{:02d}.123Z","message":"request {} of user {} done in {} ms",'
    '"kubernetes":{{"namespace":"shop","deployment":{{"name":"web-{}"}}}},"log":{{"level":"info"}}}}',
}


def options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--lines", type=int, default=LINES, help=f"lines of a topic (default {LINES:,})")


def measure(_data: Path, args: argparse.Namespace) -> dict[str, Any]:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from kafka_broker import KafkaBroker

    found = {}
    with KafkaBroker.running() as broker:
        for name, form in FORMS.items():
            broker.topic(name, PARTITIONS)
            for partition in range(PARTITIONS):
                numbers = range(args.lines // PARTITIONS)
                values = (form.format(n % 60, n, n % 977, n % 311, n % 10) for n in numbers)
                broker.send(name, values, partition=partition, compression="zstd")
            found[name] = _read(broker.url(name), args.lines // PARTITIONS * PARTITIONS)
    return found


def _read(url: str, count: int) -> dict[str, float]:
    with scratch() as folder, own_redis(folder, **ROOMY) as settings:
        return _read_into(settings, url, count)


def _read_into(settings: Settings, url: str, count: int) -> dict[str, float]:
    client = connect(settings)
    producer = Producer(Ledger(client, settings), Submit(None, client, settings), settings)
    reader = KafkaReader(KafkaSource.parse(url), producer, holder="bench", stop=threading.Event())
    before, began = time.process_time(), time.monotonic()
    thread = threading.Thread(target=reader.run)
    thread.start()
    while _accepted(producer) < count:
        if time.monotonic() - began > MOST_S:
            raise RuntimeError(f"only {_accepted(producer)} of {count} lines came in {MOST_S:g} s")
        time.sleep(0.05)
    took, cpu = time.monotonic() - began, time.process_time() - before
    reader.stop.set()
    thread.join()
    return {"lines_per_s": round(count / took), "us_per_line": round(cpu / count * 1e6, 1)}


def _accepted(producer: Producer) -> int:
    return sum(int(totals["accepted"]) for totals in producer.ledger.backlog.totals().values())
