"""Somebody without a key at every listener, next to good senders: memory, latency, and who is refused.

A stack as `logweir up` starts it listens for HTTP, gRPC, RELP, forward and syslog over TCP. HTTP and gRPC ask
for a key, forward for its own, RELP and syslog for none. A good sender of each sends five requests a second,
every tenth over a new connection. After a quiet phase come idle connections, more of them than there may be,
unfinished messages, giant keys and many senders. All share the machine's processors; the attacker runs at a
lower priority, because its own work would be done elsewhere. Memory is the resident set of the intake."""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from bench._good_senders import SENDERS, SYSLOG_HOST
from bench._load import environment, stack
from bench._running import scratch
from bench._stacks import roots_of
from pipeline.ledger.ledger import Ledger
from pipeline.redis.connection import connect
from pipeline.settings import Settings

SCHEMES: Final = {
    "http": "http",
    "grpc": "grpc",
    "relp": "relp",
    "forward": "forward",
    "syslog": "syslog+tcp",
}
PHASES: Final = ("idle", "crowd", "unfinished", "keys", "senders")
OPEN_S: Final = 15.0  # for the idle connections, before their phase begins
SECONDS: Final = 300.0
LOOK_S: Final = 0.2
WARM_UP_S: Final = 10.0
REST_S: Final = 3.0  # between two phases
NICE: Final = 10
MEMORY_MOST_MIB: Final = 300.0
P99_IDLE_MOST: Final = 1.2  # times that of the quiet phase
P99_FLOOD_MOST: Final = 3.0


def options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"of all phases together (default {SECONDS:g})"
    )


def measure(_data: Path, args: argparse.Namespace) -> dict[str, Any]:
    with scratch() as folder:
        (folder / "secret").write_text("a shared key")
        ports = {name: _free_port() for name in SCHEMES}
        listeners = [
            f"{scheme}://127.0.0.1:{ports[name]}" + (f"?secret={folder}/secret" if name == "forward" else "")
            for name, scheme in SCHEMES.items()
        ]
        with stack(folder, LOGWEIR_INTAKE=",".join(listeners), LOGWEIR_INGEST_PROCESSES="1") as settings:
            return _attacked(folder, settings, ports, args.seconds / (1 + len(PHASES)))


def failed(values: dict[str, Any]) -> bool:
    return (
        values["memory_above_idle_mib"] > MEMORY_MOST_MIB
        or values["p99_times_idle"] > P99_IDLE_MOST
        or values["p99_times_floods"] > P99_FLOOD_MOST
        or values["refused"] > 0
        or values["lost"] > 0
        or values["restarts"] > 0
    )


def _attacked(folder: Path, settings: Settings, ports: dict[str, int], seconds: float) -> dict[str, Any]:
    key = _key(folder)
    intake = roots_of(settings)["intake"]
    tops: dict[str, float] = {}
    attempts: dict[str, int] = {}
    places = {name: {"port": ports[name], "key": key, "secret": "a shared key"} for name in SENDERS}
    good = subprocess.Popen(
        [sys.executable, "-m", "bench._good_senders"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert good.stdin is not None
    with contextlib.closing(good.stdin):
        print(json.dumps(places), file=good.stdin, flush=True)
        time.sleep(WARM_UP_S)
        for phase in ("quiet", *PHASES):
            with _memory(intake) as top, _attack(phase, ports) as tried:
                time.sleep(OPEN_S if phase == "idle" else 0.0)
                print(phase, file=good.stdin, flush=True)
                time.sleep(seconds)
            tops[phase], attempts[phase] = top[0], tried[0]
            print("", file=good.stdin, flush=True)  # the end of an attack belongs to no phase
            time.sleep(REST_S)
    assert good.stdout is not None
    said = json.loads(good.stdout.read())
    if good.wait(30):
        raise RuntimeError("the good senders have failed")
    return _figures(
        settings, said, tops, attempts, restarts=int(roots_of(settings)["intake"].pid != intake.pid)
    )


def _figures(
    settings: Settings,
    said: dict[str, Any],
    tops: dict[str, float],
    attempts: dict[str, int],
    *,
    restarts: int,
) -> dict[str, Any]:
    phases = {
        name: {**said["phases"][name], "memory_mib": round(tops[name]), "attempts": attempts[name]}
        for name in ("quiet", *PHASES)
    }
    quiet = phases["quiet"]["p99_ms"]
    floods = max(phases[name]["p99_ms"] for name in PHASES if name != "idle")
    return {
        "memory_idle_mib": round(tops["quiet"]),
        "memory_above_idle_mib": round(max(tops[name] for name in PHASES) - tops["quiet"]),
        "p99_quiet_ms": quiet,
        "p99_times_idle": round(phases["idle"]["p99_ms"] / quiet, 2),
        "p99_times_floods": round(floods / quiet, 2),
        "refused": sum(phase["refused"] for phase in phases.values()),
        "lost": _lost(settings, said["sent"]),
        "restarts": restarts,
        "phases": phases,
    }


def _lost(settings: Settings, sent: dict[str, int]) -> int:
    """Lines of good senders that are not in. A line of syslog may be in that was not counted."""
    totals = Ledger(connect(settings), settings).backlog.totals()
    names = {name: f"good-{name}" for name in sent} | {"syslog": SYSLOG_HOST}
    accepted = {
        name: sum(of.get("accepted", 0) for workload, of in totals.items() if workload.startswith(begin))
        for name, begin in names.items()
    }
    return sum(max(0, sent[name] - accepted[name]) for name in sent)


@contextmanager
def _memory(process: psutil.Process) -> Iterator[list[float]]:
    """The highest resident set meanwhile, in MiB."""
    top, over = [0.0], threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            with contextlib.suppress(psutil.Error):
                top[0] = max(top[0], process.memory_info().rss / 2**20)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield top
    finally:
        over.set()
        thread.join()


@contextmanager
def _attack(phase: str, ports: dict[str, int]) -> Iterator[list[int]]:
    """The attacks of a phase meanwhile; how many connections there were."""
    tried = [0]
    if phase == "quiet":
        yield tried
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "bench._attacks", phase],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.nice(NICE),  # noqa: PLW1509 - before any thread of it
    )
    assert process.stdin is not None and process.stdout is not None
    print(json.dumps(ports), file=process.stdin, flush=True)
    try:
        yield tried
    finally:
        process.stdin.close()
        tried[0] = int(json.loads(process.stdout.read() or '{"connections": 0}')["connections"])
        process.wait(30)


def _key(folder: Path) -> str:
    """A new key of a good sender."""
    words = [sys.executable, "-m", "pipeline.cli", "keys", "add", "good", "--json"]
    made = subprocess.run(
        words, env=environment(folder), check=True, capture_output=True, text=True, timeout=60
    )
    return str(json.loads(made.stdout)["key"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
