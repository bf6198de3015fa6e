"""Several keys a record, and traces that go through several workloads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import pytest

from pipeline.drain.templates import Template, pack_template
from pipeline.settings import Settings
from pipeline.watching.incidents.live import Incidents
from pipeline.watching.incidents.origins import TraceShape, Upstream
from pipeline.watching.sessions.follow_ups import FollowUps, learn_follow_ups
from pipeline.watching.sessions.joint import joint_event
from pipeline.watching.sessions.keys import JOINT
from pipeline.watching.sessions.model import NORMAL, SessionVerdict
from tests.watching.test_watching import FAULT, OPEN, WORK, Faults, World, said

WEB, PAY = joint_event("web", OPEN), joint_event("pay", WORK)


class Trace:
    """A trace as a whole goes to the bank."""

    ends = frozenset[int]()
    per_day = 1.0
    stateful = False
    places: Mapping[int, tuple[str, int]] = {PAY: ("pay", WORK)}
    follow_ups = FollowUps()
    shape = TraceShape((Upstream(caller="web", called="pay", traces=60),))

    def __init__(self) -> None:
        self.judged: list[tuple[int, ...]] = []

    def judge(self, sessions: Sequence[Sequence[int]]) -> list[SessionVerdict]:
        self.judged += map(tuple, sessions)
        why, cause = f"session-counts:{PAY} 0/1", f"session-counts:{PAY}"
        missing = replace(said(True), reasons=(why,), cause=cause)
        return [NORMAL if PAY in session else missing for session in sessions]


class Traced(World):
    """Traces have a joint model; in the shop's workloads those and blocks are judged, and nothing else."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.whole, self.asked = Trace(), set[tuple[str, str]]()
        callbacks = replace(self.watcher.callbacks, session_model=self.model)
        self.watcher.callbacks = callbacks

    def model(self, workload: str, kind: str) -> tuple[str, Faults | Trace] | None:
        self.asked.add((workload, kind))
        if workload == JOINT:
            return ("m1", self.whole) if kind == "trace" else None
        return ("m1", self.rules) if kind in {"trace", "block"} else None


@pytest.fixture
def traced(settings: Settings) -> Traced:
    return Traced(settings)


def test_a_trace_is_judged_as_a_whole_over_workloads_and_batches_in_any_order(traced: Traced) -> None:
    late, early = traced.accept(1, workload="pay"), traced.accept(1, workload="web")
    pay = traced.rows([("trace\0t1", 1, WORK)], workload="pay")  # its lines are those of another file
    web = traced.rows([("trace\0t1", 0, OPEN)], workload="web")
    traced.commit(late, pay, ["trace\0t1"])
    traced.round()
    traced.commit(early, web, ["trace\0t1"])
    traced.stored(("trace\0t2", 0, OPEN), ("trace\0t2", 2, OPEN), workload="web")
    traced.round()
    assert traced.open() == 2, "a trace is collected once, whatever its workloads"
    # Another process goes on with what Redis has.
    callbacks = traced.watcher.callbacks
    traced.watcher = traced.another()
    traced.watcher.callbacks = callbacks
    told = traced.round(end=True)
    assert sorted(traced.whole.judged) == sorted([(WEB, PAY), (WEB, WEB)])
    assert sorted(traced.rules.judged) == [(OPEN,), (OPEN, OPEN), (WORK,)]
    (found,) = told.found
    assert (found.workload, found.cause) == ("pay", f"session-counts:{WORK}"), "blamed is who did not come"
    assert found.reasons == (f"session-counts:{WORK} 0/1",)
    assert found.message.startswith(f"T{WORK} of pay does not come, where the most similar")
    assert found.message.endswith(": session t2, 2 events in 2 s")
    assert found.detail.splitlines()[0].endswith(f"web  T{OPEN}")
    assert traced.open() == 0


def test_a_trace_with_a_part_that_went_wrong_is_reported_as_a_whole_for_another_workload_alone(
    traced: Traced,
) -> None:
    traced.stored(("trace\0t1", 0, OPEN), ("trace\0t1", 1, FAULT), workload="web")
    traced.stored(("trace\0t2", 0, OPEN), ("trace\0t2", 1, FAULT), workload="pay")
    told = traced.round(end=True)
    assert sorted((item.workload, item.cause) for item in told.found) == [
        ("pay", "session-counts:2"),  # of t1: the web went wrong, and the bank did not come
        ("pay", "session-event:9"),
        ("web", "session-event:9"),
    ]
    assert len(traced.whole.judged) == 2


def test_each_key_of_a_record_has_its_session_and_a_kind_without_a_model_is_not_collected(
    traced: Traced,
) -> None:
    batch = traced.accept(2)
    rows = traced.rows([(None, 0, OPEN), (None, 1, FAULT)])
    keys = [["block\0b1", "trace\0t1", "uuid\0u"], ["block\0b1", "block\0b2", "uuid\0u"]]
    traced.commit_keys(batch, rows, keys)
    traced.round()
    assert traced.open() == 3
    assert "unkept shop\0uuid" in traced.numbers()
    traced.round(end=True)
    assert sorted(traced.rules.judged) == [(OPEN,), (OPEN, FAULT), (FAULT,)]


def test_what_was_not_collected_is_not_missed_when_its_model_comes(traced: Traced) -> None:
    traced.watcher.callbacks = replace(traced.watcher.callbacks, session_model=lambda *_: None)
    traced.stored(("trace\0t1", 0, WORK), workload="pay")
    traced.round()
    traced.watcher.callbacks = replace(traced.watcher.callbacks, session_model=traced.model)
    traced.stored(("trace\0t1", 1, OPEN), workload="web")
    assert traced.round(end=True).found == [], "the payment may have been before"


def test_a_trace_that_breaks_off_says_what_should_have_come_within_what_time(traced: Traced) -> None:
    traced.client.hset(
        traced.keys.templates,
        mapping={
            str(number): pack_template(Template(template_id=number, text=text, severe=False, workload="web"))
            for number, text in ((OPEN, "order created"), (WORK, "payment charged"))
        },
    )
    whole = [([WEB, PAY], [0, 1_500])] * 997 + [([WEB, PAY], [0, 30_000])] * 3
    traced.whole.follow_ups = learn_follow_ups(whole)
    traced.stored(("trace\0t1", 0, OPEN), ("trace\0t1", 2, OPEN), workload="web")
    (found,) = traced.round(end=True).found
    assert found.reasons == (
        f"session-missing:{WORK} after {OPEN} 2000 997/1000",
        f"session-counts:{WORK} 0/1",
    )
    assert found.cause == f"session-missing:{WORK}-after-{OPEN}"
    says = (
        f"T{OPEN} `order created` of web is followed by T{WORK} `payment charged` of pay within 2 s in 99.7 %"
    )
    assert found.message.startswith(f"{says}; not here; T{WORK} ")
    assert ": session t1, 2 events in 2 s" in found.message
    # It is evidence of where an incident began: the bank was to come next.
    traced.stored((None, 60, FAULT), workload="web", anomalous=True)
    traced.round(end=True)
    (incident,) = Incidents.unpack(cast("bytes", traced.client.get(traced.keys.watching("incidents")))).all()
    assert incident.origins[0].workload == "pay" and incident.clear
