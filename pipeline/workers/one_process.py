"""The whole pipeline of a small run in one process: a private Redis, and one thread that does all the stages.

The steps, the ledger and the training are those of the fleet (tasks/). Wake-ups wait in memory instead of
Celery's queues, so Celery is not imported. The sweep finds a wake-up that is lost, as in the fleet.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

import redis

from pipeline.errors import BadInput, Cancelled, RedisUnavailable, Retryable, StackFailed
from pipeline.ledger.ledger import Ledger
from pipeline.logs import logger
from pipeline.messages.routing import QUEUE_INGEST, QUEUE_STORE
from pipeline.messages.submit import Submit
from pipeline.producer import Producer
from pipeline.records.batch import Batch
from pipeline.records.delivery import Stage
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.tasks import drain, infer, ingest, periodic, store, train
from pipeline.tasks.context import Context
from pipeline.tasks.loaded import ModelPart, WorkerProfile
from pipeline.training.training import load_fitting
from pipeline.upkeep import start_thread
from pipeline.workers.exits import may_be_left
from pipeline.workers.stack.stack import Stack

_TASKS: Final[dict[Stage, Callable[[Context, str], str | None]]] = {
    Stage.INGEST: ingest.run,
    Stage.INFER: infer.run,
    Stage.DRAIN: drain.run,
    Stage.STORE: store.run,
}
_STAGES: Final = {QUEUE_INGEST: Stage.INGEST, QUEUE_STORE: Stage.STORE}
IDLE_S: Final = 0.2  # between two looks of the thread that waits
# The thread ends between two steps; a training looks every few of its steps. It cannot be killed as a worker
# can, so it gets this time even where a run hurries.
STOP_S: Final = 20.0


class LocalSubmit(Submit):
    """Wake-ups that wait in this process."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        super().__init__(None, client, settings)
        self._waiting_batches: deque[tuple[Stage, str]] = deque()
        self._trains = False
        self._changed = threading.Condition()

    def wake(self, stage: Stage, batch_id: str, **_: object) -> bool:
        """Always True: memory takes every wake-up. Class and queue of the batch do not matter here."""
        with self._changed:
            self._waiting_batches.append((stage, batch_id))
            self._changed.notify()
        return True

    def wake_new(self, batches: Sequence[Batch], **_: object) -> bool:
        for batch in batches:
            self.wake(Stage.INGEST, batch.batch_id)
        return True

    def train(self, _request_id: str = "") -> bool:
        with self._changed:
            self._trains = True
            self._changed.notify()
        return True

    def waiting_ids(self, stage: Stage, **_: object) -> set[str] | None:
        with self._changed:
            return {batch_id for waiting, batch_id in self._waiting_batches if waiting is stage}

    def next_ids(self, queue: str, limit: int, **_: object) -> list[str]:
        wanted = _STAGES.get(queue, Stage.INFER)
        with self._changed:
            ids = dict.fromkeys(i for stage, i in self._waiting_batches if stage is wanted)
        return list(ids)[:limit]

    def withdraw(self, queue: str, batch_ids: Iterable[str], **_: object) -> set[str]:  # noqa: ARG002
        return set()  # a wake-up in memory costs next to nothing

    def training_waits(self) -> bool:
        return self._trains

    def take(self, timeout_s: float) -> tuple[Stage, str] | None:
        """The batch whose turn it is; None for a training, or after the timeout."""
        with self._changed:
            if not self._waiting_batches and not self._trains:
                self._changed.wait(timeout_s)
            return self._waiting_batches.popleft() if self._waiting_batches else None

    def take_training(self) -> bool:
        """True if a training waits and no batch does."""
        with self._changed:
            due = self._trains and not self._waiting_batches
            self._trains = self._trains and not due
        return due


def _load_torch() -> None:
    """Before a training needs it, which meets the same fault and says it."""
    with suppress(Exception):
        load_fitting()


class OneProcess(Stack):
    """A stack without worker processes: started, asked and stopped as one."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings.replace(gpu_agent=False, ingest_processes=1))
        self._submit: LocalSubmit | None = None
        self._thread: threading.Thread | None = None
        self._torch: threading.Thread | None = None
        self._stopping = threading.Event()
        self._failure: BaseException | None = None

    def __enter__(self) -> "OneProcess":
        super().__enter__()
        self._submit = LocalSubmit(connect(self.settings), self.settings)
        self._thread = start_thread("stages", self._work, self._submit)
        may_be_left(self._thread)
        return self

    def _roles(self, **_: object) -> list[tuple[str, str]]:
        return []

    def producer(self) -> Producer:
        """Accepts batches and wakes the thread of this process."""
        assert self._submit is not None  # noqa: S101 - the stack is entered
        client = connect(self.settings)
        return Producer(Ledger(client, self.settings), self._submit, self.settings)

    def expect_training(self) -> None:
        """Import torch, which takes seconds, while the files are read."""
        if self._torch is None:
            self._torch = start_thread("torch", _load_torch)
            may_be_left(self._torch)

    def check(self) -> None:
        """Raises StackFailed after a fault of the thread, and as a stack does."""
        super().check()
        if self._failure is not None:
            why = f"{type(self._failure).__name__}: {self._failure}"
            raise StackFailed(f"the run cannot go on: {why}") from self._failure

    def end_workers(self) -> None:
        """End the thread after its step."""
        self._stopping.set()
        if self._thread is not None and self._thread.is_alive():
            with suppress(RedisUnavailable, redis.RedisError, BadInput):
                self._cancel_training()
            self._thread.join(STOP_S)
        self._thread = None
        if self._torch is not None:
            self._torch.join(STOP_S)
            self._torch = None
        super().end_workers()

    def _cancel_training(self) -> None:
        trainings = Context(None, self.settings).trainings
        for status in trainings.active():
            trainings.cancel(status.request_id)

    def _work(self, submit: LocalSubmit) -> None:
        try:
            context = _LocalContext(self.settings, submit, self._failed, self._stopping)
            self._loop(context, submit)
        except BaseException as exc:  # noqa: BLE001 - panics of Polars are no Exceptions; check() reports it
            if not self._stopping.is_set():
                logger().exception("one_process.failed")
                self._failed(exc)

    def _loop(self, context: Context, submit: LocalSubmit) -> None:
        swept = time.monotonic()
        while not self._stopping.is_set():
            batch = submit.take(IDLE_S)
            try:
                if batch is not None:
                    _TASKS[batch[0]](context, batch[1])
                elif submit.take_training():
                    train.run(context)
                if time.monotonic() - swept > self.settings.internal.sweep_s:
                    swept = time.monotonic()
                    periodic.run(context)
            except Retryable as exc:  # the sweep sends the batch or the training again
                if not self._stopping.is_set():
                    logger().warning("one_process.task_waits", why=str(exc))
            except Exception:  # noqa: BLE001 - as above
                if not self._stopping.is_set():
                    logger().exception("one_process.task_failed")

    def _failed(self, why: BaseException) -> None:
        self._failure = why


class _LocalContext(Context):
    """The parts of the thread. A step that hangs ends the run, not the process."""

    def __init__(
        self,
        settings: Settings,
        submit: LocalSubmit,
        failed: Callable[[BaseException], None],
        stopping: threading.Event,
    ) -> None:
        super().__init__(None, settings, WorkerProfile(part=ModelPart.NETWORK))
        self.submit = submit
        self._failed, self._stopping = failed, stopping

    def go_on(self) -> None:
        """A Redis that refuses writes does not take the word that a training is cancelled."""
        if self._stopping.is_set():
            raise Cancelled("the run ends")

    def end_process(self, code: int) -> None:
        limit_s = self.settings.stack.step_s
        self._failed(StackFailed(f"a step did not end within {limit_s:g} s (code {code})"))
