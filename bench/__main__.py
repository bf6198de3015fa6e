"""Runs one benchmark by name and prints what it measured, as a table or as JSON."""

import argparse
import importlib
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

import bench

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def names() -> dict[str, str]:
    """Every benchmark with the first line of its docstring."""
    found = {}
    for info in pkgutil.iter_modules(bench.__path__):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"bench.{info.name}")
        if hasattr(module, "measure"):
            found[info.name.replace("_", "-")] = (module.__doc__ or "").strip().splitlines()[0]
    return found


def show(values: dict[str, Any], indent: str = "") -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            print(f"{indent}{key}")
            show(value, indent + "  ")
        else:
            print(f"{indent}{key:<28} {value}")


def main() -> int:
    known = names()
    listing = "\n".join(f"  {name:<14} {text}" for name, text in known.items())
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        epilog=f"benchmarks:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="one of those below")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--data", type=Path, default=DATA, help="the labelled log sets (../shared/data)")
    args = parser.parse_args()
    if args.name is None:
        print(listing)
        return 0
    if args.name not in known:
        print(f"bench: {args.name!r} is not a benchmark; they are: {', '.join(known)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"bench.{args.name.replace('-', '_')}")
    values = module.measure(args.data)
    if args.json:
        print(json.dumps(values, indent=2))
    else:
        show(values)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
