"""How large a batch should be, and how many a worker should hold at once: the way from file to Parquet with
several sizes.

One trained model, one data directory; a stack of its own for every choice, all choices in turn several times.
Each sending has other parameters. Beside the speed stand processor time, memory and how long the first lines
of a flood were on their way.

`lines_per_s`: known lines that one Producer pushes in batches of so many, over 20 workloads, on a stack with
two processes of stage ingest, until the last one is stored."""

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench._load import known, stack, train
from bench._running import scratch
from bench._stacks import command, settled, watched
from bench._stored import clear
from bench._varied import real_files, write_cycles
from pipeline.producer import Producer
from pipeline.records.delivery import Full
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of

LINES: Final = 400_000
ROUNDS: Final = 3
PUSHED: Final = (100, 1_000, 10_000)  # lines of a batch
PUSHED_LINES: Final = 200_000
WORKLOADS: Final = 20


@dataclass(frozen=True, slots=True)
class _Choice:
    records: int
    kib: int
    prefetch: int

    def __str__(self) -> str:
        return f"{self.records} records, {self.kib} KiB, prefetch {self.prefetch}"

    @property
    def extra(self) -> dict[str, str]:
        """The environment of a stack and of its sender."""
        return {
            "LOGWEIR_INGEST_PROCESSES": "1",
            "LOGWEIR_INTERNAL_BATCH_RECORDS": str(self.records),
            "LOGWEIR_INTERNAL_BATCH_KIB": str(self.kib),
            "LOGWEIR_INTERNAL_PREFETCH": str(self.prefetch),
        }


SHIPPED: Final = _Choice(
    Settings().internal.batch_records, Settings().internal.batch_kib, Settings().internal.prefetch
)
SIZES: Final = (
    (500, 128),
    (1_250, 256),
    (2_500, 512),
    (5_000, 1_024),
    (10_000, 2_048),
    (20_000, 4_096),
    (50_000, 8_192),
)
CHOICES: Final = tuple(
    dict.fromkeys(
        (
            SHIPPED,
            *(_Choice(records, kib, SHIPPED.prefetch) for records, kib in SIZES),
            *(_Choice(SHIPPED.records, SHIPPED.kib, prefetch) for prefetch in (2, 4)),
        )
    )
)


@dataclass(frozen=True, slots=True)
class _Seen:
    lines_per_s: float
    cpu_us_per_line: float
    first_s: float
    rss_mib: float


def options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--lines", type=int, default=LINES, help=f"lines of a sending (default {LINES:,})")
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help=f"sendings with each choice (default {ROUNDS}; 0: none)"
    )


def measure(data: Path, args: argparse.Namespace) -> dict[str, Any]:
    return {"lines_per_s": _pushed()} | (_choices(data, args) if args.rounds else {})


def _choices(data: Path, args: argparse.Namespace) -> dict[str, Any]:
    seen: dict[_Choice, list[_Seen]] = {choice: [] for choice in CHOICES}
    with scratch() as folder:
        sources = real_files(data, folder)
        with stack(folder, **SHIPPED.extra) as settings:
            command(folder, "send", *map(str, sources.values()), "--wait", extra=SHIPPED.extra)
            command(folder, "train", extra=SHIPPED.extra)
            settled(settings)
        for number in range(args.rounds):
            for choice in random.Random(number).sample(CHOICES, len(CHOICES)):
                cycle = 100 * (1 + number * len(CHOICES) + CHOICES.index(choice))
                seen[choice].append(_sending(folder, sources, choice, args.lines, cycle))
    shipped = [one.lines_per_s for one in seen[SHIPPED]]
    return {
        str(choice): {
            "lines_per_s": round(median(one.lines_per_s for one in found)),
            "to_shipped": round(
                median(one.lines_per_s / base for one, base in zip(found, shipped, strict=True)), 2
            ),
            "cpu_us_per_line": round(median(one.cpu_us_per_line for one in found), 1),
            "first_stored_s": round(median(one.first_s for one in found), 2),
            "rss_mib": round(median(one.rss_mib for one in found)),
        }
        for choice, found in seen.items()
    }


def _sending(folder: Path, sources: dict[str, Path], choice: _Choice, lines: int, cycle: int) -> _Seen:
    here = folder / f"sending-{cycle}"
    here.mkdir()
    made = write_cycles(sources, here, lines, first=cycle)
    with stack(folder, **choice.extra) as settings:
        settled(settings)
        clear(settings)
        began, clock = time.monotonic(), time.time()
        with watched(settings) as seen:
            command(folder, "send", *map(str, made), "--wait", extra=choice.extra, seen=seen)
            seconds = time.monotonic() - began
        sink = parquet_of(settings)
        first = min(sink.written(sink.manifest()).values()) / 1000 - clock
    for path in made:
        path.unlink()
    return _Seen(lines / seconds, sum(seen.cpu_s.values()) / lines * 1e6, first, seen.rss)


def _pushed() -> dict[str, int]:
    """Lines a second by the lines of a batch."""
    found = {}
    with scratch() as folder, stack(folder, LOGWEIR_INGEST_PROCESSES="2") as settings:
        train(folder)
        producer = Producer.connect(settings)
        for lines in PUSHED:
            _push(producer, lines, PUSHED_LINES // 10, "warm")
            settled(settings)
            began = time.monotonic()
            _push(producer, lines, PUSHED_LINES, "pushed")
            settled(settings)
            found[str(lines)] = round(PUSHED_LINES / (time.monotonic() - began))
    return found


def _push(producer: Producer, lines: int, total: int, name: str) -> None:
    batches = [known(lines, seed=seed) for seed in range(min(100, max(1, total // lines)))]
    for number in range(max(1, total // lines)):
        while isinstance(
            answer := producer.send(
                batches[number % len(batches)],
                workload=f"team-{number % WORKLOADS:02}/app",
                batch_id=f"{name}-{lines}-{number}",
            ),
            Full,
        ):
            time.sleep(answer.retry_after_s)
