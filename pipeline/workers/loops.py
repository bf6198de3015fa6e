"""Processes that run a loop and no Celery worker: beat, the agent, the exporter, the source.

Here is also the upkeep of every process: its tether to the supervisor, and its counters. Nothing of this
imports Polars or the tasks, so such a process starts sooner and stays smaller than a worker."""

import atexit
import gc
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Final

from celery import signals
from celery.beat import Scheduler

from pipeline.logs import set_up
from pipeline.messages.app import make_app
from pipeline.observe import counters as metrics
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.workers.heartbeat import Heartbeat
from pipeline.workers.liveness import Progress
from pipeline.workers.tethered import tether

# The shortest pause of beat. Celery polls forty times for an entry that is due in a hundredth of a second.
DUE_S: Final = 0.05
# New objects that begin a search for garbage. With Python's 700 a round of the watcher, which makes a hundred
# thousand, searched all objects of its process several times.
GARBAGE_AFTER: Final = 10_000
PUSH_TIMEOUT_S: Final = 1.0  # a Redis that hangs must not hold up the end of a process


def beat(settings: Settings) -> int:
    """Run celery beat: it only asks for sweeps, so two of them are harmless."""
    set_up(settings.stack.log_level)
    app = make_app(settings)
    app.conf.task_send_sent_event = False  # as for the tasks it asks for: see register()
    stay_with(settings)
    count_along(settings, "beat")
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
    count_along(settings, role_name)
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


def collect_seldom() -> None:
    """The cyclic garbage collector leaves the objects of now alone, and searches newer ones less often.

    Called when a process is ready: its modules are objects that stay to its end. To search them again and
    again took more than half of the watcher's processor time, and a sixth of the intake's. One search before
    took 0.1 s, a tenth of a worker's start. It found 1,446 of 120,000 objects to be garbage and freed no
    page, so they stay, too."""
    gc.freeze()
    gc.set_threshold(GARBAGE_AFTER, *gc.get_threshold()[1:])


def count_along(settings: Settings, role_name: str) -> None:
    """Push what this process counts, and let pool children do so for themselves."""

    def begin(**_: object) -> None:
        metrics.push(connect(settings, timeout_s=PUSH_TIMEOUT_S), Keys(settings.redis.key_prefix), role_name)

    begin()
    metrics.started(role_name)
    atexit.register(metrics.flush)
    signals.worker_process_init.connect(begin, weak=False)
    # A child ends without what is registered for the end of a process.
    signals.worker_process_shutdown.connect(lambda **_: metrics.flush(), weak=False)
