"""Runs one benchmark by name and prints what it measured, as a table or as JSON.

A benchmark is a module with `measure(data)`. One with options of its own has `options(parser)` too and gets
what was given: `measure(data, args)`. `failed(values)`, where there is one, says whether the command ends
with 1."""

import argparse
import importlib
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

import bench
from bench._leashed import keep, leashed
from pipeline.errors import BadInput
from pipeline.logs import set_up

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def modules() -> dict[str, str]:
    """The module of every benchmark."""
    found = [info.name for info in pkgutil.iter_modules(bench.__path__) if not info.name.startswith("_")]
    return {name.replace("_", "-"): f"bench.{name}" for name in found}


def names(known: dict[str, str]) -> str:
    """Every benchmark with the first line of its docstring. Importing all of them takes seconds."""
    found = {name: importlib.import_module(module) for name, module in known.items()}
    lines = {name: (module.__doc__ or "").strip().splitlines()[0] for name, module in found.items()}
    return "\n".join(f"  {name:<14} {text}" for name, text in lines.items())


def show(values: dict[str, Any], indent: str = "") -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            print(f"{indent}{key}")
            show(value, indent + "  ")
        else:
            print(f"{indent}{key:<28} {value}")


def main() -> int:
    known = modules()
    # Only the benchmark that is named may add options, and it has to be known before they are read.
    name = next((word for word in sys.argv[1:] if word in known), None)
    listing = names(known) if name is None or {"-h", "--help"} & set(sys.argv) else ""
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        epilog=f"benchmarks:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="one of those below")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--data", type=Path, default=DATA, help="the labelled log sets (../shared/data)")
    module = None if name is None else importlib.import_module(known[name])
    if hasattr(module, "options"):
        module.options(parser.add_argument_group(f"options of {name}"))  # type: ignore[union-attr]
    args = parser.parse_args()
    if args.name is None:
        print(listing)
        return 0
    if module is None or args.name != name:
        print(f"bench: {args.name!r} is not a benchmark; they are: {', '.join(known)}", file=sys.stderr)
        return 2
    if not leashed():
        return keep()
    set_up("error")  # on standard error: standard output is for the figures
    try:
        values = module.measure(args.data, args) if hasattr(module, "options") else module.measure(args.data)
    except BadInput as exc:
        print(f"bench: {exc}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(values, indent=2))
    else:
        show(values)
    return 1 if hasattr(module, "failed") and module.failed(values) else 0


if __name__ == "__main__":
    raise SystemExit(main())
