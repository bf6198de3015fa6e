"""Starts one worker process of one role: app, tasks of that role, heartbeat, tether to its supervisor.

Roles differ only in the table below. GPU and training work runs in a prefork child, so that the parent stays
responsive, enforces time limits and outlives a crash; the parent never loads torch or touches CUDA. Light
roles use the solo pool: one process each, restarted by whoever supervises it."""

import socket
from dataclasses import replace
from typing import Any, Final

import billiard.pool
from celery import signals

from pipeline.gpu.node.engine import ContainerEngine, find_engine
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.policy.fairness import parse_tenants
from pipeline.imports import uncollected
from pipeline.logs import set_up
from pipeline.messages import filter as guard
from pipeline.messages import routing
from pipeline.messages.app import declare, make_app
from pipeline.observe.embedded import called
from pipeline.settings import Settings, visible_devices
from pipeline.tasks.context import Context
from pipeline.tasks.pool import job
from pipeline.tasks.reload import HINT
from pipeline.workers.heartbeat import BEAT_S, Heartbeat
from pipeline.workers.liveness import HELD_S, Progress, end_when_held
from pipeline.workers.loops import collect_seldom, count_along, stay_with
from pipeline.workers.reloader import Reloader
from pipeline.workers.roles import Role, device_name, register, role_named
from pipeline.workers.same_store import join_beside

# Tenths of a second that the child of a prefork worker waits at its end for its parent to read its results.
# The parent may have stopped reading. Nothing is lost without them: the ledger knows what a task did.
READ_RETRIES: Final = 20


def serve(role_name: str, settings: Settings, *, name: str, device: str | None = None) -> int:
    """Run a worker until it is told to stop; returns its exit code. `role_name`: see `role_named`."""
    with uncollected():  # its parts import 155 modules more
        worker = _worker(role_name, settings, name=name, device=device)
    worker.start()
    return int(worker.exitcode or 0)


def _worker(role_name: str, settings: Settings, *, name: str, device: str | None) -> Any:
    """Celery's worker with the tasks of a role, not started."""
    role, engine = role_named(role_name), None
    if role_name == "gpu-jobs":
        role, engine = replace(role, queues=(routing.jobs_queue(this_node()),)), find_engine()
    set_up(settings.stack.log_level)
    parse_tenants(settings.gpu.tenants)  # a mistake there is said here, not by every batch
    guard.install({module.NAME for module in role.tasks})
    app = make_app(settings)
    for queue in role.queues:
        declare(app, queue)
    profile = replace(role.profile, device=device) if device else role.profile
    context = Context(app, settings, profile)
    register(app, context, role)
    if not settings.internal.supervisor_pid:  # an embedded stack has compared, probed and named the store
        join_beside()
    stay_with(settings)
    count_along(settings, role_name)
    _collect_along(role)
    _announce(settings, role_name=role_name, role=role, name=name, engine=engine)
    if engine is not None:
        job.sweep_along(context, engine)
    if profile.leased:
        _give_back_at_the_end(context)
    if profile.part is not None:
        _reload_along(context, role, name)
    visible = visible_devices()
    # Which GPU of several the pool will choose is not known yet.
    place = device_name(profile.device, visible) if visible or not profile.leased else profile.device
    billiard.pool.GUARANTEE_MESSAGE_CONSUMPTION_RETRY_LIMIT = READ_RETRIES
    return app.Worker(
        hostname=f"{name}.{place}@{socket.gethostname()}",
        pool=role.pool,
        concurrency=1,
        max_tasks_per_child=role.tasks_per_child,
        queues=list(role.queues),
        loglevel="WARNING",
        quiet=True,  # its banner takes longer than the connection
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=False,
        heartbeat_interval=BEAT_S,  # of the event for Flower; every 2 s would be a tenth of the idle load
        task_events=True,
    )


def _collect_along(role: Role) -> None:
    """In the process that does the work."""
    signal_ = signals.worker_process_init if role.pool == "prefork" else signals.worker_ready
    signal_.connect(lambda **_: collect_seldom(), weak=False)


def _reload_along(context: Context, role: Role, name: str) -> None:
    """Start the reloader in the process that does the work."""
    name = called(
        context.settings, name, embedded=bool(context.settings.internal.supervisor_pid)
    )  # as in the heartbeat
    HINT.open()  # before a pool forks

    def begin(**_: object) -> None:
        Reloader(context, name).start()
        if context.share is not None:
            context.share.announce()

    signal_ = signals.worker_process_init if role.pool == "prefork" else signals.worker_ready
    signal_.connect(begin, weak=False)


def _give_back_at_the_end(context: Context) -> None:
    """A child that is told to end gives its GPU back; one that is killed is found by its lease."""

    def bye(**_: object) -> None:
        if "share" in vars(context) and context.share is not None:
            context.share.close()

    signals.worker_process_shutdown.connect(bye, weak=False)


def _announce(
    settings: Settings, *, role_name: str, role: Role, name: str, engine: ContainerEngine | None = None
) -> None:
    """Beat from the moment the worker consumes until it stops."""
    progress = Progress()
    progress.follow_celery()
    heart = Heartbeat(
        settings, role_name=role_name, queues=role.queues, name=name, progress=progress,
        engine="" if engine is None else engine.words,
    )  # fmt: skip

    def ready(**_: object) -> None:
        heart.start()
        if role.pool == "solo":  # a prefork child is ended by its parent, at its time limit
            end_when_held(settings.stack.step_s + HELD_S)

    def bye(**_: object) -> None:
        heart.leave()

    signals.worker_ready.connect(ready, weak=False)
    signals.worker_shutting_down.connect(bye, weak=False)
