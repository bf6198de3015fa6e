"""Starts one worker process of one role: app, tasks of that role, heartbeat, tether to its supervisor.

Roles differ only in the table below. GPU and training work runs in a prefork child, so that the parent stays
responsive, enforces time limits and outlives a crash; the parent never loads torch or touches CUDA. Light roles
use the solo pool: one process each, restarted by whoever supervises it.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import redis
from celery import Celery, signals

from pipeline import routing
from pipeline.app import make_app
from pipeline.errors import BadSetting, RedisUnavailable
from pipeline.observe import logger, set_up
from pipeline.settings import Settings
from pipeline.tasks import drain, infer, ingest, periodic, store, train
from pipeline.tasks.context import Context
from pipeline.workers import guard

BEAT_S: Final = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a worker process serves. `time_limit_s` needs the prefork pool."""

    queues: tuple[str, ...]
    tasks: tuple[Any, ...]  # modules with NAME and run(context, *ids)
    pool: str = "solo"
    time_limit_s: float | None = None
    device: str = "cpu"


ROLES: Final[dict[str, Role]] = {
    "ingest": Role(queues=(routing.QUEUE_INGEST,), tasks=(ingest,)),
    "infer-cpu": Role(queues=(routing.QUEUE_CPU,), tasks=(infer,), pool="prefork", time_limit_s=300),
    "infer-gpu": Role(
        queues=(routing.QUEUE_GPU,), tasks=(infer,), pool="prefork", time_limit_s=300, device="cuda"
    ),
    "drain": Role(queues=(routing.QUEUE_DRAIN,), tasks=(drain,)),
    "store": Role(queues=(routing.QUEUE_STORE, routing.QUEUE_PERIODIC), tasks=(store, periodic)),
    "train": Role(queues=(routing.QUEUE_TRAIN,), tasks=(train,), pool="prefork", time_limit_s=3600),
}


def register(app: Celery, context: Context, role: Role) -> None:
    """Make the role's task modules known to the app under their names."""
    for module in role.tasks:
        options: dict[str, Any] = {"name": module.NAME, "acks_late": True, "ignore_result": True}
        if role.time_limit_s is not None:
            options |= {"soft_time_limit": role.time_limit_s, "time_limit": role.time_limit_s + 10}
        app.task(_bind(module.run, context), **options)


def _bind(run: Callable[..., None], context: Context) -> Callable[..., None]:
    def task(*ids: str) -> None:
        run(context, *ids)

    return task


def serve(role_name: str, settings: Settings, *, name: str, device: str | None = None) -> int:
    """Run a worker until it is told to stop; returns its exit code."""
    role = ROLES.get(role_name)
    if role is None:
        raise BadSetting(f"{role_name!r} is not a worker role; the roles are: {', '.join(ROLES)}")
    set_up(settings.log_level)
    guard.install()
    app = make_app(settings)
    context = Context(app, settings, device=device or role.device)
    register(app, context, role)
    _stay_with(settings)
    _announce(settings, role_name=role_name, role=role, name=name)
    worker = app.Worker(
        hostname=f"{name}@{socket.gethostname()}",
        pool=role.pool,
        concurrency=1,
        queues=list(role.queues),
        loglevel="WARNING",
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=False,
        task_events=True,
    )
    worker.start()
    return int(worker.exitcode or 0)


def beat(settings: Settings) -> int:
    """Run celery beat: it only asks for sweeps, so two of them are harmless."""
    set_up(settings.log_level)
    app = make_app(settings)
    _stay_with(settings)
    _Heartbeat(settings, role_name="beat", queues=(), name="beat").start()
    app.Beat(loglevel="WARNING", quiet=True, redirect_stdouts=False).run()
    return 0


def _stay_with(settings: Settings) -> None:
    """End with the supervisor, and let pool children end with us, whatever way the parent goes (kill -9 too)."""
    if settings.supervisor_pid:
        _tether(settings.supervisor_pid, grace_s=10.0)

    def child(**_: object) -> None:
        _tether(os.getppid(), grace_s=0.0)

    signals.worker_process_init.connect(child, weak=False)


def _tether(parent: int, *, grace_s: float) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        if grace_s:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(grace_s)
        os._exit(70)  # a task that does not end must not keep an orphan alive

    threading.Thread(target=watch, name="tether", daemon=True).start()


class _Heartbeat(threading.Thread):
    """Says every few seconds that this process lives; Redis being away only makes it silent."""

    def __init__(self, settings: Settings, *, role_name: str, queues: tuple[str, ...], name: str) -> None:
        super().__init__(name="heartbeat", daemon=True)
        from pipeline.presence import Presence
        from pipeline.tasks.context import connect

        self.presence = Presence(connect(settings), settings)
        # Replicas in containers share a name; those of the embedded stack are awaited by theirs.
        name = name if settings.supervisor_pid else f"{name}@{socket.gethostname()}"
        self.fields = {"name": name, "role": role_name, "pid": os.getpid(), "queues": queues}
        self.stopping = threading.Event()

    def run(self) -> None:
        while True:
            try:
                self.presence.beat(**self.fields, model_version="")  # type: ignore[arg-type]
            except (RedisUnavailable, redis.RedisError) as exc:
                logger().warning("heartbeat.failed", why=str(exc))
            if self.stopping.wait(BEAT_S):
                return

    def leave(self) -> None:
        self.stopping.set()
        try:
            self.presence.leave(str(self.fields["name"]))
        except (RedisUnavailable, redis.RedisError):
            return  # the sweep forgets silent workers


def _announce(settings: Settings, *, role_name: str, role: Role, name: str) -> None:
    """Beat from the moment the worker consumes until it stops."""
    heart = _Heartbeat(settings, role_name=role_name, queues=role.queues, name=name)

    def ready(**_: object) -> None:
        heart.start()

    def bye(**_: object) -> None:
        heart.leave()

    signals.worker_ready.connect(ready, weak=False)
    signals.worker_shutting_down.connect(bye, weak=False)
