"""Sources of a chaos run next to files: the mock cluster of librdkafka, and a nats-server."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from bench._chaos.writers import NATS_SUBJECT, PARTITIONS, TOPIC


class Brokers:
    """Both run within the block. The faults leave them alone: what they have acknowledged they keep."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.kafka: Any = None
        self.nats: Any = None

    def __enter__(self) -> Self:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
        from kafka_broker import KafkaBroker
        from nats_server import NatsServer

        self.kafka = self._stack.enter_context(KafkaBroker.running())
        self.kafka.topic(TOPIC, PARTITIONS)
        self.nats = self._stack.enter_context(NatsServer.running())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def settings(self) -> dict[str, str]:
        """Of the stacks that read from them."""
        return {"kafka_source": self.kafka.url(TOPIC), "nats_source": self.nats.url(NATS_SUBJECT)}
