"""A look at one variant of the code as it stands: `python -m bench._triage_quick [--sets NAME ...] [--repeats
N]`.

Prints AUROC of ours, of what each term adds and gives alone, and of the cheap baselines (NuLog with --peers).
All sets once take about a minute; `scripts/bench detection --only triage` is the measurement that counts."""

import argparse
import time
from pathlib import Path
from typing import Any

from bench._triage_data import all_sets
from bench._triage_run import Plan, run
from pipeline.logs import set_up

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench._triage_quick")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--sets", nargs="*", default=[], help="names; default: all")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--edition", choices=("causal", "transformer"), default="causal")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--peers", action="store_true", help="with NuLog")
    args = parser.parse_args()
    set_up("error")
    began = time.monotonic()
    sets = [s for s in all_sets(args.data) if not args.sets or s.name in args.sets]
    plan = Plan(
        seeds=args.repeats, repeats=args.repeats, peers=args.peers, edition=args.edition, first=args.first
    )
    values = run(sets, plan, processes=args.processes)
    for name, row in values.items():
        if row and name != "skipped":
            show(name, row)
    print(f"{time.monotonic() - began:.0f} s")


def show(name: str, row: dict[str, Any]) -> None:
    flagged = (
        f"  flagged {row['anomalies_flagged']:.2f} / {row['normal_flagged']:.2f}"
        if "normal_flagged" in row
        else ""
    )
    print(f"{name:<18} ours {row['auroc']:.3f}  ap {row['ap']:.3f}{flagged}")
    for title in ("adding", "alone", "baselines"):
        cells = [(n, v["auroc"] if isinstance(v, dict) else v) for n, v in row[title].items()]
        print(f"    {title:<10} " + "  ".join(f"{n} {v:.3f}" for n, v in cells))


if __name__ == "__main__":
    main()
