"""Programs whose lines are read: from logs that are rotated, a topic of Kafka, a stream of NATS."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from bench._chaos.history import History
from bench._chaos.producers import batch, marked
from bench._rotation import RotatedLog

EVERY_S: Final = 1.0
ROTATE_S: Final = (4.0, 12.0)  # a service that talks much may rotate as often by size
REOPEN_S: Final = 1.5  # a program goes on writing to the old file for so long
TOPIC: Final = "queued"
PARTITIONS: Final = 2
NATS_WORKLOAD: Final = "chaos/nats/web"  # cluster, namespace and deployment of its payloads
NATS_SUBJECT: Final = "raw_logs"


class Writer(threading.Thread):
    """Writes some lines every second until `finish`. `place`: where they are, for the history."""

    place: dict[str, Any]

    def __init__(self, history: History, workload: str, *, seed: int) -> None:
        super().__init__(name=f"write-{workload}", daemon=True)
        self.history = history
        self.workload = workload
        self.written = 0
        self.place = {}
        self.rng = random.Random(f"{seed} {workload}")
        self.finishing = threading.Event()

    def put(self, lines: Sequence[str]) -> None:
        """Returns when they are where readers find them."""
        raise NotImplementedError

    def end(self) -> None:
        """Behind the last line."""

    def run(self) -> None:
        while not self.finishing.wait(EVERY_S):
            texts = batch(self.rng, self.rng.randint(5, 30))
            lines = [
                marked(text, self.workload, self.written + n, time.time()) for n, text in enumerate(texts, 1)
            ]
            self.put(lines)
            self.written += len(lines)
            self.history.note(
                "file", who=self.name, workload=self.workload, written=self.written, **self.place
            )
        self.end()

    def finish(self) -> None:
        self.finishing.set()


class FileWriter(Writer):
    """A program that appends to its log, which is rotated now and then; somebody follows the file. Some lines
    come in two writes, and some of those right after a rotation into the old file."""

    def __init__(
        self, history: History, log: RotatedLog, workload: str, *, seed: int, begun: Callable[[], bool]
    ) -> None:
        """`begun`: a follower has a place in the log. Before, only the file of the name is read."""
        super().__init__(history, workload, seed=seed)
        self.log = log
        self.place = {"path": str(log.path)}
        self.begun = begun
        self.rotate_at, self.reopen_at = self._next_rotation(), 0.0

    def _next_rotation(self) -> float:
        return time.monotonic() + self.rng.uniform(*ROTATE_S)

    def put(self, lines: Sequence[str]) -> None:
        now = time.monotonic()
        if now >= self.reopen_at:
            self.log.reopen()
        if now >= self.rotate_at and self.begun():
            self.log.rotate()
            self.rotate_at, self.reopen_at = self._next_rotation(), now + REOPEN_S
        text = "".join(line + "\n" for line in lines)
        torn, late = self.rng.randrange(len(text)), self.log.has_old and self.rng.random() < 0.5
        for part in (text[:torn], text[torn:]):
            self.log.append(part, late=late)
            self.finishing.wait(0.05)

    def end(self) -> None:
        self.log.close()


class KafkaWriter(Writer):
    """Records of a topic, which is the workload of their lines."""

    def __init__(self, history: History, broker: Any, *, seed: int) -> None:
        super().__init__(history, TOPIC, seed=seed)
        self.broker = broker

    def put(self, lines: Sequence[str]) -> None:
        self.broker.send(TOPIC, lines, partition=self.rng.randrange(PARTITIONS))


class NatsWriter(Writer):
    """Payloads as Opni's collector sends them, each repeated under its id until the stream has it."""

    def __init__(self, history: History, server: Any, *, seed: int) -> None:
        super().__init__(history, NATS_WORKLOAD, seed=seed)
        self.server = server

    def put(self, lines: Sequence[str]) -> None:
        asyncio.run(self._put(lines))

    async def _put(self, lines: Sequence[str]) -> None:
        from nats.errors import Error  # an extra, as confluent-kafka is

        from pipeline.nats.payloads import Payload, payload_bytes

        cluster, namespace, deployment = NATS_WORKLOAD.split("/")
        client = await self.server.client()
        for number, line in enumerate(lines, self.written + 1):
            payload = Payload(
                id=f"id{number}", log=line, cluster_id=cluster, namespace_name=namespace,
                deployment=deployment, pod_name="web-1", log_type="workload",
            )  # fmt: skip
            while True:
                try:
                    await client.jetstream().publish(
                        NATS_SUBJECT, payload_bytes(payload), headers={"Nats-Msg-Id": payload.id}
                    )
                    break
                except Error:  # the gateway has not made the stream yet
                    await asyncio.sleep(0.2)
        await client.close()
