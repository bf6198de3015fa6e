"""`logweir gpu selftest`: what holds on the GPUs of this machine, as a table to paste.

It needs no stack. The device is used, so run it where nobody else works.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from pipeline.commands.common import out, print_json, settings_of
from pipeline.errors import LeaseRefused, LogweirError, NoDriver
from pipeline.gpu.node import mps
from pipeline.gpu.node.health import reading_fault
from pipeline.gpu.node.host_lock import HOST_DIRECTORY, host_lock
from pipeline.gpu.node.nvml import Nvml
from pipeline.gpu.node.probe import probe_devices
from pipeline.gpu.node.readings import MachineReading, Reading
from pipeline.gpu.policy.explain import short
from pipeline.logs import set_up
from pipeline.settings import Settings, inherited
from pipeline.units import plural
from pipeline.upkeep import UpkeepThread, start_thread

NO_GPU: Final = 3  # exit code where there is no GPU to test
CHILD_S: Final = 300.0
DOORS: Final = 20
CHILD: Final = "pipeline.commands.gpu.selftest_child"


class CheckResult(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCheck:
    """One row of the table."""

    check: str
    device: str = ""
    verdict: CheckResult
    measured: str


Ask = Callable[[str, str], dict[str, Any]]  # a check of selftest_child.py on a device -> its facts


def main(args: argparse.Namespace) -> int:
    """0: all passed or skipped, 1: some failed, NO_GPU: there is no GPU."""
    settings = settings_of(args)
    set_up(settings.stack.log_level)  # else each door of the last row is logged between the rows
    machine, why = look_at_machine()
    if machine is None:
        if args.json:
            print_json({"gpus": 0, "why": why, "checks": []})
        else:
            out().print(f"no GPU to test on this machine: {why}", markup=False, soft_wrap=True)
        return NO_GPU
    context_mib = settings.internal.gpu_context_mib
    checks = []
    for check in all_checks(machine, context_mib, lambda kind, uuid: ask_child(kind, uuid, context_mib)):
        checks.append(check)
        if not args.json:
            print_row(check, first=len(checks) == 1)
    if args.json:
        gpus = sum(not one.parent for one in machine.readings)
        print_json({"gpus": gpus, "why": "", "checks": [asdict(check) for check in checks]})
    return int(any(check.verdict is CheckResult.FAILED for check in checks))


def look_at_machine() -> tuple[MachineReading | None, str]:
    """The devices, or None and the reason why there is none to test."""
    probed = probe_devices()
    if probed is None:
        return None, "no NVIDIA driver is installed"
    if probed.trouble or not probed.count:
        return None, probed.trouble or "the NVIDIA driver shows no GPU"
    driver = Nvml()
    try:
        driver.open()
        return driver.read(), ""
    except NoDriver as exc:
        return None, str(exc)
    finally:
        driver.close()


def all_checks(machine: MachineReading, context_mib: int, ask: Ask) -> Iterator[DeviceCheck]:
    """The rows, as they come."""
    yield _of_driver(machine)
    split = {one.parent for one in machine.readings if one.parent}
    for one in machine.readings:
        if one.uuid in split:
            continue
        yield _of_health(one)
        if one.split:
            continue  # MIG is on without a slice
        yield _of_mig(one)
        yield _of_limit(one, ask)
        yield _of_lock(one, context_mib)
        yield _of_mps(one)
        yield from _of_model(one, ask)
    yield _of_door(machine)


def print_row(check: DeviceCheck, *, first: bool) -> None:
    """A row of a Markdown table."""
    console = out()
    if first:
        console.print(
            "| check | device | result | measured |\n|---|---|---|---|", markup=False, soft_wrap=True
        )
    device = short(check.device) if check.device else ""
    row = f"| {check.check} | {device} | {check.verdict.value} | {check.measured} |"
    console.print(row, markup=False, soft_wrap=True)


def _check(
    name: str, device: str, facts: dict[str, Any], words: Callable[[dict[str, Any]], str]
) -> DeviceCheck:
    if "error" in facts:
        return DeviceCheck(
            check=name, device=device, verdict=CheckResult.FAILED, measured=str(facts["error"])[:300]
        )
    return DeviceCheck(check=name, device=device, verdict=CheckResult.PASSED, measured=words(facts))


def _of_driver(machine: MachineReading) -> DeviceCheck:
    gpus = [one for one in machine.readings if not one.parent]
    slices = sum(bool(one.parent) for one in machine.readings)
    lost = [f"{uuid}: {why}" for uuid, why in machine.lost.items()] + list(machine.unnamed)
    names = ", ".join(sorted({one.name for one in gpus}))
    return DeviceCheck(
        check="driver",
        verdict=CheckResult.FAILED if lost else CheckResult.PASSED,
        measured=f"{machine.driver}; {plural(len(gpus), 'GPU')} ({names}), {plural(slices, 'MIG slice')}"
        + (f"; no answer from {'; '.join(lost)}" if lost else ""),
    )


def _of_health(one: Reading) -> DeviceCheck:
    why = reading_fault(one, 0)
    heat = "" if one.temperature_c is None else f", {one.temperature_c} °C"
    good = f"{one.name}, {one.total_mib:,} MiB, {one.used_mib:,} MiB used{heat}"
    return DeviceCheck(
        check="health",
        device=one.uuid,
        verdict=CheckResult.FAILED if why else CheckResult.PASSED,
        measured=why or good,
    )


def _of_mig(one: Reading) -> DeviceCheck:
    words = f"a slice of {one.parent}" if one.parent else "MIG is off"
    return DeviceCheck(check="MIG", device=one.uuid, verdict=CheckResult.PASSED, measured=words)


def _of_limit(one: Reading, ask: Ask) -> DeviceCheck:
    return _check(
        "memory limit of a lease",
        one.uuid,
        ask("limit", one.uuid),
        lambda f: (
            f"tensors got {f['got_mib']} MiB of {f['leased_mib']} MiB less {f['context_mib']} MiB for CUDA"
        ),
    )


def _of_lock(one: Reading, context_mib: int) -> DeviceCheck:
    """A process of nobody's pool has the device alone: nobody else begins there, and the driver shows it.
    It is skipped where a program of this machine has a lease of the device."""
    name = "exclusive use by a foreign process"
    if not _can_hold(one.uuid, exclusive=True):
        words = "a program has a lease of the device; try again without one, as without `logweir up`"
        return DeviceCheck(check=name, device=one.uuid, verdict=CheckResult.SKIPPED, measured=words)
    with child(["hold", one.uuid, str(context_mib)]) as process:
        facts = _last_line(process)
        if "pid" not in facts:
            return _check(name, one.uuid, facts or {"error": "no answer"}, str)
        refused = not _can_hold(one.uuid, exclusive=False)
        pids = {p.pid for other in _readings() if other.uuid == one.uuid for p in other.processes or ()}
    seen = facts["pid"] in pids
    words = f"{'kept' if refused else 'did not keep'} another process out; the driver " + (
        "lists it" if seen else "does not list its process id (as in a container without the host's)"
    )
    verdict = CheckResult.PASSED if refused else CheckResult.FAILED
    return DeviceCheck(check=name, device=one.uuid, verdict=verdict, measured=words)


def _can_hold(uuid: str, *, exclusive: bool) -> bool:
    """Whether this process may hold the device now, alone or together with others."""
    try:
        with host_lock(HOST_DIRECTORY, uuid, exclusive=exclusive, wait_s=0):
            return True
    except LeaseRefused:
        return False


def _readings() -> Sequence[Reading]:
    machine, _ = look_at_machine()
    return () if machine is None else machine.readings


def _of_mps(one: Reading) -> DeviceCheck:
    daemon = mps.find(one.uuid, path=inherited("PATH").get("PATH", mps.PATHS))
    if daemon is None:
        words = "no daemon; `logweir gpu mps start` starts one"
        return DeviceCheck(check="MPS", device=one.uuid, verdict=CheckResult.SKIPPED, measured=words)
    listed = mps.clients(daemon)
    verdict = CheckResult.FAILED if listed is None else CheckResult.PASSED
    words = "it does not answer" if listed is None else f"a daemon with {plural(len(listed), 'client')}"
    return DeviceCheck(check="MPS", device=one.uuid, verdict=verdict, measured=words)


def _of_model(one: Reading, ask: Ask) -> Iterator[DeviceCheck]:
    facts = ask("model", one.uuid)
    yield _check("training", one.uuid, facts, lambda f: f"{f['training_s']} s for 2,000 distinct lines")
    yield _check("scoring", one.uuid, facts, lambda f: f"{f['lines_per_s']:,} distinct lines/s")


def _of_door(machine: MachineReading) -> DeviceCheck:
    """From wanting a device alone until having it, while a shared holder gives back when it is asked."""
    name = "door of a device"
    try:
        with TemporaryDirectory(prefix="logweir-selftest-") as folder:
            took_ms = sorted(_doors(machine, Path(folder)))
    except (LogweirError, OSError) as exc:
        return _check(name, "", {"error": str(exc)}, str)
    half, longest = took_ms[len(took_ms) // 2], took_ms[-1]
    words = f"p50 {half:.0f} ms, longest {longest:.0f} ms of {len(took_ms)}, without a batch in hand"
    return DeviceCheck(check=name, verdict=CheckResult.PASSED, measured=words)


def _doors(machine: MachineReading, folder: Path) -> Iterator[float]:
    from pipeline.gpu.node.inventory import devices, machine_size, this_node
    from pipeline.gpu.pool import Pool
    from pipeline.gpu.values import HEADROOM_MIB, LeaseMode, Need, Report
    from pipeline.redis.connection import connect
    from pipeline.workers.stack.private_redis import PrivateRedis

    own = Settings(data_dir=folder, gpu_node_ttl_ms=3_600_000)
    server = PrivateRedis(own)
    process = server.start()
    try:
        own = own.replace(redis_url=server.url)
        pool = Pool(connect(own), own)
        pool.ledger.clear_quarantine()
        found = devices(machine.readings, node=this_node(), headroom_mib=HEADROOM_MIB, why={})[:1]
        cpu, memory = machine_size()
        pool.report(
            Report(
                node=this_node(),
                agent="selftest",
                clock_ms=0,
                devices=found,
                cpu_milli=cpu,
                memory_mib=memory,
            )
        )
        for _ in range(DOORS):
            with pool.lease(Need(memory_mib=1, preemptible=True), holder="shared", pids=()) as using:
                leaving = start_thread("selftest-asked", using.asked.wait, 20.0)
                began = time.perf_counter()
                asking = _Asking(pool, Need(mode=LeaseMode.EXCLUSIVE))
                leaving.join()
            asking.join()
            yield (asking.had - began) * 1000
    finally:
        process.terminate()
        process.wait(20)


class _Asking(UpkeepThread):
    """Wants a device alone; `had`: when it had it."""

    def __init__(self, pool: Any, need: Any) -> None:
        super().__init__("selftest-alone")
        self.pool, self.need, self.had = pool, need, 0.0
        self.start()

    def work(self) -> None:
        lease = self.pool.request(self.need, holder="alone", timeout_s=20.0)
        self.had = time.perf_counter()
        self.pool.release(lease)


def child(words: Sequence[str]) -> "subprocess.Popen[str]":
    """A process of selftest_child.py."""
    return subprocess.Popen(
        [sys.executable, "-m", CHILD, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def ask_child(kind: str, uuid: str, context_mib: int) -> dict[str, Any]:
    """The facts of one check, or why there are none (`error`)."""
    with child([kind, uuid, str(context_mib)]) as process:
        try:
            answer, _ = process.communicate("", timeout=CHILD_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return {"error": f"it did not end within {CHILD_S:.0f} s"}
    lines = answer.strip().splitlines()
    return _facts(lines[-1]) if lines else {"error": f"its process ended with {process.returncode}"}


def _last_line(process: "subprocess.Popen[str]") -> dict[str, Any]:
    line = process.stdout.readline() if process.stdout is not None else ""
    return _facts(line) if line.strip() else {}


def _facts(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {"error": f"it said {line[:200]!r}"}
    return found if isinstance(found, dict) else {"error": f"it said {line[:200]!r}"}
