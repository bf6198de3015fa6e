"""The first minutes with `logweir run`: formats read right, seconds to the first screen, causes on top.

A file of each format of config/formats.toml is read in one run. A share counts the records whose stored
time, level, service or message is what its example expects. Seconds are the median of several runs of the
command on ten and on 3,000 lines of syslog. `cause_leads` counts the recorded faults whose incident begins
with the cause, `cause_in_three` those with the cause among the first three findings of the incident."""

import argparse
import re
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import polars as pl

from bench._running import scratch, watched_run
from pipeline.records.declared import Declaration, shipped_formats
from pipeline.report import findings

SAMPLES: Final = Path(__file__).resolve().parents[1] / "samples"
RECORDS: Final = 60
# What a line that lacks a year or a date tells.
_WRITTEN: Final = {"": "%F %T.%6f", "year": "%m-%d %T.%6f", "date": "%T.%6f"}
WANTED_SHARE: Final = 0.95
FIRST_SCREEN: Final = "at first sight"
# What an operator would call the cause, in the words of the program that hit it; by the fault's name.
CAUSES: Final = {
    "certificate-expired": r"certificate has expired",
    "backend-killed": r"was terminated by signal 9",
    "connection-limit": r"too many clients already|remaining connection slots",
    "upstream-gone": r"connect\(\) failed \(111: Connection refused\)",
    "lock-timeout": r"statement timeout|still waiting for \w+Lock",
    "redis-cannot-save": r"Failed opening the (?:temp )?RDB file|Background saving error",
    "disk-full": r"No space left on device",
}
STARTS: Final = {  # minutes of 2026-11-20, UTC (samples/README.md)
    "certificate-expired": ("15:37:34", "15:37:55"),
    "backend-killed": ("15:38:38", "15:38:49"),
    "connection-limit": ("15:39:31", "15:39:50"),
    "upstream-gone": ("15:40:32", "15:40:48"),
    "lock-timeout": ("15:41:31", "15:41:49"),
    "redis-cannot-save": ("15:42:31", "15:42:58"),
    "disk-full": ("15:43:40", "15:44:01"),
}


def options(parser: Any) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="runs of the command for each time (default 3)")
    parser.add_argument("--only", choices=("formats", "seconds", "causes"), help="one part; default: all")


def measure(_data: Path, args: argparse.Namespace) -> dict[str, Any]:
    values: dict[str, Any] = {}
    with scratch() as folder:
        if args.only in (None, "formats"):
            values["formats"] = _formats(folder)
        if args.only in (None, "seconds"):
            values |= _seconds(folder, args.rounds)
        if args.only in (None, "causes"):
            values |= _causes(folder)
    return values


def failed(values: dict[str, Any]) -> bool:
    """True when a format is read worse than wanted, or a cause does not lead."""
    shares = [
        share
        for row in values.get("formats", {}).values()
        for name, share in row.items()
        if name not in ("lines", "stored")
    ]
    return any(share < WANTED_SHARE for share in shares) or values.get("cause_leads", 7) < len(CAUSES)


def _formats(folder: Path) -> dict[str, dict[str, Any]]:
    """Each shipped format: a file of records like its example, which `expect` says how to read."""
    inputs = folder / "formats"
    inputs.mkdir()
    paths = {form.name: inputs / f"{form.name}.log" for form in shipped_formats()}
    for form in shipped_formats():
        paths[form.name].write_text(f"{form.example}\n" * RECORDS, encoding="utf-8", newline="")
    watched_run(list(map(str, paths.values())), folder / "formats-out")
    stored = pl.read_parquet(folder / "formats-out/results/**/*.parquet", hive_partitioning=False)
    stored = stored.filter(pl.col("template_id").fill_null(0) >= 0)
    return {
        form.name: _shares(stored.filter(pl.col("source") == str(paths[form.name])), form)
        for form in shipped_formats()
    }


def _shares(stored: pl.DataFrame, form: Declaration) -> dict[str, Any]:
    """Lines of the file, lines stored, and the shares of records that are read as expected."""
    missing = form.clock.missing if form.clock else ""
    written = _WRITTEN[missing]
    right: dict[str, Any] = {
        "lines": RECORDS * (form.example.count("\n") + 1),
        "stored": int(stored["lines"].sum()),
    }
    for name, value in form.expect.items():
        if name == "time":
            moment = pl.Series([datetime.fromisoformat(value)]).dt.strftime(written).item()
            hits = stored["timed"] & (stored["timestamp"].dt.strftime(written) == moment)
        elif name == "message":
            hits = stored[name].str.starts_with(value)
        else:
            hits = stored[name] == value
        right[name] = round(hits.sum() / RECORDS, 3)
    return right


def _seconds(folder: Path, rounds: int) -> dict[str, Any]:
    screens: dict[str, float] = {}
    whole: dict[str, float] = {}
    for lines in (10, 3_000):
        path = folder / f"lines-{lines}.log"
        path.write_text(_syslog(lines), encoding="utf-8")
        took = [_timed(path, folder / f"out-{lines}") for _ in range(rounds)]
        screens[str(lines)] = round(statistics.median(first for first, _ in took), 2)
        whole[str(lines)] = round(statistics.median(end for _, end in took), 2)
    return {"first_screen_s": screens, "all_s": whole}


def _syslog(lines: int) -> str:
    """Ordinary lines of four services, and one kernel that kills a process for want of memory."""
    first = datetime.now(UTC) - timedelta(days=1)
    kinds = (
        "app[812]: request {n} served in {m} ms",
        "sshd[77]: Accepted publickey for deploy from 10.0.0.{m} port {n}",
        "CRON[{n}]: (root) CMD (run-parts /etc/cron.hourly)",
        "systemd[1]: Started session {n} of user deploy.",
    )
    text = []
    for n in range(lines):
        moment = first + timedelta(seconds=n)
        kind = kinds[n % len(kinds)].format(n=1000 + n, m=n % 200)
        if n == lines * 7 // 10:
            kind = "kernel: Out of memory: Killed process 4312 (java) total-vm:8123456kB"
        text.append(f"{moment:%b} {moment.day:2d} {moment:%H:%M:%S} web1 {kind}")
    return "\n".join(text) + "\n"


def _timed(path: Path, out: Path) -> tuple[float, float]:
    """Seconds until the first screen stands, and until the command ends."""
    command = [sys.executable, "-m", "pipeline.cli", "run", str(path), "--out", str(out)]
    began = time.monotonic()
    first = None
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if first is None and FIRST_SCREEN in line:
            first = time.monotonic() - began
    code = process.wait()
    if code or first is None:
        raise RuntimeError(f"`logweir run` ended with {code}: {''.join(said)[-2000:]}")
    return first, time.monotonic() - began


def _causes(folder: Path) -> dict[str, Any]:
    observed = sorted((SAMPLES / "observed").glob("*.zst"))
    baseline = sorted((SAMPLES / "baseline").glob("*.zst"))
    out = folder / "causes"
    watched_run([*map(str, observed), "--baseline", *map(str, baseline)], out)
    found = findings.collect(out / "results", pl.read_parquet(out / "templates.parquet"))
    incidents = findings.by_incident(found)
    places = {name: _place(incidents, name) for name in CAUSES}
    return {
        "cause_leads": sum(place == 1 for place in places.values()),
        "cause_in_three": sum(place is not None and place <= 3 for place in places.values()),
        "cause_places": places,
    }


def _place(incidents: list[list[findings.Finding]], name: str) -> int | None:
    """Where the cause of this fault stands in its incident, 1 for the first; None where it stands nowhere."""
    begin, end = (datetime.fromisoformat(f"2026-11-20T{at}+00:00") for at in STARTS[name])
    for incident in incidents:
        for place, finding in enumerate(incident, start=1):
            inside = any(begin <= sample.timestamp <= end for sample in finding.samples)
            if inside and any(re.search(CAUSES[name], sample.raw) for sample in finding.samples):
                return place
    return None
