"""Incidents: what begins together is one thing, whatever the order, however often it is told, and wherever it
is cut."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import BadPayload, TooNew
from pipeline.watching.incidents import live as incidents
from pipeline.watching.incidents import onsets, values
from pipeline.watching.incidents.live import Cause, Incident, IncidentEvent, Incidents

START = datetime(2026, 11, 22, 3, 0, tzinfo=UTC)
DAY = timedelta(days=1)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def event(
    cause: object, seconds: float = 0, lasts: float = 0, workload: str = "shop", **changes: Any
) -> IncidentEvent:
    base = IncidentEvent(
        event_id=f"{workload} {cause} {seconds}",
        workload=workload,
        cause=f"template:{cause}",
        kind="template",
        first=at(seconds),
        last=at(seconds + lasts),
        count=1,
        score=0.9,
        severity=3,
        text=f"{cause} failed",
    )
    return replace(base, **changes)


def state(events: Iterable[IncidentEvent], now: float | None = None) -> Incidents:
    made = Incidents()
    made.add(events)
    if now is not None:
        made.close(at(now))
    return made


def grouping(made: Incidents) -> list[tuple[Any, ...]]:
    """All but the ids: those are given when an incident is first shown."""
    return [(i.first, i.last, i.count, i.causes, i.more, i.seen, i.open) for i in made.all()]


def parts(made: Incidents) -> list[set[str]]:
    """Causes of each incident, the oldest first."""
    return [{c.cause.removeprefix("template:") for c in i.causes} for i in reversed(made.all())]


any_event = st.builds(
    lambda number, cause, seconds, lasts, count, severity, score, workload: event(
        cause,
        seconds,
        lasts,
        workload,
        event_id=f"e{number}",
        count=count,
        severity=severity,
        score=score,
        text=f"text {number}",
    ),
    st.integers(0, 10_000),
    st.integers(0, 12),
    st.integers(0, 4_000),
    st.sampled_from([0, 0, 1, 30, 200, 2_000]),
    st.integers(1, 50),
    st.integers(1, 3),
    st.floats(0, 1),
    st.sampled_from(["shop", "bank", "gate"]),
)
event_lists = st.lists(any_event, max_size=25, unique_by=lambda e: e.event_id)


@given(many=event_lists, seed=st.integers(0, 1_000), step=st.integers(1, 7))
@settings(max_examples=40)
def test_neither_order_nor_portions_change_the_grouping(
    many: list[IncidentEvent], seed: int, step: int
) -> None:
    expected = grouping(state(many))
    shuffled = random.Random(seed).sample(many, len(many))
    made = Incidents()
    for begin in range(0, len(shuffled), step):
        made.add(shuffled[begin : begin + step])
    assert grouping(made) == expected
    assert sorted(e.count for e in many) == [] or sum(i.count for i in made.every()) == sum(
        e.count for e in many
    )


@given(many=event_lists, seed=st.integers(0, 1_000))
@settings(max_examples=40)
def test_what_comes_late_within_the_bound_is_grouped_as_if_it_had_come_in_time(
    many: list[IncidentEvent], seed: int
) -> None:
    draw = random.Random(seed)
    points = [replace(e, last=e.first) for e in many]
    in_time, late = Incidents(), Incidents()
    arrivals = sorted((e.first + draw.random() * incidents.LATE, n) for n, e in enumerate(points))
    by_time = sorted(range(len(points)), key=lambda n: (points[n].first, n))
    for (now, arrived), on_time in zip(arrivals, by_time, strict=True):
        for made, number in ((late, arrived), (in_time, on_time)):
            made.add([points[number]])
            made.close(now if made is late else points[number].first)
    for made in (late, in_time):
        made.close(at(10_000))
    assert [c for i in late.all() for c in i.causes] == [c for i in in_time.all() for c in i.causes]
    assert parts(late) == parts(in_time)


@given(many=event_lists, cuts=st.lists(st.integers(0, 25), max_size=6), every=st.integers(60, 900))
@settings(max_examples=40)
def test_packing_at_any_cut_changes_nothing(many: list[IncidentEvent], cuts: list[int], every: int) -> None:
    whole, cut = Incidents(), Incidents()
    for number, one in enumerate(many):
        for made in (whole, cut):
            made.add([one])
            made.close(at(number * every))
        if number in cuts:
            cut = Incidents.unpack(cut.pack())
    assert cut.all() == whole.all()
    assert cut.pack() == whole.pack() == Incidents.unpack(whole.pack()).pack()


@given(many=event_lists, portion=st.integers(1, 4), every=st.integers(60, 900))
@settings(max_examples=40)
def test_a_state_that_goes_on_lists_what_one_that_is_read_lists(
    many: list[IncidentEvent], portion: int, every: int
) -> None:
    made = Incidents()
    for begin in range(0, len(many), portion):
        made.add(many[begin : begin + portion])
        assert made.all() == Incidents.unpack(made.pack()).all()
        made.close(at(begin * every))
        assert made.all() == Incidents.unpack(made.pack()).all()


@given(many=event_lists, again=event_lists, every=st.integers(60, 900))
@settings(max_examples=60)
def test_causes_that_are_counted_again_stand_in_the_order_of_all_causes(
    many: list[IncidentEvent], again: list[IncidentEvent], every: int
) -> None:
    made = Incidents()
    for number, one in enumerate([*many, *(replace(e, event_id=f"again {e.event_id}") for e in again)]):
        made.add([one])
        made.close(at(number * every))
    for incident in made.all():
        assert incident.causes == values.led(reversed(incident.causes))


@given(many=event_lists, again=st.lists(st.integers(0, 24)), now=st.integers(0, 6_000))
@settings(max_examples=40)
def test_an_event_that_comes_again_counts_once(many: list[IncidentEvent], again: list[int], now: int) -> None:
    made = state(many, now)
    before, packed = made.all(), made.pack()
    made.add([many[n] for n in again if n < len(many)])
    assert made.all() == before
    assert made.pack() == packed


@given(many=event_lists, now=st.integers(0, 20_000))
@settings(max_examples=40)
def test_onsets_of_an_incident_span_three_minutes_at_most_and_every_count_is_kept(
    many: list[IncidentEvent], now: int
) -> None:
    made = state(many)
    assert all(
        max(c.first for c in i.causes) - i.first <= onsets.SPAN + onsets.BURST_SPAN + onsets.GAP
        for i in made.every()
    )

    def leads(cause: Cause) -> bool:  # not if it became severe later
        end = cause.first + onsets.BURST_SPAN
        events = [e for e in many if (e.workload, e.cause) == cause.key and cause.first <= e.first <= end]
        return any(e.severity > 1 for e in events)

    for incident in made.every():
        leading = [c.first for c in incident.causes if leads(c)] or [incident.first]
        assert max(leading) - min(leading) <= onsets.SPAN
    made.close(at(now))
    assert sum(i.count for i in made.every()) == sum(e.count for e in many)
    assert len({i.id for i in made.every()}) == len(made.every())


def test_calm_new_lines_alone_are_no_incident_and_join_one_that_is_near() -> None:
    made = state([event(1, 4_000, severity=1)])
    assert made.all() == [] and len(made.every()) == 1
    made.add([event(2, 4_010)])
    assert parts(made) == [{"1", "2"}]
    made.add([event(3, 90_000, severity=1, kind="rate-silence")])  # the alarm budget kept it back
    assert len(made.all()) == 1
    made.add([event(3, 90_060, severity=2, kind="rate-silence")])
    assert len(made.all()) == 2


def test_one_fault_that_shows_in_three_services_is_one_incident() -> None:
    made = state([event(1), event(2, 20, workload="bank"), event(3, 70, workload="gate"), event(4, 900)])
    assert parts(made) == [{"1", "2", "3"}, {"4"}]
    assert made.all()[1].workloads == ("shop", "bank", "gate")


def test_an_incident_is_named_by_its_most_urgent_cause_and_keeps_its_id_when_more_is_known() -> None:
    made = state([event(1, 10, severity=2, score=0.4)])
    (first,) = made.all()
    made.add([event(2, 30, workload="bank"), event(3, 5, severity=2)])
    (found,) = made.all()
    assert (found.id, found.title, found.severity, found.score) == (first.id, "2 failed", 3, 0.9)
    assert [c.cause for c in found.causes] == ["template:2", "template:3", "template:1"]


def test_a_cause_that_keeps_coming_back_is_counted_and_opens_nothing() -> None:
    made = Incidents()
    for minute in range(0, 600, 10):
        made.add([event(1, 60 * minute, count=3)])
        made.close(at(60 * minute))
    (found,) = made.all()
    assert (found.count, found.open, found.last) == (180, True, at(60 * 590))
    made.close(at(60 * 590) + incidents.QUIET + timedelta(seconds=1))
    assert not made.all()[0].open


def test_a_workload_that_is_noisy_all_day_joins_nothing() -> None:
    made = Incidents()
    for minute in range(600):
        seen = [event("noise", 60 * minute, workload="noisy", count=50)]
        seen += [event(minute, 60 * minute + 20)] if minute % 100 == 50 else []
        made.add(seen)
        made.close(at(60 * minute + 30))
    assert parts(made) == [{"noise"}, *({str(n)} for n in range(50, 600, 100))]


def test_a_cause_that_was_noise_often_enough_leads_no_incident_but_joins_one() -> None:
    made = Incidents()
    for hour in range(incidents.NOISY):
        made.add([event("noise", 3_600 * hour)])
        made.close(at(3_600 * hour + 60))
        made.close(at(3_600 * hour + 1_800))
    begin = 3_600 * incidents.NOISY
    made.add([event(1, begin), event("noise", begin + 50), event(2, begin + 100)])
    assert parts(made)[-2:] == [{"1", "noise"}, {"2"}]


def test_what_comes_back_after_it_was_over_is_a_new_incident_that_was_seen_before() -> None:
    made = Incidents()
    group = [event(n, n) for n in range(1, 5)]
    for day in range(3):
        shifted = [
            replace(e, event_id=f"{e.event_id} {day}", first=e.first + day * DAY, last=e.last + day * DAY)
            for e in group
        ]
        made = Incidents.unpack(made.pack())
        made.add(shifted[: 4 - day])
        made.close(START + day * DAY + timedelta(hours=1))
    third, second, first = made.all()
    assert (first.seen_before, second.seen_before, third.seen_before) == (None, first.id, second.id)
    assert (first.seen, second.seen, third.seen) == (0, 1, 2)
    assert not any(i.open for i in made.all())


def test_a_fault_that_comes_every_day_is_one_incident_each_time_and_never_becomes_mere_noise() -> None:
    made = Incidents()
    for day in range(2 * incidents.NOISY):
        made.add(event(n, 86_400 * day + 20 * n, workload=w) for n, w in enumerate(("shop", "bank", "gate")))
        made.close(at(86_400 * day + 60))
        made.close(at(86_400 * day + 3_600))
    assert parts(made) == [{"0", "1", "2"}] * 2 * incidents.NOISY
    assert [i.seen for i in made.all()] == list(reversed(range(2 * incidents.NOISY)))
    newest, before, *_ = made.all()
    assert newest.seen_before == before.id


def test_a_clock_that_is_far_off_does_not_cost_the_state() -> None:
    for moment in (datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)):
        made = state([event(1)])
        made.close(moment)
        assert Incidents.unpack(made.pack()).all() == made.all()


def test_a_clock_that_was_years_ahead_for_a_moment_is_forgotten_when_it_is_right_again() -> None:
    made = state([event(1)], 0)
    made.close(at(0) + 3_000 * DAY)
    made.add([event(2, 7_200)])
    made.close(at(7_201))
    assert [i.open for i in made.all()] == [True, False]
    made.close(at(7_200 + 3_600))
    assert [i.open for i in made.all()] == [False, False]
    settled = Incidents.unpack(made.pack())
    settled.add([event(3, 7_201)])
    assert parts(settled) == [{"1"}, {"2"}, {"3"}]


def test_lines_of_a_clock_that_is_years_ahead_are_not_open_for_years() -> None:
    made = state([event(1, severity=3), event(2, 3_000 * 86_400), event(3, 10 * 3_600)], 5)
    assert [i.open for i in made.all()] == [False, True, True]


def test_one_shared_cause_among_new_ones_is_no_recognition() -> None:
    made = state([event(n, n) for n in range(1, 5)], 3_600)
    made.add([event(n, 7_200 + n) for n in (1, 11, 12)])
    assert made.all()[0].seen_before is None
    made.close(at(90_000))
    assert made.all()[0].seen_before is None


def test_lines_that_are_sent_a_week_late_are_grouped_by_their_own_time() -> None:
    made = state([event(9, 0)], 0)
    made.add([event(1, -7 * 86_400), event(3, -6 * 86_400)])
    made.close(at(1))
    made.add([event(2, -7 * 86_400 + 30)])
    made.close(at(2))
    assert parts(made) == [{"1", "2"}, {"3"}, {"9"}]
    assert [i.open for i in made.all()] == [True, False, False]


def test_ten_minutes_of_trouble_are_a_few_incidents_and_not_thirty() -> None:
    assert [len(p) for p in parts(state([event(n, 20 * n) for n in range(30)]))] == [10, 10, 10]
    assert [len(p) for p in parts(state([event(n, n) for n in range(300)]))] == [50, 50]


def test_an_incident_tells_fifty_causes_and_counts_the_others_when_they_come_again() -> None:
    many = [event(n, n / 10) for n in range(200)]
    made = state(many, 3_600)
    (found,) = made.all()
    assert (len(found.causes), found.more, found.count) == (values.MAX_CAUSES, 150, 200)
    made = state(many, 400)
    made.add([replace(e, event_id=f"{e.event_id} again", first=at(500), last=at(500)) for e in many])
    made = Incidents.unpack(made.pack())
    (found,) = made.all()
    assert (found.more, found.count, found.last) == (150, 400, at(500))


@pytest.mark.long
def test_everything_is_bounded_whatever_comes() -> None:
    made = Incidents()
    long = "\U0001f525" * 5_000
    for minute in range(0, 1_200, 10):
        seen = [
            event(
                f"{minute} {n} {long}",
                60 * minute + n,
                workload=f"{n} {long}",
                text=long,
                event_id=f"{minute} {n}",
            )
            for n in range(0, 60, 4)
        ]
        made.add(seen)
        made.close(at(60 * minute))
    assert len(made.pack()) <= incidents.BYTES
    assert made.all()[-1].first > START
    made.add([event(n, 1e6 + n / 100) for n in range(2_000)])
    packed = made.pack()
    assert len(packed) <= incidents.BYTES
    assert Incidents.unpack(packed).all() == made.all()
    many = state([event(n, 1_000 * n) for n in range(1_500)], 1_000 * 1_500)
    assert len(many.all()) == incidents.MAX_INCIDENTS
    assert many.all()[0].causes[0].cause == "template:1499"


def test_incidents_that_open_for_nobody_leave_half_of_the_places_to_the_others() -> None:
    most = incidents.MAX_INCIDENTS
    made = Incidents()
    for begin in range(0, most + most // 2, 20):
        severity = 2 if begin < most // 2 else 1
        made.add([event(n, 1_000 * n, severity=severity) for n in range(begin, begin + 20)])
        made.close(at(1_000 * (begin + 20)))
    assert len(made.all()) > 0.45 * most and len(made.every()) > 0.95 * most


def test_numbers_and_texts_that_no_event_should_have_are_held_in_bounds() -> None:
    made = state(
        [
            event(
                1,
                score=float("nan"),
                severity=99,
                count=1 << 70,
                text="\ud800 half",
                first=datetime.max.replace(tzinfo=UTC),
            ),
            event(2, score=float("inf"), severity=-4, count=-7, last=datetime.min.replace(tzinfo=UTC)),
        ],
        0,
    )
    made.close(at(3_600))
    found = Incidents.unpack(made.pack()).every()
    assert found == made.every()
    assert {c.severity for i in found for c in i.causes} == {1, 3}
    assert all(0 <= c.score <= 1 and c.count >= 1 for i in found for c in i.causes)


def test_a_state_of_nothing_has_no_incidents() -> None:
    assert Incidents.unpack(None).all() == []
    assert Incidents.unpack(Incidents().pack()).all() == []


NOON = msgpack.Timestamp(1_795_000_000)
BLOB = state([event(n, 400 * n, workload=w) for n in range(9) for w in ("shop", "bank")], 2_000).pack()


@given(damage=st.lists(st.tuples(st.integers(0, len(BLOB) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=100)
def test_a_damaged_state_is_refused_or_is_a_state(damage: Sequence[tuple[int, int]]) -> None:
    blob = bytearray(BLOB)
    for place, value in damage:
        blob[place] = value
    try:
        made = Incidents.unpack(bytes(blob))
    except (BadPayload, TooNew):
        return
    made.add([event(1, 100)])
    made.close(at(9_000))
    assert all(isinstance(i, Incident) for i in Incidents.unpack(made.pack()).all())


def settled_wire() -> list[Any]:
    """What is packed of one incident that is settled."""
    made = state([event(1, 100)], 9_000)
    made.close(at(10_000))
    wire: list[Any] = msgpack.unpackb(made.pack())
    return wire


@pytest.mark.parametrize(
    ("place", "value"),
    [(7, 0), (7, 9), (4, msgpack.Timestamp(1)), (3, msgpack.Timestamp(1 << 33))],
    ids=["calm", "worse", "ends first", "begins last"],
)
def test_a_cause_that_no_reader_could_show_is_refused(place: int, value: int) -> None:
    wire = settled_wire()
    wire[1][3][0][4][0][place] = value
    with pytest.raises(BadPayload):
        Incidents.unpack(msgpack.packb(wire))


@pytest.mark.parametrize("name", ["", "a b", "\x1b[2J", "[bold]", "\u202e"])
def test_an_id_that_could_steer_a_terminal_is_refused(name: str) -> None:
    for place in (0, 6):
        wire = settled_wire()
        wire[1][3][0][place] = name
        with pytest.raises(BadPayload):
            Incidents.unpack(msgpack.packb(wire))


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\xc1",
        BLOB[:-1],
        BLOB + b"\x00",
        b"\x91" * 5_000,
        b"x" * (3 * incidents.BYTES),
        *map(
            msgpack.packb,
            [
                7,
                [],
                [1],
                [1, [None, b"", []]],
                ["1", [None, b"", [], []]],
                [1, [1.5, b"", [], []]],
                [1, [None, b"123", [], []]],
                [1, [None, b"", [7], []]],
                [1, [None, b"", [], [["a", NOON, NOON, 1, [], 0, None, 0, True, []]]]],
            ],
        ),
    ],
)
def test_what_is_no_state_is_refused(blob: bytes) -> None:
    with pytest.raises(BadPayload, match="not readable"):
        Incidents.unpack(blob)


def test_a_state_of_a_newer_build_is_left_to_it() -> None:
    with pytest.raises(TooNew, match="update"):
        Incidents.unpack(msgpack.packb([incidents.WIRE_VERSION + 1, "anything"]))
