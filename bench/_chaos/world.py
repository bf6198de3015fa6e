"""The world of a chaos run: machines with a stack each, their Redis, their store.

    with World(folder, history, minutes=3) as world:   # the stacks are ready here
        world.services.kill("redis"); world.workers(); world.store.disk.fill()

A process that ends is started again, as systemd would. Messages of a worker that is stopped for longer than
VISIBILITY_S are given to another one, so that both have them when it goes on. Everything ends with the block;
and with this process, whatever way that ends, because nothing here outlives its parent."""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import psutil  # type: ignore[import-untyped] # it publishes no types

from bench._chaos.brokers import Brokers
from bench._chaos.history import History
from bench._chaos.machine import Machine
from bench._chaos.servers import OneServer, SentinelServers, Servers, client_of
from bench._chaos.services import Services
from bench._chaos.stores import FILE, LOCAL, S3, SERVICE, Bucket, OnDisk, Store
from pipeline.settings import Settings

FOLLOW: Final = "follow-"
SERVERS: Final = ("redis", "sentinel", SERVICE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many machines, where their store lies, whether their Redis fails over, and whether they read a
    topic of Kafka and a stream of NATS."""

    machines: int = 1
    store: str = LOCAL
    sentinel: bool = False
    brokers: bool = False

    def __post_init__(self) -> None:
        if self.machines < 1 or (self.machines > 1 and self.store == LOCAL):
            raise ValueError("several machines need a store that all reach: --store file or --store s3")

    @classmethod
    def replayed(cls, path: Path) -> Self:
        """The shape of the run that left this history."""
        begin = next((item for item in History.read(path) if item["op"] == "begin"), {})
        return cls(
            **{name: begin[name] for name in ("machines", "store", "sentinel", "brokers") if name in begin}
        )


def settings_of(folder: Path, shape: Shape, **more: Any) -> Settings:
    """The product's own time-outs; small limits where a run must be able to reach them."""
    processes = 2 if shape.machines == 1 else 1
    return Settings(
        data_dir=folder,
        key_prefix="chaos",
        ingest_processes=processes,
        infer_processes=processes,
        drain_processes=processes,
        store_processes=processes,
        max_pending_batches=100,
        step_s=10.0,
        retrain_lines=20_000,
        retrain_backoff_s=5.0,
        flower=False,
        metrics=False,
        gpu_agent=False,
        **more,
    )


class World:
    """Use it from the main thread; its methods may be called from any."""

    def __init__(self, folder: Path, history: History, *, minutes: float, shape: Shape) -> None:
        self.folder = folder
        self.shape = shape
        self.services = Services(folder, history)
        self.servers: Servers = (SentinelServers if shape.sentinel else OneServer)(folder, self.services)
        self.store: Store = (
            Bucket(folder, self.services)
            if shape.store == S3
            else OnDisk(
                folder,
                shared=shape.store == FILE,
                mib=int(64 + 16 * minutes) * shape.machines,
                processes=self._writers,
            )
        )
        common = {**self.store.settings, "redis_replicas_ack": self.servers.replicas_ack}
        # Of the bench itself: past the proxies where there is a way. One machine is judged by its own folder.
        judge = folder / ("data" if shape.machines == 1 else "judge")
        self.direct = settings_of(judge, shape, redis_url=self.servers.direct, **common)
        self.settings = self.direct  # through the network, once that is there
        self.client = client_of(self.servers.direct, timeout_s=5)
        self.machines: list[Machine] = []
        self.brokers: Brokers | None = Brokers() if shape.brokers else None
        self._common = common

    def __enter__(self) -> Self:
        try:
            self.services.__enter__()
            self.store.start()
            self.servers.start()
            self.settings = self.direct.replace(redis_url=self.servers.url)
            sources = self.brokers.__enter__().settings() if self.brokers is not None else {}
            for n in range(self.shape.machines):
                place = self.folder / ("data" if self.shape.machines == 1 else f"machine-{n}")
                settings = settings_of(
                    place, self.shape, redis_url=self.servers.url, **sources, **self._common
                )
                name = "up" if self.shape.machines == 1 else f"up-{n}"
                self.machines.append(Machine(name, settings, self.services, self.store.env))
                self.machines[-1].start()
            self.services.wait(lambda: all(m.ready() for m in self.machines), "the stacks are ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in [name for name in self.services.all if name.startswith(FOLLOW)]:
            self.services.stop(name)
        for machine in self.machines:
            machine.stop()
        self.services.__exit__()
        if self.brokers is not None:
            self.brokers.__exit__()
        self.servers.close()
        self.store.close()

    def follow(self, path: Path, workload: str) -> None:
        """Somebody follows a file from now on."""
        command = [
            *(sys.executable, "-m", "pipeline.cli", "send", str(path)),
            *("--follow", "--workload", workload),
        ]
        self.services.add(FOLLOW + workload, command, self.machines[0].environment())
        self.services.start(FOLLOW + workload)

    def workers(self, role: str = "") -> dict[str, int]:
        """Processes of all machines' workers by name."""
        found: dict[str, int] = {}
        for machine in self.machines:
            place = "" if len(self.machines) == 1 else f"{machine.name}:"
            found |= {f"{place}{name}": pid for name, pid in machine.workers(role).items()}
        return found

    def pids(self) -> list[int]:
        """Every process of the world but servers and those that start something."""
        skip = {
            process.pid
            for name in list(self.services.all)
            if name.partition("-")[0] in SERVERS and (process := self.services.running(name)) is not None
        }
        with suppress(psutil.Error):
            return [p.pid for p in psutil.Process().children(recursive=True) if p.pid not in skip]
        return []

    def folders(self) -> list[Path]:
        """The data directories of all machines."""
        return [machine.settings.data.dir for machine in self.machines]

    def _writers(self) -> list[int]:
        return [*self.workers("ingest").values(), *self.workers("store").values()]


def clean_environment() -> None:
    """Nothing of a developer's own settings reaches the run, nor this process."""
    for name in list(os.environ):
        if name == "REDIS_URL" or name.startswith(("LOGWEIR_", "OPENSEARCH_", "AWS_")):
            del os.environ[name]
