"""Feeds hostile bytes to everything that reads what others wrote: executions, executions/s and findings per target."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench._fuzz_child import HEAD, atheris_or_none

NAMES = ("message", "stored", "manifest", "weights", "payload", "documents", "times", "framing", "masking")


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
        "engine": "mutations of seeds" if atheris_or_none() is None else "atheris",
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
    directory.mkdir(parents=True, exist_ok=True)
    before = _state(directory)[0]
    began = time.monotonic()
    while (left := seconds - (time.monotonic() - began)) > 0.5:
        command = [sys.executable, "-m", "bench._fuzz_child", name, str(left), str(seed), str(directory)]
        # One thread: a second one in Polars would only wait for the other targets' processor.
        env = os.environ | {"POLARS_MAX_THREADS": "1", "RUST_BACKTRACE": "0", "PYTHONHASHSEED": "0"}
        with (directory / "log").open("wb") as log:
            code = subprocess.run(command, env=env, stdout=log, stderr=log, check=False).returncode
        if code == 0:
            break
        executions, data = _state(directory)
        (directory / f"finding-died-{executions}").write_bytes(data)
        what = f"died with {code}: {(directory / 'log').read_bytes()[-200:].decode('utf-8', 'replace')}"
        (directory / f"finding-died-{executions}.json").write_text(
            json.dumps({"what": what, "bytes": len(data)})
        )
        seed += 1
    took = time.monotonic() - began
    executions = _state(directory)[0] - before
    findings = [json.loads(path.read_text())["what"] for path in sorted(directory.glob("finding-*.json"))]
    return {
        "executions": executions,
        "seconds": round(took, 1),
        "per_s": round(executions / max(took, 0.1)),
        "findings": findings,
    }


def _state(directory: Path) -> tuple[int, bytes]:
    """Executions so far, and the input that was tried last."""
    try:
        state = (directory / "state").read_bytes()
    except FileNotFoundError:
        return 0, b""
    executions, size = HEAD.unpack_from(state)
    return executions, state[HEAD.size : HEAD.size + size]
