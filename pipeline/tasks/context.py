"""What a worker process holds: one of each part, built on first use in the process that uses it.

A prefork parent must not open connections or start threads that its children inherit, so nothing is built
before the first task runs.
"""

import functools
import os
import socket
import uuid
from typing import TYPE_CHECKING

import redis
from celery import Celery

from pipeline.detect import Knowledge
from pipeline.drain.learner import Learner
from pipeline.drain.masking import MaskSet
from pipeline.drain.verdicts import Verdicts
from pipeline.errors import BadSetting
from pipeline.gpu.leases import Leases
from pipeline.ledger import Ledger
from pipeline.models.bundle import load_known
from pipeline.presence import Presence
from pipeline.records import Purpose
from pipeline.registry import Registry
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink
from pipeline.tasks.submit import Submit

if TYPE_CHECKING:
    from pipeline.models.line import LineModel


def connect(settings: Settings) -> "redis.Redis":
    """A client for the ledger: short time-outs, because a worker that waits for ever is not alive."""
    if settings.redis_url is None:
        raise BadSetting("no Redis is known; set REDIS_URL, or start the embedded stack with `logweir up`")
    return redis.Redis.from_url(
        settings.redis_url, socket_timeout=30, socket_connect_timeout=5, health_check_interval=10
    )


class Context:
    """The parts of one process, each built once. `device` is where models run."""

    def __init__(self, app: Celery, settings: Settings, *, device: str = "cpu") -> None:
        self.app = app
        self.settings = settings
        self.device = device
        self._model: tuple[str, LineModel] | None = None
        self._knowledge: dict[str, Knowledge] = {}

    @functools.cached_property
    def owner(self) -> str:
        """Who we are in claims and leases. Host and pid are for readers: containers share both, so chance tells apart."""
        return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"

    @functools.cached_property
    def client(self) -> "redis.Redis":
        return connect(self.settings)

    @functools.cached_property
    def ledger(self) -> Ledger:
        return Ledger(self.client, self.settings)

    @functools.cached_property
    def submit(self) -> Submit:
        return Submit(self.app, self.client, self.settings)

    @functools.cached_property
    def presence(self) -> Presence:
        return Presence(self.client, self.settings)

    @functools.cached_property
    def registry(self) -> Registry:
        return Registry(self.client, self.settings)

    @functools.cached_property
    def leases(self) -> Leases:
        return Leases(self.client, self.settings)

    @functools.cached_property
    def masks(self) -> MaskSet:
        return MaskSet.load(extra=self.settings.masks)

    @functools.cached_property
    def verdicts(self) -> Verdicts:
        return Verdicts(self.client, self.settings)

    @functools.cached_property
    def learner(self) -> Learner:
        return Learner(self.client, self.settings, self.verdicts)

    @functools.cached_property
    def _sinks(self) -> dict[Purpose, ParquetSink]:
        return {
            Purpose.SCORE: ParquetSink(self.settings.results),
            Purpose.BASELINE: ParquetSink(self.settings.baseline),
        }

    def sink(self, purpose: Purpose) -> ParquetSink:
        """Where results of this purpose are stored."""
        return self._sinks[purpose]

    def model(self, version: str) -> "LineModel":
        """The network of a version; the one before is dropped when it changes. Raises BadBundle."""
        from pipeline.models.line import LineModel

        if self._model is None or self._model[0] != version:
            path = self.registry.path(version)
            self._model = (version, LineModel.load(path, self.device, self.settings.torch_threads))
        return self._model[1]

    def knowledge(self, version: str) -> Knowledge:
        """What concluding needs from a version. Raises BadBundle."""
        found = self._knowledge.get(version)
        if found is None:
            calibration = self.registry.manifest(version).calibration
            found = Knowledge(calibration=calibration, known=load_known(self.registry.path(version)))
            # Batches in flight end under the version they began with, so the one before is still asked for.
            self._knowledge = {**dict(list(self._knowledge.items())[-1:]), version: found}
        return found
