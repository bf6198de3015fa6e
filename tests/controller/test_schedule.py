"""Slots on a real Redis: one acts per slot, the dead are replaced, what was missed is caught up once. Times
of day."""

import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import ClassVar
from zoneinfo import ZoneInfo

import pytest
import redis
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as effort
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.backoff import NoBackoff
from redis.retry import Retry

from pipeline.controller.schedule import STEP_BACK_MS, Slot, Slots, last_time_of_day, next_time_of_day
from pipeline.errors import RedisUnavailable
from pipeline.settings import Settings

# So long that no test meets the end of a slot by accident; time passes by moving what is stored into the
# past.
EVERY_S = 1_000_000.0
EVERY_MS = 1_000_000_000
BERLIN = ZoneInfo("Europe/Berlin")
MILLENNIUM = datetime(2000, 1, 1)  # noqa: DTZ001 - hypothesis adds the zone itself
modest = effort(max_examples=60, deadline=None)  # a busy machine is no fault


@pytest.fixture
def slots(client: "redis.Redis", settings: Settings) -> Slots:
    return Slots(client, settings)


def stored(slots: Slots, field: str, name: str = "tick") -> int:
    return int(slots.scripts.client.hget(slots.key, f"{name}|{field}") or 0)


def store(slots: Slots, field: str, value: int, name: str = "tick") -> None:
    slots.scripts.client.hset(slots.key, f"{name}|{field}", value)


def pass_slots(slots: Slots, count: int) -> None:
    """As if `count` periods had gone by."""
    for field in ("done", "deadline"):
        if slots.scripts.client.hexists(slots.key, f"tick|{field}"):
            store(slots, field, stored(slots, field) - count * EVERY_MS)


def begun(slots: Slots, owner: str = "a") -> Slot:
    slot = slots.begin("tick", EVERY_S, owner)
    assert slot is not None
    return slot


def done(slots: Slots, owner: str = "a") -> Slot:
    slot = begun(slots, owner)
    assert slots.finish(slot)
    return slot


# One slot


def test_the_first_one_acts_and_the_others_do_not(slots: Slots) -> None:
    slot = begun(slots)
    assert slots.begin("tick", EVERY_S, "b") is None
    assert slots.begin("tick", EVERY_S, "a") is None
    assert slots.finish(slot)
    assert slots.begin("tick", EVERY_S, "b") is None


def test_the_nominal_time_is_a_multiple_of_the_period_and_not_after_now(slots: Slots) -> None:
    slot = slots.begin("fine", 0.5, "a")
    assert slot is not None
    assert slot.nominal.microsecond % 500_000 == 0
    assert timedelta(0) <= datetime.now(UTC) - slot.nominal < timedelta(seconds=10)


def test_schedules_do_not_touch_each_other(slots: Slots) -> None:
    begun(slots)
    assert slots.begin("sweep", EVERY_S, "b") is not None


def test_the_next_slot_comes_with_its_time(slots: Slots) -> None:
    first = done(slots)
    pass_slots(slots, 1)
    second = begun(slots, "b")
    assert second.missed == 0
    assert second.seq > first.seq


def test_a_dead_ones_slot_is_taken_over_after_its_deadline(slots: Slots) -> None:
    dead = begun(slots)
    store(slots, "deadline", stored(slots, "deadline") - slots.ttl_ms)
    heir = begun(slots, "b")
    assert heir.nominal == dead.nominal
    assert not slots.finish(dead)
    assert slots.finish(heir)
    assert not slots.finish(heir)


def test_one_who_is_late_but_alone_still_finishes(slots: Slots) -> None:
    slot = begun(slots)
    store(slots, "deadline", 1)
    assert slots.finish(slot)
    assert slots.begin("tick", EVERY_S, "b") is None


@pytest.mark.parametrize("missed", [1, 7, 1_000])
def test_what_was_missed_is_caught_up_once(slots: Slots, missed: int) -> None:
    done(slots)
    pass_slots(slots, missed + 1)
    slot = begun(slots)
    assert slot.missed == missed
    assert slots.finish(slot)
    assert slots.begin("tick", EVERY_S, "a") is None


def test_a_slot_that_nobody_finished_is_not_done_when_the_next_one_comes(slots: Slots) -> None:
    done(slots)
    pass_slots(slots, 1)
    begun(slots)  # and dies
    pass_slots(slots, 1)
    assert begun(slots, "b").missed == 1


def test_a_running_slot_holds_back_the_next_one(slots: Slots) -> None:
    begun(slots)
    store(slots, "done", stored(slots, "done") - EVERY_MS)
    assert slots.begin("tick", EVERY_S, "b") is None


def test_another_period_goes_on_from_what_is_done(slots: Slots) -> None:
    done(slots)
    assert slots.begin("tick", 2 * EVERY_S, "a") is None


def test_a_silent_redis_is_told_as_such(settings: Settings) -> None:
    nobody = redis.Redis(port=1, retry=Retry(NoBackoff(), 0))
    with pytest.raises(RedisUnavailable):
        Slots(nobody, settings).begin("tick", 1.0, "a")
    nobody.close()


# The clock


def test_a_clock_that_steps_back_a_little_repeats_nothing(slots: Slots) -> None:
    slot = slots.begin("tick", 1.0, "a")
    assert slot is not None
    assert slots.finish(slot)
    store(slots, "done", stored(slots, "done") + STEP_BACK_MS // 2)
    assert slots.begin("tick", 1.0, "a") is None


def test_a_clock_that_was_far_ahead_does_not_stop_the_schedule(slots: Slots) -> None:
    slot = slots.begin("tick", 1.0, "a")
    assert slot is not None
    assert slots.finish(slot)
    store(slots, "done", stored(slots, "done") + 365 * 86_400_000)
    again = slots.begin("tick", 1.0, "a")
    assert again is not None
    assert again.missed == 0
    assert slots.finish(again)
    assert abs(stored(slots, "done") - time.time() * 1000) < 30_000


def test_an_owner_of_a_clock_that_was_far_ahead_does_not_hold_the_slot(slots: Slots) -> None:
    begun(slots)
    store(slots, "deadline", stored(slots, "deadline") + 86_400_000)
    assert slots.begin("tick", EVERY_S, "b") is not None


# Many at once


@pytest.mark.long
def test_of_many_threads_exactly_one_acts_per_slot(redis_url: str, settings: Settings) -> None:
    acted: list[datetime] = []
    running, most = [0], [0]
    guard = threading.Lock()
    start = threading.Barrier(8)

    def beat(owner: str) -> None:
        connection = redis.Redis.from_url(redis_url)
        slots = Slots(connection, settings)
        start.wait()
        until = time.monotonic() + 1.2
        while time.monotonic() < until:
            slot = slots.begin("tick", 0.05, owner)
            if slot is None:
                continue
            with guard:
                running[0] += 1
                most[0] = max(most[0], running[0])
                acted.append(slot.nominal)
            with guard:
                running[0] -= 1
            assert slots.finish(slot)
        connection.close()

    threads = [threading.Thread(target=beat, args=(f"beat-{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(acted) == len(set(acted))
    assert acted == sorted(acted)
    assert most[0] == 1
    assert 3 <= len(acted) <= 60


class SlotMachine(RuleBasedStateMachine):
    """Beats begin, finish, die and are late while periods go by; a model says what each answer must be."""

    slots: ClassVar[Slots]

    @initialize()
    def new(self) -> None:
        self.mine = Slots(self.slots.scripts.client, Settings(key_prefix=f"t{uuid.uuid4().hex[:12]}"))
        self.held: list[Slot] = []  # begun, not finished, by whoever lives
        self.current: int | None = None  # seq of who may finish
        self.expired = False
        self.since_done: int | None = None  # periods since the last slot that was done; None: never

    @rule(owner=st.sampled_from("abc"))
    def begin(self, owner: str) -> None:
        slot = self.mine.begin("tick", EVERY_S, owner)
        free = self.current is None or self.expired
        if self.since_done == 0 or not free:
            assert slot is None
            return
        assert slot is not None
        assert slot.missed == (0 if self.since_done is None else self.since_done - 1)
        self.current, self.expired = slot.seq, False
        self.held.append(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        slot = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        ours = slot.seq == self.current
        assert self.mine.finish(slot) == ours
        if ours:
            now = self.mine.scripts.client.time()
            nominal_ms = int(slot.nominal.timestamp()) * 1000
            self.since_done = int(now[0]) * 1000 // EVERY_MS - nominal_ms // EVERY_MS
            self.current = None

    @precondition(lambda self: self.held)
    @rule()
    def die(self) -> None:
        self.held.pop()

    @precondition(lambda self: self.current is not None)
    @rule()
    def expire(self) -> None:
        store(self.mine, "deadline", 1)
        self.expired = True

    @rule(count=st.integers(1, 3))
    def go_on(self, count: int) -> None:
        pass_slots(self.mine, count)
        self.held = [
            replace(slot, nominal=slot.nominal - timedelta(seconds=count * EVERY_S)) for slot in self.held
        ]
        self.expired = self.current is not None
        if self.since_done is not None:
            self.since_done += count

    def teardown(self) -> None:
        if hasattr(self, "mine"):
            self.mine.scripts.client.delete(self.mine.key)


@pytest.mark.long
def test_slots_behave_like_their_model(slots: Slots) -> None:
    SlotMachine.slots = slots
    run_state_machine_as_test(
        SlotMachine,
        settings=effort(
            max_examples=60,
            stateful_step_count=25,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )


# Times of day


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def test_without_times_there_is_none() -> None:
    assert last_time_of_day(utc("2026-11-20 12:00"), (), BERLIN) is None
    assert next_time_of_day(utc("2026-11-20 12:00"), (), BERLIN) is None


def test_a_time_of_day_is_one_of_its_zone() -> None:
    now = utc("2026-11-20 12:00")
    assert last_time_of_day(now, ("02:30", "18:00"), BERLIN) == utc("2026-11-20 01:30")
    assert next_time_of_day(now, ("02:30", "18:00"), BERLIN) == utc("2026-11-20 17:00")


def test_the_very_moment_has_come() -> None:
    now = utc("2026-11-20 01:30")
    assert last_time_of_day(now, ("02:30",), BERLIN) == now
    assert next_time_of_day(now, ("02:30",), BERLIN) == utc("2026-11-21 01:30")


def test_a_skipped_time_comes_once_that_day_an_hour_later() -> None:
    # 2026-03-29: 02:00 becomes 03:00.
    assert last_time_of_day(utc("2026-03-29 12:00"), ("02:30",), BERLIN) == utc("2026-03-29 01:30")
    assert next_time_of_day(utc("2026-03-28 12:00"), ("02:30",), BERLIN) == utc("2026-03-29 01:30")


def test_a_repeated_time_comes_once_that_day() -> None:
    # 2026-10-25: 03:00 becomes 02:00, so 02:30 is at 00:30 and at 01:30 UTC.
    first = utc("2026-10-25 00:30")
    assert last_time_of_day(utc("2026-10-25 01:45"), ("02:30",), BERLIN) == first
    assert next_time_of_day(first, ("02:30",), BERLIN) == utc("2026-10-26 01:30")


def hours(begin: datetime, days: int) -> Iterator[datetime]:
    for hour in range(days * 24):
        yield begin + timedelta(hours=hour)


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "UTC"])
def test_in_a_whole_year_a_time_comes_once_a_day(zone: str) -> None:
    seen = {last_time_of_day(now, ("02:10",), ZoneInfo(zone)) for now in hours(utc("2026-01-01 12:00"), 365)}
    assert len(seen) == 366  # both first days of January


@modest
@given(
    now=st.datetimes(MILLENNIUM, MILLENNIUM.replace(year=2040), timezones=st.just(UTC)),
    times=st.lists(st.times().map(lambda t: f"{t:%H:%M}"), min_size=1, max_size=4),
    zone=st.sampled_from(["Europe/Berlin", "America/St_Johns", "Pacific/Apia", "Africa/Casablanca", "UTC"]),
)
def test_no_time_lies_between_the_last_and_the_next(now: datetime, times: list[str], zone: str) -> None:
    last = last_time_of_day(now, times, ZoneInfo(zone))
    following = next_time_of_day(now, times, ZoneInfo(zone))
    assert last is not None
    assert following is not None
    assert last <= now < following <= last + timedelta(hours=49)
    assert next_time_of_day(last, times, ZoneInfo(zone)) == following
    assert last_time_of_day(following - timedelta(seconds=1), times, ZoneInfo(zone)) == last
