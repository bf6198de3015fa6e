"""Starts one worker process of one role: app, tasks of that role, heartbeat, tether to its supervisor.

Roles differ only in the table below. GPU and training work runs in a prefork child, so that the parent stays
responsive, enforces time limits and outlives a crash; the parent never loads torch or touches CUDA. Light roles
use the solo pool: one process each, restarted by whoever supervises it.
"""

import atexit
import os
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import redis
from celery import Celery, signals
from celery.beat import Scheduler

from pipeline.errors import BadSetting, RedisUnavailable, StepFailed
from pipeline.gpu.policy.fairness import tenants
from pipeline.logs import logger, set_up
from pipeline.messages import filter as guard
from pipeline.messages import routing
from pipeline.messages.app import make_app
from pipeline.observe import counters as metrics
from pipeline.observe.presence import Pace, Presence
from pipeline.redis.keys import Keys, connect
from pipeline.redis.shards import of_shard, shard_named
from pipeline.settings import Settings, visible_devices
from pipeline.tasks import drain, infer, ingest, periodic, store, tick, train, watch
from pipeline.tasks.context import Context
from pipeline.tasks.reload import HINT
from pipeline.workers.liveness import HELD_S, Liveness, Looker, Progress, end_when_held
from pipeline.workers.reloader import Reloader
from pipeline.workers.stack.data_dir import called
from pipeline.workers.tethered import tether

BEAT_S: Final = 4.0
# A look at a schedule that is due in less time: Celery comes forty times for one that is due in a hundredth of a second.
DUE_S: Final = 0.05
PUSH_TIMEOUT_S: Final = 1.0  # a Redis that hangs must not hold up the end of a process
# An exception may quote what it could not read; a sentence is enough to know which one it was.
REASON_LIMIT: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a worker process serves. `time_limit_s`: of what is no step, and needs the prefork pool."""

    queues: tuple[str, ...]
    tasks: tuple[Any, ...]  # modules with NAME and run(context, *ids)
    pool: str = "solo"
    time_limit_s: float | None = None
    device: str = "cpu"
    pooled: bool = False  # works only under a lease of the GPU pool
    tasks_per_child: int | None = None  # then the child ends, and with it what CUDA keeps
    loads: str = ""  # what it needs of a model version (tasks/context.py); "": it answers under none


ROLES: Final[dict[str, Role]] = {
    "ingest": Role(queues=routing.both(routing.QUEUE_INGEST), tasks=(ingest,), loads="manifest"),
    "infer-cpu": Role(
        queues=routing.both(routing.QUEUE_CPU), tasks=(infer,), pool="prefork", loads="network"
    ),
    "infer-gpu": Role(
        queues=routing.both(routing.QUEUE_GPU),
        tasks=(infer,),
        pool="prefork",
        device="cuda",
        pooled=True,
        loads="network",
    ),
    "drain": Role(queues=routing.both(routing.QUEUE_DRAIN), tasks=(drain,), loads="knowledge"),
    "store": Role(
        queues=(routing.QUEUE_PERIODIC, *routing.both(routing.QUEUE_STORE)),
        tasks=(store, periodic, tick, watch),
    ),
    # Besides the fit itself, whose time is a setting: reading a long history takes hours.
    "train": Role(queues=(routing.QUEUE_TRAIN,), tasks=(train,), pool="prefork", time_limit_s=6 * 3600),
    "train-gpu": Role(
        queues=(routing.QUEUE_TRAIN,),
        tasks=(train,),
        pool="prefork",
        time_limit_s=6 * 3600,
        device="cuda",
        pooled=True,
        tasks_per_child=1,
    ),
}


def register(app: Celery, context: Context, role: Role) -> None:
    """Make the role's task modules known to the app under their names."""
    for module in role.tasks:
        options: dict[str, Any] = {
            "name": module.NAME,
            "acks_late": True,
            "ignore_result": True,
            "shared": False,  # another app of this process has a context of its own
            # Said already, by the step and in the ledger: no second traceback in the log.
            "throws": (StepFailed,),
            # Sweeps every other second would bury what somebody looks for in Flower; what they send is seen there.
            "send_events": module not in (periodic, tick, watch),
        }
        if role.time_limit_s is not None:
            limit = role.time_limit_s + 3 * context.settings.train_seconds
            options |= {"soft_time_limit": limit, "time_limit": limit + 10}
        elif role.pool == "prefork":
            # A step ends itself after `step_s`; this is for one that lets no thread of its process run.
            options["time_limit"] = context.settings.step_s + 3 * HELD_S
        app.task(_bind(module.run, context), **options)


def _bind(run: Callable[..., str | None], context: Context) -> Callable[..., None]:
    def task(*ids: str, **_of_a_newer_sender: object) -> None:
        reason = run(context, *ids)
        if reason is not None:
            # For people who watch tasks: a failed one with its reason. Late acks acknowledge failed ones too.
            raise StepFailed(reason[:REASON_LIMIT])

    return task


def device_name(device: str, visible: str | None) -> str:
    """What stands in a worker's name: `cpu`, or the GPU as this machine counts it, `cuda2`. Asks no driver.

    `visible` is CUDA_VISIBLE_DEVICES: indices, or `GPU-` and `MIG-` ids, of which the first characters tell enough.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return kind
    index = int(number) if number.isdecimal() else 0
    chosen = [part.strip() for part in (visible or "").split(",") if part.strip()]
    if not chosen:
        return f"cuda{index}"
    own = chosen[min(index, len(chosen) - 1)][:12]
    return f"cuda{own}" if own.isdecimal() else f"cuda-{own}"


def placed(text: str, settings: Settings) -> tuple[str, int]:
    """The role and the drain shard that a command line names: `store`, `drain`, `drain.2`. Raises BadSetting."""
    shard = shard_named(text, "drain")
    if shard is not None and shard >= settings.drain_shards:
        raise BadSetting(
            f"{text!r} is no drain shard here, where drain_shards = {settings.drain_shards}; raise it in all processes alike"
        )
    role = text if shard is None else "drain"
    if role not in ROLES:
        raise BadSetting(f"{text!r} is not a worker role; the roles are: {', '.join(ROLES)}, and drain.1 ...")
    return role, shard or 0


def serve(role_name: str, settings: Settings, *, name: str, device: str | None = None) -> int:
    """Run a worker until it is told to stop; returns its exit code. `role_name`: see `placed`."""
    role_name, shard = placed(role_name, settings)
    role = ROLES[role_name]
    if shard:
        role = replace(role, queues=routing.both(of_shard(routing.QUEUE_DRAIN, shard)))
    set_up(settings.log_level)
    tenants(settings.gpu_tenants)  # a mistake there is said here, not by every batch
    guard.install({module.NAME for module in role.tasks})
    app = make_app(settings)
    context = Context(
        app,
        settings,
        device=device or role.device,
        loads=role.loads or "manifest",
        pooled=role.pooled,
        shard=shard,
    )
    register(app, context, role)
    stay_with(settings)
    _count(settings, role_name)
    _announce(settings, role_name=role_name, role=role, name=name)
    if role.pooled:
        _give_back_at_the_end(context)
    if role.loads:
        _reload_along(context, role, name)
    visible = visible_devices()
    # Which GPU of several the pool will choose is not known yet.
    place = device_name(context.device, visible) if visible or not role.pooled else context.device
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
        heartbeat_interval=BEAT_S,  # of the event that Flower sees; every other second would be a tenth of what idling costs
        task_events=True,
    )
    worker.start()
    return int(worker.exitcode or 0)


def beat(settings: Settings) -> int:
    """Run celery beat: it only asks for sweeps, so two of them are harmless."""
    set_up(settings.log_level)
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
    """Run a loop that is no Celery worker until it is told to stop: signals, heartbeat, tether as a worker has them.

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
    """End with the supervisor, and let pool children end with us, whatever way the parent goes (kill -9 too)."""
    if settings.supervisor_pid:
        tether(settings.supervisor_pid, grace_s=10.0)

    def child(**_: object) -> None:
        tether(os.getppid(), grace_s=0.0)

    signals.worker_process_init.connect(child, weak=False)


def _count(settings: Settings, role_name: str) -> None:
    """Push what this process counts, and let pool children do so for themselves."""

    def begin(**_: object) -> None:
        metrics.push(connect(settings, timeout_s=PUSH_TIMEOUT_S), Keys(settings.key_prefix), role_name)

    begin()
    metrics.started(role_name)
    atexit.register(metrics.flush)
    signals.worker_process_init.connect(begin, weak=False)
    # A child ends without what is registered for the end of a process.
    signals.worker_process_shutdown.connect(lambda **_: metrics.flush(), weak=False)


class Heartbeat(threading.Thread):
    """Says every few seconds that this process lives; Redis being away only makes it silent."""

    def __init__(
        self,
        settings: Settings,
        *,
        role_name: str,
        queues: tuple[str, ...],
        name: str,
        progress: Progress | None = None,
        ends: bool = True,
    ) -> None:
        """`progress`: what is told of the work. `ends`: the process is ended when it takes nothing (liveness.py)."""
        super().__init__(name="heartbeat", daemon=True)
        self.presence = Presence(connect(settings), settings)
        self.role = role_name
        self.queues = queues
        self.worker = called(settings, name, embedded=bool(settings.supervisor_pid))
        self.progress = progress
        self.looker: Looker | None = None
        if progress is not None:
            keys = list(map(Keys(settings.key_prefix).kombu, queues))
            # A client of its own: neither waits behind the other.
            liveness = Liveness(connect(settings), progress, keys, stall_s=settings.stall_s)
            self.looker = Looker(liveness) if ends else Looker(liveness, end=lambda: None)
        self.stopping = threading.Event()

    def run(self) -> None:
        if self.looker is not None:
            self.looker.start()
        while True:
            try:
                self.presence.beat(
                    name=self.worker,
                    role=self.role,
                    pid=os.getpid(),
                    queues=self.queues,
                    progress=self._pace(),
                )
            except (RedisUnavailable, redis.RedisError) as exc:
                logger().warning("heartbeat.failed", why=str(exc))
            if self.stopping.wait(BEAT_S):
                return

    def _pace(self) -> Pace | None:
        if self.progress is None or self.looker is None:
            return None
        moment = self.progress.now()
        return Pace(quiet_s=moment.quiet_s, busy=moment.busy, stalled_s=self.looker.stalled_s)

    def leave(self) -> None:
        self.stopping.set()
        if self.looker is not None:
            self.looker.stopping.set()
        try:
            self.presence.leave(self.worker)
        except (RedisUnavailable, redis.RedisError):
            return  # the sweep forgets silent workers


def _reload_along(context: Context, role: Role, name: str) -> None:
    """Start the reloader in the process that does the work."""
    name = called(
        context.settings, name, embedded=bool(context.settings.supervisor_pid)
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
            end_when_held(settings.step_s + HELD_S)

    def bye(**_: object) -> None:
        heart.leave()

    signals.worker_ready.connect(ready, weak=False)
    signals.worker_shutting_down.connect(bye, weak=False)
