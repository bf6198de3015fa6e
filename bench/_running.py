"""Runs `logweir run` as a user would and watches it from outside: wall time and memory of all its
processes."""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pipeline.settings import Settings
from pipeline.workers.stack.private_redis import PrivateRedis


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """One finished run. `peak_rss_mib` adds the resident sets of all processes (shared pages counted in
    each), `peak_pss_mib` counts shared pages once."""

    seconds: float
    peak_rss_mib: float
    peak_pss_mib: float
    summary: dict[str, Any]


def family(process: psutil.Process) -> list[psutil.Process]:
    """A process and its descendants."""
    return [process, *process.children(recursive=True)]


def cpu_seconds(process: psutil.Process) -> dict[int, float]:
    """User + system time of a process and each of its descendants, by pid."""
    found = {}
    for one in family(process):
        try:
            times = one.cpu_times()
        except psutil.Error:
            continue
        found[one.pid] = float(times.user + times.system)
    return found


def resident(process: psutil.Process) -> float:
    """RSS in MiB of a process and its descendants, in a tenth of the time of `memory`."""
    rss = 0
    for one in family(process):
        with suppress(psutil.Error):
            rss += one.memory_info().rss
    return rss / 2**20


def memory(process: psutil.Process) -> tuple[float, float]:
    """(RSS, PSS) in MiB of a process and its descendants."""
    rss = pss = 0
    for one in family(process):
        try:
            full = one.memory_full_info()
        except psutil.Error:
            continue
        rss += full.rss
        pss += getattr(full, "pss", full.rss)
    return rss / 2**20, pss / 2**20


def watched_run(arguments: Sequence[str], out: Path) -> Watched:
    """Raises CalledProcessError with the command's messages when the run fails."""
    command = [sys.executable, "-m", "pipeline.cli", "run", *arguments, "--out", str(out), "--json"]
    began = time.monotonic()
    peaks = [0.0, 0.0]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)

        def watch() -> None:
            tree = psutil.Process(process.pid)
            while process.poll() is None:
                try:
                    for i, value in enumerate(memory(tree)):
                        peaks[i] = max(peaks[i], value)
                except psutil.Error:
                    return
                time.sleep(0.1)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        code = process.wait()
        seconds = time.monotonic() - began
        watcher.join()
        if code:
            said.seek(0)
            raise subprocess.CalledProcessError(code, command, stderr=said.read().decode())
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return Watched(
        seconds=round(seconds, 1),
        peak_rss_mib=round(peaks[0]),
        peak_pss_mib=round(peaks[1]),
        summary=summary,
    )


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="logweir-bench-") as folder:
        yield Path(folder)


@contextmanager
def own_redis(folder: Path, **more: Any) -> Iterator[Settings]:
    """A Redis with these settings."""
    settings = Settings(data_dir=folder, **more)
    server = PrivateRedis(settings)
    process = server.start()
    try:
        yield settings.replace(redis_url=server.url, lease_ttl_ms=3_600_000)
    finally:
        process.terminate()
        process.wait(20)
