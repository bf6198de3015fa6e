"""Answers requests as Opni's GPU service and training controller do. One of several gateways answers each.

A request has a second. Handlers ask Redis, so they run in threads, a bounded number at a time. A request that
finds no room is not answered, as if nobody had heard it.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from pipeline.errors import LogweirError, SourceUnavailable
from pipeline.logs import logger
from pipeline.nats import subjects
from pipeline.nats.connection import NatsConnection
from pipeline.nats.streams import ensure_in, ensure_out
from pipeline.producer import Producer
from pipeline.redis.connection import now_ms
from pipeline.upkeep import start_task
from pipeline.workers.nats.jobs import RESET, SUBMITTED, Jobs

CHECK_S: Final = 1.0
AT_ONCE: Final = 8
WAITING: Final = 256  # requests
WAITING_BYTES: Final = 64 << 20
TAKE_S: Final = 0.8  # for logs of a request, whose sender waits for a second
YES, NO, RUNNING = b"YES", b"NO", b"running"

Answer = Callable[[bytes], bytes]
Work = Callable[[bytes], None]


class RequestAnswers:
    """Subscribes, and subscribes again to a new connection. `run` returns after `stop` was set."""

    def __init__(self, connection: NatsConnection, producer: Producer, stop: threading.Event) -> None:
        self.connection = connection
        self.producer = producer
        self.stop = stop
        self.jobs = Jobs(connection, producer)
        self.log = logger(role="nats")
        self._subscribed: Client | None = None
        self._limit = asyncio.Semaphore(AT_ONCE)
        self._in_order = asyncio.Lock()  # orders change the same things
        self._tasks: set[asyncio.Task[None]] = set()
        source = connection.source
        # The answer to each request, and the work behind it.
        self.answers: dict[str, tuple[Answer, Work | None]] = {}
        self.orders: dict[str, Work] = {}
        if source.is_gpu_service:
            self.answers[subjects.GPU_RUNNING] = (self._running, None)
            self.orders[subjects.GPU_TRAINING] = self.jobs.train_as_gpu_service
        if source.is_controller:
            self.answers[subjects.GPU_INFERENCE] = (self._take, None)
            self.answers[subjects.MODEL_STATUS] = (lambda _: self.jobs.status(), None)
            self.answers[subjects.WORKLOAD_PARAMETERS] = (self._parameters, None)
            self.answers[subjects.TRAIN_MODEL] = (self._submitted, self.jobs.train_model)
            self.orders[subjects.TRAIN] = self.jobs.train
            del self.orders[subjects.GPU_TRAINING]  # its orders come as `train`

    def run(self) -> None:
        """Keeps the subscriptions."""
        while not self.stop.is_set():
            try:
                client = self.connection.client
                if client is not self._subscribed:
                    if self.connection.source.is_durable:  # a stream carries all that is told
                        ensure_in(self.connection, self.connection.source)
                        ensure_out(self.connection, self.connection.source)
                    self.connection.call(self._subscribe(client))
                    self._subscribed = client
                    self.log.info("nats.answers", subjects=sorted([*self.answers, *self.orders]))
            except SourceUnavailable:
                pass  # the reader says it
            self.stop.wait(CHECK_S)

    async def _subscribe(self, client: Client) -> None:
        limits: Mapping[str, Any] = {
            "queue": subjects.ANSWERERS,
            "pending_msgs_limit": WAITING,
            "pending_bytes_limit": WAITING_BYTES,
        }
        for subject in [*self.answers, *self.orders]:
            await client.subscribe(subject, cb=self._on_message, **limits)
        await client.flush(timeout=5)

    async def _on_message(self, message: Msg) -> None:
        await self._limit.acquire()
        task = start_task("nats-answer", self._handled(message))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        self._limit.release()

    async def _handled(self, message: Msg) -> None:
        subject = message.subject
        answer, work = self.answers.get(subject) or (None, self.orders[subject])
        try:
            if work is None:
                await self._answer(message, answer)
                return
            async with self._in_order:
                await self._answer(message, answer)
                await asyncio.to_thread(work, message.data)
        except (LogweirError, NatsError) as exc:
            self.log.warning("nats.not_answered", subject=subject, why=str(exc))
        except Exception:  # the next request is answered all the same
            self.log.exception("nats.answer_failed", subject=subject)

    async def _answer(self, message: Msg, answer: Answer | None) -> None:
        if answer is not None and message.reply:
            await message.respond(await asyncio.to_thread(answer, message.data))

    # ---- answers --------------------------------------------------------------------------------

    def _running(self, _: bytes) -> bytes:
        now_ms(self.producer.ledger.client)  # without Redis nothing runs
        return RUNNING

    def _parameters(self, _: bytes) -> bytes:
        return json.dumps(self.jobs.parameters().workloads).encode()

    def _submitted(self, data: bytes) -> bytes:
        asks = json.loads(data)
        return SUBMITTED if isinstance(asks, dict) and asks.get("workloads") is not None else RESET

    def _take(self, data: bytes) -> bytes:
        """YES: the logs of the request are taken in, and their sender has nothing to do for them."""
        if not self.jobs.live() or self.producer.ledger.intake.full() is not None:
            return NO
        connection = self.connection
        try:
            if connection.source.is_durable:
                connection.call(_stored(connection, data), TAKE_S)
            else:
                connection.call(connection.client.publish(subjects.GPU_LOGS, data), TAKE_S)
        except SourceUnavailable:
            return NO
        return YES


async def _stored(connection: NatsConnection, data: bytes) -> None:
    await connection.client.jetstream(timeout=TAKE_S).publish(subjects.GPU_LOGS, data)
