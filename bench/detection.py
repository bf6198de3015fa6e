"""What detection finds, on public sets and on our own samples, each beside simple rules and the peer's
scorer.

`hdfs` (P1) and `trainticket` judge sessions, `bgl` (P3) lines in the order of time, `triage` (P4) ranks lines
of shapes that no training saw, `samples` judges the recorded faults, `units` ranks blocks, nodes and traces,
and, for each fault of a shop of twelve services, the services (`origin`). `incident_origin` names the first
service of the same faults as incidents do. `numbers` looks for latency. Nothing is tuned on what is scored; a
threshold picked with the labels is called oracle wherever it is shown."""

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench import _alerts, _chronological, _numbers, _origin, _shop, _units, _windows, samples
from bench._shop_data import SHOP, TESTING, TUNING
from bench._triage_data import all_sets
from bench._triage_run import Plan, run

PARTS: Final = (
    "hdfs", "bgl", "triage", "trainticket", "samples", "units", "incident_origin", "numbers",
)  # fmt: skip


def options(parser: Any) -> None:
    parser.add_argument(
        "--only", action="append", choices=PARTS, help="one part, may be given again; default: all"
    )
    parser.add_argument("--seeds", type=_positive, default=5)
    parser.add_argument(
        "--services",
        type=Path,
        default=SHOP,
        help="a set in the layout of samples/services, for `incident_origin`",
    )
    parser.add_argument(
        "--half", choices=(TUNING, TESTING), default=TESTING, help="of that set; figures are those of testing"
    )
    parser.add_argument(
        "--repeats", type=_positive, default=20, help="splits of every triage set, spread over the seeds"
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def measure(data: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The parts asked for, by name; `seconds` that each took. The part `units` gives `origin` too."""
    values: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "hdfs": lambda: _sequences().hdfs(data, args.seeds),
        "bgl": lambda: _chronological.measure(data, seeds=args.seeds),
        "triage": lambda: (
            run(all_sets(data), Plan(seeds=args.seeds, repeats=max(args.repeats, args.seeds)))
            | {"alerts": _alerts.systems(data)}
        ),
        "trainticket": lambda: _sequences().trainticket(data, args.seeds),
        "units": lambda: _units.measure(data, draws=4 * args.seeds) | _shop.measure(),
        "incident_origin": lambda: _origin.measure(args.services, half=args.half),
        "numbers": lambda: _numbers.measure(data),
        "samples": lambda: {**samples.measure(data), "lines_judged": _windows.measure(seeds=args.seeds)},
    }
    for name in args.only or PARTS:
        began = time.monotonic()
        print(f"detection: {name} ...", file=sys.stderr, flush=True)  # some take minutes
        values[name] = parts[name]()
        if "origin" in values[name]:
            values["origin"] = values[name].pop("origin")
        seconds[name] = round(time.monotonic() - began, 1)
    return {**values, "alerts_per_day": _alerts_per_day(values), "seconds": seconds}


def _alerts_per_day(values: dict[str, Any]) -> dict[str, float]:
    """False alarms of a workload and day, of the sets that were asked for and have times."""
    found = {
        name: row["alerts"]["false_per_day"]
        for name, row in values.get("units", {}).items()
        if "alerts" in row
    }
    for name, row in values.get("triage", {}).get("alerts", {}).items():
        found[name] = row["false_per_day"]
    if "bgl" in values:
        found["bgl"] = values["bgl"]["first_40"]["after"]["false_alarms_per_day"]
    if "numbers" in values:
        found["numbers"] = values["numbers"]["false_per_day"]
        found["numbers_made_up"] = values["numbers"]["false_per_day_made_up"]
    return found


def _sequences() -> Any:
    return importlib.import_module("bench._sequences")
