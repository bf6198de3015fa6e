"""The process that reads logs of Opni's services over NATS, and answers their requests."""

import os
import socket
import threading
from typing import Final

from pipeline.errors import BadSetting, SourceUnavailable
from pipeline.logs import logger, set_up
from pipeline.nats.connection import NatsConnection
from pipeline.producer import Producer
from pipeline.settings import Settings
from pipeline.settings.nats import EXAMPLE, NatsSource, nats_source
from pipeline.upkeep import start_thread
from pipeline.workers.liveness import Progress
from pipeline.workers.loops import tend
from pipeline.workers.nats.answers import RequestAnswers
from pipeline.workers.nats.at_most_once import AtMostOnceReader
from pipeline.workers.nats.event_mirror import EventMirror
from pipeline.workers.nats.reader import NatsReader

ROLE: Final = "nats"


def main(argv: list[str]) -> int:
    (name,) = argv
    settings = Settings.load()
    set_up(settings.stack.log_level)
    source = nats_source(settings.nats.source)
    if source is None:
        raise BadSetting(f"no NATS server is named to read from; set nats_source, such as {EXAMPLE}")
    holder = f"{name}@{socket.gethostname()}:{os.getpid()}"
    producer, stop, progress = Producer.connect(settings), threading.Event(), Progress()
    gateway = Gateway(source, producer, holder=holder, stop=stop, progress=progress)
    tend(settings, gateway.run, stop, role_name=ROLE, name=name, progress=progress)
    return 0


class Gateway:
    """A reader, and a thread for requests, over one connection."""

    def __init__(
        self,
        source: NatsSource,
        producer: Producer,
        *,
        holder: str,
        stop: threading.Event,
        progress: Progress | None = None,
    ) -> None:
        self.connection = NatsConnection(source, name=f"logweir {holder}"[:100])
        self.answers = RequestAnswers(self.connection, producer, stop)
        self.mirror = EventMirror(self.connection, producer.ledger)
        self._why = ""  # the events of the pipeline wait
        kind = NatsReader if source.is_durable else AtMostOnceReader
        self.reader = kind(
            self.connection,
            producer,
            holder=holder,
            stop=stop,
            pulse=(lambda: None) if progress is None else progress.pulse,
            beside=self.tend,
        )

    def tend(self) -> None:
        """Beside the reading: tells what Opni's services wait for, and the events of the pipeline."""
        if self.connection.source.is_gpu_service:
            self.answers.jobs.tend()
        try:
            self.mirror.tend()
            self._why = ""
        except SourceUnavailable as exc:  # the stream of events alone may be refused: logs are read on
            if str(exc) != self._why:
                logger(role=ROLE).warning("nats.events_wait", why=str(exc))
            self._why = str(exc)

    def run(self) -> None:
        """Until `stop` was set."""
        thread = start_thread("nats-answers", self.answers.run)
        try:
            self.reader.run()
        finally:
            thread.join(5.0)
            self.connection.close()
