"""The process that reads topics of Kafka: a thread for each address of `kafka_source`."""

import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final

from pipeline.errors import BadSetting
from pipeline.logs import set_up
from pipeline.producer import Producer
from pipeline.settings import Settings
from pipeline.settings.kafka import EXAMPLE, kafka_sources
from pipeline.upkeep import start_thread
from pipeline.workers.kafka.reader import KafkaReader
from pipeline.workers.liveness import Progress
from pipeline.workers.loops import tend

ROLE: Final = "kafka"


def main(argv: list[str]) -> int:
    (name,) = argv
    settings = Settings.load()
    set_up(settings.stack.log_level)
    sources = kafka_sources(settings.kafka.source)
    if not sources:
        raise BadSetting(f"no topic of Kafka is named to read from; set kafka_source, such as {EXAMPLE}")
    holder = f"{name}@{socket.gethostname()}:{os.getpid()}"
    producer, stop, progress = Producer.connect(settings), threading.Event(), Progress()
    readers = [
        KafkaReader(source, producer, holder=holder, stop=stop, pulse=progress.pulse) for source in sources
    ]
    tend(settings, lambda: _run(readers), stop, role_name=ROLE, name=name, progress=progress)
    return 0


def _run(readers: Sequence[KafkaReader]) -> None:
    """All of them, until each has ended."""
    runs: list[Callable[[], None]] = [reader.run for reader in readers]
    threads = [start_thread("kafka", run) for run in runs[1:]]
    runs[0]()
    for thread in threads:
        thread.join()
