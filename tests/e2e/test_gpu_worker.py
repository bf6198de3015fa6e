"""Our own workers on a GPU that a made-up driver shows: the share, the door, the CPU that does the work when
it must.

The arithmetic runs on the CPU (`pipeline.workers.gpu NAME cpu`); agent, pool, queues, leases and processes
are real."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import psutil
import pytest
import redis
from fake_nvml_driver import Driver, Gpu

from e2e.harness import FLEET, Command, Up, environment, nothing_left, novel, ordinary, running, until
from pipeline.errors import LeaseRefused
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import LeaseMode, Need, PoolLease
from pipeline.redis.attach import attached
from pipeline.settings import Settings

A = f"GPU-d{os.getpid():07x}-0000"  # a host has one lock per uuid, whoever runs tests on it
# The GPU worker as it is, but for CUDA: what it begins stays with its process, as a context does.
WORKER = """
from pipeline.tasks.loaded import LoadedModels
begin = LoadedModels.begin
LoadedModels.begin = lambda self, lease: begin(self, lease) or vars(self).update(marked=lease.parts[0].uuid)
LoadedModels.cuda_device = property(lambda self: vars(self).get("marked"))
from pipeline.workers.gpu import main
raise SystemExit(main(["gpu-test", "cpu"]))
"""
ALONE = Need(mode=LeaseMode.EXCLUSIVE)
QUICK = {"LOGWEIR_INTERNAL_GPU_BEAT_S": "0.2", "LOGWEIR_INTERNAL_GPU_NODE_TTL_MS": "4000"}


def seen(driver: Driver) -> dict[str, str]:
    return {"LD_LIBRARY_PATH": str(driver.library.parent), "FAKE_NVML": str(driver.control), **QUICK}


@dataclass
class Machine:
    """A trained stack with an agent and a GPU worker beside it."""

    up: Up
    driver: Driver
    pool: Pool
    worker: "subprocess.Popen[bytes]"
    log: Path

    def scored(self) -> int:
        return self.log.read_text().count('"event": "batch.step"')

    def children(self) -> list[int]:
        return [process.pid for process in psutil.Process(self.worker.pid).children()]

    def child(self) -> psutil.Process:
        (found,) = self.children()
        return psutil.Process(found)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("gpu")
    driver = Driver(folder)
    driver.devices(Gpu(A))
    quick = Settings(gpu_agent=False, lease_ttl_ms=4000, gpu_node_ttl_ms=4000, gpu_beat_s=0.2)
    with running(quick.to_environ()) as up:
        up.send(ordinary(300), "base")
        done = up.logweir("train", "--json")
        assert done.returncode == 0, done.stderr
        mark = "gpu-" + up.mark
        settings = attached(Settings(data_dir=up.data))
        env = environment(mark, {**seen(driver), **settings.to_environ()})
        log = folder / "log"
        with log.open("wb") as out:
            processes = [
                subprocess.Popen([sys.executable, *args], env=env, stderr=out)
                for args in (("-m", "pipeline.workers.agent", "agent"), ("-c", WORKER))
            ]
        try:
            assert up.pid(f"gpu-test@{socket.gethostname()}")  # outside the stack, so named with its host
            with redis.Redis.from_url(str(settings.redis.url)) as client:
                pool = Pool(client, settings)
                until(lambda: pool.snapshot().devices, what="the agent has told its GPU")
                until(lambda: not pool.snapshot().quarantine_ms, what="leases are granted")
                yield Machine(up, driver, pool, processes[1], log)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(30)
            print(log.read_text()[-5000:])
        nothing_left(mark)


def shared(machine: Machine) -> PoolLease | None:
    return next((x for x in machine.pool.snapshot().leases if x.need.mode is LeaseMode.SHARED), None)


def test_unknown_lines_go_to_the_gpu_when_it_is_open_and_to_the_cpu_while_somebody_holds_it_alone(
    machine: Machine,
) -> None:
    up, before = machine.up, machine.scored()
    up.send(novel(20, "gpuopen"), "gpu1")
    assert machine.scored() == before + 1
    held = shared(machine)
    assert held is not None, "the share is kept for the next batch"
    child = machine.child().pid
    assert held.pids == (child,)
    [shown] = json.loads(up.logweir("gpu", "models", "--json").stdout)
    assert shown["model"].startswith("scoring m0") and (shown["state"], shown["ready"]) == ("ready", 1)
    on_cpu = len(up.events("infer-cpu", "batch.step"))
    with machine.pool.lease(ALONE, timeout_s=20):
        assert shared(machine) is None
        until(
            lambda: machine.children() not in ([], [child]),
            what="its process ends, and Celery starts another",
        )
        up.send(novel(20, "gpuheld"), "gpu2")

        def pending() -> bool:
            rows = json.loads(up.logweir("gpu", "models", "--json").stdout)
            return any(
                row["state"] == "pending" and "every device is taken whole" in row["why"] for row in rows
            )

        until(pending, what="it is said why no process scores there")
    assert machine.scored() == before + 1
    assert len(up.events("infer-cpu", "batch.step")) == on_cpu + 1
    up.send(novel(20, "gpuback"), "gpu3")
    assert machine.scored() == before + 2, "inference is back on the GPU by itself"
    for workload in ("gpu1", "gpu2", "gpu3"):
        assert up.rows(workload)["score"].null_count() == 0


def test_the_parent_of_a_gpu_worker_never_loads_torch(machine: Machine) -> None:
    machine.up.send(novel(20, "loaded"), "gpu6")
    until(lambda: shared(machine), what="the worker has its share")

    def maps(process: psutil.Process) -> str:
        return " ".join(Path(m.path).name for m in process.memory_maps())

    assert "libtorch" in maps(machine.child())
    assert "libtorch" not in maps(psutil.Process(machine.worker.pid))


def test_a_killed_worker_keeps_its_gpu_closed_until_the_driver_has_seen_it_go(machine: Machine) -> None:
    machine.up.send(novel(20, "killed"), "gpu4")
    held = until(lambda: shared(machine), what="the worker has its share")
    child = machine.child().pid
    assert held.pids == (child,)
    machine.driver.change(A, processes={child: 900}, used=900)
    os.kill(child, signal.SIGKILL)
    until(lambda: machine.pool.snapshot().orphans, what="its lease has expired")
    with pytest.raises(LeaseRefused):
        machine.pool.request(ALONE, holder="test", timeout_s=1)
    machine.driver.change(A, processes={}, used=0)
    lease = machine.pool.request(ALONE, holder="test", timeout_s=20)
    machine.pool.release(lease)
    machine.up.send(novel(20, "again"), "gpu5")
    until(lambda: shared(machine), what="the new child has taken a share")


def test_a_gpu_whose_cuda_does_not_start_costs_neither_lines_nor_the_model(
    logweir: Command, tmp_path: Path
) -> None:
    driver = Driver(tmp_path)
    driver.devices(Gpu(A))
    lines = [*ordinary(400), *novel(40, "odd")]
    (logweir.cwd / "app.log").write_text("".join(line + "\n" for line in lines))
    done = logweir("run", "app.log", "--json", timeout=200, **seen(driver), **FLEET)
    assert done.returncode == 0, done.stderr
    rows = pl.read_parquet(logweir.cwd / "logweir-out/results/**/*.parquet", hive_partitioning=False)
    assert rows.height == 440
    assert rows["score"].null_count() == 0, "a model was trained, and every line scored, on the CPU"


def test_an_agent_that_keeps_dying_is_given_up_and_the_stack_goes_on(
    tmp_path: Path,
) -> None:
    driver = Driver(tmp_path)
    driver.devices(Gpu(A))
    with socket.create_server(("127.0.0.1", 0)) as free:
        serve = f"http://127.0.0.1:{free.getsockname()[1]}"
    with running({**seen(driver), "LOGWEIR_GPU_SERVE": serve}) as up:
        assert up.facts["serve"] == serve

        def leased() -> bool:
            try:
                with urllib.request.urlopen(f"{serve}/v2/health/ready", timeout=10) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        until(leased, what="the process that serves models has its lease")

        def agent() -> int:
            return int(json.loads((up.data / "stack.json").read_text())["workers"].get("agent", 0))

        for _ in range(5):
            pid = until(agent, what="there is an agent")
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: agent() != pid, what="it was started again or given up")  # type: ignore[misc]
        assert agent() == 0
        up.send(ordinary(20), "w")
        assert up.rows("w").height == 20
        assert up.stop() == 0
