"""Feeds hostile bytes to everything that reads what others wrote: executions, executions/s and findings per
target."""

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench._fuzz_child import TRIED, atheris_or_none, keep, unpacked

NAMES = (
    "message",
    "stored",
    "manifest",
    "request",
    "payload",
    "documents",
    "times",
    "framing",
    "masking",
)
NO_END = 120  # seconds after its time: what then still runs never ends


def options(parser: Any) -> None:
    parser.add_argument("--minutes", type=float, default=1.0, help="in all, shared by the targets (1)")
    parser.add_argument("--target", choices=NAMES, action="append", help="only this one; may be given again")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--keep", type=Path, help="directory for corpora and findings, used again by the next run"
    )


def measure(_data: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One process per target in turn; one that dies is a finding, and another goes on."""
    names = args.target or NAMES
    with tempfile.TemporaryDirectory(prefix="logweir-fuzz-") as scratch:
        root = args.keep or Path(scratch)
        found = {name: fuzz(name, args.minutes * 60 / len(names), args.seed, root / name) for name in names}
    return {
        "executions": sum(f["executions"] for f in found.values()),
        "findings": sum(len(f["findings"]) for f in found.values()),
        "targets": {
            name: f | {"findings": dict(enumerate(f["findings"], start=1))} for name, f in found.items()
        },
    }


def failed(values: dict[str, Any]) -> bool:
    return bool(values["findings"])


def fuzz(name: str, seconds: float, seed: int, directory: Path) -> dict[str, Any]:
    """Try one target for so long."""
    from bench._fuzz_targets import TARGETS  # loads all that is fuzzed, which naming the targets need not

    directory.mkdir(parents=True, exist_ok=True)
    guided = atheris_or_none() is not None and TARGETS[name].together == 1
    before, busy, began = _state(directory)[0], _processor_s(), time.monotonic()
    (directory / "log").unlink(missing_ok=True)
    while (left := seconds - (time.monotonic() - began)) > 0.5:
        command = [sys.executable, "-m", "bench._fuzz_child", name, str(left), str(seed), str(directory)]
        # One thread: a second one in Polars would only wait for the other targets' processor.
        env = os.environ | {"POLARS_MAX_THREADS": "1", "RUST_BACKTRACE": "0", "PYTHONHASHSEED": "0"}
        with (directory / "log").open("ab") as log:
            try:
                code: int | str = subprocess.run(
                    command, env=env, stdout=log, stderr=log, check=False, timeout=left + NO_END
                ).returncode
            except subprocess.TimeoutExpired:
                code = "no end"
        if code == 0:
            break
        _, inputs = _state(directory)
        # Of several inputs the next process finds the one.
        if len(inputs) <= 1:
            end = (directory / "log").read_bytes()[-200:].decode("utf-8", "replace")
            path = directory / f"finding-died-{hashlib.sha256(b''.join(inputs)).hexdigest()[:12]}"
            keep(path, f"died with {code}: {end}", inputs or [b""])
        if not inputs:  # it would die again at once
            break
        seed += 1
    took = time.monotonic() - began
    executions = _state(directory)[0] - before
    findings = [json.loads(path.read_text())["what"] for path in sorted(directory.glob("finding-*.json"))]
    return {
        "engine": "atheris" if guided else "mutations of seeds",
        "executions": executions,
        "seconds": round(took, 1),
        "per_s": round(executions / max(took, 0.1)),
        "per_processor_s": round(executions / max(_processor_s() - busy, 0.1)),
        "findings": findings,
    }


def _processor_s() -> float:
    """Of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _state(directory: Path) -> tuple[int, list[bytes]]:
    """Executions so far, and the inputs that were being tried."""
    try:
        return unpacked((directory / TRIED).read_bytes())
    except FileNotFoundError:
        return 0, []
