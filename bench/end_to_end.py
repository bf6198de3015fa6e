"""File to Parquet through Redis and Celery, 2 million real lines with varied parameters, beside Drain3 in one
process.

`logweir send FILES --wait` on a stack that has a trained model and has seen the files as they were: reading,
accepting, masking, answering, scoring the few lines that are new, storing, committing. A round ends with the
last line stored; `watched_` figures end when the watcher has looked at all lines, too. Each round has
parameters of its own. Drain3 gets the messages alone (of a stack trace the whole), with the same masks and
its templates learnt, on one thread; it masks and matches, and stores nothing. Its speed is that of a sample,
evenly spaced over lines of the same kind."""

import argparse
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

import polars as pl

from bench import _flame
from bench._drain3 import miner
from bench._load import stack
from bench._log_files import read_file
from bench._running import scratch
from bench._stacks import Seen, command, settled, watched
from bench._stored import clear
from bench._varied import real_files, write_cycles
from pipeline.commands.send import verb
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.drain.masking.multiline import cleaned
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of
from pipeline.sources import formats
from pipeline.tasks import step
from pipeline.workers import roles

LINES: Final = 2_000_000
ROUNDS: Final = 5
LEARN: Final = 1_000  # of a file, for Drain3 to learn the common templates before the sample is timed
SAMPLE: Final = 20_000  # records that Drain3 gets a round
# Of each role: the last argument of its processes, and the frame from which on its work is drawn.
FLAMES: Final = {
    "send": ("--wait", _flame.frame_of(verb.main)),
    "ingest": ("ingest-1", _flame.frame_of(step.perform_joint)),
    "store": ("store", _flame.frame_of(roles._bind)),
}


def options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--lines", type=int, default=LINES, help=f"lines of a round (default {LINES:,})")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"rounds, of which the median counts (default {ROUNDS})"
    )
    parser.add_argument(
        "--ingest",
        type=int,
        default=0,
        help="ingest processes of the stack (default 0, as shipped: as needed)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the stack, as in batch_records=10000",
    )
    parser.add_argument(
        "--flames",
        type=Path,
        metavar="FOLDER",
        help="write flame graphs there; sampling takes some percent of the speed",
    )


def measure(data: Path, args: argparse.Namespace) -> dict[str, Any]:
    extra = {"LOGWEIR_INGEST_PROCESSES": str(args.ingest)}
    for item in args.set:
        name, _, value = item.partition("=")
        extra[f"LOGWEIR_{name.upper()}"] = value
    with scratch() as folder:
        if args.flames:
            extra |= _flame.environment(folder / "samples")
        sources = real_files(data, folder)
        (folder / "sample").mkdir()
        sample = _Sample(write_cycles(sources, folder / "sample", args.lines))
        world = _World(folder=folder, extra=extra, sources=sources, lines=args.lines, sample=sample)
        with stack(folder, **extra) as settings:
            world.command("send", *map(str, sources.values()), "--wait")
            world.command("train")
            # What was stored before there was a model is judged, too: it would be done in the first round.
            settled(settings)
            rounds = [_round(world, settings, n) for n in range(args.rounds)]
        for role, (pattern, root) in FLAMES.items() if args.flames else ():
            _flame.draw(folder / "samples", pattern, root, args.flames / f"{role}.svg")
    ours = median(r.lines / r.stored_s for r in rounds)
    theirs = median(r.drain3_lines_per_s for r in rounds)
    ratios = [r.lines / r.stored_s / r.drain3_lines_per_s for r in rounds]
    cpu: dict[str, float] = {}
    for name in dict.fromkeys(name for r in rounds for name in r.cpu_s):
        cpu[name] = round(median(r.cpu_s.get(name, 0.0) for r in rounds) / rounds[0].lines * 1e6, 2)
    return {
        "lines": rounds[0].lines,
        "bytes": world.sample.size,
        "rounds": len(rounds),
        "ingest_processes": args.ingest,
        "lines_per_s": round(ours),
        "drain3_lines_per_s": round(theirs),
        "ratio": round(median(ratios), 2),
        "lowest_ratio": round(min(ratios), 2),
        "watched_lines_per_s": round(median(r.lines / r.watched_s for r in rounds)),
        "watched_ratio": round(median(r.lines / r.watched_s / r.drain3_lines_per_s for r in rounds), 2),
        "peak_rss_mib": max(r.peak_rss_mib for r in rounds),
        "peak_pss_mib": max(r.peak_pss_mib for r in rounds),
        "stored_mib": round(median(r.stored_mib for r in rounds)),
        "flagged": round(median(r.flagged for r in rounds)),
        "lost": sum(abs(r.lost) for r in rounds),
        "doubled": sum(r.doubled for r in rounds),
        "cpu_us_per_line": cpu,
        "stored_cpu_us_per_line": round(median(r.stored_cpu_s / r.lines for r in rounds) * 1e6, 2),
    }


def failed(values: dict[str, Any]) -> bool:
    return bool(values["lost"] or values["doubled"])


@dataclass(slots=True, kw_only=True)
class _Round:
    lines: int
    stored_s: float  # until the last line was stored
    watched_s: float  # until the watcher has looked at every batch, as `send --wait` waits for
    drain3_lines_per_s: float
    peak_rss_mib: float
    peak_pss_mib: float
    stored_mib: float
    flagged: int
    lost: int
    doubled: int
    cpu_s: dict[str, float]
    stored_cpu_s: float  # of all processes, until the last line was stored


def _round(world: "_World", settings: Settings, number: int) -> _Round:
    """One sending of all files under names of their own, then Drain3 while the stack rests."""
    here = world.folder / f"round-{number}"
    here.mkdir()
    made = write_cycles(world.sources, here, world.lines, first=100 * (number + 1))
    wanted = sum(path.read_bytes().count(b"\n") for path in made)
    theirs = [world.sample.lines_per_s()]
    with watched(settings) as seen:
        began = time.monotonic()
        world.command("send", *map(str, made), "--wait", seen=seen)
        ended = time.monotonic()
    rows = parquet_of(settings).scan().filter(pl.col("source").str.starts_with(str(here)))
    lines, ids, records, flagged = (
        rows.select(
            pl.col("lines").sum(),
            pl.col("record_id").n_unique(),
            pl.len().alias("n"),
            pl.col("anomalous").sum().alias("flagged"),
        )
        .collect(engine="streaming")
        .row(0)
    )
    stored = sum(part.bytes for part in parquet_of(settings).parts())
    clear(settings)  # the next round starts as this one did
    for path in made:
        path.unlink()
    return _Round(
        lines=wanted,
        stored_s=min(ended, seen.stored_at) - began,
        watched_s=ended - began,
        drain3_lines_per_s=mean(
            [*theirs, world.sample.lines_per_s()]
        ),  # before and after: other work comes and goes
        peak_rss_mib=round(seen.rss),
        peak_pss_mib=round(seen.pss),
        stored_mib=stored / 2**20,
        flagged=int(flagged),
        lost=wanted - int(lines),
        doubled=int(records - ids),
        cpu_s=dict(seen.cpu_s),
        stored_cpu_s=seen.stored_cpu_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _World:
    """What all rounds share."""

    folder: Path
    extra: dict[str, str]  # of the environment
    sources: dict[str, Path]
    lines: int
    sample: "_Sample"

    def command(self, *verb: str, seen: Seen | None = None) -> None:
        command(self.folder, *verb, extra=self.extra, seen=seen)


class _Sample:
    """What Drain3 gets: the messages of the same lines, evenly spaced, with their physical lines."""

    def __init__(self, made: list[Path]) -> None:
        self.masks, self.settings = MaskSet.load(), Settings()
        self.size = sum(path.stat().st_size for path in made)
        self.total = sum(path.read_bytes().count(b"\n") for path in made)
        parts, firsts = [], []
        for path in made:
            firsts.append(_messages(path, every=1, most=LEARN))
            parts.append(_messages(path, every=max(1, self.total // SAMPLE)))
        self.first = [m for part in firsts for m in part[0]]
        self.messages = [m for part in parts for m in part[0]]
        self.lines = sum(part[1] for part in parts)
        self.theirs = miner(self.masks, self.settings)
        for message in [*self.first, *self.messages]:
            self.theirs.add_log_message(message)

    def lines_per_s(self) -> float:
        """Physical lines: a stack trace is one message here as there."""
        began = time.perf_counter()
        for message in self.messages:
            self.theirs.add_log_message(message)
        return self.lines / (time.perf_counter() - began)


def _messages(path: Path, *, every: int, most: int | None = None) -> tuple[list[str], int]:
    found: list[str] = []
    lines = at = 0
    for chunk in read_file(path):
        chosen = chunk.records.gather_every(every, at) if at < chunk.records.height else chunk.records.head(0)
        parsed = formats.parse(chosen, chunk.formats, arrived=datetime.now(UTC), zone="UTC")
        at = (at - chunk.records.height) % every
        found += cleaned(parsed["message"].str.replace_all("\n", " ")).to_list()
        lines += int(parsed["lines"].sum())
        if most is not None and len(found) >= most:
            break
    return found[:most], lines
