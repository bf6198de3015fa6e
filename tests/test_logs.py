"""What a process says about itself: one JSON object per line, whoever speaks."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

from pipeline.logs import logger, set_up


@pytest.fixture(autouse=True)
def _as_before() -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


def test_our_events_and_those_of_libraries_are_one_json_object_per_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up("info", json=True)
    logger(batch="b1").info("batch.step", lines=3)
    logging.getLogger("kombu.transport").warning('lost "%s"\nagain', "it")
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("celery").exception("task failed")
    ours, theirs, failure = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (ours["event"], ours["batch"], ours["lines"], ours["level"]) == ("batch.step", "b1", 3, "info")
    assert (theirs["event"], theirs["logger"], theirs["message"]) == (
        "library", "kombu.transport", 'lost "it"\nagain',
    )  # fmt: skip
    assert "ValueError: no" in failure["exception"]


def test_what_is_below_the_level_is_not_said(capsys: pytest.CaptureFixture[str]) -> None:
    set_up("error", json=True)
    logger().warning("batch.waits")
    logging.getLogger("celery").warning("hm")
    logger().error("batch.dead")
    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["batch.dead"]


def test_a_host_program_that_set_nothing_up_finds_warnings_on_its_standard_error_only() -> None:
    code = """
from pipeline.logs import logger
log = logger(batch="b1")
log.info("batch.step")
log.warning("part.missing", why="not = there")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", 'event=part.missing batch=b1 why="not = there"\n')


def test_the_logging_of_a_host_program_takes_our_events(caplog: pytest.LogCaptureFixture) -> None:
    structlog.reset_defaults()
    with caplog.at_level("INFO", logger="logweir"):
        logger().info("batch.step", lines=3)
    assert [(one.name, one.levelname, one.getMessage()) for one in caplog.records] == [
        ("logweir", "INFO", "event=batch.step lines=3")
    ]


def test_an_event_that_cannot_be_written_is_dropped(tmp_path: Path) -> None:
    """On a full disk a process must still do what comes after its event."""
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib, resource, sys\n"
        "from pipeline.logs import logger, set_up\n"
        "set_up('info', json=True)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))\n"
        "logger().warning('batch.waits', why='the disk is full')\n"
        "sys.exit(7)\n"
    )
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run([sys.executable, script], stderr=log, timeout=50, check=False)
    assert done.returncode == 7 and (tmp_path / "log").read_text() == ""
