"""Model versions in the memory of one process, and on its leased device."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeVar

from cachetools import LRUCache

from pipeline.errors import BadBundle, BadInput, LeaseRefused, ModelUnavailable, RedisUnavailable
from pipeline.gpu.own_models import OwnCopies, scoring_model
from pipeline.gpu.values import PoolLease
from pipeline.imports import uncollected
from pipeline.logs import logger
from pipeline.models.known.patterns import load_known
from pipeline.models.registry import Registry
from pipeline.models.serving import Serving
from pipeline.models.verdict import Knowledge
from pipeline.observe import counters as metrics
from pipeline.settings import Settings, set_for_cuda
from pipeline.watching.callbacks import Expected
from pipeline.watching.sessions.bundled import read_session_models, session_model_of
from pipeline.watching.sessions.model import SessionModel

if TYPE_CHECKING:
    from pipeline.models.line import LineModel

T = TypeVar("T")
# Model versions in memory, some MiB each: the shared one, its predecessor, and own models of a few workloads.
LOADED_MODELS: Final = 8


class ModelPart(StrEnum):
    """The part of a model version that a process reads before it answers under that version."""

    NETWORK = "network"
    KNOWLEDGE = "knowledge"
    MANIFEST = "manifest"  # its hashes are checked


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProfile:
    """How a worker process uses models."""

    part: ModelPart | None = None  # None: it answers under no version
    device: str = "cpu"  # where networks run
    # Runs networks only under a lease of the GPU pool. `device` is a kind then ("cuda"): the lease names the
    # device, and networks stay in host memory until there is a lease.
    leased: bool = False


CPU_PROFILE: Final = WorkerProfile()


class LoadedModels:
    """The models of one process. Threads share it: the reloader loads the version that the next batch
    needs."""

    def __init__(self, registry: Registry, settings: Settings, profile: WorkerProfile) -> None:
        self.registry = registry
        self.settings = settings
        self.profile = profile
        self.place = "cpu"  # where networks run now, as torch names it
        self._networks: LRUCache[str, LineModel] = LRUCache(LOADED_MODELS)
        self._copies: OwnCopies[LineModel] | None = None  # on the leased device
        self._knowledge: LRUCache[str, Knowledge] = LRUCache(LOADED_MODELS)
        self._expected: LRUCache[str, Expected] = LRUCache(LOADED_MODELS)
        self._sessions: LRUCache[str, dict[tuple[str | None, str], SessionModel]] = LRUCache(LOADED_MODELS)
        self._lock = threading.RLock()
        read: dict[ModelPart | None, Callable[[str], object]] = {
            ModelPart.NETWORK: self.network,
            ModelPart.KNOWLEDGE: self.knowledge,
        }
        self.serving = Serving(registry, read.get(profile.part, registry.manifest))

    def network(self, version: str) -> "LineModel":
        """The network of a version. Raises BadBundle."""
        with uncollected():
            from pipeline.models.line import LineModel

        device = "cpu" if self.profile.leased else self.profile.device
        return self._cached(
            self._networks,
            version,
            lambda: self.registry.read(version, lambda path: LineModel.load(path, device)),
        )

    def scorer(self, version: str) -> "LineModel":
        """The network of a version on the device where this process may score now.

        It is the one in host memory, for the CPU, where there is no lease or the placement refuses the
        version. Raises BadBundle, DeviceFailed, and what the device raises.
        """
        network = self.network(version)
        if self._copies is None:
            return network
        try:
            return self._copies.get(scoring_model(version, network.weights_mib))
        except (LeaseRefused, BadInput, RedisUnavailable) as exc:
            logger(version=version).info("share.not_placed", why=str(exc))
            return network

    def knowledge(self, version: str) -> Knowledge:
        """The calibration and known lines of a version. Raises BadBundle."""

        def load() -> Knowledge:
            calibration = self.registry.manifest(version).calibration
            return Knowledge(calibration=calibration, known=self.registry.read(version, load_known))

        return self._cached(self._knowledge, version, load)

    def expected(self, version: str) -> Expected:
        """What the training of a version expects of a day. Raises BadBundle."""
        return self._cached(self._expected, version, lambda: Expected.by(self.registry.manifest(version)))

    def session_model(self, version: str, workload: str, kind: str) -> SessionModel | None:
        """The session model of a workload and a kind of key; None if the version has none for them or it
        cannot be read."""
        models = self._cached(self._sessions, version, lambda: self._session_models(version))
        return session_model_of(models, workload, kind)

    def _session_models(self, version: str) -> dict[tuple[str | None, str], SessionModel]:
        """Of a version; {} if they cannot be read."""
        try:
            return self.registry.read(version, read_session_models)
        except BadBundle as exc:
            logger(version=version).error("watch.damaged", what="sequences", why=str(exc))
            return {}

    def _cached(self, cache: "LRUCache[str, T]", version: str, load: Callable[[], T]) -> T:
        # Several versions: batches end under the version they began with, and workloads may have models of
        # their own.
        with self._lock:
            value: T | None = cache.get(version)
        if value is None:
            value = load()  # outside the lock: meanwhile the worker goes on under the version before
            with self._lock:
                cache[version] = value
        return value

    # The interface of tasks/share.py, `DeviceUser`.

    @property
    def cuda_device(self) -> str | None:
        """The device that this process has started CUDA on. CUDA's context ends only with the process."""
        if self.profile.device == "cpu" or not self.profile.leased:
            return None
        from pipeline.gpu.node import cuda

        return cuda.started_on()

    @property
    def began(self) -> bool:
        """True if this process has memory on a device until it ends."""
        return self.cuda_device is not None

    def prepare(self) -> None:
        """Import torch and read the live model, which takes seconds, before there is a claim or a lease."""
        with suppress(ModelUnavailable, RedisUnavailable):  # the step that needs the model reports it
            self.serving.version()

    def begin(self, lease: PoolLease) -> None:
        """Start to use the leased device, within the leased memory.

        Raises LogweirError, LeaseRefused before the start where the placement refuses the live model.
        """
        copies = self._ask_placement(lease)
        if self.profile.device != "cpu":
            from pipeline.gpu.node import cuda, mps

            part = lease.parts[0]
            context_mib = self.settings.internal.gpu_context_mib
            if cuda.started_on() is None:  # CUDA reads them once
                set_for_cuda(mps.of_part(part, context_mib))
            self.place = cuda.begin(part.uuid, memory_mib=part.memory_mib, context_mib=context_mib)
        self._copies = copies

    def _ask_placement(self, lease: PoolLease) -> "OwnCopies[LineModel] | None":
        """The copies of a scoring process under a lease; None for a process that scores nothing.

        CUDA's context ends only with its process, so the placement is asked before there is one.
        """
        if self.profile.part is not ModelPart.NETWORK:
            return None
        copies: OwnCopies[LineModel] = OwnCopies(
            self.registry.client, self.settings, lease=lease,
            copy=lambda version: self.network(version).on(self.place),
        )  # fmt: skip
        with suppress(ModelUnavailable):
            version = self.serving.version()
            if version is not None and (
                why := copies.placement.refusal(scoring_model(version, self.network(version).weights_mib))
            ):
                raise LeaseRefused(why)
        return copies

    def unload(self) -> None:
        """Take the networks off the device."""
        if self._copies is not None:
            self._copies.clear()
        self._copies = None
        self.place = "cpu"
        if self.profile.device != "cpu":
            from pipeline.gpu.node import cuda

            cuda.unload()

    def end(self) -> None:
        """End this process between two batches, to free the memory of CUDA's context. Celery starts another
        one."""
        metrics.flush()
        os._exit(0)
