"""What a process says about itself: one JSON object per line, whoever speaks."""

import json
import logging

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
