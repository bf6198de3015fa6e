"""Open sessions: what they collect, when they are over, and that neither batches nor their order change what
is judged."""

import random
from dataclasses import replace
from typing import Any

import msgpack
import msgspec
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadPayload
from pipeline.records.batch import Purpose
from pipeline.watching.anomalies import ANOMALIES
from pipeline.watching.observation import (
    EVENTS,
    RATES,
    Lane,
    Observation,
)
from pipeline.watching.sessions.growing import MAX_SESSION_EVENTS, GrowingSession, batch_events
from pipeline.watching.sessions.history import MAX_REPORTED, SessionHistory
from pipeline.watching.sessions.joint import joint_event
from pipeline.watching.sessions.keys import JOINT
from pipeline.watching.sessions.open_sessions import OpenSession, session_name, split_name
from pipeline.watching.table import ObservedTable

MINUTE_MS = 60_000


def observed(events: list[tuple[str, int, int, int]], **more: Any) -> Observation:
    """A batch with these (session, at ms, line, template)."""
    made = Observation(
        batch_id="b",
        workload="shop",
        lane=Lane.FRESH,
        purpose=Purpose.SCORE,
        version="m1",
        source="app.log",
        accepted_ms=1_000,
        newest_ms=0,
        rates=RATES.empty(),
        events=ObservedTable.of(EVENTS, pl.DataFrame(events, schema=EVENTS.types, orient="row")),
        anomalies=ANOMALIES.empty(),
    )
    return replace(made, **more)


def grown(batches: list[Observation], *, restarts: bool = True) -> dict[str, GrowingSession]:
    """`restarts`: each batch finds the sessions as Redis has them."""
    sessions: dict[str, GrowingSession] = {}
    for batch in batches:
        for key, piece in batch_events(batch).items():
            session = sessions.setdefault(key, GrowingSession(workload=batch.workload, key=key))
            session.add(piece)
            if restarts:
                sessions[key] = GrowingSession.unpack(batch.workload, key, session.pack())
    return sessions


def folded(batches: list[Observation]) -> dict[str, OpenSession]:
    return {key: OpenSession.of(session) for key, session in grown(batches).items()}


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 600_000), st.integers(1, 12)),
        min_size=1,
        max_size=40,
    ),
    st.integers(1, 5),
    st.randoms(),
)
def test_what_is_judged_depends_on_neither_how_lines_were_cut_nor_which_batch_came_first(
    lines: list[tuple[str, int, int]], size: int, chance: random.Random
) -> None:
    events = [(key, at, line, template) for line, (key, at, template) in enumerate(lines, 1)]
    batches = [observed(events[i : i + size]) for i in range(0, len(events), size)]
    shuffled = chance.sample(batches, len(batches))
    whole, parts = folded([observed(events)]), folded(shuffled)
    assert set(whole) == set(parts)
    for name, session in whole.items():
        assert list(session.segments(MINUTE_MS)) == list(parts[name].segments(MINUTE_MS))


def test_a_long_silence_cuts_a_session_and_a_short_one_does_not() -> None:
    events = [("a", 0, 1, 5), ("a", 60_000, 2, 6), ("a", 120_001, 3, 7), ("a", 120_001, 4, 8)]
    (session,) = folded([observed(events)]).values()
    assert [part.templates for part in session.segments(MINUTE_MS)] == [(5, 6), (7, 8)]


def test_together_each_part_stands_with_all_before_it_unless_a_day_lies_between() -> None:
    day = 86_400_000
    events = [("a", 0, 1, 5), ("a", 9, 2, 6), ("a", 100_000, 3, 7), ("a", 100_001 + day, 4, 8)]
    (session,) = folded([observed(events)]).values()
    parts = list(session.segments(MINUTE_MS, stateful=True))
    assert [part.prefix for part in parts] == [(5, 6), (5, 6, 7), (8,)]
    past = parts[1].history
    assert past == SessionHistory(
        source="app.log", line=1, began_ms=0, until_ms=9, dropped=0, templates=(5, 6)
    )
    assert parts[2].history is None


@pytest.mark.parametrize("before", [0, 1_500])
def test_a_session_that_is_silent_after_each_event_is_judged_at_some_silences_and_the_last(
    before: int,
) -> None:
    events = [("a", (1 + at) * 5 * MINUTE_MS, at + 1, at) for at in range(MAX_SESSION_EVENTS)]
    (session,) = folded([observed(events)]).values()
    past = SessionHistory(source="x", line=1, began_ms=0, until_ms=0, dropped=0, templates=(7,) * before)
    parts = list(session.segments(MINUTE_MS, stateful=True, history=past if before else None))
    assert [x for part in parts for x in part.templates] == list(range(MAX_SESSION_EVENTS))
    lengths = [len(part.templates) for part in parts]
    assert len(parts) >= 5 and max(lengths) - min(lengths) <= before + 1
    assert sum(len(part.prefix) for part in parts) <= 20_000


def test_after_a_day_even_a_session_that_is_judged_at_few_silences_begins_anew() -> None:
    times = [at * 5 * MINUTE_MS + (at >= 300) * 90_000_000 for at in range(600)]
    (session,) = folded([observed([("a", at, n, n) for n, at in enumerate(times, start=1)])]).values()
    parts = list(session.segments(MINUTE_MS, stateful=True))
    assert [part.prefix[0] for part in parts].count(301) == len([p for p in parts if p.lines[0] > 300]) > 5
    assert all(part.prefix[-1] <= 300 or part.prefix[0] == 301 for part in parts)


@pytest.mark.parametrize("away", [-86_400_001, 86_400_001])
def test_what_is_more_than_a_day_away_from_a_past_is_another_session_whichever_way(away: int) -> None:
    past = SessionHistory(source="x", line=1, began_ms=0, until_ms=10**11, dropped=0, templates=(7,))
    (session,) = folded([observed([("a", 10**11 + away, 1, 5)])]).values()
    (part,) = session.segments(MINUTE_MS, stateful=True, history=past, lost=True)
    assert (part.history, part.partial) == (None, False)


def test_what_began_before_its_past_ended_is_joined_to_it_and_known_to_be_in_no_order() -> None:
    past = SessionHistory(source="x", line=1, began_ms=0, until_ms=10**11, dropped=0, templates=(7,))
    events = [("a", 10**11 - 5, 1, 5), ("a", 10**11 + 10**6, 2, 6)]
    (session,) = folded([observed(events)]).values()
    parts = list(session.segments(MINUTE_MS, stateful=True, history=past))
    assert [(part.prefix, part.partial) for part in parts] == [((7, 5), True), ((7, 5, 6), True)]
    assert parts[0].next_history().until_ms == 10**11
    assert SessionHistory.unpack(parts[1].next_history().pack()).partial


@pytest.mark.parametrize("field", [2, 4, 5])
def test_an_endless_number_in_an_open_session_is_damage(field: int) -> None:
    fields = msgpack.unpackb(OpenSession(workload="w", key="k", at_ms=[1], lines=[1], templates=[1]).pack())
    fields[1][field] = float("inf")
    with pytest.raises(BadPayload):
        OpenSession.unpack("w", "k", msgpack.packb(fields))


@pytest.mark.parametrize("field", [1, 2, 3, 4])
def test_an_endless_number_in_a_past_is_damage(field: int) -> None:
    past = SessionHistory(source="x", line=1, began_ms=0, until_ms=1, dropped=0, templates=(7,))
    fields = msgpack.unpackb(past.pack())
    fields[1][field] = float("inf")
    with pytest.raises(BadPayload):
        SessionHistory.unpack(msgpack.packb(fields))


def test_a_session_that_goes_on_past_the_most_that_is_kept_keeps_its_first_events() -> None:
    events = [("a", at, at + 1, 3) for at in range(MAX_SESSION_EVENTS)]
    (session,) = folded([observed(events)]).values()
    (part,) = session.segments(MINUTE_MS, stateful=True)
    (later,) = folded([observed([("a", 10**7, 9_000, 4)])]).values()
    (again,) = later.segments(MINUTE_MS, stateful=True, history=part.next_history())
    assert again.prefix == part.prefix
    assert (len(again.next_history().templates), again.next_history().dropped) == (MAX_SESSION_EVENTS, 1)


def test_events_of_one_second_stay_in_the_order_of_their_lines() -> None:
    later, earlier = observed([("a", 1_000, 7, 70)]), observed([("a", 1_000, 6, 60)])
    (session,) = folded([later, earlier]).values()
    assert [part.templates for part in session.segments(MINUTE_MS)] == [(60, 70)]


def test_a_session_without_end_keeps_its_first_events_and_counts_the_others() -> None:
    events = [("a", at, at + 1, 3) for at in range(MAX_SESSION_EVENTS + 10)]
    (session,) = folded([observed(events)]).values()
    (part,) = session.segments(MINUTE_MS)
    assert (len(part.templates), part.dropped) == (MAX_SESSION_EVENTS, 10)
    assert len(session.pack()) < 12_000


def test_it_closes_a_timeout_and_a_grace_after_its_newest_batch_and_an_ended_one_after_the_grace() -> None:
    first = observed([("a", 0, 1, 5)], accepted_ms=10_000)
    second = observed([("a", 9, 2, 6)], accepted_ms=30_000)
    (session,) = grown([second, first]).values()
    assert session.due_ms(MINUTE_MS) == 95_000
    assert not session.ends_with(frozenset({5})), "its last event ends nothing"
    session.wire.ended = session.ends_with(frozenset({6}))
    assert session.due_ms(MINUTE_MS) == 35_000


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.sampled_from("ab")), min_size=1, max_size=12),
    st.randoms(),
)
def test_the_last_event_is_that_of_the_newest_time_and_line_however_events_came(
    events: list[tuple[int, int, str]], chance: random.Random
) -> None:
    rows = [("trace\0t", at, line, number + 7) for number, (at, line, _) in enumerate(events)]
    batches = [observed([row], workload=workload) for row, (_, _, workload) in zip(rows, events, strict=True)]
    trace = GrowingSession(workload=JOINT, kind="trace", key="t")
    for batch in chance.sample(batches, len(batches)):
        for piece in batch_events(batch).values():
            trace.add(piece)
    last = max((at, line, number + 7) for number, (at, line, _) in enumerate(events))
    joint = max((at, joint_event(of, number + 7)) for number, (at, _, of) in enumerate(events))
    assert trace.ends_with(frozenset({last[2]})) and trace.ends_with(frozenset({joint[1]}), joint=True)
    assert (trace.wire.last, trace.wire.last_joint) == (last, joint)
    again = OpenSession.of(trace)
    assert OpenSession.unpack(JOINT, "trace\0t", again.pack()) == again


@given(st.integers(0, 300), st.integers(1, 40), st.randoms())
def test_many_events_are_parted_by_session_as_few_are(n: int, keys: int, chance: random.Random) -> None:
    rows = [(f"block\0b{chance.randrange(keys)}", at, at + 1, chance.randrange(9)) for at in range(n)]
    found = {
        key: list(zip(e.at_ms, e.lines, e.templates, strict=True))
        for key, e in batch_events(observed(rows)).items()
    }
    wanted: dict[str, list[tuple[int, int, int]]] = {}
    for key, *event in rows:
        wanted.setdefault(key, []).append((event[0], event[1], event[2]))
    assert found == wanted


@given(
    st.lists(st.tuples(st.integers(0, 2**41), st.integers(1, 2**40), st.integers(1, 10**6)), max_size=30),
    st.sampled_from(Lane),
)
def test_an_open_session_is_read_as_it_was_written(events: list[tuple[int, int, int]], lane: Lane) -> None:
    session = OpenSession(
        workload="w", key="k\0k", source="x", lane=lane, accepted_ms=7, dropped=3, ended=True
    )
    for at_ms, line, template in events:
        session.at_ms.append(at_ms)
        session.lines.append(line)
        session.templates.append(template)
    assert OpenSession.unpack(*split_name(session_name("w", "k\0k")), session.pack()) == session


@pytest.mark.long
@given(
    st.tuples(st.text(max_size=20), *[st.integers(0, 2**60)] * 4),
    st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=30),
    st.lists(st.text(max_size=30), max_size=2 * MAX_REPORTED),
)
def test_a_past_is_read_as_it_was_written(
    fields: tuple[str, int, int, int, int], templates: list[int], told: list[str]
) -> None:
    source, line, began_ms, until_ms, left_out = fields
    past = SessionHistory(
        source=source,
        line=line,
        began_ms=began_ms,
        until_ms=until_ms,
        dropped=left_out,
        templates=tuple(templates),
        reported=tuple(told[-MAX_REPORTED:]),
    )
    assert SessionHistory.unpack(past.pack()) == past
    assert SessionHistory.unpack(msgspec.structs.replace(past, reported=tuple(told)).pack()) == past, (
        "no more causes than that are kept"
    )


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb([1]),
        msgpack.packb([9, ["s", 1, 2, 3, 0, [7], []]]),
        msgpack.packb([1, ["s", 1, 2, 3, 0, [], []]]),
        msgpack.packb([1, ["s", 1, 2, 3, 0, [7], [8]]]),
        msgpack.packb([1, ["s", 1, 2, None, 0, [7], []]]),
    ],
)
def test_what_is_no_past_is_refused(blob: bytes) -> None:
    with pytest.raises(BadPayload):
        SessionHistory.unpack(blob)


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\xc1",
        msgpack.packb([1]),
        msgpack.packb([9, []]),
        msgpack.packb([1, ["s", "no lane", 1, False, 0, [], [], []]]),
        msgpack.packb([1, ["s", "fresh", 1, False, 0, [1], [], []]]),
        msgpack.packb([2, ["s", "no lane", 1, False, 0, 0, None, None, [], []]]),
        msgpack.packb([2, ["s", "fresh", 1, False, 0, 1, None, None, [], [b"\xc1"]]]),
        msgpack.packb([2, ["s", "fresh", 1, False, 0, 1, None, None, [], [msgpack.packb([0, [1], [], []])]]]),
        msgpack.packb([2, ["s", "fresh", 1, False, 0, 2, None, None, [], []]]),
    ],
)
def test_what_is_no_open_session_is_refused(blob: bytes) -> None:
    with pytest.raises(BadPayload):
        OpenSession.unpack("w", "k", blob)


def test_a_trace_has_a_part_in_each_workload_and_events_of_one_moment_stand_in_one_order() -> None:
    trace = OpenSession(
        workload=JOINT, kind="trace", key="t", at_ms=[5, 5, 5, 4], lines=[9, 1, 5, 7], templates=[1, 2, 3, 4],
        origins=[("web", "a.log"), ("pay", "b.log")], origin_of=[0, 1, 0, 1],
    )  # fmt: skip
    (whole,) = trace.whole().segments(MINUTE_MS)
    events = [joint_event(*place) for place in (("web", 1), ("pay", 2), ("web", 3))]
    assert whole.templates == (joint_event("pay", 4), *sorted(events))
    assert (whole.source, set(whole.lines)) == ("", {0})
    assert {name: (one.source, one.templates) for name, one in trace.parts().items()} == {
        "web\0trace\0t": ("a.log", [1, 3]),
        "pay\0trace\0t": ("b.log", [2, 4]),
    }
    assert OpenSession.unpack(JOINT, "trace\0t", trace.pack()) == trace
    fields = msgpack.unpackb(trace.pack())
    fields[1][8].pop()
    with pytest.raises(BadPayload, match="no workload"):
        OpenSession.unpack(JOINT, "trace\0t", msgpack.packb(fields))
