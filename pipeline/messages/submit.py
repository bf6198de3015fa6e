"""The only sender of messages. A message is a wake-up with ids; the ledger knows the rest."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import redis

from pipeline.errors import RedisUnavailable
from pipeline.logs import logger
from pipeline.messages.queues import LOOK_AT_MOST, batches_of, ids_in, requests_in
from pipeline.messages.routing import (
    QUEUE_BACKFILL,
    QUEUE_GPU,
    QUEUE_INGEST,
    QUEUE_TRAIN,
    STAGE_QUEUES,
    STAGE_TASK,
    TASK_BACKFILL,
    TASK_JOB,
    TASK_TRAIN,
    GpuView,
    jobs_queue,
    nodes_of_queues,
    of_class,
    queue_for,
)
from pipeline.messages.wake_ups import wake_up_message
from pipeline.observe.presence import Presence
from pipeline.records.batch import Batch
from pipeline.records.delivery import Stage
from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.settings import Settings

if TYPE_CHECKING:
    from celery import Celery

# A message that cannot be sent now is not worth waiting for: the sweeper sends what is missing.
RETRY: Final = {"max_retries": 2, "interval_start": 0.1, "interval_step": 0.2, "interval_max": 0.5}
RETRY_PAUSES_S: Final = (0.1, 0.3)  # of RETRY
# Longer names are cut where tasks are shown. Ids are whole: the ledger takes none that is longer.
NAME_LIMIT: Final = 60
ID_LIMIT: Final = 512


class Submit:
    """Sends by name; never imports what runs.

    `gpu_open` answers whether a GPU would take a scoring process now. Without it unknown lines go to CPU
    workers: a producer only wakes stage ingest, so it carries no GPU pool."""

    def __init__(
        self,
        app: "Celery | None",
        client: "redis.Redis",
        settings: Settings,
        *,
        gpu_open: Callable[[], bool] = lambda: False,
    ) -> None:
        self.app = app
        self.client = client
        self.keys = Keys(settings.redis.key_prefix)
        self.gpu_open = gpu_open
        self.presence = Presence(client, settings)
        self._looked_at: dict[str, dict[str, bytes]] = {}  # by queue: the messages of `next_ids`, by batch

    def wake(
        self,
        stage: Stage,
        batch_id: str,
        *,
        backfill: bool = False,
        workload: str = "",
        lines: int = 0,
        queue: str | None = None,
    ) -> bool:
        """Wake a worker for a batch in a stage. False when the broker was not reached: the sweeper sends it
        again.

        `backfill` is the batch's class in the ledger. `queue` chooses one of a stage's two queues.
        `workload` and `lines` are for people who watch tasks."""
        if queue is None:
            try:
                queue = queue_for(stage, self.gpu(stage, backfill=backfill), backfill=backfill)
            except (RedisUnavailable, redis.RedisError) as exc:
                logger(batch=batch_id).warning("message.not_sent", why=str(exc))
                return False
        else:
            queue = of_class(queue, backfill=backfill)
        shown = shown_args(batch_id, workload, lines)
        return self._send(STAGE_TASK[stage], queue, [batch_id], {"batch": batch_id}, shown)

    def wake_new(self, batches: Sequence[Batch], *, backfill: bool = False) -> bool:
        """Wakes stage ingest for these batches of the ledger by one command. False when Redis was not
        reached."""
        if self.app is None or not batches:
            return False
        task = STAGE_TASK[Stage.INGEST]
        try:
            queue = of_class(QUEUE_INGEST, backfill=backfill)
            messages = [
                wake_up_message(
                    task,
                    queue,
                    batch.batch_id,
                    shown_args(batch.batch_id, batch.workload, batch.physical_lines),
                )
                for batch in batches
            ]
            self._push(queue, messages)
        except Exception as exc:  # noqa: BLE001 - the batches are in; the sweeper wakes a worker
            logger(task=task, batches=len(batches)).warning(
                "message.not_sent", why=f"{type(exc).__name__}: {exc}"
            )
            return False
        return True

    def train(self, request_id: str = "") -> bool:
        """Say that a training waits; `request_id` is for people who watch tasks."""
        return self._send(
            TASK_TRAIN, QUEUE_TRAIN, [request_id], {"request": request_id}, shown_args(request_id)
        )

    def read(self, backfill: str) -> bool:
        """Wake a reader for a backfill."""
        return self._send(
            TASK_BACKFILL, QUEUE_BACKFILL, [backfill], {"request": backfill}, shown_args(backfill)
        )

    def start_job(self, node: str, job_id: str, rank: int = 0) -> bool:
        """Wake the process of a node that starts jobs, for one rank of this job."""
        if self.app is None:
            return False
        from pipeline.messages.app import declare  # a producer carries no Celery

        queue = jobs_queue(node)
        declare(self.app, queue)
        args = [job_id, str(rank)]
        return self._send(TASK_JOB, queue, args, {"request": job_id}, shown_args(job_id))

    def job_nodes(self) -> dict[str, str]:
        """The nodes that take jobs now, each with its container engine, "" without one. Raises
        RedisUnavailable."""
        live = sorted(self.presence.live(), key=lambda worker: worker.engine)  # of two on a node, the engine
        return {node: worker.engine for worker in live for node in nodes_of_queues(worker.queues)}

    def readers_called(self, backfill: str) -> int:
        """How many wake-ups of readers of this backfill wait."""
        with answering():
            raw: list[Any] = self.client.lrange(self.keys.kombu(QUEUE_BACKFILL), 0, LOOK_AT_MOST)
        return sum(name == backfill for name in requests_in(raw))

    def waiting_ids(self, stage: Stage, *, backfill: bool = False) -> set[str] | None:
        """The batch ids whose messages wait in the queues of this stage and class; None when a queue is too
        long to read.

        Messages in the GPU queue count as lost when its last worker ended: the sweeper sends them elsewhere.
        """
        dead = () if self.gpu(stage, backfill=backfill).workers else (QUEUE_GPU,)
        found: set[str] = set()
        for queue in STAGE_QUEUES[stage]:
            if queue in dead:
                continue
            ids = self._waiting(of_class(queue, backfill=backfill))
            if ids is None:
                return None
            found |= ids
        return found

    def next_ids(self, queue: str, limit: int, *, backfill: bool = False) -> list[str]:
        """The batch ids of the next messages of one queue of this class, in the order of their turn.

        Nothing is taken: the message of a batch that is worked on finds it done. Raises RedisUnavailable.
        """
        if limit < 1:
            return []
        # Kombu pushes on the left and pops on the right.
        key = self.keys.kombu(of_class(queue, backfill=backfill))
        with answering():
            raw: list[Any] = self.client.lrange(key, -limit, -1)
        messages: dict[str, bytes] = {}
        for message in reversed(raw):
            for batch_id in ids_in([message]):
                messages.setdefault(batch_id, message)
        self._looked_at[key] = messages
        return list(messages)

    def withdraw(self, queue: str, batch_ids: Iterable[str], *, backfill: bool = False) -> set[str]:
        """Takes messages that `next_ids` has shown out of the queue, for batches that need them no more.

        Answers the batches whose messages lay there. Without Redis there are none: each message finds its
        batch done."""
        key = self.keys.kombu(of_class(queue, backfill=backfill))
        looked_at = self._looked_at.pop(key, {})
        messages = {batch_id: looked_at[batch_id] for batch_id in batch_ids if batch_id in looked_at}
        if not messages:
            return set()
        pipe: Any = self.client.pipeline(transaction=False)
        for message in messages.values():
            pipe.lrem(key, -1, message)  # from the end that is taken next, where it lies
        try:
            with answering():
                removed = pipe.execute()
        except (RedisUnavailable, redis.RedisError):
            return set()
        return {batch_id for batch_id, count in zip(messages, removed, strict=True) if count}

    def training_waits(self) -> bool:
        """True when a message lies in the queue of trainings; whoever takes it works on all that wait."""
        return bool(self.client.llen(self.keys.kombu(QUEUE_TRAIN)))

    def gpu(self, stage: Stage = Stage.INFER, *, backfill: bool = False) -> GpuView:
        """A snapshot of the GPU side; asks Redis only for the stage that needs it."""
        if stage is not Stage.INFER:
            return GpuView(workers=0, open_to_shared=False)
        # A worker of a build that knew no classes serves fresh batches only.
        queue = of_class(QUEUE_GPU, backfill=backfill)
        workers = sum(1 for w in self.presence.live() if queue in w.queues)
        return GpuView(workers=workers, open_to_shared=workers > 0 and self.gpu_open())

    def _waiting(self, queue: str) -> set[str] | None:
        # One answer: between two a message could move from what is read later to what was read before.
        raw: list[Any] = self.client.lrange(self.keys.kombu(queue), 0, LOOK_AT_MOST)
        return None if len(raw) > LOOK_AT_MOST else batches_of(raw)

    def _push(self, queue: str, messages: Sequence[bytes]) -> None:
        """Tries as often as `_send`. A try whose answer was lost leaves each message twice; the second one
        finds its batch claimed. Raises RedisUnavailable."""
        key = self.keys.kombu(queue)
        for pause_s in RETRY_PAUSES_S:
            with suppress(RedisUnavailable), answering():
                self.client.lpush(key, *messages)  # kombu's consumers pop on the right
                return
            time.sleep(pause_s)
        with answering():
            self.client.lpush(key, *messages)

    def _send(self, task: str, queue: str, args: list[str], headers: dict[str, str], shown: str) -> bool:
        if self.app is None:
            return False
        try:
            self.app.send_task(
                task, args=args, queue=queue, headers=headers, argsrepr=shown,
                retry=True, retry_policy=RETRY,
                # Without these two the limits of this process would travel; the worker has its own.
                time_limit=None, soft_time_limit=None,
            )  # fmt: skip
        except Exception as exc:  # noqa: BLE001 - Kombu raises anything; the sweeper sends it again
            logger(task=task, **headers).warning("message.not_sent", why=f"{type(exc).__name__}: {exc}")
            return False
        return True


def shown_args(wanted_id: str, workload: str = "", lines: int = 0) -> str:
    """A task's arguments as Flower shows them: `shop/app, 1,200 lines, 5f3a07`; never anything of a line.

    The id is whole, so that it can be copied. Names are users' own: they are cut and cannot steer a terminal.
    """
    count = f"{lines:,} line{'' if lines == 1 else 's'}" if lines else ""
    parts = (_shown(workload, NAME_LIMIT), count, _shown(wanted_id, ID_LIMIT))
    return ", ".join(part for part in parts if part)


def _shown(name: str, limit: int) -> str:
    clean = "".join(c if c.isprintable() else "?" for c in name)
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"
