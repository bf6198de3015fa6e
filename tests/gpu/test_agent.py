"""The node agent: what it tells the pool of, whatever the driver does."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
from fake_nvml_driver import DRIVER_NOT_LOADED, UNKNOWN, Driver, Gpu
from polling import Clock, wait_until

from pipeline.errors import RedisUnavailable
from pipeline.gpu.node.agent import Agent
from pipeline.gpu.node.health import Patience
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import Device, Process, Report
from pipeline.observe.presence import Presence
from pipeline.settings import Settings
from pipeline.workers.agent import AgentWorker

IMPATIENT = Patience(good=3, first_s=4, most_s=16, forget_s=1000)


@dataclass
class Recorder:
    """A pool in memory: keeps what it is told; refuses while another agent's name stands in `taken_by`."""

    reports: list[Report] = field(default_factory=list)
    sweeps: int = 0
    taken_by: str = ""

    def report(self, report: Report) -> str:
        if self.taken_by and self.taken_by != report.agent:
            return f"node {report.node} is watched by agent {self.taken_by}"
        self.reports.append(report)
        return ""

    def sweep(self) -> object:
        self.sweeps += 1
        return None


@dataclass
class Bench:
    """An agent on a machine whose driver and clock the test moves."""

    driver: Driver
    agent: Agent
    pool: Recorder
    clock: Clock

    def beat(self, *, pause_s: float = 1.0) -> dict[str, Device]:
        self.clock.now += pause_s
        return {device.uuid: device for device in self.agent.beat().devices}

    def why(self, uuid: str = "GPU-a", *, pause_s: float = 1.0) -> str:
        return self.beat(pause_s=pause_s)[uuid].why


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    """A machine with two GPUs, of different sizes."""
    driver = Driver(tmp_path)
    driver.devices(
        Gpu("GPU-a", processes={77: 600}, temperature=61, utilisation=20),
        Gpu("GPU-b", name="NVIDIA Test 12GB", total=12_288, reserved=300),
    )
    return driver


@pytest.fixture
def bench(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """It seen from this process."""
    driver.use(monkeypatch)
    clock, pool = Clock(), Recorder()
    agent = Agent(pool, Settings(), "node-1", patience=IMPATIENT, clock=clock, monotonic=clock)
    yield Bench(driver, agent, pool, clock)
    driver.mend()


def test_a_beat_tells_the_pool_what_the_machine_has_and_lets_it_sweep(bench: Bench) -> None:
    found = bench.beat()
    (report,) = bench.pool.reports
    assert (report.node, report.agent, report.driver) == ("node-1", bench.agent.name, "570.86.10")
    assert report.clock_ms == 1_001_000
    assert bench.pool.sweeps == 1
    assert found["GPU-a"] == Device(
        uuid="GPU-a",
        node="node-1",
        index=0,
        name="NVIDIA Test 24GB",
        total_mib=24_576,
        schedulable_mib=24_576 - 512 - 256,
        reserved_mib=512,
        processes=(Process(pid=77, used_mib=600),),
        utilisation_percent=20,
        temperature_c=61,
    )


def test_unequal_gpus_of_a_node_keep_their_own_sizes(bench: Bench) -> None:
    found = bench.beat()
    sizes = {u: (d.name, d.total_mib, d.reserved_mib, d.schedulable_mib) for u, d in found.items()}
    assert sizes == {
        "GPU-a": ("NVIDIA Test 24GB", 24_576, 512, 24_576 - 512 - 256),
        "GPU-b": ("NVIDIA Test 12GB", 12_288, 300, 12_288 - 300 - 256),
    }


def test_without_a_driver_the_pool_is_empty_and_the_agent_goes_on(bench: Bench) -> None:
    bench.driver.error("nvmlInitWithFlags", DRIVER_NOT_LOADED)
    assert bench.beat() == {}
    assert bench.beat() == {}
    bench.driver.mend()
    assert set(bench.beat(pause_s=120)) == {"GPU-a", "GPU-b"}


def test_an_agents_name_is_of_one_process_alone(bench: Bench) -> None:
    other = Agent(bench.pool, Settings(), "node-1")
    assert other.name != bench.agent.name
    assert f":{os.getpid()}:" in other.name


def test_a_fatal_xid_makes_the_gpu_unusable_until_it_was_well_for_a_while(bench: Bench) -> None:
    bench.beat()
    bench.driver.xid("GPU-a", 79)
    found = bench.beat()
    assert found["GPU-a"].why == "XID 79 (fell off the bus) at 00:16 UTC; it is probed again"
    assert found["GPU-b"].usable
    assert [bool(bench.why()) for _ in range(6)] == [True, True, True, True, False, False]


def test_errors_of_a_program_leave_the_gpu_usable(bench: Bench) -> None:
    bench.beat()
    for xid in (13, 31, 43, 45, 68, 109):
        bench.driver.xid("GPU-a", xid)
    assert bench.why() == ""


def test_an_xid_marks_every_slice_of_its_gpu_and_no_other(bench: Bench) -> None:
    bench.driver.devices(Gpu("GPU-a", slices=(Gpu("MIG-1"), Gpu("MIG-2"), Gpu("MIG-3"))), Gpu("GPU-b"))
    assert all(device.usable for device in bench.beat().values())
    bench.driver.xid("GPU-a", 95)
    found = bench.beat()
    assert {uuid for uuid, device in found.items() if not device.usable} == {"MIG-1", "MIG-2", "MIG-3"}


def test_an_xid_that_names_no_gpu_marks_all(bench: Bench) -> None:
    bench.beat()
    bench.driver.xid(None, 79)
    assert not any(device.usable for device in bench.beat().values())


def test_a_relapse_takes_twice_as_long_to_recover(bench: Bench) -> None:
    bench.beat()
    waits = []
    for _ in range(3):
        bench.driver.xid("GPU-a", 79)
        bench.beat()
        waits.append(sum(1 for _ in iter(bench.why, "")))
    assert waits == [4, 8, 16]


def test_new_memory_errors_make_it_unusable_and_old_ones_no_longer(bench: Bench) -> None:
    bench.driver.change("GPU-a", ecc=2)
    assert bench.why().startswith("2 uncorrectable memory errors at")  # who knows since when
    for _ in range(5):
        bench.beat()
    assert bench.why() == ""
    bench.driver.change("GPU-a", ecc=3)
    assert bench.why().startswith("1 uncorrectable memory error at")


def test_a_gpu_whose_driver_asks_for_a_reset_is_unusable_until_it_was_reset(bench: Bench) -> None:
    bench.beat()
    bench.driver.change("GPU-a", recovery=1)
    for _ in range(10):
        assert bench.why().startswith("its driver asks for a reset at")
    bench.driver.change("GPU-a", recovery=0)
    assert [bool(bench.why()) for _ in range(5)] == [True, True, True, True, False]


def test_a_gpu_without_ecc_and_recovery_action_is_usable(bench: Bench) -> None:
    bench.driver.change("GPU-a", ecc=-1, recovery=-1)
    assert bench.why() == ""


def test_a_gpu_whose_errors_would_go_unnoticed_is_unusable(bench: Bench) -> None:
    bench.driver.error("nvmlDeviceRegisterEvents", UNKNOWN, uuid="GPU-a")
    found = bench.beat()
    assert "cannot be watched" in found["GPU-a"].why
    assert found["GPU-b"].usable


def test_a_lost_gpu_stays_in_the_reports_as_unusable_and_comes_back(bench: Bench) -> None:
    bench.beat()
    bench.driver.lose("GPU-a")
    found = bench.beat()
    assert found["GPU-a"].why.startswith("its driver does not answer (GPU is lost) at")
    assert (found["GPU-a"].total_mib, found["GPU-a"].processes) == (24_576, None)
    assert found["GPU-b"].usable
    bench.driver.find("GPU-a")
    assert [bool(bench.why()) for _ in range(5)] == [True, True, True, True, False]


def test_a_gpu_that_the_driver_shows_no_more_stays_in_the_reports(bench: Bench) -> None:
    bench.beat()
    bench.driver.devices(Gpu("GPU-b"))
    found = bench.beat()
    assert found["GPU-a"].why.startswith("its driver does not show it any more at")
    assert found["GPU-b"].usable


def test_a_slice_that_was_destroyed_is_forgotten(bench: Bench) -> None:
    bench.driver.devices(Gpu("GPU-a", slices=(Gpu("MIG-1"), Gpu("MIG-2"))))
    assert set(bench.beat()) == {"MIG-1", "MIG-2"}
    bench.driver.devices(Gpu("GPU-a", slices=(Gpu("MIG-2"),)))
    assert set(bench.beat()) == {"MIG-2"}


def test_slices_of_a_lost_gpu_stay_as_unusable(bench: Bench) -> None:
    bench.driver.devices(Gpu("GPU-a", slices=(Gpu("MIG-1"), Gpu("MIG-2"))))
    bench.beat()
    bench.driver.lose("GPU-a")
    found = bench.beat()
    assert set(found) == {"MIG-1", "MIG-2"}
    assert not any(device.usable for device in found.values())


def test_when_the_driver_goes_away_its_gpus_are_unusable_until_it_is_back(bench: Bench) -> None:
    bench.beat()
    bench.driver.error("nvmlDeviceGetCount_v2", DRIVER_NOT_LOADED)
    bench.driver.error("nvmlInitWithFlags", DRIVER_NOT_LOADED)
    bench.driver.error("nvmlShutdown", DRIVER_NOT_LOADED)
    found = bench.beat()
    assert set(found) == {"GPU-a", "GPU-b"}
    assert all("driver" in device.why and device.processes is None for device in found.values())
    bench.driver.mend()
    assert bench.why(pause_s=120)
    for _ in range(4):
        bench.beat()
    assert all(device.usable for device in bench.beat().values())


def test_a_driver_that_is_away_is_not_asked_with_every_beat(bench: Bench) -> None:
    bench.driver.error("nvmlInitWithFlags", DRIVER_NOT_LOADED)
    asked = []
    opened = bench.agent._driver.driver.open
    bench.agent._driver.driver.open = lambda: (asked.append(bench.clock.now), opened())[1]  # type: ignore[method-assign, func-returns-value]
    for _ in range(300):
        bench.beat()
    assert len(asked) < 15
    assert max(b - a for a, b in itertools.pairwise(asked)) <= 61


class Stuck:
    """A driver whose look ends when the test says so."""

    def __init__(self, driver: object) -> None:
        self.driver = driver
        self.free = threading.Event()
        self.free.set()
        self.looks = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.driver, name)

    def read(self) -> object:
        self.looks += 1
        assert self.free.wait(30)
        return self.driver.read()  # type: ignore[attr-defined]


def test_a_driver_that_hangs_does_not_stop_the_beats_and_is_not_asked_twice(bench: Bench) -> None:
    looker = bench.agent._driver
    stuck = looker.driver = Stuck(looker.driver)  # type: ignore[assignment]
    looker.limit_s = 0.05
    wait_until(lambda: "GPU-a" in bench.beat(), timeout_s=10)
    stuck.free.clear()
    before = stuck.looks
    for _ in range(5):
        found = bench.beat()
        assert found["GPU-a"].why.startswith("its driver does not answer at")
        assert found["GPU-a"].processes is None
    assert stuck.looks == before + 1
    stuck.free.set()
    assert wait_until(lambda: bench.beat()["GPU-a"].usable, timeout_s=10)


def test_a_look_whose_thread_cannot_start_makes_devices_unusable_and_they_recover(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who cannot look knows nothing of the devices' health."""

    def full(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    assert all(device.usable for device in bench.beat().values())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        for _ in range(5):
            found = bench.beat()
            assert set(found) == {"GPU-a", "GPU-b"}
            for device in found.values():
                assert "cannot be asked (can't start new thread)" in device.why
                assert device.processes is None
    assert wait_until(lambda: all(d.usable for d in bench.beat().values()), timeout_s=20)
    assert bench.beat()["GPU-a"].processes == (Process(pid=77, used_mib=600),)


def test_processes_of_a_look_that_took_long_are_not_told(bench: Bench) -> None:
    """By then others may have begun, and the pool frees memory by what it is told."""
    looker = bench.agent._driver
    stuck = looker.driver = Stuck(looker.driver)  # type: ignore[assignment]
    looker.limit_s = 0.05
    assert wait_until(lambda: "GPU-a" in bench.beat(), timeout_s=10)
    stuck.free.clear()
    bench.beat()
    stuck.free.set()

    def came_late() -> bool:
        device = bench.beat(pause_s=2)["GPU-a"]
        assert device.temperature_c is not None or device.processes is None
        return device.temperature_c is not None

    assert wait_until(came_late, timeout_s=10)
    assert bench.pool.reports[-1].devices[0].processes is None
    assert bench.beat()["GPU-a"].processes == (Process(pid=77, used_mib=600),)


def test_a_slow_look_that_ends_within_its_beat_tells_its_processes(bench: Bench) -> None:
    """Else a machine whose driver is always slow would never open a device again."""
    bench.driver.hang("nvmlDeviceGetTemperature", seconds=0.6)
    assert bench.beat()["GPU-a"].processes == (Process(pid=77, used_mib=600),)


def test_a_fault_in_reading_is_told_like_a_driver_that_is_away(bench: Bench) -> None:
    bench.beat()
    reader = bench.agent._driver.driver

    def broken() -> object:
        raise ValueError("not a number")

    reader.read = broken  # type: ignore[method-assign, assignment]
    assert bench.why().startswith("not a number at")


def test_a_second_agent_is_told_once_that_it_is_not_needed_and_takes_over(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.pool.taken_by = "another"
    for _ in range(5):
        bench.beat()
    assert bench.pool.reports == []
    bench.pool.taken_by = ""
    bench.beat()
    assert len(bench.pool.reports) == 1
    assert caplog.text.count("agent.refused") == 1


def test_redis_being_away_is_said_once_and_waited_out(
    bench: Bench, caplog: pytest.LogCaptureFixture, settings: Settings, client: redis.Redis
) -> None:
    tries = []

    class Away(Recorder):
        def report(self, report: Report) -> str:
            tries.append(report)
            if len(tries) <= 3:
                raise RedisUnavailable("Redis does not answer")
            return super().report(report)

    bench.agent.pool = away = Away()
    worker = AgentWorker(settings.replace(gpu_beat_s=0.05), agent=bench.agent, pool=Pool(client, settings))
    thread = threading.Thread(target=worker.run)
    thread.start()
    assert wait_until(lambda: len(away.reports) > 1, timeout_s=10)
    worker.stop.set()
    thread.join(10)
    assert caplog.text.count("redis.away") == 1


def process(driver: Driver, settings: Settings, name: str = "agent") -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline.workers.agent", name],
        env={**driver.environ(), **settings.to_environ()},
        stderr=subprocess.DEVNULL,
    )


@pytest.fixture
def quick(settings: Settings) -> Settings:
    """A pool that notices soon."""
    return settings.replace(gpu_beat_s=0.1, gpu_node_ttl_ms=1_000)


@pytest.mark.long
def test_the_agent_of_a_machine_fills_the_pool_shows_as_a_worker_and_leaves_it_when_told_to_end(
    driver: Driver, quick: Settings, client: redis.Redis
) -> None:
    pool = Pool(client, quick)
    agent = process(driver, quick)
    try:
        assert wait_until(lambda: len(pool.snapshot().devices) == 2, timeout_s=30)
        assert {device.usable for device in pool.snapshot().devices} == {True}
        presence = Presence(client, quick)
        assert wait_until(lambda: any(w.role == "agent" for w in presence.live()), timeout_s=10)
        driver.xid("GPU-a", 79)
        assert wait_until(lambda: any("XID 79" in d.why for d in pool.snapshot().devices), timeout_s=10)
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(20) == 0
        assert not any(device.usable for device in pool.snapshot().devices)
        assert not any(w.role == "agent" for w in presence.live())
    finally:
        agent.kill()
        agent.wait()


@pytest.mark.long
def test_the_node_of_a_killed_agent_is_silent_within_the_bound_and_the_next_agent_takes_over(
    driver: Driver, quick: Settings, client: redis.Redis
) -> None:
    pool = Pool(client, quick)
    first, second = process(driver, quick), process(driver, quick, "agent-2")
    try:
        assert wait_until(lambda: bool(pool.snapshot().devices), timeout_s=30)
        (node,) = pool.snapshot().nodes
        pids = {first.pid: (first, second), second.pid: (second, first)}
        speaking, other = pids[int(node.agent.split(":")[1])]
        other_pid = str(other.pid)
        speaking.kill()
        speaking.wait()
        assert wait_until(lambda: pool.snapshot().nodes[0].agent.split(":")[1] == other_pid, timeout_s=15)
        other.kill()
        other.wait()
        killed = time.monotonic()
        assert wait_until(lambda: pool.snapshot().nodes[0].silent, timeout_s=15)
        assert time.monotonic() - killed < 5
        assert not any(device.usable for device in pool.snapshot().devices)
    finally:
        for one in (first, second):
            one.kill()
            one.wait()
