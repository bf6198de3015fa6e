"""Made-up devices, who really used them and when, and the judge of it.

What happened is judged by evidence of the users' own, not by what the ledger says: every process appends to
one file when it begins and ends to use a device, with the token that it got. A begin is written after the
grant was confirmed and an end before it is given back, so two uses that overlap in the file did overlap."""

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipeline.gpu.leasing import wire as pool_wire
from pipeline.gpu.values import FULL_PERCENT, Device, LeaseMode, PoolLease, Process, Report

MIB: Final = 16_000
NODE: Final = "torture"


def devices(n: int, seen: Mapping[str, Iterable[int]] | None = None, mib: int = MIB) -> tuple[Device, ...]:
    """Made-up devices, with the processes that are on them."""
    return tuple(
        Device(
            uuid=(name := f"GPU-{NODE}-{index}"),
            node=NODE,
            index=index,
            name="Made-up 16",
            total_mib=mib + 384,
            reserved_mib=384,
            schedulable_mib=mib,
            processes=tuple(Process(pid=pid) for pid in (seen or {}).get(name, ())),
        )
        for index in range(n)
    )


def report(n: int, seen: Mapping[str, Iterable[int]] | None = None) -> Report:
    return Report(node=NODE, agent="torturer", clock_ms=0, devices=devices(n, seen))


class Evidence:
    """One file for all processes; a line is one append, so lines never mix. Times are of the system's
    monotonic clock."""

    def __init__(self, folder: Path) -> None:
        self.marks = folder / "marks"
        self.marks.mkdir(exist_ok=True)
        self.fd = os.open(folder / "evidence.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def say(self, what: str, **more: Any) -> None:
        line = json.dumps({"t": time.monotonic_ns(), "pid": os.getpid(), "what": what, **more})
        os.write(self.fd, line.encode() + b"\n")

    def begin(self, lease: PoolLease, lost: Callable[[], bool]) -> bool:
        """A process goes onto the devices, asks whether its lease still holds, and uses them only then."""
        encoded = pool_wire.encode(lease)
        for part in lease.parts:
            (self.marks / f"{os.getpid()}.{part.uuid}").touch()
        if lost():
            self._leave(lease)
            return False
        self.say("begin", lease=encoded)
        return True

    def end(self, lease: PoolLease) -> None:
        self.say("end", lease_id=lease.lease_id)
        self._leave(lease)

    def _leave(self, lease: PoolLease) -> None:
        for part in lease.parts:
            (self.marks / f"{os.getpid()}.{part.uuid}").unlink(missing_ok=True)

    def on_devices(self) -> dict[str, list[int]]:
        """What a driver would list: the living processes that are on each device."""
        found: dict[str, list[int]] = {}
        for mark in self.marks.iterdir():
            pid, _, device = mark.name.partition(".")
            if _alive(int(pid)):
                found.setdefault(device, []).append(int(pid))
            else:
                mark.unlink(missing_ok=True)
        return found


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@dataclass(slots=True)
class _Use:
    begin: int
    end: int
    lease: PoolLease


def _uses(lines: list[dict[str, Any]]) -> list[_Use]:
    killed = {line["victim"]: line["at"] for line in lines if line["what"] == "killed"}
    last = max(line["t"] for line in lines)
    uses, open_uses = [], {}
    for line in lines:
        if line["what"] == "begin":
            lease = pool_wire.read_json(PoolLease, line["lease"])
            use = _Use(line["t"], killed.get(line["pid"], last), lease)
            uses.append(use)
            open_uses[lease.lease_id] = use
        elif line["what"] == "end" and line["lease_id"] in open_uses:
            use = open_uses.pop(line["lease_id"])
            use.end = min(use.end, line["t"])
    return uses


def judge(lines: list[dict[str, Any]], n_devices: int) -> dict[str, int]:
    """What must never happen, counted."""
    found = {"two_holders": 0, "over_capacity": 0, "stale_tokens": 0, "wrong_answers": 0}
    uses = _uses(lines)
    for device in devices(n_devices):
        here = [(u, p) for u in uses for p in u.lease.parts if p.uuid == device.uuid]
        events = sorted(
            [(u.begin, 1, u, p) for u, p in here] + [(u.end, 0, u, p) for u, p in here], key=lambda e: e[:2]
        )
        now: list[tuple[_Use, Any]] = []
        newest = newest_exclusive = 0
        for _, begins, use, part in events:
            if not begins:
                now = [one for one in now if one[0] is not use]
                continue
            exclusive = use.lease.need.mode is LeaseMode.EXCLUSIVE
            if now and (exclusive or any(u.lease.need.mode is LeaseMode.EXCLUSIVE for u, _ in now)):
                found["two_holders"] += 1
            now.append((use, part))
            memory, compute = sum(p.memory_mib for _, p in now), sum(p.compute_percent for _, p in now)
            found["over_capacity"] += memory > device.schedulable_mib or compute > FULL_PERCENT
            found["stale_tokens"] += part.token <= (newest if exclusive else newest_exclusive)
            newest = max(newest, part.token)
            newest_exclusive = part.token if exclusive else newest_exclusive
    for line in lines:
        if line["what"] == "op" and line.get("wrong"):
            found["stale_tokens" if line["name"].startswith("stale") else "wrong_answers"] += 1
    return found
