"""The watcher on a real Redis: what it finds, that it finds it once, and that it is bounded."""

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import cast

import polars as pl
import pytest
import redis
from prometheus_client import CollectorRegistry

from pipeline.commands import drain
from pipeline.drain.templates import Template, pack_template
from pipeline.errors import LeaseRefused, SinkUnavailable
from pipeline.ledger.ledger import Ledger
from pipeline.marks.marks import State as MarkedAs
from pipeline.marks.marks import Target
from pipeline.marks.store import Marks
from pipeline.messages.app import make_app
from pipeline.records.batch import Batch, Purpose
from pipeline.records.delivery import Accepted, Claim, Stage
from pipeline.records.schema import RESULT_SCHEMA, raw_frame
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.redis.leases import WATCH, Lease, Leases, granted
from pipeline.service.stored.usual import usual_values
from pipeline.settings import Settings
from pipeline.tasks import compact
from pipeline.tasks import watch as task
from pipeline.tasks.context import Context
from pipeline.watching import memory, rate_round, session_round, state
from pipeline.watching import watcher as module
from pipeline.watching.callbacks import Callbacks, Expected
from pipeline.watching.incidents.live import Incidents
from pipeline.watching.incidents.origins import TraceShape
from pipeline.watching.observation import Lane, Observation, observe
from pipeline.watching.rates import minute_counts
from pipeline.watching.rates.minute_counts import MinuteCounts
from pipeline.watching.rates.rates import Rates
from pipeline.watching.rows import MAX_ROWS, marked_as, template_of
from pipeline.watching.sessions.follow_ups import FollowUp, FollowUps
from pipeline.watching.sessions.growing import GrowingSession
from pipeline.watching.sessions.model import NORMAL, SessionVerdict
from pipeline.watching.state import WatcherState
from pipeline.watching.table import ObservedTable
from pipeline.watching.time_budget import BUSY_OLD_S, FLOOD, RATES_S
from pipeline.watching.verdicts import events_of
from pipeline.watching.watcher import RoundSummary, Watcher
from pipeline.workers.scrape import Scrape

T0 = datetime(2026, 11, 20, 10, 0, tzinfo=UTC)
OPEN, WORK, CLOSE, FAULT = 1, 2, 3, 9


def keys_of(sessions: Sequence[str | None]) -> pl.Series:
    """One key a record, or none, as `find_keys` gives them; a name without a kind is as good as one."""
    lists = [[session] for session in sessions]
    return pl.Series("sessions", lists, dtype=pl.List(pl.String))


def said(anomalous: bool) -> SessionVerdict:
    if not anomalous:
        return NORMAL
    return SessionVerdict(
        anomalous=True, score=0.9, p_value=0.001, reasons=("session-event:9",), cause="session-event:9"
    )


class Faults:
    """A session with a fault is wrong; CLOSE ends one."""

    ends = frozenset({CLOSE})
    per_day = 1.0
    stateful = False
    places: Mapping[int, tuple[str, int]] = {}
    follow_ups = FollowUps()
    shape = TraceShape()

    def __init__(self) -> None:
        self.judged: list[tuple[int, ...]] = []

    def judge(self, sessions: Sequence[Sequence[int]]) -> list[SessionVerdict]:
        self.judged += map(tuple, sessions)
        return [said(FAULT in session) for session in sessions]


@dataclass(slots=True)
class Sink:
    """Rows by batch id, as every sink keeps them."""

    batches: dict[str, pl.DataFrame] = field(default_factory=dict)
    down: bool = False
    writes: int = 0

    def store(self, batch_id: str, workload: str, rows: pl.DataFrame) -> None:
        if self.down:
            raise SinkUnavailable("the disk is full")
        assert rows["workload"].unique().to_list() == [workload]
        self.writes += 1
        self.batches[batch_id] = rows

    def rows(self) -> pl.DataFrame:
        frames = list(self.batches.values())
        return pl.concat(frames) if frames else pl.DataFrame(schema=RESULT_SCHEMA)


class World:
    """Batches that are stored, the time that passes, and one watcher."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.client = connect(settings)
        self.keys = Keys(settings.redis.key_prefix)
        self.ledger = Ledger(self.client, settings)
        self.leases = Leases(self.client, settings)
        self.rules, self.sink = Faults(), Sink()
        self.marks = Marks(self.client, settings)
        self.lease = self.hold("watcher")
        self.watcher = self.another()
        self.lines = self.batches = 0

    def hold(self, holder: str) -> Lease:
        return granted(self.leases.request(WATCH, holder), WATCH)

    def another(self) -> Watcher:
        state = WatcherState(connect(self.settings), self.settings)
        known = Callbacks(
            session_model=lambda *_: ("m1", self.rules), store=self.sink.store, normal=self.marks.normal
        )
        return Watcher(state, self.settings, known)

    def accept(self, n: int, *, workload: str = "shop", purpose: Purpose = Purpose.SCORE) -> str:
        self.batches += 1
        batch = Batch(
            batch_id=f"b{self.batches}", workload=workload, source="app.log", source_key="k", purpose=purpose,
            arrived=T0, formats=(), zone="UTC", records=raw_frame(["x"] * n, first_line=self.lines + 1),
        )  # fmt: skip
        assert isinstance(self.ledger.intake.accept(batch), Accepted)
        return batch.batch_id

    def commit(self, batch_id: str, rows: pl.DataFrame, sessions: Sequence[str | None]) -> Observation | None:
        return self.commit_keys(batch_id, rows, [[session] for session in sessions])

    def commit_keys(
        self, batch_id: str, rows: pl.DataFrame, keys: Sequence[Sequence[str | None]]
    ) -> Observation | None:
        claim = self.ledger.claim(batch_id, Stage.INGEST, "w")
        assert isinstance(claim, Claim)
        seen = observe(claim, rows, pl.Series("sessions", keys, dtype=pl.List(pl.String)))
        self.ledger.commit(claim, warming=False, outcomes={}, observation=seen.pack() if seen else b"")
        return seen

    def rows(
        self,
        events: Sequence[tuple[str | None, int, int]],
        *,
        workload: str = "shop",
        anomalous: bool = False,
    ) -> pl.DataFrame:
        """RESULT_SCHEMA of (session, second, template)."""
        self.lines += len(events)
        blank = dict.fromkeys(RESULT_SCHEMA)
        return pl.DataFrame(
            [
                blank | {
                    "record_id": f"k-{self.lines - len(events) + i}", "source": "app.log", "lines": 1,
                    "line": self.lines - len(events) + i + 1, "workload": workload, "message": f"says T{template}",
                    "timestamp": datetime.fromtimestamp(T0.timestamp() + second, UTC), "template_id": template,
                    "score": 0.7, "anomalous": anomalous,
                    "reasons": ["error-severity:failed"] if anomalous else [], "model_version": "m1",
                }
                for i, (_, second, template) in enumerate(events)
            ],
            schema=RESULT_SCHEMA,
        )  # fmt: skip

    def stored(
        self, *events: tuple[str | None, int, int], workload: str = "shop", anomalous: bool = False
    ) -> str:
        """A batch of these lines is accepted and stored."""
        batch_id = self.accept(len(events), workload=workload)
        rows = self.rows(events, workload=workload, anomalous=anomalous)
        self.commit(batch_id, rows, [session for session, _, _ in events])
        return batch_id

    def later(self, seconds: float) -> None:
        """As if everything that is open had begun so much earlier."""
        for lane in Lane:
            key = self.keys.watching("idle", lane.value)
            for name, at in cast(
                "list[tuple[bytes, float]]", self.client.zrange(key, 0, -1, withscores=True)
            ):
                self.client.zadd(key, {name: at - seconds * 1000})
        for batch_id in cast("list[bytes]", self.client.zrange(self.keys.due, 0, -1)):
            self.client.hincrby(self.keys.batch(batch_id.decode()), "accepted_ms", -int(seconds * 1000))
            self.client.zincrby(self.keys.in_flight, -int(seconds * 1000), batch_id.decode())

    def round(self, *, end: bool = False) -> RoundSummary:
        return self.watcher.round(self.lease.token, end=end)

    def open(self) -> int:
        return int(self.client.hlen(self.keys.watching("sessions")))

    def waits(self) -> int:
        return int(self.client.llen(self.keys.watching("observations")))

    def numbers(self) -> dict[str, int]:
        return {k.decode(): int(v) for k, v in self.client.hgetall(self.keys.watching()).items()}  # type: ignore[union-attr]


@pytest.fixture
def world(settings: Settings) -> World:
    return World(settings)


GOOD = (("a", 0, OPEN), ("a", 1, WORK), ("a", 2, WORK))
BAD = (("x", 0, OPEN), ("x", 1, FAULT))


def test_a_session_that_went_wrong_becomes_one_finding_that_is_of_no_line(world: World) -> None:
    world.stored(*GOOD, *BAD, (None, 3, WORK))
    assert world.round().found == [] and world.open() == 2 and world.waits() == 0
    world.later(64)
    assert world.round().judged == 0, "the grace is not over"
    world.later(3)
    told = world.round()
    assert (told.judged, len(told.found), world.open()) == (2, 1, 0)
    (row,) = world.sink.rows().to_dicts()
    assert (row["source"], row["lines"], row["level"], row["workload"]) == (
        "logweir:sessions",
        0,
        "warning",
        "shop",
    )
    assert row["template_id"] == template_of("shop", "logweir:sessions", "session-event:9") < -1
    assert row["message"].startswith("T9 is in no normal session: session x, 2 events in 1 s")
    assert row["message"].endswith("from line 4 of app.log")
    assert (row["anomalous"], row["p_value"], row["reasons"], row["line"]) == (
        True,
        0.001,
        ["session-event:9"],
        5,
    )
    assert world.numbers()["events"] == 0


def test_a_session_of_lines_without_times_is_followed_in_the_order_of_its_lines(world: World) -> None:
    for events in (("x", 0, OPEN), ("y", 0, OPEN), ("x", 0, WORK)), (("x", 0, FAULT), ("y", 0, CLOSE)):
        rows = world.rows(events).with_columns(timed=pl.lit(value=False))
        world.commit(world.accept(len(events)), rows, [session for session, _, _ in events])
    told = world.round(end=True)
    assert sorted(world.rules.judged) == sorted([(OPEN, WORK, FAULT), (OPEN, CLOSE)])
    (row,) = world.sink.rows().to_dicts()
    assert (row["timed"], row["line"], row["message"]) == (
        False,
        4,
        "T9 is in no normal session: session x, 3 events from line 1 of app.log",
    )
    assert row["raw"].splitlines() == [f"T{template}" for template in (OPEN, WORK, FAULT)]
    (incident,) = events_of([], told.found)
    assert not incident.timed


def test_what_follows_is_not_missed_in_lines_without_times(world: World) -> None:
    follows = FollowUp(
        after=OPEN, event=CLOSE, parts=5_000, came=5_000, within=5_000, usual_ms=10, longest_ms=10, tail=4.0
    )
    world.rules.follow_ups = FollowUps((follows,))
    for timed, found in ((False, 0), (True, 1)):
        rows = world.rows((("x", 0, OPEN), ("x", 0, WORK))).with_columns(timed=pl.lit(timed))
        world.commit(world.accept(2), rows, ["x", "x"])
        assert len(world.round(end=True).found) == found


def test_what_is_marked_as_normal_is_not_told_until_the_mark_is_revoked(world: World) -> None:
    name = Target.template(template_of("shop", "logweir:sessions", "session-event:9"))
    world.marks.put(name, MarkedAs.NORMAL, text="T9 is in no normal session")
    world.stored(*BAD)
    world.stored(*BAD, workload="bank")
    told = world.round(end=True)
    assert (told.judged, [item.workload for item in told.found]) == (2, ["bank"])
    assert world.sink.rows()["workload"].to_list() == ["bank"]
    blob = cast("bytes | None", world.client.get(world.keys.watching("incidents")))
    (incident,) = Incidents.unpack(blob).all()
    assert incident.workloads == ("bank",)
    assert world.marks.revoke([name]) == [(name, "")]
    world.stored(("y", 5, OPEN), ("y", 6, FAULT))
    assert [item.workload for item in world.round(end=True).found] == ["shop"]


def test_a_cause_of_an_incident_names_what_a_mark_of_it_is_about() -> None:
    assert marked_as("shop", "template:17") == 17
    assert marked_as("shop", "template:0") is None, "lines past the template limit"
    assert marked_as("shop", "session-event:9") == template_of("shop", "logweir:sessions", "session-event:9")
    assert marked_as("shop", "rate-silence:9") == template_of("shop", "logweir:rates", "rate-silence:9")


def test_an_end_event_closes_a_session_after_the_grace_alone(world: World) -> None:
    world.stored(("a", 0, OPEN), ("a", 1, CLOSE), ("b", 0, OPEN))
    world.round()
    world.later(6)
    assert world.round().judged == 1
    assert world.rules.judged == [(OPEN, CLOSE)] and world.open() == 1


def test_a_session_that_stands_in_several_batches_is_judged_as_a_whole_in_order(world: World) -> None:
    first, second = world.accept(2), world.accept(1)
    early, late = world.rows([("a", 0, OPEN), ("a", 1, WORK)]), world.rows([("a", 2, CLOSE)])
    world.commit(second, late, ["a"])
    world.round()
    world.later(100)
    assert world.round().judged == 0, "a batch that was accepted before it is in flight"
    world.commit(first, early, ["a", "a"])
    world.round()
    world.later(100)
    world.round()
    assert world.rules.judged == [(OPEN, WORK, CLOSE)]


def test_a_session_that_goes_on_is_not_closed_by_what_was_expected_of_it(world: World) -> None:
    world.stored(("a", 0, OPEN))
    world.round()
    world.later(100)
    world.stored(("a", 50, WORK))
    assert world.round().judged == 0 and world.open() == 1


def test_the_end_closes_and_judges_all_that_is_open(world: World) -> None:
    world.stored(*GOOD)
    world.round()
    world.stored(*BAD)
    told = world.round(end=True)
    assert (told.judged, len(told.found), told.more, world.open()) == (2, 1, False, 0)


def test_what_one_watcher_leaves_another_process_goes_on_with(world: World) -> None:
    world.stored(("a", 0, OPEN))
    world.round()
    world.watcher = world.another()
    world.stored(("a", 1, FAULT))
    world.round(end=True)
    assert world.rules.judged == [(OPEN, FAULT)]


def anomalous_lines(world: World) -> int:
    incidents = Incidents.unpack(world.watcher.state.incidents()).all()
    return sum(cause.count for one in incidents for cause in one.causes if cause.kind == "template")


def no_reading(*_: object) -> None:
    raise AssertionError("a state was read again")


def fault_after_a_round(world: World) -> None:
    """A session that a round has opened, and its fault, which waits for the next one."""
    world.stored(("a", 0, OPEN), anomalous=True)
    world.round()
    world.stored(("a", 1, FAULT), anomalous=True)


def test_a_process_reads_no_state_again_that_it_wrote_in_the_last_round(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault_after_a_round(world)
    with monkeypatch.context() as patch:
        for kind in (MinuteCounts, Incidents, GrowingSession):
            patch.setattr(kind, "unpack", no_reading)
        world.round()
        told = world.round(end=True)
    assert len(told.found) == 1 and world.rules.judged == [(OPEN, FAULT)]


def test_a_round_of_another_process_between_ends_what_a_process_kept(world: World) -> None:
    other = world.another()
    for second, watcher in enumerate([world.watcher, other, world.watcher, other]):
        world.stored(("a", second, FAULT if second == 3 else WORK), anomalous=True)
        watcher.round(world.lease.token)
    world.round(end=True)
    assert world.rules.judged == [(WORK, WORK, WORK, FAULT)]
    assert anomalous_lines(world) == 4
    counts = MinuteCounts.unpack(world.client.hget(world.keys.watching("pulses"), "shop") or b"")
    assert not counts.waiting


def test_a_round_that_fails_leaves_nothing_of_it_to_the_next_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault_after_a_round(world)
    with monkeypatch.context() as patch:
        patch.setattr(world.watcher.state, "change", lambda *_, **__: False)
        with pytest.raises(LeaseRefused):
            world.round()
    world.round(end=True)
    assert world.rules.judged == [(OPEN, FAULT)]
    assert anomalous_lines(world) == 2


def test_a_process_keeps_no_more_sessions_than_there_is_room_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MOST_SESSIONS", 2)
    read = list[str]()
    unpack = GrowingSession.unpack

    def reading(workload: str, entry: str, blob: bytes) -> GrowingSession:
        read.append(entry)
        return unpack(workload, entry, blob)

    world.stored(("a", 0, OPEN), ("b", 0, OPEN), ("c", 0, OPEN))
    world.round()
    world.stored(("a", 1, WORK), ("b", 1, WORK), ("c", 1, WORK))
    monkeypatch.setattr(GrowingSession, "unpack", reading)
    world.round()
    assert read == ["a"]
    world.round(end=True)
    assert sorted(world.rules.judged) == [(OPEN, WORK)] * 3


def test_a_watcher_that_lost_its_lease_changes_nothing(world: World) -> None:
    world.stored(*BAD)
    old = world.lease
    world.leases.release(old)
    new = world.hold("another")
    before = world.client.dump(world.keys.watching("observations"))
    with pytest.raises(LeaseRefused):
        world.watcher.round(old.token, end=True)
    assert world.client.dump(world.keys.watching("observations")) == before
    assert world.sink.batches == {} and world.open() == 0
    assert len(world.another().round(new.token, end=True).found) == 1


def test_while_the_sink_is_down_what_was_found_waits_and_nothing_is_folded_in(world: World) -> None:
    world.stored(*BAD)
    world.sink.down = True
    with pytest.raises(SinkUnavailable):
        world.round(end=True)
    world.stored(*GOOD)
    for _ in range(2):
        with pytest.raises(SinkUnavailable):
            world.round()
    assert world.waits() == 1 and len(world.watcher.state.outbox()) == 1
    world.sink.down = False
    world.round(end=True)
    assert world.sink.rows().height == 1 and world.waits() == 0 and world.watcher.state.outbox() == []


def test_a_crash_between_the_sink_and_the_note_of_it_stores_the_same_rows_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stored(*BAD)

    def dies(_: bytes, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(world.watcher.state, "delivered", dies)
        with pytest.raises(KeyboardInterrupt):
            world.round(end=True)
    world.watcher = world.another()
    world.round()
    assert world.sink.writes == 2 and world.sink.rows().height == 1


def test_a_crash_before_the_step_that_changes_everything_is_as_if_nothing_had_been(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stored(*BAD)

    def dies(*_: object, **__: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(world.watcher.state, "change", dies)
        with pytest.raises(KeyboardInterrupt):
            world.round(end=True)
    assert world.sink.batches == {} and world.waits() == 1
    assert len(world.round(end=True).found) == 1


def test_a_flood_of_sessions_with_one_fault_is_bounded_and_says_how_many_there_were(world: World) -> None:
    world.stored(*((f"s{i}", i % 50, FAULT) for i in range(MAX_ROWS + 312)))
    world.round(end=True)
    rows = world.sink.rows()
    assert rows.height == MAX_ROWS and rows["template_id"].n_unique() == 1
    assert rows.filter(pl.col("message").str.ends_with("and 312 more like it")).height == 1
    (incident,) = Incidents.unpack(world.watcher.state.incidents()).all()
    assert [cause.count for cause in incident.causes] == [MAX_ROWS + 312]


def test_past_the_limit_the_longest_idle_session_is_closed_first(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.watching.session_round.MAX_OPEN", 100)
    world = World(settings)
    for i in range(12):
        world.stored(*((f"s{i}-{j}", i, 100 + i) for j in range(10)))
        world.later(1)
        world.round()
    assert world.open() == 100
    assert {session[0] for session in world.rules.judged} == {100, 101}


def test_events_of_all_open_sessions_are_bounded_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_round, "MAX_OPEN_EVENTS", 100)
    for i in range(10):
        world.stored(*((f"s{i}", j, WORK) for j in range(30)))
        world.later(1)
        world.round()
    assert world.numbers()["events"] <= 130 and 3 <= world.open() <= 5


def test_past_the_limit_of_their_list_the_oldest_observations_are_dropped_and_counted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.ledger.ledger.MAX_OBSERVATIONS", 3)
    for i in range(5):
        world.stored((f"s{i}", 0, OPEN))
    assert world.waits() == 3
    assert (world.numbers()["dropped"], world.numbers()["head"]) == (2, 2)
    world.round()
    assert world.open() == 3 and world.numbers()["bytes"] == 0


def test_a_round_takes_many_small_observations_and_ends_at_its_bounds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(40):
        world.stored((f"s{i}", 0, OPEN))
    assert world.round().observations == 40 and world.open() == 40
    for i in range(9):
        world.stored((f"s{i}", 1, WORK))
    monkeypatch.setattr(state, "MAX_ROWS", 6)  # each has a rate and an event
    assert world.round().observations == 3
    monkeypatch.setattr(state, "MAX_BYTES", world.numbers()["bytes"] // 3)
    assert world.round().observations == 2
    monkeypatch.setattr(state, "MAX_BYTES", 1)
    assert world.round().observations == 1 and world.waits() == 3


def test_a_round_takes_a_bounded_number_of_anomalies(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MAX_ANOMALIES", 2)
    for i in range(5):
        world.stored((f"s{i}", 0, OPEN), anomalous=True)
    assert [world.round().observations for _ in range(3)] == [2, 2, 1]


def test_what_is_dropped_while_a_round_works_is_not_taken_for_seen(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.ledger.ledger.MAX_OBSERVATIONS", 2)
    world.stored(("a", 0, OPEN))
    world.stored(("b", 0, OPEN))
    look = world.watcher.state.snapshot

    def meanwhile(most: int, most_events: int) -> object:
        seen = look(most, most_events)
        world.stored(("c", 0, OPEN))
        return seen

    with monkeypatch.context() as patch:
        patch.setattr(world.watcher.state, "snapshot", meanwhile)
        world.round()
    assert world.open() == 2 and world.waits() == 1
    world.round()
    assert world.open() == 3 and world.waits() == 0


@pytest.mark.long
@pytest.mark.parametrize("what", ["observation", "session", "pulse", "rates", "numbers", "incidents", "rows"])
def test_a_damaged_state_is_dropped_and_the_rest_goes_on(world: World, what: str) -> None:
    world.stored(*GOOD, anomalous=True)
    world.round()
    world.stored(("b", 0, OPEN))
    places: dict[str, Callable[[], object]] = {
        "observation": lambda: world.client.lset(world.keys.watching("observations"), 0, b"\xc1"),  # type: ignore[arg-type]
        "session": lambda: world.client.hset(world.keys.watching("sessions"), "shop\0a", b"\xc1"),
        "pulse": lambda: world.client.hset(world.keys.watching("pulses"), "shop", b"\xc1"),
        "rates": lambda: world.client.hset(world.keys.watching("rates"), "shop", b"\xc1"),
        "numbers": lambda: world.client.hset(world.keys.watching("numbers"), "shop", b"\xc1"),
        "incidents": lambda: world.client.set(world.keys.watching("incidents"), b"\xc1"),
        "rows": lambda: world.client.rpush(world.keys.watching("outbox"), b"\xc1"),
    }
    places[what]()
    world.watcher = world.another()  # the one before keeps what it wrote
    world.stored(*BAD, anomalous=True)
    world.round()
    told = world.round(end=True)
    assert len(told.found) == 1 and world.open() == 0 and world.waits() == 0
    read = what != "numbers"  # without values nobody looks at those
    assert (world.numbers().get("failed", 0) == 1) is read


def test_anomalous_templates_become_incidents_and_their_number_is_known(world: World) -> None:
    now = world.ledger.store.now_ms() // 1000 - int(T0.timestamp())
    world.stored((None, now, 17), (None, now + 1, 17), (None, now, 18), anomalous=True)
    world.round()
    (incident,) = Incidents.unpack(world.watcher.state.incidents()).all()
    assert {(cause.cause, cause.count) for cause in incident.causes} == {
        ("template:17", 2),
        ("template:18", 1),
    }
    assert world.numbers()["incidents"] == 1


def test_an_error_at_the_rate_of_its_training_is_no_incident_and_far_above_it_is_one(world: World) -> None:
    known = replace(
        world.watcher.callbacks, expected=lambda of: Expected(errors={17: 3.0} if of == "shop" else {})
    )
    world.watcher.callbacks = known
    for second in (0, 9_000, 18_000):
        world.stored((None, second, 17), anomalous=True)
        world.round()
    assert Incidents.unpack(world.watcher.state.incidents()).all() == []
    world.stored((None, 27_000, 18), anomalous=True)
    world.round()
    world.stored(*((None, 36_000 + n, 17) for n in range(40)), anomalous=True)
    world.round()
    found = Incidents.unpack(world.watcher.state.incidents()).all()
    assert [cause.cause for one in found for cause in one.causes] == ["template:17", "template:18"]


@pytest.mark.long
def test_an_error_that_comes_every_day_is_no_incident_and_a_new_one_is(world: World) -> None:
    def fatal(day: int, template: int, score: float = 0.7, new: bool = False) -> None:
        batch_id = world.accept(1)
        rows = world.rows([(None, 86_400 * day, template)], anomalous=True).with_columns(
            pl.lit("fatal").alias("level"),
            pl.lit(score).alias("score"),
            pl.Series("reasons", [["new-template"] if new else ["error-severity:fatal"]]),
        )
        world.commit(batch_id, rows, [None])
        world.round()

    def causes() -> list[str]:
        found = Incidents.unpack(world.watcher.state.incidents()).all()
        return sorted(cause.cause for incident in found for cause in incident.causes)

    for day in range(-8, -2):
        fatal(day, 40)
        world.watcher = world.another()
    assert causes() == ["template:40"] * 2, "the third day is the first that two days of the week before have"
    fatal(-2, 41)
    fatal(-2, 40, score=1.0)  # as a person marked it
    fatal(-2, 42, new=True)
    assert causes() == ["template:40"] * 3 + ["template:41", "template:42"]


def test_new_calm_patterns_after_a_start_are_one_cause_and_errors_are_not(world: World) -> None:
    for number, text in ((50, "Server started on port <NUM>"), (51, "cart service is ready")):
        template = Template(template_id=number, text=text, severe=False, workload="shop")
        world.client.hset(world.keys.templates, str(number), pack_template(template))

    def new(second: int, template: int, level: str = "info") -> None:
        batch_id = world.accept(1)
        rows = world.rows([(None, second, template)], anomalous=True).with_columns(
            pl.lit(level).alias("level"), pl.Series("reasons", [["new-template"]])
        )
        world.commit(batch_id, rows, [None])
        world.round()

    new(0, 60)  # before the start
    world.stored((None, 3_600, 50), (None, 3_600, 51))
    world.round()
    world.watcher = world.another()
    new(3_700, 61)
    new(4_500, 62)
    new(4_510, 63, level="error")
    new(9_000, 64)  # long after it
    found = Incidents.unpack(world.watcher.state.incidents()).all()
    causes = sorted((cause.cause, cause.kind, cause.count) for incident in found for cause in incident.causes)
    assert causes == [
        ("new-version", "new-version", 2), ("template:63", "template", 1),
    ]  # fmt: skip
    assert any(cause.text == "new version: says T61" for incident in found for cause in incident.causes)


def test_incidents_that_fail_stop_no_round(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.stored(*BAD, anomalous=True)
    with monkeypatch.context() as broken:
        broken.setattr(Incidents, "add", lambda *_: 1 / 0)
        assert len(world.round(end=True).found) == 1
    assert world.waits() == 0 and world.watcher.state.incidents() is None


def test_one_line_that_claims_a_time_to_come_does_not_stretch_its_cause_until_then(world: World) -> None:
    now = world.ledger.store.now_ms() // 1000 - int(T0.timestamp())
    world.stored((None, now, 17), (None, now + 3_000 * 86_400, 17), anomalous=True)
    world.stored((None, now + 3_600, 17), anomalous=True)
    world.round()
    incidents = Incidents.unpack(world.watcher.state.incidents()).all()
    assert max(i.last for i in incidents) - T0 < timedelta(seconds=now + 2 * 86_400)


def test_a_baseline_is_learnt_from_and_nothing_in_it_is_a_session(world: World) -> None:
    batch_id = world.accept(2, purpose=Purpose.BASELINE)
    seen = world.commit(batch_id, world.rows([("a", 0, OPEN), ("a", 1, FAULT)], anomalous=True), ["a", "a"])
    assert seen is not None and seen.rates.height == 2
    assert not seen.events and not seen.anomalies
    world.round(end=True)
    assert world.sink.batches == {} and world.rules.judged == []


@pytest.mark.long
def test_a_silence_of_a_heartbeat_becomes_a_finding(world: World) -> None:
    for minute in range(0, 600, 20):
        world.stored(
            *(
                (None, 60 * m + s, 30 + s)
                for m in range(minute, minute + 20)
                for s in range(2)
                if s or m < 560
            )
        )
    while world.round(end=True).more:
        pass
    rows = world.sink.rows()
    assert rows.height >= 1 and set(rows["source"]) == {"logweir:rates"}
    assert any("rate-silence" in text for text in rows["reasons"].explode().to_list())
    assert rows["lines"].sum() == 0


def test_a_shift_of_durations_becomes_a_finding_whichever_process_goes_on(world: World) -> None:
    def answered(minutes: range, ms: int) -> None:
        events = [(None, 60 * minute + second, 30) for minute in minutes for second in range(0, 60, 3)]
        batch_id = world.accept(len(events))
        rows = world.rows(events).with_columns(
            pl.Series("message", [f"answered in {ms + at % 5} ms" for at in range(len(events))])
        )
        world.commit(batch_id, rows, [None] * len(events))

    world.client.hset(
        world.keys.templates,
        "30",
        pack_template(Template(template_id=30, text="answered in <NUM> ms", severe=False, workload="shop")),
    )
    answered(range(20), 40)
    world.round(end=True)
    world.watcher = world.another()  # as after a restart
    answered(range(20, 23), 1_800)
    world.round(end=True)
    rows = world.sink.rows()
    assert rows["source"].to_list() == ["logweir:numbers"] and rows["lines"].sum() == 0
    assert re.match(
        r"`answered in <NUM> ms`: (median|90 % quantile) 1.9 s, was 4[0-9] ms, in 1[0-9] values until 2026-11-20 10:2",
        rows["message"][0],
    )
    cause = rows["reasons"][0][0]
    assert cause == "number-shift:30"
    assert marked_as("shop", "number-shift:30:duration#1") == rows["template_id"][0]
    (usual,) = usual_values(world.client, world.settings, ["shop", "other"], 30)
    assert (usual.name, usual.kind, usual.summary) == (
        "duration#1", "duration", "median 41 ms, 90 % quantile 45 ms",
    )  # fmt: skip


def test_two_rounds_of_equal_faults_are_one_finding(world: World) -> None:
    for key in "xy":
        world.stored((key, 0, OPEN), (key, 1, FAULT))
        world.round(end=True)
    rows = world.sink.rows()
    assert rows.height == 2 and rows["template_id"].n_unique() == 1 and rows["record_id"].n_unique() == 2


def test_a_redis_that_lost_the_last_round_finds_the_same_again_under_the_same_ids(
    world: World, client: "redis.Redis"
) -> None:
    world.stored(*BAD)
    names = list(client.scan_iter(f"{{{world.settings.redis.key_prefix}}}:watching*"))
    before = {name: client.dump(name) for name in names}
    world.round(end=True)
    client.delete(*client.scan_iter(f"{{{world.settings.redis.key_prefix}}}:watching*"))
    for name, blob in before.items():
        client.restore(name, 0, blob)  # type: ignore[arg-type]
    world.round(end=True)
    assert world.sink.writes == 2 and world.sink.rows().height == 1


def test_at_the_end_of_a_long_stream_a_session_that_may_go_on_is_not_blamed_for_what_it_lacks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "session-counts:3 0/1"

    def judge(sessions: Sequence[Sequence[int]]) -> list[SessionVerdict]:
        return [replace(said(anomalous=CLOSE not in s), reasons=(why,), cause=why) for s in sessions]

    monkeypatch.setattr(world.rules, "judge", judge)
    world.stored(("a", 0, OPEN), ("b", 700, OPEN), ("c", 701, OPEN), ("c", 702, CLOSE))
    closing = pack_template(Template(template_id=CLOSE, text="closed by <*>", severe=False, workload="shop"))
    world.client.hset(world.keys.templates, str(CLOSE), closing)
    world.round(end=True)
    (row,) = world.sink.rows().to_dicts()
    assert row["message"].startswith(
        "T3 `closed by <*>` does not come, where the most similar normal session has it 1 time: session a,"
    )
    world.stored(("d", 800, OPEN), ("e", 801, FAULT))
    why = "session-event:9"
    world.round(end=True)
    assert world.sink.rows().height == 3, "an event that no normal session has is wrong in any"


@pytest.mark.long
def test_rules_that_fail_for_one_workload_leave_the_others_judged(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Faults):
        def judge(self, sessions: Sequence[Sequence[int]]) -> list[SessionVerdict]:
            raise ValueError("no")

    rules = {"shop": world.rules, "broken": Broken()}
    parts = replace(
        world.watcher.callbacks,
        session_model=lambda workload, _: ("m1", rules[workload]) if workload in rules else None,
    )
    monkeypatch.setattr(world.watcher, "callbacks", parts)
    world.stored(*BAD, workload="broken")
    world.stored(*BAD)
    told = world.round(end=True)
    assert [item.workload for item in told.found] == ["shop"] and world.open() == 0


def test_states_of_rates_are_bounded_together_and_the_longest_silent_workload_is_forgotten(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abcde":
        world.stored(*((None, second, second % 7) for second in range(0, 600, 5)), workload=name)
    world.round(end=True)
    sizes = [len(blob) for blob in world.watcher.state.rates(list("abcde")).values()]
    assert len(sizes) == 5
    monkeypatch.setattr(rate_round, "MAX_RATE_BYTES", sum(sizes[2:]))
    world.stored((None, 601, 1), workload="e")
    world.round()
    assert set(world.watcher.state.rates(list("abcde"))) == {"c", "d", "e"}
    assert world.numbers()["workloads"] == 2, "counted, as they had lines lately"


def test_a_batch_in_flight_holds_the_counts_of_later_ones_back(world: World) -> None:
    waits = world.accept(1)
    world.stored((None, 0, 5), (None, 60, 5))
    world.round()
    (pulse,) = world.watcher.state.snapshot(1, 0).minute_counts.values()
    assert len(pulse.counts) == 2 and pulse.ahead and pulse.at_ms is None
    world.commit(waits, world.rows([(None, 0, 5)]), [None])
    world.round()
    (pulse,) = world.watcher.state.snapshot(1, 0).minute_counts.values()
    assert not pulse.ahead and pulse.at_ms is not None


def test_what_is_scored_again_gives_its_sessions_and_no_second_count(world: World) -> None:
    events = [("a", 0, OPEN), ("a", 1, FAULT)]
    batch_id, rows = world.accept(2), world.rows(events)
    warming = rows.with_columns(score=None, anomalous=None, model_version=None).cast(dict(rows.schema))
    claim = world.ledger.claim(batch_id, Stage.INGEST, "w")
    assert isinstance(claim, Claim)
    first = observe(claim, warming, keys_of(["a", "a"]))
    assert first is not None and first.rates.height == 2 and not first.events
    again = observe(replace(claim, rescore=True), rows, keys_of(["a", "a"]))
    assert again is not None and not again.rates and again.events.height == 2
    assert (again.lane, again.version) == (Lane.RESCORED, "m1")
    assert Observation.unpack(again.pack()).events == again.events
    nothing = observe(replace(claim, rescore=True), warming, None)
    assert nothing is None


def test_one_process_watches_and_another_leaves_it_to_it(settings: Settings) -> None:
    first, second = Context(make_app(settings), settings), Context(make_app(settings), settings)
    held = granted(first.leases.request(WATCH, first.owner), WATCH)
    assert not task.watch_stored(second)
    first.leases.release(held)
    assert task.watch_stored(second) and task.watch_stored(first), "it is given back after every round"
    task.run(first)
    assert first.ledger.backlog.watching()["age_s"] < 60


def test_what_watching_does_is_counted_and_shown(settings: Settings) -> None:
    world = World(settings)
    world.stored(*GOOD)
    world.round()
    world.stored((None, 3, WORK))
    world.leases.release(world.lease)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Scrape(world.client, settings))
    assert registry.get_sample_value("logweir_observations") == 1
    task.watch_stored(Context(make_app(settings), settings))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Scrape(world.client, settings))
    assert registry.get_sample_value("logweir_observations") == 0
    assert registry.get_sample_value("logweir_open_sessions") == 1
    assert registry.get_sample_value("logweir_observations_dropped_total") == 0
    age = registry.get_sample_value("logweir_watch_age_seconds")
    assert age is not None and age < 60


def test_a_round_that_does_not_end_takes_its_process_with_it(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, ended = Context(make_app(settings), settings.replace(step_s=1.0)), threading.Event()
    codes: list[int] = []

    def leaves(code: int) -> None:
        codes.append(code)
        ended.set()

    def hangs(*_: object, **__: object) -> RoundSummary:
        assert ended.wait(20)
        return RoundSummary()

    monkeypatch.setattr(task.os, "_exit", leaves)
    monkeypatch.setattr(context.watcher, "round", hangs)
    task.run(context)
    # It does not hang again at once: its process has batches to store.
    monkeypatch.setattr(context.watcher, "round", lambda *_, **__: pytest.fail("a round too early"))
    task.run(context)
    assert codes == [74]


def test_draining_waits_until_what_is_stored_was_looked_at_and_not_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.stored(*GOOD)
    looks = threading.Timer(0.3, world.round)
    looks.start()
    drain.Drain.of(world.settings).wait(None, ended=None)
    assert world.waits() == 0 and world.open() == 1, "its sessions stay open"
    looks.join()
    monkeypatch.setattr(drain, "WATCHED_S", 0.2)
    world.stored(*GOOD)
    assert drain.Drain.of(world.settings).wait(None, ended=None) < 5
    assert world.waits() == 1


@pytest.mark.long
def test_an_observation_with_which_a_round_fails_is_left_out_and_no_other(world: World) -> None:
    world.stored(*GOOD)
    batch_id = world.accept(1)
    seen = world.commit(batch_id, world.rows((("c", 0, 17),), anomalous=True), ["c"])
    assert seen is not None
    # A time that no calendar has: of a damaged list, or a source of the days to come.
    wrong = dict(seen.anomalies.columns) | {"first": [1 << 60]}
    seen = replace(seen, anomalies=ObservedTable(seen.anomalies.schema, wrong))
    world.client.lset(world.keys.watching("observations"), 1, seen.pack())  # type: ignore[arg-type]
    world.stored(*BAD)
    found = [item for _ in range(6) for item in world.round(end=True).found]
    assert len(found) == 1 and world.waits() == 0 and world.watcher.max_observations > 1


@pytest.mark.long
def test_a_session_whose_times_no_calendar_has_is_over_and_stops_no_round(world: World) -> None:
    world.stored(*BAD)
    world.round()
    state = world.watcher.state
    (session,) = state.sessions(["shop\0x"]).values()
    session.at_ms = [1 << 60, 1 << 60]
    world.client.hset(world.keys.watching("sessions"), "shop\0x", session.pack())
    world.round(end=True)
    assert world.open() == 0


@pytest.mark.long
def test_rows_that_no_sink_can_write_do_not_hold_up_those_behind_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def store(batch_id: str, workload: str, rows: pl.DataFrame) -> None:
        if workload == "odd":
            raise pl.exceptions.SchemaError("no such column")
        world.sink.store(batch_id, workload, rows)

    monkeypatch.setattr(world.watcher, "callbacks", replace(world.watcher.callbacks, store=store))
    world.stored(*BAD, workload="odd")
    world.stored(*BAD)
    world.round(end=True)
    assert world.sink.rows().height == 1 and world.watcher.state.outbox() == []
    assert world.numbers()["failed"] == 1


def test_a_round_takes_no_more_than_so_many_events_and_one_batch_at_least(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_EVENTS", 5)
    for at in range(3):
        world.stored(*((f"{at}{i}", i, WORK) for i in range(3 + 4 * (at == 1))))
    assert [world.round().observations for _ in range(4)] == [1, 1, 1, 0]


def test_of_many_workloads_none_waits_for_ever_for_a_look_at_its_rates(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_round, "MAX_RATED", 1)
    for _ in range(2):
        for name in "ab":
            world.stored((None, 0, 1), workload=name)
        # As if a minute had passed since the last round.
        pulses = world.watcher.state.snapshot(1, 0).minute_counts
        for name, pulse in pulses.items():
            pulse.last_round -= 1
            world.client.hset(world.keys.watching("pulses"), name, pulse.pack())
        world.round()
    assert set(world.watcher.state.rates(["a", "b"])) == {"a", "b"}


@pytest.mark.parametrize("lost", ["a round", "an observation"])
def test_a_redis_that_loses_its_last_moments_within_a_round_is_told_nothing_of_it(
    world: World, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    names = [world.keys.watching(*part) for part in ((), ("observations",), ("sessions",), ("idle", "fresh"))]
    world.stored(*GOOD)

    def kept() -> dict[str, bytes]:
        return {name: blob for name in names if (blob := world.client.dump(name)) is not None}

    def goes_back() -> None:
        world.client.delete(*names)
        for name, blob in before.items():
            world.client.restore(name, 0, blob)

    before = kept()
    if lost == "a round":
        world.round()
    world.stored(("a", 3, CLOSE))
    look = world.watcher.state.snapshot

    def meanwhile(most: int, most_events: int) -> object:
        seen = look(most, most_events)
        goes_back()
        return seen

    with monkeypatch.context() as patch:
        patch.setattr(world.watcher.state, "snapshot", meanwhile)
        with pytest.raises(LeaseRefused):
            world.round()
    world.stored(("a", 3, CLOSE))  # its batch is stored again
    world.round(end=True)
    assert world.rules.judged == [(OPEN, WORK, WORK, CLOSE)]


def test_one_line_of_the_year_9999_does_not_make_every_minute_complete(world: World) -> None:
    now = world.ledger.store.now_ms() // 1000 - int(T0.timestamp())
    far = int(datetime(9999, 1, 1, tzinfo=UTC).timestamp() - T0.timestamp())
    world.stored((None, now - 60, 5), (None, far, 5))
    world.round()
    (pulse,) = world.watcher.state.snapshot(1, 0).minute_counts.values()
    assert pulse.at_ms is not None and pulse.at_ms <= world.ledger.store.now_ms() + 600_000
    # And what is so far away does not wait here until its time has come.
    assert pulse.counts == {}


class Ticks:
    """A clock that goes on by so much whenever it is looked at."""

    def __init__(self, step_s: float) -> None:
        self.step_s, self.now = step_s, 1_000.0

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


def sparse(world: World, *, minutes: int, workload: str = "old") -> None:
    """A log of an hour's line each, in one batch."""
    world.stored(*((None, 3600 * i - 90 * 86_400, 40 + i % 2) for i in range(minutes)), workload=workload)


@pytest.mark.long
def test_a_round_ends_when_the_time_for_rates_is_up_and_the_next_ones_go_on(world: World) -> None:
    other = world.another()
    sparse(world, minutes=300)
    world.watcher.clock = Ticks(0.01)  # some 25 steps of the rates a round
    rounds, told = 1, world.round(end=True)
    assert told.more and told.behind and world.waits() == 0
    while told.more:
        # Whichever process does the next round, it goes on.
        world.watcher = world.another() if rounds % 2 else other
        world.watcher.clock = Ticks(0.01)
        told = world.round(end=True)
        rounds += 1
    assert rounds > 10
    (pulse,) = world.watcher.state.snapshot(1, 0).minute_counts.values()
    assert not pulse.behind and pulse.waiting == 0


def test_rates_that_are_behind_are_looked_at_without_waiting_for_the_next_minute(world: World) -> None:
    sparse(world, minutes=100)
    world.watcher.clock = Ticks(0.01)
    told, rounds = world.round(), 1
    assert told.more
    while told.more:
        told, rounds = world.round(), rounds + 1
    assert rounds > 3 and world.round().more is False


def test_a_workload_whose_rates_take_long_keeps_no_other_from_being_looked_at(world: World) -> None:
    sparse(world, minutes=400)
    world.watcher.clock = Ticks(0.05)
    world.round()
    world.stored((None, 0, 7), workload="quick")
    for _ in range(2):
        told = world.round()
    assert told.behind
    assert "quick" in world.watcher.state.rates(["quick"])


@pytest.mark.long
def test_with_too_many_counts_that_wait_for_rates_nothing_is_read_until_some_were_taken(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 100)
    monkeypatch.setattr(minute_counts, "MOST_COUNTS", 90)
    # Rates take some 2,000 counts at once, and have no time to judge them.
    world.stored(*((None, 60 * i, 40 + i % 2) for i in range(2_500)))
    clock, world.watcher.clock = world.watcher.clock, Ticks(0.2)
    world.round()
    (pulse,) = world.watcher.state.snapshot(1, 0).minute_counts.values()
    assert pulse.behind and pulse.waiting > 100
    world.stored(*GOOD)
    told = world.round()
    assert (told.observations, told.more, world.waits(), world.open()) == (0, True, 1, 0)
    world.watcher.clock = clock
    while world.round(end=True).more:
        pass
    assert world.waits() == 0 and world.rules.judged == [(OPEN, WORK, WORK)]


def test_a_round_that_took_long_takes_fewer_events_the_next_time(world: World) -> None:
    world.stored(*GOOD)
    before = world.watcher.budget.part
    world.watcher.clock = Ticks(2.0)
    world.round()
    assert world.watcher.budget.part < before


def test_while_lines_are_on_their_way_minutes_of_old_logs_get_one_round_of_a_call(settings: Settings) -> None:
    world, context = World(settings), Context(make_app(settings), settings)
    world.leases.release(world.lease)
    sparse(world, minutes=300)
    context.watcher.clock = Ticks(0.01)
    world.accept(1)
    rounds: list[RoundSummary] = []
    look = context.watcher.round

    def counted(token: int, *, end: bool = False, flood: bool = False) -> RoundSummary:
        rounds.append(look(token, end=end, flood=flood))
        return rounds[-1]

    context.watcher.round = counted  # type: ignore[method-assign]
    assert task.watch_stored(context) is False
    assert [one.only_behind for one in rounds] == [True]
    world.client.hset(world.keys.counts, "batches", 0)
    while not task.watch_stored(context):
        assert len(rounds) > 2 and rounds[-1].behind
    assert not rounds[-1].behind


def one_a_round(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, *, waiting: int
) -> tuple[World, Context]:
    """The task takes one observation a round; so many wait."""
    world, context = World(settings), Context(make_app(settings), settings)
    world.leases.release(world.lease)
    monkeypatch.setattr(module, "MAX_OBSERVATIONS", 1)
    context.watcher.max_observations = 1
    for _ in range(waiting):
        world.stored(*GOOD)
    return world, context


def test_while_batches_wait_to_be_stored_watching_ends_after_a_round_and_rests(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, context = one_a_round(settings, monkeypatch, waiting=4)
    waiting = world.accept(1)
    claim = world.ledger.claim(waiting, Stage.INGEST, "w")
    assert isinstance(claim, Claim)
    world.ledger.advance(claim, Stage.STORE)
    assert task.watch_stored(context) is False
    assert world.waits() == 3, "one round"
    context.watcher.rotation.end(context.watcher.rotation._ended + 60.0, unread=3)
    assert task.watch_stored(context) is False and world.waits() == 3, "it rests as long as it worked"
    world.client.hdel(world.keys.counts, "stage:store")
    assert task.watch_stored(context) is True
    assert world.waits() == 0


def test_a_flood_of_lines_gets_the_processor_first_and_no_observation_is_lost(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, context = one_a_round(settings, monkeypatch, waiting=6)
    world.client.hset(world.keys.counts, "batches", FLOOD)
    rotation = context.watcher.rotation
    assert task.watch_stored(context) is False
    assert world.waits() == 5, "one round"
    rotation._worked = 0.5
    rotation._ended -= 2.0
    assert task.watch_stored(context) is False and world.waits() == 5, "half a second of work, 7.5 of rest"
    monkeypatch.setattr(task, "MAX_OBSERVATIONS", 10)  # half of their memory is in use
    assert task.watch_stored(context) is False and world.waits() == 4
    world.client.hset(world.keys.counts, "batches", FLOOD - 1)
    assert task.watch_stored(context) is True and world.waits() == 0


def test_files_of_commits_are_merged_behind_a_flood_or_after_a_minute(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, context = World(settings), Context(make_app(settings), settings)
    merged: list[Context] = []
    monkeypatch.setattr(compact, "compact", merged.append)
    monkeypatch.setattr(compact, "store_usage", lambda _: None)

    def merges() -> bool:
        merged.clear()
        compact.run(context)
        return bool(merged)

    assert merges()
    world.client.hset(world.keys.counts, "batches", FLOOD)
    assert not any(merges() for _ in range(compact.YIELDS)) and merges()
    world.client.hset(world.keys.counts, "batches", FLOOD - 1)
    assert merges()
    monkeypatch.setattr(compact, "FLOOD", 2)
    world.client.hdel(world.keys.counts, "batches")
    for _ in range(2):
        world.stored(*GOOD)
    assert not merges(), "the watcher goes first"
    world.round()
    assert world.waits() == 0 and merges()


def test_while_observations_wait_minutes_of_old_logs_take_a_small_part_of_a_round(world: World) -> None:
    sparse(world, minutes=100)
    world.watcher.clock = Ticks(0.01)
    told = world.watcher.round(world.lease.token, flood=True)
    assert told.behind and 0 < told.rates_s <= BUSY_OLD_S + 0.05
    told = world.round()
    assert told.behind and told.rates_s >= RATES_S, "the flood is over"
    while told.more:
        told = world.round()
    other = world.another()
    sparse(world, minutes=100, workload="twin")
    while other.round(world.lease.token).more:
        pass
    blobs = world.watcher.state.rates(["old", "twin"])
    old, twin = (Rates.unpack(blobs[name]).detector.packed() for name in ("old", "twin"))
    assert old == twin, "the same as at once"
