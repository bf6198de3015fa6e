"""The world of a chaos run: what its workers have that the product has not, and how its servers fail."""

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from polling import wait_until

from bench._chaos.acts import Missed
from bench._chaos.history import History
from bench._chaos.machine import VISIBILITY_S, Machine
from bench._chaos.redis_faults import RedisFaults
from bench._chaos.schedule import Fault
from bench._chaos.servers import SentinelServers
from bench._chaos.services import Services
from bench._chaos.world import Shape, World
from pipeline.settings import Settings

PROBE = """
from pipeline.messages.app import make_app
from pipeline.settings import Settings
print(make_app(Settings.load()).conf.broker_transport_options["visibility_timeout"])
"""


def test_a_message_of_a_stopped_worker_is_given_to_another_one_within_seconds(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, redis_url="redis://127.0.0.1:1/0")
    machine = Machine("up", settings, cast("Services", None), {})
    asked = subprocess.run(
        [sys.executable, "-c", PROBE], env=machine.environment(), capture_output=True, text=True, check=True
    )
    assert float(asked.stdout) == VISIBILITY_S


def test_several_machines_without_a_store_that_all_reach_are_refused() -> None:
    with pytest.raises(ValueError, match="--store file or --store s3"):
        Shape(machines=2)


def test_a_history_gives_back_its_machines_store_and_sentinels(tmp_path: Path) -> None:
    several = Shape(machines=3, store="s3", sentinel=True)
    for name, facts, shape in (("old", {}, Shape()), ("new", asdict(several), several)):
        with History(tmp_path / name) as history:
            history.note("begin", seed=1, minutes=1.0, **facts)
        assert Shape.replayed(tmp_path / name) == shape


class Started:
    """Services that are started once and not again."""

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.commands: dict[str, list[str]] = {}

    def add(self, name: str, command: list[str], _env: dict[str, str]) -> None:
        self.commands[name] = command

    def start(self, name: str) -> None:
        self.processes[name] = subprocess.Popen(self.commands[name])

    def running(self, name: str) -> "subprocess.Popen[bytes] | None":
        process = self.processes.get(name)
        return process if process is not None and process.poll() is None else None

    def kill(self, name: str) -> bool:
        self.processes[name].kill()
        self.processes[name].wait(10)
        return True

    def hold(self, name: str, seconds: float) -> None:
        """It is not started again anyway."""

    def wait(self, done: Callable[[], bool], what: str) -> None:
        assert wait_until(done, timeout_s=60), what


@pytest.fixture
def group(tmp_path: Path) -> Iterator[tuple[SentinelServers, Started]]:
    started = Started()
    servers = SentinelServers(tmp_path, cast("Services", started))
    try:
        servers.start()
        yield servers, started
    finally:
        for process in started.processes.values():
            process.send_signal(signal.SIGKILL)
            process.wait(10)
        servers.close()


@pytest.mark.long
def test_a_server_fails_only_while_the_others_have_what_it_has(
    group: tuple[SentinelServers, Started],
) -> None:
    servers, started = group
    shape = Shape(sentinel=True)
    world: Any = SimpleNamespace(servers=servers, services=started, shape=shape, client=None)
    acts = RedisFaults(cast("World", world), threading.Event()).acts
    rng = random.Random(1)

    def do(kind: str, target: str = "") -> Any:
        return acts[kind](Fault(n=1, at_s=0.0, kind=kind, target=target), rng)

    assert servers.redundant()
    first = servers.master()
    _, go_on = do("stop_replica")
    with pytest.raises(Missed, match="another server"):
        do("kill_redis")
    go_on()
    assert wait_until(servers.redundant, timeout_s=30)
    # A master that is cut off from clients, sentinels and replicas is replaced.
    _, heal = do("refuse")
    assert wait_until(lambda: servers.master() not in ("", first), timeout_s=30)
    heal()
    assert wait_until(servers.redundant, timeout_s=60)
    assert servers.way() is servers.proxies[servers.master()]
    started.kill(servers.replicas()[0])
    with pytest.raises(Missed, match="not redundant"):
        do("cut")
