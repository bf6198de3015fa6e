"""Where an incident began: what normal traces show of workloads, and what its causes say with that."""

import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.watching.incidents.live import Incidents
from pipeline.watching.incidents.named import by_last_part, named_in_text
from pipeline.watching.incidents.origins import MOST, Clue, TraceShape, Upstream, likely_origins
from pipeline.watching.incidents.values import IncidentEvent
from pipeline.watching.sessions.trace_shape import trace_shape

BEGAN = datetime(2026, 11, 20, 10, 0, tzinfo=UTC)


def clue(workload: str, late_s: float = 0, **changes: Any) -> Clue:
    facts: dict[str, Any] = {
        "workload": workload, "kind": "template", "first": BEGAN + timedelta(seconds=late_s), "timed": True,
        "severity": 3, "count": 1, "new": True,
    }  # fmt: skip
    return Clue(**(facts | changes))


def calling(*pairs: tuple[str, str], ahead_ms: dict[str, int] | None = None) -> TraceShape:
    return TraceShape(tuple(Upstream(caller=a, called=b, traces=100) for a, b in pairs), ahead_ms or {})


SHOP = calling(("web", "orders"), ("web", "pay"), ("orders", "pay"))


def test_errors_go_from_the_called_to_the_caller() -> None:
    found = likely_origins([clue("web"), clue("orders"), clue("pay", 0.4)], SHOP)
    assert found.origins[0].workload == "pay" and found.clear
    assert found.origins[0].reasons == (
        "waited for by orders, web",
        "its first cause came 0.4 s after the first",
        "1 cause that no training has seen",
    )


def test_a_workload_that_errors_name_needs_no_cause_and_theirs_count_before_normal_traces() -> None:
    causes = [clue("web", named=("orders",)), clue("orders", named=("mail",)), clue("pay", 9)]
    found = likely_origins(causes, SHOP)
    assert found.origins[0].workload == "mail" and found.clear
    assert found.origins[0].reasons[0] == "named in errors of orders, and waited for by web"
    calm = likely_origins([clue("web", severity=1, named=("mail",)), clue("orders")], SHOP)
    assert "mail" not in {one.workload for one in calm.origins}


def test_events_that_did_not_come_behind_a_named_fault_are_explained() -> None:
    gone = clue("pay", kind="session-missing", severity=2, count=30, new=False)
    found = likely_origins([clue("orders", 3, named=("mail",)), gone], SHOP)
    assert found.origins[0].workload == "mail"
    assert not any("did not come" in reason for one in found.origins for reason in one.reasons)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("payments POST /charges: [Errno 111] Connection refused", ("shop/payments",)),
        ('"path":"/orders","error":"orders POST /orders answered 502"', ("shop/orders",)),
        ("GET /orders -> 500", ()),
        ('{"orders": 12, "upstream": "Payments"}', ("shop/payments",)),
        ("web: unhandled error", ()),
        ("POST http://payments:8080/charges: no route", ("shop/payments",)),
        ("dial orders.shop.svc.cluster.local:443. Connection refused", ("shop/orders",)),
        ("orders.shop is a file", ()),
        ("File orders.py, orders=3, orders@host, pre-orders", ()),
        ("cache is gone", ("shop/cache",)),  # that of the same shop
        ("queue is gone", ()),  # which of two?
    ],
)
def test_a_text_names_workloads_by_their_last_part(text: str, names: tuple[str, ...]) -> None:
    workloads = ["shop/web", "shop/payments", "shop/orders", "shop/cache", "test/cache", "a/queue", "b/queue"]
    assert named_in_text(text, "shop/web", by_last_part(workloads)) == names


def test_a_workload_that_did_not_write_what_it_normally_does_is_a_candidate_without_an_error() -> None:
    gone = clue("pay", 2, kind="session-missing", severity=2, count=30, new=False)
    found = likely_origins([clue("web", 1), clue("web", 1.5), gone], SHOP)
    assert found.origins[0].workload == "pay" and found.clear
    assert "events of it that normally follow did not come, 30 times" in found.origins[0].reasons


def test_who_waits_for_a_slow_workload_is_slow_too() -> None:
    slow = {"kind": "number-shift", "severity": 2, "new": False}
    found = likely_origins([clue("web", **slow), clue("orders", 1, **slow), clue("pay", 3, **slow)], SHOP)
    assert found.origins[0].workload == "pay" and found.clear
    assert found.origins[0].reasons[0] == "waited for by orders, web"


def test_the_first_onset_counts_on_clocks_that_agree() -> None:
    clues = [clue("a"), clue("b", 9, new=False)]
    assert likely_origins(clues, TraceShape()).origins[0].workload == "a"
    ahead = likely_origins([clue("a"), clue("b", 9)], calling(ahead_ms={"b": 30_000}))
    assert ahead.origins[0].workload == "b" and ahead.clear
    assert ahead.origins[0].reasons[0] == "its first cause came first; its clock is 30.0 s ahead"


def test_even_evidence_is_not_clear_and_at_most_three_are_candidates() -> None:
    found = likely_origins([clue(name) for name in "dcba"], TraceShape())
    assert [one.workload for one in found.origins] == ["a", "b", "c"] and not found.clear
    (only,) = likely_origins([clue("a"), clue("a", 3)], TraceShape()).origins
    assert only.workload == "a"


@given(
    st.lists(
        st.builds(
            clue,
            st.sampled_from("abcde"),
            st.integers(0, 100),
            kind=st.sampled_from(["template", "session-missing"]),
            severity=st.integers(1, 3),
            count=st.integers(1, 1 << 53),
            new=st.booleans(),
            timed=st.booleans(),
            named=st.lists(st.sampled_from("abcdef"), max_size=2).map(tuple),
        ),
        min_size=1,
        max_size=12,
    ),
    st.lists(st.tuples(st.sampled_from("abcde"), st.sampled_from("abcde")), max_size=8),
    st.randoms(),
)
def test_candidates_are_affected_or_named_and_do_not_depend_on_the_order_of_causes(
    clues: list[Clue], pairs: list[tuple[str, str]], chance: random.Random
) -> None:
    shape = calling(*pairs)
    found = likely_origins(clues, shape)
    assert likely_origins(chance.sample(clues, len(clues)), shape) == found
    names = [one.workload for one in found.origins]
    assert 1 <= len(names) <= MOST and len(set(names)) == len(names)
    assert set(names) <= {one.workload for one in clues} | {name for one in clues for name in one.named}


def spans(
    *of_trace: Sequence[tuple[str, Sequence[int]]], traces: int = 100, ahead_ms: dict[str, int] | None = None
) -> pl.DataFrame:
    """`traces` traces of each kind: workloads with the times of their events, a little later each."""
    rows = [
        (f"{kind}-{number}", workload, 60_000 * number + at + number % 7 + (ahead_ms or {}).get(workload, 0))
        for kind, of_kind in enumerate(of_trace)
        for number in range(traces)
        for workload, times in of_kind
        for at in times
    ]
    return pl.DataFrame(rows, schema=["trace", "workload", "at_ms"], orient="row")


# The gateway writes when all is over; the catalog is asked before the payment; a mail is sent afterwards.
BUY = (
    ("gateway", [90]), ("web", [0, 80]), ("orders", [10, 70]), ("catalog", [20, 25]), ("pay", [40, 50]),
    ("mail", [300, 310]),
)  # fmt: skip
LOOK = (("gateway", [90]), ("web", [0, 80]), ("catalog", [20, 25]))


def pairs_of(shape: TraceShape) -> set[tuple[str, str]]:
    return {(one.caller, one.called) for one in shape.upstream}


def test_callers_stand_around_what_they_call_or_write_when_it_is_over() -> None:
    found = trace_shape(spans(BUY, LOOK))
    below_web = {("web", "orders"), ("web", "catalog"), ("web", "pay")}
    assert below_web | {("orders", "catalog"), ("orders", "pay")} <= pairs_of(found)
    assert {("gateway", "orders"), ("gateway", "pay")} <= pairs_of(found)
    assert ("catalog", "pay") not in pairs_of(found), "one is asked after the other"
    assert not {pair for pair in pairs_of(found) if pair[::-1] in pairs_of(found)}
    assert found.ahead_ms == {}
    assert ("gateway", "web") in pairs_of(trace_shape(spans(LOOK)))


def test_a_clock_that_is_seconds_ahead_is_found_and_takes_no_caller_away() -> None:
    found = trace_shape(spans(LOOK[1:], ahead_ms={"catalog": 5_000}))
    assert pairs_of(found) == {("web", "catalog")}
    apart_ms = found.ahead_ms.get("catalog", 0) - found.ahead_ms.get("web", 0)
    assert apart_ms == pytest.approx(5_000, abs=40)


def test_few_traces_say_nothing() -> None:
    assert trace_shape(spans(LOOK, traces=5)) == TraceShape()
    assert trace_shape(spans((("web", [0]),))) == TraceShape()


def test_an_incident_keeps_where_it_began() -> None:
    state = Incidents()
    state.shape = SHOP
    facts = {"cause": "template:1", "kind": "template", "count": 1, "score": 0.9, "severity": 3, "text": "x"}
    state.add(
        [
            IncidentEvent(**facts, event_id=name, workload=name, first=BEGAN, last=BEGAN)  # type: ignore[arg-type]
            for name in ("web", "pay")
        ]
    )
    for minutes in (1, 30, 60):
        state.close(BEGAN + timedelta(minutes=minutes))
        state = Incidents.unpack(state.pack())
        (incident,) = state.all()
        assert [one.workload for one in incident.origins][:1] == ["pay"] and incident.clear
