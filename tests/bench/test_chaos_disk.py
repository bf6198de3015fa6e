"""The disk of a chaos run is really full, in both ways there are, and can be written again afterwards."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench._chaos.disk import Disk

# Writes what it is told to, and says how that went.
WRITER = """
import os, pathlib, sys
for number, line in enumerate(sys.stdin):
    path = pathlib.Path(line.strip()) / f"{number}.bin"
    try:
        with path.open("wb") as file:
            file.write(bytes(20_000))
            os.fsync(file.fileno())
        print("written", flush=True)
    except OSError as exc:
        path.unlink(missing_ok=True)
        print(exc.strerror, flush=True)
"""


class Writer:
    """A process of its own: one of the limits is a process's."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def write(self, folder: Path) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{folder}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.fixture
def writer() -> Iterator[Writer]:
    one = Writer()
    yield one
    one.process.communicate()


@pytest.mark.parametrize("way", ["tmpfs", "limit"])
def test_while_it_is_full_nothing_can_be_written(tmp_path: Path, writer: Writer, way: str) -> None:
    disk = Disk(tmp_path / "results", mib=2, processes=lambda: [writer.process.pid])
    disk.mount()
    try:
        if way == "limit":
            disk.unmount()
            disk.kind = "limit"  # as where nobody may mount
        elif disk.kind == "limit":
            return  # nobody may, and the other way is seen to work
        assert writer.write(disk.path) == "written"
        disk.fill()
        assert writer.write(disk.path) in ("No space left on device", "File too large")
        disk.free()
        assert writer.write(disk.path) == "written"
    finally:
        disk.unmount()
    assert not disk.path.is_mount()
