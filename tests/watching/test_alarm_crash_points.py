"""An alarm and the state that remembers it change together: whichever effect of a round a crash strikes, each
finding is stored and each incident is announced exactly once."""

from collections.abc import Callable

import numpy as np
import pytest
from crash_points import Crash, Fault, Killed, crashing
from watching.test_rates import START, play, traffic
from watching.test_watching import BAD, World

from pipeline.errors import LeaseRefused, RedisUnavailable
from pipeline.records.verdict import Reason
from pipeline.settings import Settings
from pipeline.watching.callbacks import Callbacks
from pipeline.watching.numbers.numbers import Numbers
from pipeline.watching.rates.minute_counts import SLOTS, MinuteCounts
from pipeline.watching.rates.rates import Rates
from pipeline.watching.state import WatcherState
from pipeline.watching.values.bins import bin_of
from pipeline.watching.values.typed import ValueKind
from pipeline.watching.watcher import Watcher

DAY = 1_440
EFFECTS = 4  # more than a round has


@pytest.fixture(scope="module")
def learnt() -> bytes:
    rates = Rates()
    assert play(rates, traffic(DAY)) == []
    return rates.pack()


def rate_fault(world: World, learnt: bytes, change: Callable[[np.ndarray], None], minutes: int = 90) -> None:
    """A workload known for a day, whose next minutes wait to be judged."""
    counts = traffic(minutes, seed=1)
    change(counts)
    waiting = MinuteCounts(newest_ms=world.ledger.store.now_ms())
    rows, columns = np.nonzero(counts)
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        waiting.counts[START + DAY + row, column + 1] = int(counts[row, column])
    world.client.hset(world.keys.watching("rates"), "shop", learnt)
    world.client.hset(world.keys.watching("pulses"), "shop", waiting.pack())


def burst(world: World, learnt: bytes) -> None:
    def change(counts: np.ndarray) -> None:
        counts[20:60, 3] *= 10

    rate_fault(world, learnt, change)


def bursts_of_many(world: World, learnt: bytes) -> None:
    def change(counts: np.ndarray) -> None:
        counts[20:60, :5] += 200

    rate_fault(world, learnt, change)


def silence(world: World, learnt: bytes) -> None:
    def change(counts: np.ndarray) -> None:
        counts[30:, 6] = 0

    rate_fault(world, learnt, change)


def mix(world: World, learnt: bytes) -> None:
    def change(counts: np.ndarray) -> None:
        rng = np.random.default_rng(3)
        counts[30:, 5] = rng.poisson(18, size=len(counts) - 30)
        counts[30:, 4] = rng.poisson(29, size=len(counts) - 30)
        counts[30:, 3] = rng.poisson(14, size=len(counts) - 30)

    rate_fault(world, learnt, change, minutes=120)


def shift(world: World, _: bytes) -> None:
    """Durations known for two hours, and slower ones that wait."""

    def values(minutes: range, ms: int) -> dict[tuple[int, int, str, str], dict[int, int]]:
        kind = ValueKind.DURATION
        return {
            (minute * SLOTS, 1, "duration#1", kind.value): {bin_of(kind, (ms + minute % 5) / 1000): 20}
            for minute in minutes
        }

    numbers = Numbers()
    assert numbers.step(values(range(START, START + 120), 40).items(), judged=True) == []
    waiting = MinuteCounts(newest_ms=world.ledger.store.now_ms())
    waiting.values = values(range(START + 120, START + 130), 1_800)
    world.client.hset(world.keys.watching("numbers"), "shop", numbers.pack())
    world.client.hset(world.keys.watching("pulses"), "shop", waiting.pack())


def session(world: World, _: bytes) -> None:
    world.stored(*BAD)


def anomalous_lines(world: World, _: bytes) -> None:
    world.stored((None, 0, 7), (None, 1, 7), anomalous=True)


KINDS = {
    burst: Reason.RATE_BURST,
    bursts_of_many: Reason.RATE_BURST,
    silence: Reason.RATE_SILENCE,
    mix: Reason.RATE_MIX,
    shift: Reason.NUMBER_SHIFT,
    session: Reason.SESSION_EVENT,
    anomalous_lines: None,
}


def process(world: World, crash: Crash) -> Watcher:
    """A watcher each of whose effects `crash` may strike."""
    state = WatcherState(crashing(str(world.settings.redis.url), crash), world.settings)

    def store(batch_id: str, workload: str, rows: object) -> None:
        crash.effect("store", lambda: world.sink.store(batch_id, workload, rows), RedisUnavailable("cut"))

    known = Callbacks(session_model=lambda *_: ("m1", world.rules), store=store, normal=lambda *_: set())
    return Watcher(state, world.settings, known)


def outcome(world: World) -> tuple[set[str], list[tuple[str, str]]]:
    """Ids of the stored findings, and (type, incident) of every event."""
    events = [
        (entry[b"type"].decode(), entry[b"subject"].decode())
        for _, entry in world.client.xrange(world.keys.events)
    ]
    return set(world.sink.rows()["record_id"]), events


def watched(
    settings: Settings, crash: Crash, prepare: Callable[[World, bytes], None], learnt: bytes
) -> tuple[set[str], list[tuple[str, str]]]:
    """What is known outside after rounds of processes that die, until nothing is left to do."""
    world = World(settings)
    names = list(world.client.scan_iter(match="{" + settings.redis.key_prefix + "}*"))
    world.client.delete(*names)
    world = World(settings)
    prepare(world, learnt)
    watcher = process(world, crash)
    for _ in range(6):
        try:
            if not watcher.round(world.lease.token, end=True).more:
                break
        except (Killed, RedisUnavailable, LeaseRefused):
            crash.dead = False
            watcher = process(world, crash)
    assert watcher.state.outbox() == []
    return outcome(world)


@pytest.mark.parametrize("prepare", KINDS, ids=lambda one: one.__name__)
def test_each_alarm_is_stored_and_announced_once_whatever_strikes_the_round(
    settings: Settings, learnt: bytes, prepare: Callable[[World, bytes], None]
) -> None:
    rows, events = watched(settings, Crash(Fault.BEFORE), prepare, learnt)
    reason = KINDS[prepare]
    assert bool(rows) is bool(reason) and events
    struck = 0
    for fault in Fault:
        for at in range(1, EFFECTS + 1):
            crash = Crash(fault, (at,))
            assert watched(settings, crash, prepare, learnt) == (rows, events), (fault, at, crash.seen)
            struck += crash.struck
    # The step, and of a finding the sink and the note of it.
    assert struck >= (3 if reason else 1) * len(Fault)
