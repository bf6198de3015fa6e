"""Lines over HTTP, from clients in other processes to Parquet, beside the same lines from files.

A stack as `logweir up` starts it, with a trained model that has seen the lines with other parameters. Each
round takes new parameters: `logweir send FILES --wait` first, then every protocol with requests of 1,000
lines from 20 workloads; the ratio is that of the same round. Both clocks begin with the first lines that are
taken in and end when the last one is stored. Smaller requests and other numbers of workloads follow, in the
three protocols that most senders speak. `us_per_line` is processor time of the decoder alone;
`intake_us_per_line` that of the process that listens; `stack_us_per_line` that of all processes.

Latency is that of a line at 1,000 lines/s, from the moment when its request was due until its batch is
committed. In a further measurement 200 workloads send five lines a second each. First each sends a request
every second, then a request holds 20 of them. It counts the processors of all processes of the stack, its
rest included."""

import argparse
import itertools
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench._decoding import decode_us_per_line
from bench._intake_world import Run, Steady, World
from bench._load import stack
from bench._requests import PROTOCOLS, Protocol, Record
from bench._running import scratch
from bench._stacks import command
from bench._traffic import Timetable, heap, read_all
from bench._varied import real_files
from pipeline.settings import listeners

# As shipped, with one process of stage ingest. The intake takes the next port where its own is in use.
STACK: Final = {"LOGWEIR_INGEST_PROCESSES": "1", "LOGWEIR_INTAKE": listeners.DEFAULT}
LINES: Final = 100_000
SECONDS: Final = 15.0
ROUNDS: Final = 1
WORKLOADS: Final = 20
MANY: Final = 200
REQUEST_LINES: Final = 1_000
SIZES: Final = (10, 100)  # lines a request, beside REQUEST_LINES
NUMBERS: Final = (1, MANY)  # of workloads, beside WORKLOADS
MAIN: Final = ("otlp", "bulk", "loki")
# A sender waits for its answer, and a window of the intake takes up to a quarter of a second: so many at a
# time keep the intake busy.
CONNECTIONS: Final = 32
CONNECTIONS_SMALL: Final = 200
FEWER: Final = 4  # of the lines one in so many, where the shape of requests is compared
WARM_UP_S: Final = 3.0
RATE: Final = 1_000  # lines/s, for the latency and for many workloads
PREPARE_S: Final = 3.0  # to write the requests of a timetable
P99_MOST_MS: Final = 2_000.0
CORES_MOST: Final = 0.25
SHARE_LEAST: Final = 0.6


def options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--lines", type=int, default=LINES, help=f"lines of a sending (default {LINES:,})")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"of each steady stream (default {SECONDS:g})"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"the median counts (default {ROUNDS})")
    parser.add_argument(
        "--protocols",
        nargs="+",
        choices=PROTOCOLS,
        default=list(MAIN),
        help=f"of {', '.join(PROTOCOLS)} (default {' '.join(MAIN)})",
    )


def measure(data: Path, args: argparse.Namespace) -> dict[str, Any]:
    with scratch() as folder:
        sources = real_files(data, folder)
        with stack(folder, **STACK) as settings:
            command(folder, "send", *map(str, sources.values()), "--wait")
            command(folder, "train")
            world = World(folder, settings, sources)
            _warm_up(world, args.protocols)
            rounds = [_round(world, args, number) for number in range(1, args.rounds + 1)]
            shapes = _shapes(world, args)
            decoders = _decoders(read_all(list(sources.values())))
            steady = _steady(world, args.seconds)
    return {
        "lines": args.lines,
        "rounds": args.rounds,
        "end_to_end_lines_per_s": round(median(one["files"].lines_per_s for one in rounds)),
        "end_to_end_us_per_line": round(median(one["files"].us_per_line() for one in rounds), 1),
        "protocols": {name: _of_protocol(rounds, name, decoders) for name in args.protocols},
        "decoders_us_per_line": decoders,
        "shapes": shapes,
        **steady,
    }


def failed(values: dict[str, Any]) -> bool:
    runs = [*values["protocols"].values(), *values["shapes"].values()]
    shares = [of["share_of_end_to_end"] for name, of in values["protocols"].items() if name in MAIN]
    return (
        any(run["lost"] or run["doubled"] for run in runs)
        or any(share < SHARE_LEAST for share in shares)
        or values["latency_p99_ms"] > P99_MOST_MS
        or values["workloads_200_cores"] >= CORES_MOST
    )


def _warm_up(world: World, protocols: list[str]) -> None:
    """The lines as they were: their formats and templates are known afterwards."""
    records = read_all(list(world.sources.values()))
    few = {name: several[:REQUEST_LINES] for name, several in records.items()}
    for name in protocols:
        requests = heap(PROTOCOLS[name], few, lines=REQUEST_LINES, workloads=WORKLOADS, now=time.time())
        world.ship(requests, connections=CONNECTIONS)


def _round(world: World, args: argparse.Namespace, number: int) -> dict[str, Run]:
    """The same lines from files, then by each protocol."""
    made = world.written(args.lines, number)
    records = read_all(made)
    found = {"files": world.send_files(made)}
    for name in args.protocols:
        requests = heap(PROTOCOLS[name], records, lines=REQUEST_LINES, workloads=WORKLOADS, now=time.time())
        found[name] = world.ship(requests, connections=CONNECTIONS)
    return found


def _decoders(records: dict[str, list[Record]]) -> dict[str, float]:
    """Microseconds a line of every protocol, in this process."""
    few = {name: several[:REQUEST_LINES] for name, several in records.items()}
    found = {}
    for name, protocol in PROTOCOLS.items():
        requests = heap(protocol.plain, few, lines=REQUEST_LINES, workloads=WORKLOADS, now=time.time())
        if not protocol.gzip:
            found[name] = round(decode_us_per_line(protocol, requests), 2)
    return found


def _of_protocol(rounds: list[dict[str, Run]], name: str, decoders: dict[str, float]) -> dict[str, Any]:
    shares = [one[name].lines_per_s / one["files"].lines_per_s for one in rounds]
    return {
        **_figures([one[name] for one in rounds]),
        "us_per_line": decoders[name.removesuffix("_gzip")],
        "share_of_end_to_end": round(median(shares), 2),
    }


def _figures(runs: list[Run]) -> dict[str, Any]:
    return {
        "lines_per_s": round(median(run.lines_per_s for run in runs)),
        "intake_us_per_line": round(median(run.us_per_line("intake") for run in runs), 1),
        "stack_us_per_line": round(median(run.us_per_line() for run in runs), 1),
        "clients_us_per_line": round(median(run.client_us_per_line for run in runs), 1),
        "refused": sum(run.refused for run in runs),
        "lost": sum(abs(run.lost) for run in runs),
        "doubled": sum(run.doubled for run in runs),
    }


def _shapes(world: World, args: argparse.Namespace) -> dict[str, Any]:
    """Requests of other sizes, and other numbers of workloads."""
    shapes = [*((size, WORKLOADS) for size in SIZES), *((REQUEST_LINES, number) for number in NUMBERS)]
    records = read_all(world.written(args.lines // FEWER, args.rounds + 1))
    found = {}
    for name, (size, workloads) in itertools.product(args.protocols, shapes):
        if name in MAIN:
            requests = heap(PROTOCOLS[name], records, lines=size, workloads=workloads, now=time.time())
            connections = CONNECTIONS_SMALL if size in SIZES else CONNECTIONS
            run = world.ship(requests, connections=connections)
            found[f"{name}, {size} lines, {workloads} workloads"] = _figures([run])
    return found


def _steady(world: World, seconds: float) -> dict[str, Any]:
    """Requests of 100 lines; of five lines from each of many workloads; and of many workloads together."""
    records = read_all(list(world.sources.values()))
    few = Timetable(workloads=WORKLOADS, lines=100, every_s=WORKLOADS * 100 / RATE)
    alone = Timetable(workloads=MANY, lines=RATE // MANY, every_s=1.0)
    together = replace(alone, together=WORKLOADS)
    found = {
        name: _stream(world, PROTOCOLS[protocol], records, table, seconds)
        for name, protocol, table in (
            ("latency", "otlp", few),
            ("workloads_200", "otlp", alone),
            ("workloads_200_bulk", "bulk", alone),
            ("workloads_200_together", "otlp", together),
        )
    }
    return {
        "latency_p50_ms": found["latency"].p50_ms,
        "latency_p99_ms": found["latency"].p99_ms,
        "latency_cores": found["latency"].cores,
        **{f"{name}_cores": found[name].cores for name in found if name != "latency"},
        "streams": {name: asdict(steady) for name, steady in found.items()},
    }


def _stream(
    world: World, protocol: Protocol, records: dict[str, list[Record]], table: Timetable, seconds: float
) -> Steady:
    """After a short one, which tells the formats of each workload."""
    for length in (WARM_UP_S, seconds):
        requests = table.requests(protocol, records, begins=time.time() + PREPARE_S, seconds=length)
        steady = world.stream(requests, connections=CONNECTIONS_SMALL, seconds=length)
    return steady
