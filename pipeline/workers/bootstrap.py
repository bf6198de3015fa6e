"""Starts one worker process of one role: app, tasks of that role, heartbeat, tether to its supervisor.

Roles differ only in the table below. GPU and training work runs in a prefork child, so that the parent stays
responsive, enforces time limits and outlives a crash; the parent never loads torch or touches CUDA. Light
roles use the solo pool: one process each, restarted by whoever supervises it."""

import atexit
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from celery import signals
from celery.beat import Scheduler

from pipeline.errors import BadInput, LogweirError
from pipeline.gpu.policy.fairness import parse_tenants
from pipeline.logs import set_up
from pipeline.messages import filter as guard
from pipeline.messages import routing
from pipeline.messages.app import make_app
from pipeline.observe import counters as metrics
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.redis.shards import of_shard
from pipeline.settings import Settings, visible_devices
from pipeline.tasks.context import Context
from pipeline.tasks.reload import HINT
from pipeline.workers.heartbeat import BEAT_S, Heartbeat
from pipeline.workers.liveness import HELD_S, Progress, end_when_held
from pipeline.workers.reloader import Reloader
from pipeline.workers.roles import ROLES, Role, device_name, placed, register
from pipeline.workers.same_store import join_beside
from pipeline.workers.stack.data_dir import called
from pipeline.workers.tethered import tether

# The shortest pause of beat. Celery polls forty times for an entry that is due in a hundredth of a second.
DUE_S: Final = 0.05
PUSH_TIMEOUT_S: Final = 1.0  # a Redis that hangs must not hold up the end of a process


def serve(role_name: str, settings: Settings, *, name: str, device: str | None = None) -> int:
    """Run a worker until it is told to stop; returns its exit code. `role_name`: see `placed`."""
    role_name, shard = placed(role_name, settings)
    role = ROLES[role_name]
    if shard:
        role = replace(role, queues=routing.both(of_shard(routing.QUEUE_DRAIN, shard)))
    set_up(settings.stack.log_level)
    parse_tenants(settings.gpu.tenants)  # a mistake there is said here, not by every batch
    guard.install({module.NAME for module in role.tasks})
    app = make_app(settings)
    profile = replace(role.profile, device=device) if device else role.profile
    context = Context(app, settings, profile, shard=shard)
    register(app, context, role)
    if not settings.internal.supervisor_pid:  # an embedded stack has compared, probed and named the store
        try:
            join_beside()
        except LogweirError as exc:
            sys.stderr.write(f"{exc}\n")
            return 2 if isinstance(exc, BadInput) else 1
    stay_with(settings)
    _count(settings, role_name)
    _announce(settings, role_name=role_name, role=role, name=name)
    if profile.leased:
        _give_back_at_the_end(context)
    if profile.part is not None:
        _reload_along(context, role, name)
    visible = visible_devices()
    # Which GPU of several the pool will choose is not known yet.
    place = device_name(profile.device, visible) if visible or not profile.leased else profile.device
    worker = app.Worker(
        hostname=f"{name}.{place}@{socket.gethostname()}",
        pool=role.pool,
        concurrency=1,
        max_tasks_per_child=role.tasks_per_child,
        queues=list(role.queues),
        loglevel="WARNING",
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=False,
        heartbeat_interval=BEAT_S,  # of the event for Flower; every 2 s would be a tenth of the idle load
        task_events=True,
    )
    worker.start()
    return int(worker.exitcode or 0)


def beat(settings: Settings) -> int:
    """Run celery beat: it only asks for sweeps, so two of them are harmless."""
    set_up(settings.stack.log_level)
    app = make_app(settings)
    app.conf.task_send_sent_event = False  # as for the tasks it asks for: see register()
    stay_with(settings)
    _count(settings, "beat")
    progress = Progress()

    class Ticking(Scheduler):  # type: ignore[misc] # celery publishes no types
        """In memory, because a sweep needs no memory of the last one; and seen to go on."""

        def tick(self, *args: Any, **kwargs: Any) -> Any:
            progress.pulse()
            wait_s = super().tick(*args, **kwargs)
            return wait_s and max(wait_s, DUE_S)

    Heartbeat(settings, role_name="beat", queues=(), name="beat", progress=progress).start()
    app.Beat(loglevel="WARNING", quiet=True, redirect_stdouts=False, scheduler_cls=Ticking).run()
    return 0


def tend(
    settings: Settings,
    run: Callable[[], object],
    stop: threading.Event,
    *,
    role_name: str,
    name: str,
    progress: Progress | None = None,
) -> None:
    """Run a loop that is no Celery worker until a signal: with heartbeat and tether, as a worker.

    `progress`: pulsed by the loop; `logweir health` tells when it stands still.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stay_with(settings)
    _count(settings, role_name)
    heart = Heartbeat(settings, role_name=role_name, queues=(), name=name, progress=progress, ends=False)
    heart.start()
    try:
        run()
    finally:
        heart.leave()


def stay_with(settings: Settings) -> None:
    """End with the supervisor, and pool children with this process, after kill -9 too."""
    if settings.internal.supervisor_pid:
        tether(settings.internal.supervisor_pid, grace_s=10.0)

    def child(**_: object) -> None:
        tether(os.getppid(), grace_s=0.0)

    signals.worker_process_init.connect(child, weak=False)


def _count(settings: Settings, role_name: str) -> None:
    """Push what this process counts, and let pool children do so for themselves."""

    def begin(**_: object) -> None:
        metrics.push(connect(settings, timeout_s=PUSH_TIMEOUT_S), Keys(settings.redis.key_prefix), role_name)

    begin()
    metrics.started(role_name)
    atexit.register(metrics.flush)
    signals.worker_process_init.connect(begin, weak=False)
    # A child ends without what is registered for the end of a process.
    signals.worker_process_shutdown.connect(lambda **_: metrics.flush(), weak=False)


def _reload_along(context: Context, role: Role, name: str) -> None:
    """Start the reloader in the process that does the work."""
    name = called(
        context.settings, name, embedded=bool(context.settings.internal.supervisor_pid)
    )  # as in the heartbeat
    HINT.open()  # before a pool forks

    def begin(**_: object) -> None:
        Reloader(context, name).start()

    signal_ = signals.worker_process_init if role.pool == "prefork" else signals.worker_ready
    signal_.connect(begin, weak=False)


def _give_back_at_the_end(context: Context) -> None:
    """A child that is told to end gives its GPU back; one that is killed is found by its lease."""

    def bye(**_: object) -> None:
        if "share" in vars(context) and context.share is not None:
            context.share.close()

    signals.worker_process_shutdown.connect(bye, weak=False)


def _announce(settings: Settings, *, role_name: str, role: Role, name: str) -> None:
    """Beat from the moment the worker consumes until it stops."""
    progress = Progress()
    progress.follow_celery()
    heart = Heartbeat(settings, role_name=role_name, queues=role.queues, name=name, progress=progress)

    def ready(**_: object) -> None:
        heart.start()
        if role.pool == "solo":  # a prefork child is ended by its parent, at its time limit
            end_when_held(settings.stack.step_s + HELD_S)

    def bye(**_: object) -> None:
        heart.leave()

    signals.worker_ready.connect(ready, weak=False)
    signals.worker_shutting_down.connect(bye, weak=False)
