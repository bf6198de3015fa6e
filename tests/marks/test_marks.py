"""Marks on a real Redis: they hold from the next batch on, run out by themselves, are bounded, and never stop
a batch."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import msgpack
import polars as pl
import pytest
import redis

from pipeline import detect
from pipeline.errors import BadInput, BadPayload, RedisUnavailable
from pipeline.marks import store as mark_store
from pipeline.marks.marks import Mark, Overlay, State, Target, lesson
from pipeline.marks.store import MAX_WHY, SHOWN_AFTER, Marks
from pipeline.messages.app import make_app
from pipeline.producer import Producer
from pipeline.records.batch import Purpose
from pipeline.records.delivery import Stage
from pipeline.records.schema import RESULT_SCHEMA, SAMPLE_SCHEMA
from pipeline.records.verdict import Verdict, pattern_ids
from pipeline.report.findings import finding_severity
from pipeline.report.why import explain
from pipeline.settings import Settings
from pipeline.tasks import ingest
from pipeline.tasks.context import Context
from pipeline.tasks.step import perform
from pipeline.watching.observation import observe
from tests.watching.test_observation import BATCH

NORMAL, ANOMALOUS = State.NORMAL, State.ANOMALOUS
NOW = datetime(2026, 11, 22, 10, tzinfo=UTC)
BIG = 2**64 - 2


@pytest.fixture
def marks(client: "redis.Redis", settings: Settings) -> Marks:
    return Marks(client, settings)


@pytest.fixture
def other(client: "redis.Redis", settings: Settings) -> Marks:
    """Another process."""
    return Marks(client, settings)


def mark(target: Target, state: State = NORMAL, **changes: Any) -> Mark:
    return replace(Mark(target=target, state=state, text="x", at=NOW, by="ann"), **changes)


def work(*rows: tuple[int, int | None, float | None]) -> pl.DataFrame:
    """WORK_SCHEMA rows of (pattern id, template id, score)."""
    frame = pl.DataFrame(
        {
            "key": [pattern for pattern, _, _ in rows],
            "pattern_id": [pattern for pattern, _, _ in rows],
            "template_id": [template for _, template, _ in rows],
            "score": [score for _, _, score in rows],
            "anomalous": [None if score is None else score >= 0.5 for _, _, score in rows],
            "p_value": [0.25 for _ in rows],
            "reasons": [["rare:1/9"] for _ in rows],
        },
        schema={n: t for n, t in detect.WORK_SCHEMA.items() if n in {
            "key", "pattern_id", "template_id", "score", "anomalous", "p_value", "reasons"}},
    )  # fmt: skip
    blank = [pl.lit(None, dtype=t).alias(n) for n, t in detect.WORK_SCHEMA.items() if n not in frame.columns]
    return frame.with_columns(blank).select(list(detect.WORK_SCHEMA))


def said(frame: pl.DataFrame) -> list[tuple[float | None, bool | None, str]]:
    return [(s, a, r[0]) for s, a, r in frame.select("score", "anomalous", "reasons").iter_rows()]


# ---- laid over verdicts ------------------------------------------------------------------------


def test_a_mark_forces_the_verdict_and_keeps_what_the_model_said() -> None:
    rows = work((1, 7, 0.9), (BIG, 8, 0.1), (3, 9, 0.4))
    overlay = Overlay([mark(Target.pattern(1)), mark(Target.template(8), ANOMALOUS, by="")])
    seen = overlay.over(rows, "shop", NOW)
    assert said(seen) == [
        (0.0, False, "marked:normal by ann"),
        (1.0, True, "marked:anomalous by somebody"),
        (0.4, False, "rare:1/9"),
    ]
    assert seen["reasons"][0].to_list() == ["marked:normal by ann", "rare:1/9"]
    assert seen["p_value"].to_list() == [0.25] * 3
    assert seen.schema == rows.schema
    assert Overlay().over(rows, "shop", NOW) is rows
    assert Overlay([mark(Target.pattern(5))]).over(rows, "shop", NOW) is rows


def test_a_line_that_nobody_judged_stays_so() -> None:
    rows = work((1, 7, None), (2, None, None))
    overlay = Overlay([mark(Target.pattern(1), ANOMALOUS), mark(Target.pattern(2), ANOMALOUS)])
    assert overlay.over(rows, "shop", NOW) is rows


@pytest.mark.parametrize(
    ("marks", "state"),
    [
        ([mark(Target.template(7), ANOMALOUS), mark(Target.pattern(1))], NORMAL),
        ([mark(Target.pattern(1), ANOMALOUS), mark(Target.pattern(1), workload="shop")], NORMAL),
        ([mark(Target.template(7), ANOMALOUS, workload="shop"), mark(Target.pattern(1))], NORMAL),
        ([mark(Target.template(7), ANOMALOUS, workload="other")], None),
        ([mark(Target.pattern(1), ANOMALOUS, until=NOW)], None),
        ([mark(Target.pattern(1), ANOMALOUS, until=NOW), mark(Target.template(7))], NORMAL),
        ([mark(Target.pattern(1), ANOMALOUS, until=NOW + timedelta(milliseconds=1))], ANOMALOUS),
        ([mark(Target.pattern(7)), mark(Target.template(1))], None),
    ],
)
def test_the_narrowest_mark_that_holds_counts(marks: Sequence[Mark], state: State | None) -> None:
    ((score, _, _),) = said(Overlay(marks).over(work((1, 7, 0.5)), "shop", NOW))
    assert score == {NORMAL: 0.0, ANOMALOUS: 1.0, None: 0.5}[state]


# ---- kept in Redis -----------------------------------------------------------------------------


def test_a_mark_holds_in_every_process_from_the_next_batch_on_and_once_revoked_the_model_counts_again(
    marks: Marks, other: Marks
) -> None:
    rows = work((1, 7, 0.9))
    assert other.overlay()(rows, "shop") is rows
    made, replaced = marks.put(Target.pattern(1), NORMAL, text="a <NUM>", by="ann", why="it restarts nightly")
    assert replaced is None
    assert said(other.overlay()(rows, "shop")) == [(0.0, False, "marked:normal by ann")]
    assert other.look().marks == (made,)
    assert (made.text, made.why, made.until) == ("a <NUM>", "it restarts nightly", None)
    assert other.revoke([Target.pattern(1)]) == [(Target.pattern(1), "")]
    assert marks.overlay()(rows, "shop") is rows
    assert marks.revoke([Target.pattern(1)]) == []


def test_marks_are_read_again_only_after_a_change(
    marks: Marks, other: Marks, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks.put(Target.pattern(1), NORMAL, text="a")
    looked: list[int] = []
    look = other.look
    monkeypatch.setattr(other, "look", lambda: looked.append(1) or look())
    for _ in range(3):
        other.overlay()(work((1, 7, 0.9)), "shop")
    assert len(looked) == 1
    marks.put(Target.pattern(2), NORMAL, text="b")
    assert said(other.overlay()(work((2, 7, 0.9)), "shop"))[0][0] == 0.0
    assert len(looked) == 2


def test_a_mark_of_the_same_lines_replaces_the_one_before(marks: Marks) -> None:
    first, _ = marks.put(Target.template(7), NORMAL, text="t", by="ann")
    second, replaced = marks.put(Target.template(7), ANOMALOUS, text="t", by="bob")
    assert replaced == first
    _, beside = marks.put(Target.template(7), NORMAL, text="t", workload="shop")
    assert beside is None
    assert [m.state for m in marks.look().marks if not m.workload] == [ANOMALOUS]
    assert marks.look().marks[0] == second


def test_a_mark_runs_out_by_the_clock_of_redis_and_is_listed_for_a_while(
    marks: Marks, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = work((1, 7, 0.9))
    made, _ = marks.put(Target.pattern(1), NORMAL, text="a", lasts=timedelta(milliseconds=1))
    while marks.look().holding:  # a millisecond
        pass
    assert marks.overlay()(rows, "shop") is rows
    assert marks.look().marks == (made,)
    marks.put(Target.pattern(2), NORMAL, text="b")
    assert len(marks.look().marks) == 2
    monkeypatch.setattr(mark_store, "SHOWN_AFTER", timedelta(0))
    marks.put(Target.pattern(3), NORMAL, text="c")
    assert [m.target.number for m in marks.look().marks] == [2, 3]
    assert timedelta(days=1) < SHOWN_AFTER


def test_there_is_a_limit_and_marks_that_ran_out_make_room(
    marks: Marks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mark_store, "MAX_MARKS", 2)
    marks.put(Target.pattern(1), NORMAL, text="a", lasts=timedelta(milliseconds=1))
    marks.put(Target.pattern(2), NORMAL, text="b")
    while len(marks.look().holding) > 1:  # a millisecond
        pass
    marks.put(Target.pattern(3), NORMAL, text="c")
    with pytest.raises(BadInput, match="there are 2 marks, the limit"):
        marks.put(Target.pattern(4), NORMAL, text="d")
    marks.put(Target.pattern(3), ANOMALOUS, text="c")
    assert [m.target.number for m in marks.look().marks] == [2, 3]


def test_a_mark_that_was_renewed_meanwhile_is_not_swept_away(
    marks: Marks, other: Marks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mark_store, "SHOWN_AFTER", timedelta(0))
    marks.put(Target.pattern(1), NORMAL, text="a", lasts=timedelta(milliseconds=1))
    while marks.look().holding:  # a millisecond
        pass
    before = marks.look()
    other.put(Target.pattern(1), ANOMALOUS, text="a")
    monkeypatch.setattr(marks, "look", lambda: before)
    marks.put(Target.pattern(2), NORMAL, text="b")
    assert {m.target.number: m.state for m in other.look().marks} == {1: ANOMALOUS, 2: NORMAL}


def test_every_change_gives_another_version_also_after_redis_has_lost_the_last_one(
    marks: Marks, client: "redis.Redis"
) -> None:
    marks.put(Target.pattern(1), NORMAL, text="a")
    kept = client.dump(marks.keys.marks)
    marks.put(Target.pattern(2), NORMAL, text="b")
    lost = marks.look().version
    client.restore(marks.keys.marks, 0, kept, replace=True)  # type: ignore[arg-type]
    marks.put(Target.pattern(3), NORMAL, text="c")
    assert marks.look().version not in {lost, ""}
    rows = work((3, 7, 0.9))
    assert marks.overlay()(rows, "shop") is not rows
    client.delete(marks.keys.marks)
    assert marks.overlay()(rows, "shop") is rows


@pytest.mark.parametrize(
    ("target", "changes", "words"),
    [
        (Target.template(0), {}, "no template"),
        (Target.pattern(2**64), {}, "no pattern"),
        (Target.pattern(1), {"why": "x" * (MAX_WHY + 1)}, "shorten"),
        (Target.pattern(1), {"lasts": timedelta(0)}, "some time"),
        (Target.pattern(1), {"lasts": timedelta(days=3_000_000)}, "year 9999"),
        (Target.pattern(1), {"workload": "a\nb"}, "no workload"),
        (Target.pattern(1), {"workload": "x" * 300}, "no workload"),
    ],
)
def test_what_can_be_no_mark_is_refused(
    marks: Marks, target: Target, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        marks.put(target, NORMAL, text="a", **changes)
    assert marks.look().marks == ()


def test_nothing_in_a_mark_steers_a_terminal_and_all_of_it_is_bounded(marks: Marks) -> None:
    made, _ = marks.put(
        Target.pattern(1), NORMAL, text="\x1b[2J" + "x" * 5000, by="ann\x07\ud800" * 100, why="a\nb"
    )
    (kept,) = marks.look().marks
    assert kept == made and kept.text.isprintable() and kept.by.isprintable() and kept.why == "a b"
    assert len(kept.text) == 1024 and len(kept.by) == 100


# ---- in a batch --------------------------------------------------------------------------------


def test_a_batch_is_stored_and_counted_as_marked_while_drift_sees_what_the_model_said(
    settings: Settings, marks: Marks, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Context(make_app(settings), settings)
    monkeypatch.setattr(context, "versions", lambda workloads: dict.fromkeys(workloads, "m1"))
    bad, good = pattern_ids(["disk failed", "all is well"])
    context.verdicts.learn("m1", {
        bad: Verdict(template_id=1, score=0.9, anomalous=True, reasons=("new-template",)),
        good: Verdict(template_id=2, score=0.1, anomalous=False, reasons=()),
    })  # fmt: skip

    def sent(batch_id: str, workload: str) -> list[tuple[bool, str]]:
        lines = ["disk failed", "disk failed", "all is well"]
        Producer(context.ledger, context.submit, settings).send(lines, workload=workload, batch_id=batch_id)
        assert perform(context, Stage.INGEST, batch_id, ingest.step) is None
        rows = context.sink(Purpose.SCORE).read(batch_id, workload)
        assert rows is not None
        return [(a, r[0] if r else "") for a, r in rows.select("anomalous", "reasons").iter_rows()]

    marks.put(Target.pattern(bad), NORMAL, text="", by="ann")
    marks.put(Target.template(2), ANOMALOUS, text="", by="ann", workload="shop")
    quiet, loud = (False, "marked:normal by ann"), (True, "marked:anomalous by ann")
    assert sent("a", "shop") == [quiet, quiet, loud]
    assert sent("b", "bank") == [quiet, quiet, (False, "")]
    totals = context.ledger.backlog.totals()
    assert [(totals[w].get("anomalous", 0), totals[w]["normal"]) for w in ("shop", "bank")] == [
        (1, 2),
        (0, 3),
    ]
    drift = context.client.hgetall(context.ledger.keys.drift("m1"))
    assert (int(drift[b"anomalous"]), int(drift[b"novel"])) == (4, 4)
    marks.revoke([Target.pattern(bad), Target.template(2)])
    assert sent("c", "shop") == [(True, "new-template")] * 2 + [(False, "")]


def test_readers_are_told_who_marked_a_line_and_meet_it_among_the_warnings() -> None:
    assert explain(["marked:anomalous by ann", "rare:1/9"])[0] == "marked anomalous by ann"
    assert explain(["marked"]) == ["marked by somebody"]
    finding = SimpleNamespace(level="info", reasons=("marked:anomalous by ann",))
    assert finding_severity(finding) == 2  # type: ignore[arg-type]


def test_incidents_are_told_of_a_marked_line_as_of_a_warning() -> None:
    blank = dict.fromkeys(RESULT_SCHEMA)
    told = [("marked:anomalous by ann", 1), ("rare:1/9", 2), ("error-severity:failed", 3)]
    rows = pl.DataFrame(
        [
            blank
            | {"lines": 1, "timestamp": NOW, "score": 1.0, "anomalous": True, "reasons": [why]}
            | {"template_id": number, "message": "a", "model_version": "m1"}
            for why, number in told
        ],
        schema=RESULT_SCHEMA,
    )
    seen = observe(BATCH, rows, None)  # type: ignore[arg-type]
    assert seen is not None
    severities = dict(zip(seen.anomalies["template_id"], seen.anomalies["severity"], strict=True))
    assert severities == {1: 2, 2: 1, 3: 3}


# ---- upgrades and damage -----------------------------------------------------------------------


def test_a_mark_that_cannot_be_read_is_passed_over_and_can_be_revoked(
    marks: Marks, client: "redis.Redis"
) -> None:
    made, _ = marks.put(Target.pattern(1), NORMAL, text="a")
    for name, blob in {
        "pattern:2:": msgpack.packb([99, "normal", "of a newer build"]),
        "template:3:shop": b"\xc1",
        "pattern:4:": msgpack.packb([1, "purple", "t", 0, None, "", ""]),
        "pattern:5:": msgpack.packb([1, "normal", "t", 2**70 // 2**7, None, "", ""]),
        "session:6:": made.pack(),
        "pattern:99999999999999999999999:": made.pack(),
        "pattern:٣:": made.pack(),
        "pattern": b"",
    }.items():
        client.hset(marks.keys.marks, name, blob)
    client.hset(marks.keys.marks, "", "not a number")
    marked = marks.look()
    assert (marked.marks, len(marked.unreadable)) == ((made,), 8)
    rows = work((1, 7, 0.9), (2, 7, 0.9))
    assert [a for _, a, _ in said(marks.overlay()(rows, "shop"))] == [False, True]
    assert marks.revoke([Target.pattern(2), Target.template(3)]) == [
        (Target.pattern(2), ""),
        (Target.template(3), "shop"),
    ]


def test_a_mark_survives_its_wire_form_and_says_what_is_wrong_with_a_newer_one() -> None:
    one = mark(Target.template(7), ANOMALOUS, workload="a:b/c", until=NOW + timedelta(days=7), why="w")
    assert Mark.unpack(one.target, one.workload, one.pack()) == one
    with pytest.raises(BadPayload, match="wire version 2; this build reads up to 1"):
        Mark.unpack(one.target, "", msgpack.packb([2]))


def test_a_workload_with_colons_and_newest_marks_come_back_as_they_were(marks: Marks) -> None:
    made, _ = marks.put(Target.pattern(BIG), NORMAL, text="a", workload="a:b:/c")
    assert marks.look().marks == (made,)
    assert marks.revoke([made.target], "a:b") == []
    assert marks.revoke([made.target], "a:b:/c") == [(made.target, "a:b:/c")]


def test_a_redis_that_is_away_is_said_so(settings: Settings) -> None:
    away = Marks(redis.Redis(unix_socket_path="/nowhere/redis.sock", retry=None), settings)
    for call in (away.look, lambda: away.overlay()(work(), "shop"), lambda: away.revoke([Target.pattern(1)])):
        with pytest.raises(RedisUnavailable):
            call()


# ---- used in the next training -----------------------------------------------------------------


def sample(*rows: tuple[str, int, int, int]) -> pl.DataFrame:
    """SAMPLE_SCHEMA of (masked, pattern id, count, template id)."""
    frame = pl.DataFrame(rows, schema=["masked", "pattern_id", "count", "template_id"], orient="row")
    return frame.with_columns(severe=pl.lit(value=False), baseline=pl.lit(value=False)).select(
        [pl.col(n).cast(t) for n, t in SAMPLE_SCHEMA.items()]
    )


def test_a_training_leaves_out_what_is_marked_anomalous_and_trusts_what_is_marked_normal() -> None:
    rows = sample(("a", 1, 90, 7), ("b", 2, 5, 8), ("c", 3, 2, 8), ("d", BIG, 1, -1))
    taught = lesson(
        rows, [mark(Target.template(8), ANOMALOUS), mark(Target.pattern(3)), mark(Target.pattern(BIG))], ["x"]
    )
    assert taught.frame["masked"].to_list() == ["a", "c", "d"]
    assert taught.frame.schema == rows.schema
    assert (taught.known_normal, taught.left_out, taught.marks) == (frozenset({3, BIG}), 5, 3)
    assert lesson(rows, [], ["x"]).frame is rows


def test_a_mark_for_one_workload_counts_where_only_that_one_is_learnt_from() -> None:
    rows = sample(("a", 1, 90, 7), ("b", 2, 5, 8))
    marked = [mark(Target.pattern(2), ANOMALOUS, workload="shop")]
    assert lesson(rows, marked, ["shop"]).frame.height == 1
    assert lesson(rows, marked, ["other"]).frame.height == 2
    assert lesson(rows, marked, ["shop", "other"]).frame.height == 2
