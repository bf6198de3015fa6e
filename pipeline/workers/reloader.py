"""Loads a new model version in a thread before the next batch needs it, then reports which version the
process serves.

There is one such thread per worker process. It compares the live pointers every `POLL_S`, less often while
the process is idle, and at once on the broadcast hint. The work goes on under the old version while the new
one loads. A lost hint costs one poll."""

import time
from typing import Final

import redis
from celery import signals

from pipeline.errors import BadPayload, ModelUnavailable, RedisUnavailable
from pipeline.imports import uncollected
from pipeline.models.registry import Registry
from pipeline.observe import counters as metrics
from pipeline.observe.presence import Presence
from pipeline.records.versions import outdated_words
from pipeline.redis.connection import answering, connect
from pipeline.redis.keys import Keys
from pipeline.tasks.context import Context
from pipeline.tasks.loaded import ModelPart
from pipeline.tasks.reload import HINT
from pipeline.upkeep import FaultSeries, UpkeepThread

# Five looks a second in three processes were a third of what an idle stack cost.
IDLE_AFTER_S: Final = 10.0
POLL_S: Final = 0.2  # how old the version of a working process may be if the broadcast hint got lost
IDLE_POLL_S: Final = 1.0
CONFIRM_S: Final = 15.0  # said again so often: a Redis that came back empty learns it too


class Reloader(UpkeepThread):
    """Runs in the process that does the work: the worker itself, or its prefork child."""

    def __init__(self, context: Context, name: str) -> None:
        super().__init__("reloader")
        self.context = context
        self.worker = name
        # Connections of its own: the work's may be in a long call.
        self.client = connect(context.settings)
        self.keys = Keys(context.settings.redis.key_prefix)
        self.presence = Presence(self.client, context.settings)
        self.registry = Registry(self.client, context.settings)
        self.said: dict[str, str] | None = None  # nothing yet: a killed process may have left its last word
        self.quiet_s = 0.0
        self.worked = time.monotonic()
        signals.task_prerun.connect(self.works, weak=False)
        self.models = context.models  # built here, before a second thread asks for it
        self.imports = context.profile.part is ModelPart.NETWORK

    def work(self) -> None:
        faults = FaultSeries("reloader.failed", RedisUnavailable, redis.RedisError, BadPayload)
        while True:
            poll_s = self.poll_s()
            HINT.wait(poll_s)
            self.quiet_s += poll_s
            with faults.outlived():
                self.look()

    def poll_s(self) -> float:
        """Seconds until the next comparison. An idle process may compare rarely: its next batch compares by
        itself."""
        return POLL_S if time.monotonic() - self.worked < IDLE_AFTER_S else IDLE_POLL_S

    def works(self, **_: object) -> None:
        """The process begins a task."""
        self.worked = time.monotonic()

    def look(self) -> None:
        """Compare once; report the served versions if they changed."""
        serving = self.models.serving
        lives, faults = self.registry.snapshot_all()
        if self.imports and (lives or self._model_comes()):
            # torch takes seconds and 160 MiB: imported once a model exists or is in training, before lines
            # wait for it.
            with uncollected():
                from pipeline.models import line  # noqa: F401

            self.imports = False
        for live in lives:
            try:
                if serving.follow(live, faults) is None:
                    self.presence.complain("model", outdated_words(live))
            except ModelUnavailable as exc:
                self.presence.complain("model", str(exc))
        versions = serving.versions()
        if versions != self.said or (versions and self.quiet_s > CONFIRM_S):
            self.presence.serves(self.worker, versions)
            if versions != (self.said or {}):
                metrics.reloaded()
            self.said, self.quiet_s = versions, 0.0

    def _model_comes(self) -> bool:
        """A training is asked for or runs."""
        with answering():
            return bool(self.client.exists(self.keys.training_queue, self.keys.training_now))
