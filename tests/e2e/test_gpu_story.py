"""A machine with two GPUs (a made-up driver, everything else real): the stack finds them, lends them, and
closes them.

logweir up -> agent -> pool -> logweir gpu run -> kill -9 -> closed until the driver has seen the program go
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
import redis
from fake_nvml_driver import Driver, Gpu

from e2e.harness import Up, environment, running, sentence, until
from pipeline.gpu.pool import Pool
from pipeline.redis.attach import attached
from pipeline.service.pool_facts import pool_facts
from pipeline.settings import Settings

# Two large ones, and a small one that is lost for a while. A host has one lock per uuid, whoever runs tests
# on it.
A, B, C = (f"GPU-{letter}{os.getpid():07x}-0000" for letter in "abc")
SLEEP = "import time; time.sleep(600)"


@dataclass(slots=True)
class Machine:
    """The stack on it, its driver, and its pool; what it shows is looked at here, quicker than with a command
    each time."""

    up: Up
    driver: Driver
    pool: Pool
    begun: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def top(self) -> dict[str, Any]:
        return pool_facts(self.pool.snapshot())

    def device(self, uuid: str) -> dict[str, Any]:
        return next(d for d in self.top()["devices"] if d["device"] == uuid)

    def lease(self, name: str) -> dict[str, Any]:
        """None of it, {}, when there is no such lease."""
        return next((x for x in self.top()["leases"] if x["lease"] == name), {})

    def run(self, *args: str) -> "subprocess.CompletedProcess[str]":
        return self.up.logweir("gpu", "run", *args)

    def begin(self, name: str, *args: str) -> "subprocess.Popen[bytes]":
        """`logweir gpu run` of a long program in the background, once that is noted in its lease."""
        command = subprocess.Popen(
            [sys.executable, "-m", "pipeline.cli", "gpu", "run", "--name", name, *args, "--", sys.executable, "-c", SLEEP],
            stdin=subprocess.DEVNULL,
            env=environment(self.up.mark, self.up.logweir.extra),
            cwd=self.up.folder,
        )  # fmt: skip
        self.begun.append(command)
        until(lambda: self.program(name), what=f"the program of {name} is noted in its lease")
        return command

    def program(self, name: str) -> int:
        """The process of the program in the lease of this name, 0 before it is noted."""
        pids = self.lease(name).get("pids", ())
        return next((pid for pid in pids if SLEEP in psutil.Process(pid).cmdline()), 0)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    driver = Driver(tmp_path_factory.mktemp("nvml"))
    driver.devices(Gpu(A), Gpu(B), Gpu(C, total=8_192))
    seen = {"LD_LIBRARY_PATH": str(driver.library.parent), "FAKE_NVML": str(driver.control)}
    with running(
        {**seen, "LOGWEIR_INTERNAL_GPU_BEAT_S": "0.2", "LOGWEIR_INTERNAL_GPU_NODE_TTL_MS": "15000"}
    ) as up:
        settings = attached(Settings(data_dir=up.data))
        with redis.Redis.from_url(str(settings.redis.url)) as client:
            made = Machine(up, driver, Pool(client, settings))
            until(lambda: len(made.top()["devices"]) == 3, what="the agent has told its GPUs")
            until(lambda: made.top()["quarantine_s"] == 0, what="leases are granted")
            yield made


@pytest.fixture
def machine(stack: Machine) -> Iterator[Machine]:
    """Nothing that a test began outlives it."""
    yield stack
    for command in stack.begun:
        command.kill()
        command.wait()
    stack.begun.clear()


def test_the_gpus_of_the_machine_are_found_and_shown(machine: Machine) -> None:
    done = machine.up.logweir("gpu", "top", "--json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert [d["device"] for d in shown["devices"]] == [A, B, C]
    assert shown["devices"][0]["schedulable_mib"] == 24_576 - 512 - 256
    done = machine.up.logweir("gpu", "top")
    assert done.returncode == 0 and "3 GPUs on 1 machine" in done.stdout


def test_a_program_sees_its_lease_and_gives_it_back(machine: Machine) -> None:
    done = machine.run(
        "--memory", "9GiB", "--name", "short", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; exit 3"
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout.strip() in (A, B)
    assert not machine.lease("short")


def test_what_can_never_be_had_is_refused_at_once_with_the_reason_per_device(machine: Machine) -> None:
    said = sentence(machine.run("--memory", "900GiB", "--", "true"))
    assert A in said and B in said


@pytest.mark.parametrize("whole", [True, False])
def test_what_a_killed_program_had_stays_taken_until_the_driver_has_seen_it_go(
    machine: Machine, whole: bool
) -> None:
    command = machine.begin(
        "fit", *(("--exclusive",) if whole else ("--memory", "20GiB")), "--device", A, "--grace", "1s"
    )
    pid = machine.program("fit")
    machine.driver.change(A, used=5_000, processes={pid: 4_900})
    until(lambda: machine.device(A)["used_mib"] == 5_000, what="the agent has seen the program")
    token = str(machine.lease("fit")["token"])
    command.send_signal(signal.SIGKILL)
    command.wait()
    until(lambda: not psutil.pid_exists(pid), what="the program ended with the command")
    # Its driver is slow to notice: the lease expires, and still nobody may have its part.
    until(lambda: not machine.lease("fit"), what="the lease has expired")
    if whole:
        assert machine.device(A)["state"] == f"closed: process {pid} of lease fit may still be there"
    else:
        assert (
            machine.device(A)["state"]
            == f"open, 3.2 GiB free, 20.0 GiB still taken by process {pid} of lease fit"
        )
        done = machine.run("--memory", "3GiB", "--device", A, "--wait", "0s", "--", "true")
        assert done.returncode == 0, done.stderr
    assert machine.top()["left"][0]["pids"] == [pid]
    late = machine.up.logweir("gpu", "release", "fit", "--token", token)
    assert "there is no lease 'fit'" in sentence(late)
    machine.driver.change(A, used=0, processes={})
    done = machine.run("--exclusive", "--device", A, "--wait", "30s", "--", "true")
    assert done.returncode == 0, done.stderr


def test_a_need_for_two_gpus_gets_both_when_a_preemptible_program_has_given_back(machine: Machine) -> None:
    small = machine.begin("small", "--memory", "9GiB", "--preemptible")
    done = machine.run(
        "--exclusive", "--memory", "20GiB", "--devices", "2", "--wait", "60s", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES",
    )  # fmt: skip
    assert done.returncode == 0 and sorted(done.stdout.strip().split(",")) == [A, B], done.stderr
    assert small.wait(30) == 75


def test_a_gpu_that_falls_off_the_bus_gets_no_new_leases_and_is_told(machine: Machine) -> None:
    machine.driver.lose(C)
    until(lambda: not machine.device(C)["usable"], what="the agent has noticed")
    assert "no new leases" in machine.device(C)["state"]
    said = sentence(machine.run("--memory", "4GiB", "--device", C, "--wait", "0s", "--", "true"), 75)
    assert C[:12] in said
    machine.driver.find(C)  # an agent that another test has started again would never have seen it


def test_a_killed_agent_is_started_again_and_leases_go_on(machine: Machine) -> None:
    command = machine.begin("steady", "--memory", "9GiB", "--device", A)
    pid = machine.program("steady")
    agent = machine.up.pid("agent")
    os.kill(agent, signal.SIGKILL)
    until(lambda: machine.up.pid("agent") != agent, what="the agent is started again")
    until(lambda: machine.device(A)["usable"], what="its node is heard again")
    assert psutil.pid_exists(pid)
    command.terminate()
    assert command.wait(30) == 143
    assert not machine.lease("steady")
