"""`python -m pipeline.workers.source NAME`: polls the log indices of an OpenSearch for ever.

One process reads at a time, under an exclusive lease; others wait. An unreachable OpenSearch or Redis is
logged once and shown by `logweir status` while it lasts. The cursor in the ledger says where to go on."""

import os
import socket
import threading
from collections.abc import Callable
from typing import Final

import redis

from pipeline.errors import BadInput, BadPayload, BadSetting, RedisUnavailable, SourceUnavailable
from pipeline.logs import logger, set_up
from pipeline.observe.presence import Presence
from pipeline.opensearch.client import opensearch_client
from pipeline.producer import Producer
from pipeline.records.batch import Batch
from pipeline.records.delivery import Accepted, Full
from pipeline.redis.leases import SOURCE, HeldLease, Leases, Refused
from pipeline.settings import Settings
from pipeline.sources.opensearch import POLL_S, Poller, deliver
from pipeline.workers.exits import exit_code
from pipeline.workers.liveness import Progress
from pipeline.workers.loops import tend

ROLE: Final = "source"
RETRY_S: Final = 2.0  # after a failure; a complaint is forgotten after 15 s, so it has to be repeated sooner


class SourceWorker:
    """The loop of the process. `run` returns after `stop` was set."""

    def __init__(
        self, settings: Settings, *, holder: str, producer: Producer | None = None, poll_s: float = POLL_S
    ) -> None:
        if settings.opensearch.source is None:
            raise BadSetting("no index is named to read from; set opensearch_source, such as app-logs-*")
        self.settings = settings
        self.holder = holder
        self.poll_s = poll_s
        self.producer = producer or Producer.connect(settings)
        client = self.producer.ledger.client
        self.leases = Leases(client, settings)
        self.presence = Presence(client, settings)
        self.stop = threading.Event()
        self.progress = Progress()
        self.poller = Poller(opensearch_client(settings, reading=True), settings, pulse=self.progress.pulse)
        self.log = logger(role=ROLE, source=settings.opensearch.source)
        self._trouble = ("", "")

    def run(self) -> None:
        """Poll whenever the lease is ours, until `stop` is set."""
        while not self.stop.is_set():
            self.progress.pulse()
            try:
                answer = self.leases.request(SOURCE, self.holder, quarantine=True)
                if isinstance(answer, Refused):
                    self.stop.wait(min(max(answer.wait_ms, 50), 1000) / 1000)
                    continue
                with self.leases.holding(answer) as lease:
                    self._while_held(lease)
            except (RedisUnavailable, redis.ConnectionError, redis.TimeoutError) as exc:
                self._say("redis.away", str(exc))
                self.stop.wait(RETRY_S)
            except Exception as exc:  # the next try begins at the last accepted batch
                self.log.exception("source.failed")
                self._troubled(f"polling failed ({type(exc).__name__}: {exc}); it is tried again")

    def _while_held(self, lease: HeldLease) -> None:
        def go_on() -> bool:
            self.progress.pulse()
            return not self.stop.is_set() and not lease.lost.is_set()

        while go_on():
            if self._poll(go_on):
                self._wait(self.poll_s, lease)

    def _wait(self, seconds: float, lease: HeldLease) -> None:
        """Wait until the next poll. A lost lease ends the wait, so that it is released for the next
        poller."""
        remaining = seconds
        while remaining > 0 and not lease.lost.is_set() and not self.stop.wait(min(remaining, 1.0)):
            remaining -= 1.0
            self.progress.pulse()

    def _poll(self, go_on: Callable[[], bool]) -> bool:
        """False after a failure, and after the pause that follows it."""
        try:
            cursor = self.producer.ledger.intake.cursor(self.poller.cursor_key)
            polled = deliver(self.poller, cursor, self._accept, go_on=go_on, wait=self.stop.wait)
        except (SourceUnavailable, BadPayload, BadInput) as exc:
            self._troubled(str(exc))
            return False
        self._say("", "")
        if polled.documents:
            self.log.info(
                "source.polled",
                documents=polled.documents,
                batches=polled.batches,
                without_message=polled.without_message,
                without_time=polled.without_time,
            )
        return True

    def _accept(self, batch: Batch, **cursor: str) -> Accepted | Full:
        answer = self.producer.accept(batch, **cursor)  # type: ignore[arg-type]
        if isinstance(answer, Full) and answer.refused == 1:
            self.log.warning("source.waits", why=str(answer))
        return answer

    def _troubled(self, why: str) -> None:
        self._say("source.away", why)
        try:
            self.presence.complain(ROLE, why)
        except RedisUnavailable as exc:
            self._say("redis.away", str(exc))
        self.stop.wait(RETRY_S)

    def _say(self, event: str, why: str) -> None:
        """Log a change once, not every try. `event` "": all is well."""
        if (event, why) == self._trouble:
            return
        self._trouble = (event, why)
        if event:
            self.log.warning(event, why=why)
        else:
            self.log.info("source.back")


def main(argv: list[str]) -> int:
    (name,) = argv
    settings = Settings.load()
    set_up(settings.stack.log_level)
    worker = SourceWorker(settings, holder=f"{name}@{socket.gethostname()}:{os.getpid()}")
    tend(settings, worker.run, worker.stop, role_name=ROLE, name=name, progress=worker.progress)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
