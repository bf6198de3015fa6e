"""Stored records to sessions to learn from."""

import random
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from pipeline.controller.training_status import Status
from pipeline.controller.trainings import TrainingRequest
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.records.batch import Purpose
from pipeline.records.query import Query
from pipeline.records.schema import LEARN_SCHEMA, RESULT_SCHEMA
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink
from pipeline.training.training import Training
from pipeline.watching.incidents.origins import Upstream
from pipeline.watching.sessions import parent_spans
from pipeline.watching.sessions.joint import joint_event
from pipeline.watching.sessions.model import NORMAL, dump, load
from pipeline.watching.sessions.sampling import KEEP_S, MIN_SESSIONS, SampledSessions, SessionSampler

BEGAN = datetime(2026, 3, 1, tzinfo=UTC)


def record(key: str, at_s: float, template: int | None, **more: Any) -> dict[str, Any]:
    known = {
        "workload": "shop",
        "message": f"step of blk_{key}",
        "timestamp": BEGAN + timedelta(seconds=at_s),
    }
    return dict.fromkeys(LEARN_SCHEMA) | known | {"template_id": template} | more


def page(rows: list[dict[str, Any]]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=LEARN_SCHEMA)


def sampler(*, timeout_s: float = 60, limit: int = 1_000_000) -> SessionSampler:
    return SessionSampler(timeout_s=timeout_s, limit=limit)


def flow(
    number: int, at_s: float, templates: tuple[int, ...] = (1, 2, 3), **more: Any
) -> list[dict[str, Any]]:
    return [record(str(number), at_s + i, template, **more) for i, template in enumerate(templates)]


def wholes(found: SampledSessions) -> list[tuple[int, ...]]:
    """Sessions without silences."""
    return [parts[0] for parts in found.segments if len(parts) == 1]


def many(n: int = 100) -> list[dict[str, Any]]:
    """Sessions of three lines, ten seconds apart, long over when the last one begins."""
    return [row for number in range(n) for row in flow(number, 10.0 * number)]


def test_events_of_a_session_are_put_in_order_of_time_whichever_page_they_came_in() -> None:
    rows = many()
    random.Random(2).shuffle(rows)
    taken = sampler()
    for begin in range(0, len(rows), 17):
        taken.add(page(rows[begin : begin + 17]))
    found = taken.sessions()["shop\0block"]
    assert set(found.segments) == {((1, 2, 3),)}


def test_events_of_the_same_time_stay_in_the_order_they_were_read() -> None:
    taken = sampler()
    taken.add(page([*(record("5000", 0, t) for t in (5, 3, 4)), *many()]))
    assert (5, 3, 4) in wholes(taken.sessions()["shop\0block"])


def test_what_comes_after_a_silence_is_a_part_of_the_session_and_after_a_day_another_session() -> None:
    taken = sampler(timeout_s=60)
    taken.add(
        page([*many(), *flow(7, 300, (8, 8)), *flow(7, 300 + KEEP_S + 60, (4, 4)), *flow(0, 10 * KEEP_S)])
    )
    found = taken.sessions()["shop\0block"].segments
    assert ((1, 2, 3), (8, 8)) in found
    assert ((4, 4),) in found


def test_of_a_session_that_may_go_on_what_came_before_its_last_silence_is_learnt() -> None:
    taken = sampler(timeout_s=60)
    taken.add(page([*many(), *flow(0, 992, (8, 8))]))
    assert ((1, 2, 3),) in taken.sessions()["shop\0block"].segments
    assert not any((8, 8) in parts for parts in taken.sessions()["shop\0block"].segments)


def test_sessions_that_may_go_on_are_left_out_unless_that_is_most_of_them() -> None:
    taken = sampler(timeout_s=25)
    taken.add(page(many(100)))
    found = taken.sessions()["shop\0block"]
    assert found.unfinished == 3
    assert len(found.segments) == 97
    short = sampler(timeout_s=3_600)
    short.add(page(many(100)))
    assert len(short.sessions()["shop\0block"].segments) == 100


def test_sessions_with_an_anomalous_line_are_left_out_of_results_and_kept_in_a_baseline() -> None:
    rows = many() + flow(500, 20, (1, 66, 3), anomalous=True)
    taken = sampler()
    taken.add(page(rows))
    taken.add(page([row | {"workload": "bank"} for row in rows]), baseline=True)
    results, baseline = (taken.sessions()[f"{workload}\0block"] for workload in ("shop", "bank"))
    assert (1, 66, 3) not in wholes(results) and results.bad == 1
    assert (1, 66, 3) in wholes(baseline) and baseline.bad == 0


def test_workloads_are_learnt_apart() -> None:
    taken = sampler()
    taken.add(page(many(3_000)))
    taken.add(
        page([row | {"workload": "bank", "template_id": row["template_id"] + 10} for row in many(3_000)])
    )
    learnt = taken.learn()
    assert sorted(learnt) == ["bank\0block", "shop\0block"]
    assert learnt["bank\0block"].judge([(11, 12, 13)])[0] == NORMAL
    assert learnt["bank\0block"].judge([(1, 2, 3)])[0].anomalous


def test_records_without_key_or_time_and_templates_nobody_knows_do_no_harm() -> None:
    rows = many()
    rows += [record("0", 0, 4, message="no key"), record("0", 1, 5) | {"timestamp": None}]
    rows += [*flow(900, 5, (1, -3, 3)), record("901", 6, None), record("901", 7, 0)]
    taken = sampler()
    taken.add(page(rows))
    learnt = taken.learn()["shop\0block"]
    assert learnt.judge([(1, 0, 3), (0, 0)]) == [NORMAL, NORMAL]


@pytest.mark.parametrize("rows", [[], many(MIN_SESSIONS - 1), [record(str(n), n, 1) for n in range(500)]])
def test_too_few_sessions_or_sessions_of_one_line_teach_nothing(rows: list[dict[str, Any]]) -> None:
    taken = sampler()
    taken.add(page(rows))
    assert taken.learn() == {}


def test_past_the_limit_whole_sessions_are_drawn_and_memory_stays_bounded() -> None:
    taken = sampler(limit=900)
    for part in range(10):
        taken.add(page([row for n in range(200) for row in flow(part * 200 + n, 10.0 * (part * 200 + n))]))
    found = wholes(taken.sessions()["shop\0block"])
    assert 100 <= len(found) <= 300
    assert set(found) == {(1, 2, 3)}


def test_a_key_in_the_header_counts_where_the_message_has_none() -> None:
    taken = sampler()
    taken.add(page([row | {"raw": row["message"], "message": "step"} for row in many()]))
    assert len(wholes(taken.sessions()["shop\0block"])) > 90


@pytest.mark.parametrize(("purpose", "knows"), [(Purpose.SCORE, False), (Purpose.BASELINE, True)])
def test_a_training_learns_the_sessions_of_what_it_reads(
    tmp_path: Path, purpose: Purpose, knows: bool
) -> None:
    settings = Settings(data_dir=tmp_path, session_keys=("order=([0-9]+)",))
    sink = ParquetSink(settings.data.results if purpose is Purpose.SCORE else settings.data.baseline)
    rows = [
        dict.fromkeys(RESULT_SCHEMA)
        | row
        | {
            "record_id": str(n),
            "line": n + 1,
            "lines": 1,
            "message": "step",
            "raw": f"{row['message'].replace('blk_', 'order=')}",
        }
        for n, row in enumerate(many(3_000) + flow(5_000, 20, (1, 66, 3), anomalous=True))
    ]
    sink.write("b1", pl.DataFrame(rows, schema=RESULT_SCHEMA))
    work = Training(
        request=TrainingRequest(), query=Query(),
        masks=MaskSet.load(), templates=(), registry=None, settings=settings, marks=(),  # type: ignore[arg-type]
        held=SimpleNamespace(lost=threading.Event()), clock=lambda: BEGAN, status=Status(request_id="r", model="shared"),  # type: ignore[arg-type]
    )  # fmt: skip
    for _ in work.read():
        pass
    verdicts = work.session_models["shop\0user"].judge([(1, 2, 3), (1, 66, 3)])
    assert [verdict.anomalous for verdict in verdicts] == [False, not knows]


def traces(n: int = 100) -> list[dict[str, Any]]:
    """Traces through a shop and its bank, each line with the id of the request in front of the shop too."""
    rows = []
    for number in range(n):
        for at, (workload, template) in enumerate((("shop", 1), ("bank", 1), ("bank", 2), ("shop", 3))):
            message = f"request_id=r{number:05} trace_id={number + 1:032x} order"
            rows.append(record("", 10.0 * number + at, template, workload=workload, message=message))
    return rows


def test_traces_are_learnt_in_each_workload_and_as_wholes_and_what_repeats_them_is_not() -> None:
    taken = sampler()
    taken.add(page(traces(3_000)))
    learnt = taken.learn()
    assert sorted(learnt) == ["*\0trace", "bank\0trace", "shop\0trace"]
    joint = learnt["*\0trace"]
    assert sorted(joint.places.values()) == [("bank", 1), ("bank", 2), ("shop", 1), ("shop", 3)]
    normal = [joint_event(*place) for place in (("shop", 1), ("bank", 1), ("bank", 2), ("shop", 3))]
    without_bank = [normal[0], normal[3]]
    assert [verdict.anomalous for verdict in joint.judge([normal, without_bank])] == [False, True]
    assert [(one.after, one.event) for one in joint.follow_ups.every if one.after == normal[2]] == [
        (normal[2], normal[3])
    ]
    again = load(dump(learnt))["*\0trace"]
    assert again.places == joint.places and again.judge([normal]) == joint.judge([normal])


def test_traces_of_one_workload_have_no_joint_model_and_another_cut_of_the_records_is_a_kind() -> None:
    rows = [row | {"workload": "shop"} for row in traces(240)]
    for number, row in enumerate(rows):  # four traces belong to a request
        row["message"] = f"request_id=r{number // 16:05} {row['message'].partition(' ')[2]}"
    taken = sampler()
    taken.add(page(rows))
    assert sorted(taken.learn()) == ["shop\0request", "shop\0trace"]


def called_by_span(number: int, field: str, parent: int) -> list[dict[str, Any]]:
    """A trace in which `web` ends first, and the span of `jobs` has this parent."""
    trace = f"trace_id={number:032x}"
    of = (
        (f"span_id={number:016x}", "web", 0.0),
        (f"span_id={number + 1:016X} {field}={parent:016X}", "jobs", 1.0),
    )
    return [
        record("", 10 * number + at, 1, workload=workload, message=f"step {trace} {ids}")
        for ids, workload, at in of
    ]


@pytest.mark.parametrize("field", ["parent_span_id", "parentSpanId", "parent_id", "parent.id"])
def test_parent_spans_tell_who_calls_whom(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def upstream(parent: int) -> tuple[Upstream, ...]:
        taken = sampler()
        for begin in range(1, 200, 50):
            numbers = range(begin, begin + 50)
            taken.add(
                page([row for n in numbers for row in called_by_span(n << 8, field, (n << 8) + parent)])
            )
        return taken.learn()["*\0trace"].shape.upstream

    assert upstream(0) == (Upstream(caller="web", called="jobs", traces=200),)
    # The order of events alone takes the one that ends last for the caller.
    assert upstream(7) == (Upstream(caller="jobs", called="web", traces=200),)
    monkeypatch.setattr(parent_spans, "MAX_LINKS", 200)
    assert 25 <= upstream(0)[0].traces <= 100
