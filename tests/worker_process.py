"""A worker in a process of its own, as compose runs it, on the settings of a test."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.settings import Settings


def begun(settings: Settings, role: str, log: Path, **environ: str) -> "subprocess.Popen[bytes]":
    """It runs, and writes to `log`; whoever calls ends it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LOGWEIR_")}
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline.workers.cpu", role, role],
            env={**clean, **settings.to_environ(), **environ},
            stdout=out,
            stderr=out,
        )


@contextmanager
def working(settings: Settings, role: str, folder: Path) -> Iterator[Path]:
    """A worker of this role meanwhile; its log."""
    log = folder / f"{role}.log"
    process = begun(settings, role, log)
    try:
        yield log
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
            raise
