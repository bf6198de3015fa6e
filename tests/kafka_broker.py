"""A broker of Kafka for tests (kafka_mock.py), and a producer of its records."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from confluent_kafka import Producer

QUIET = logging.getLogger("tests.kafka")
QUIET.addHandler(logging.NullHandler())
QUIET.propagate = False


class KafkaBroker:
    """One broker. Topics have as many partitions as they are made with."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("kafka_mock.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.servers = self._process.stdout.readline().strip()
        self._producer: Any = None

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[Self]:
        broker = cls()
        try:
            yield broker
        finally:
            broker._process.kill()
            broker._process.communicate()

    def call(self, name: str, *values: str | int) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, *values]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        assert answer == "0", f"{name}{values}: {answer}"

    def topic(self, name: str, partitions: int = 1) -> str:
        self.call("topic_create", name, partitions, 1)
        return name

    def remove_before(self, topic: str, partition: int, offset: int) -> None:
        """As retention does. Whole batches of a producer go."""
        self.call("partition_delete_records", topic, partition, offset)

    def go_away(self) -> None:
        self.call("broker_set_down", 1)

    def come_back(self) -> None:
        self.call("broker_set_up", 1)

    def is_found_at(self, host: str, port: int) -> None:
        """Tells clients from now on that it is there, as a broker behind a proxy does."""
        self.call("broker_set_host_port", 1, host, port)

    def send(
        self,
        topic: str,
        values: Iterable[bytes | str | None],
        *,
        partition: int = 0,
        compression: str = "none",
        **more: Any,
    ) -> None:
        """Produces these values and waits until they are in. `more`: key, headers, timestamp in ms."""
        options = {"bootstrap.servers": self.servers, "logger": QUIET, "compression.type": compression}
        producer = Producer({**options, "linger.ms": 0})
        for value in values:
            producer.produce(topic, value, partition=partition, **more)
            producer.poll(0)
        assert producer.flush(20) == 0

    def url(self, path: str, query: Mapping[str, str] | None = None) -> str:
        options = "&".join(f"{name}={value}" for name, value in (query or {}).items())
        return f"kafka://{self.servers}/{path}" + (f"?{options}" if options else "")
