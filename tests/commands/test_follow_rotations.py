"""`logweir send --follow` on logs that are rotated as logrotate does it: every line is accepted once."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from log_rotation import Program
from polling import wait_until

from bench._rotation import STYLES, Style
from pipeline.ledger.ledger import Ledger
from pipeline.settings import Settings
from pipeline.sources.pushed import framed

pytestmark = pytest.mark.long

Start = Callable[[Path], "subprocess.Popen[bytes]"]


@pytest.fixture
def start(settings: Settings, tmp_path: Path) -> Iterator[Start]:
    """Starts `logweir send --follow` on a file; what it says stands in said.txt."""
    started: list[subprocess.Popen[bytes]] = []
    clean = {k: v for k, v in os.environ.items() if not k.startswith("LOGWEIR_")}

    def run(path: Path) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "pipeline.cli", "send", "--follow", str(path), "--workload", "app"]
        with (tmp_path / "said.txt").open("ab") as said:
            started.append(
                subprocess.Popen(command, env={**clean, **settings.to_environ()}, stdout=said, stderr=said)
            )
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait(10)
    print((tmp_path / "said.txt").read_text(errors="replace")[-3000:])  # shown when a test fails


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    made: list[Program] = []

    def make(style: Style, *, compress: bool = False) -> Program:
        (tmp_path / "log").mkdir()
        made.append(Program(tmp_path / "log", style, compress=compress))
        return made[-1]

    yield make
    for one in made:
        one.close()


def accepted(ledger: Ledger) -> list[str]:
    found: list[str] = []
    for key in ledger.client.scan_iter(ledger.keys("payload", "*")):
        frame, _ = framed(ledger.payload(key.decode().rpartition(":")[2]))
        found += [line for raw in frame["raw"].to_list() for line in raw.split("\n")]
    return sorted(found)


def lost(ledger: Ledger) -> int:
    return int(ledger.client.hget(ledger.keys.counts, "source_lost") or 0)


def all_accepted(ledger: Ledger, program: Program) -> bool:
    return wait_until(lambda: accepted(ledger) == sorted(program.lines), timeout_s=60)


@pytest.mark.parametrize("style", STYLES)
def test_a_program_that_writes_on_after_each_rotation_loses_no_line(
    start: Start, ledger: Ledger, program: Callable[..., Program], style: Style
) -> None:
    writer = program(style)
    writer.write(5)
    start(writer.path)
    assert all_accepted(ledger, writer)
    for _ in range(3):
        for _ in range(4):
            writer.write()
            time.sleep(0.05)
        if (
            style == "copytruncate"
        ):  # what is written between the copy and the truncation is lost by logrotate
            assert all_accepted(ledger, writer)
        writer.rotate()
        for _ in range(8):
            writer.write_late()
            writer.write()
            time.sleep(0.05)
    assert all_accepted(ledger, writer), set(writer.lines) - set(accepted(ledger))
    assert lost(ledger) == 0


@pytest.mark.parametrize("style", STYLES)
def test_files_that_come_and_go_while_the_pipeline_is_full_are_read(
    start: Start, ledger: Ledger, program: Callable[..., Program], style: Style
) -> None:
    writer = program(style, compress=True)
    writer.write(5)
    process = start(writer.path)
    assert all_accepted(ledger, writer)
    ledger.intake.pause("a test")
    writer.write(3)
    for _ in range(3):
        time.sleep(0.5)
        writer.rotate()
        writer.write(4)
        writer.write_late(2)
    process.send_signal(signal.SIGSTOP)  # it cannot even look
    for _ in range(3):
        writer.rotate()
        writer.write(4)
    process.send_signal(signal.SIGCONT)
    ledger.intake.resume()
    assert all_accepted(ledger, writer), set(writer.lines) - set(accepted(ledger))
    assert lost(ledger) == 0


@pytest.mark.parametrize("style", STYLES)
def test_a_follower_that_was_killed_goes_on_in_the_files_that_came_since(
    start: Start, ledger: Ledger, program: Callable[..., Program], style: Style
) -> None:
    writer = program(style, compress=True)
    writer.write(5)
    process = start(writer.path)
    assert all_accepted(ledger, writer)
    process.kill()
    process.wait(10)
    for _ in range(3):
        writer.write(4)
        writer.rotate()
    writer.write(4)
    start(writer.path)
    assert all_accepted(ledger, writer), set(writer.lines) - set(accepted(ledger))
    assert lost(ledger) == 0


def test_a_rest_that_cannot_be_found_is_said_and_counted(
    start: Start, ledger: Ledger, program: Callable[..., Program], tmp_path: Path
) -> None:
    writer = program("create")
    writer.write(5)
    process = start(writer.path)
    assert all_accepted(ledger, writer)
    process.kill()
    process.wait(10)
    writer.rotate()
    writer.write(2)
    writer.path.with_name("app.log.1").unlink()
    start(writer.path)
    assert all_accepted(ledger, writer)
    assert wait_until(lambda: lost(ledger) == 1, timeout_s=10)
    said = (tmp_path / "said.txt").read_text()
    assert "read to its line 5 is neither there nor under a rotated name" in said


def test_an_emptied_file_without_a_copy_is_said_and_counted(
    start: Start, ledger: Ledger, program: Callable[..., Program], tmp_path: Path
) -> None:
    writer = program("create")
    writer.write(5)
    start(writer.path)
    assert all_accepted(ledger, writer)
    os.truncate(writer.path, 0)
    assert wait_until(lambda: lost(ledger) == 1, timeout_s=20)
    writer.write(3)
    assert all_accepted(ledger, writer)
    assert "was emptied and no copy of it is there" in (tmp_path / "said.txt").read_text()
