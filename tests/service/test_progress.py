"""The progress of backfills and sends: a share where the whole is known, an estimate once it was measured."""

from dataclasses import replace

import pytest

from pipeline.service.running.progress import ProgressWatch
from pipeline.service.values import WorkloadLines
from pipeline.sources.backfill.plans import BackfillView

BEGUN = BackfillView(
    name="a", place="/logs", state="reading", created_ms=0, parallel=1, objects=1, pieces=4, done=0, skipped=0,
    failed=0, bytes=1_000, bytes_read=100, lines=10, readers=1,
)  # fmt: skip


def test_a_backfill_has_an_estimate_once_its_pace_was_measured() -> None:
    watch = ProgressWatch()
    (first,) = watch.backfills([BEGUN], 0.0)
    assert (first.percent, first.left_s, first.lines_per_s) == (10.0, None, None)
    (later,) = watch.backfills([replace(BEGUN, bytes_read=200, lines=30)], 10.0)
    assert (later.percent, later.left_s, later.lines_per_s) == (20.0, pytest.approx(80.0), pytest.approx(2.0))
    (still,) = watch.backfills([replace(BEGUN, bytes_read=200, lines=30)], 69.0)
    assert still.left_s == pytest.approx(800 * 69 / 100)
    (again,) = watch.backfills([replace(BEGUN, bytes_read=900, lines=30)], 200.0)
    assert (again.percent, again.left_s) == (90.0, None), "nobody looked for two minutes"


def test_an_archive_that_is_still_listed_has_no_share_and_one_that_is_over_no_estimate() -> None:
    watch = ProgressWatch()
    views = [replace(BEGUN, state="planning"), replace(BEGUN, name="b", state="cancelled")]
    for now in (0.0, 10.0):
        assert [(one.percent, one.left_s) for one in watch.backfills(views, now)] == [(None, None)] * 2


def test_a_send_has_lines_so_far_and_the_time_until_those_on_their_way_are_stored() -> None:
    watch = ProgressWatch()
    lines = {"idle": WorkloadLines(accepted=9), "a": WorkloadLines(accepted=100, in_flight=50)}
    (first,) = watch.sends(lines, 0.0)
    assert (first.workload, first.accepted, first.in_flight, first.left_s) == ("a", 100, 50, None)
    (later,) = watch.sends(lines | {"a": WorkloadLines(accepted=200, in_flight=100)}, 10.0)
    assert (later.accepted, later.left_s) == (200, pytest.approx(20.0))
