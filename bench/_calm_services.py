"""Many calm services: normal lines, numbers and sessions of each, through the real detectors and incidents.

Services of one kind have the same past and rates, and lines of their own. A deployment of one service has all
of the alarm budget to itself, one of all services shares it among them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Final

import numpy as np

from pipeline.watching.alarm_budget import AlarmBudget
from pipeline.watching.incident_round import within_budget
from pipeline.watching.incidents.live import Incidents
from pipeline.watching.numbers.numbers import Numbers, ValueCounts
from pipeline.watching.rates.rates import Alarm, Rates
from pipeline.watching.rows import WatcherFinding
from pipeline.watching.sessions.joint import EventNames
from pipeline.watching.sessions.model import SessionModel
from pipeline.watching.sessions.open_sessions import Segment
from pipeline.watching.values.bins import bin_of
from pipeline.watching.values.sampling import SLOT_S
from pipeline.watching.values.typed import ValueKind
from pipeline.watching.verdicts import events_of, of_alarm, of_numbers, of_session

DAY: Final = 1440  # minutes
BEGIN: Final = 29_000_000 // DAY * DAY  # epoch minute
SESSIONS: Final = 1_000  # of a service a day
LEARNT: Final = 5_000
_TOGETHER: Final = 30  # minutes that are judged at once
_VALUES: Final = 12  # of a minute
_SLOTS: Final = 60 // SLOT_S


@dataclass(frozen=True)
class Kind:
    """Services alike. `levels`: lines a minute by template. `clump`: lines of a template at once."""

    number: int
    levels: tuple[float, ...]
    clump: float

    def counts(
        self, rng: np.random.Generator, minutes: int
    ) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
        """Lines (minutes, templates), Poisson or negative binomial."""
        mean = np.array(self.levels)
        size = (minutes, len(mean))
        if self.clump > 1:
            mean = rng.gamma(mean / (self.clump - 1), self.clump - 1, size)
        return rng.poisson(mean, size)

    def values(self, rng: np.random.Generator, minute: int) -> ValueCounts:
        """Durations of one minute, log-normal."""
        counts: dict[int, int] = {}
        for value in np.exp(rng.normal(-3.0, 0.5 + 0.2 * self.number, _VALUES)).tolist():
            place = bin_of(ValueKind.DURATION, value)
            counts[place] = counts.get(place, 0) + 1
        return [((minute * _SLOTS, 1, "took", ValueKind.DURATION), counts)]

    def sessions(self, rng: np.random.Generator, number: int) -> list[tuple[int, ...]]:
        """Steps that come or not, and retries."""
        chances = 1.0 - 0.5 ** np.arange(1.0, 11.0)
        comes = rng.random((number, len(chances))) < chances
        retries = rng.geometric(0.7, number) - 1
        return [
            (1, *(np.flatnonzero(row) + 2).tolist(), *[20] * again, 30)
            for row, again in zip(comes, retries.tolist(), strict=True)
        ]

    @cached_property
    def past(self) -> tuple[bytes, bytes, SessionModel]:
        """What the detectors know: states of rates and of numbers, and the model of sessions."""
        rng = np.random.default_rng([self.number, 1])
        rates, numbers = Rates(), Numbers()
        for _ in judged(rates, self.counts(rng, DAY), BEGIN - DAY, math.inf):
            pass
        for minute in range(BEGIN - DAY, BEGIN):
            numbers.step(self.values(rng, minute), judged=True)
        model = SessionModel.fit(self.sessions(rng, LEARNT))
        return rates.pack(), numbers.pack(), replace(model, per_day=SESSIONS)


KINDS: Final = (
    Kind(0, (6.0, 2.0, 0.5), 1.0),
    Kind(1, (30.0, 0.2), 1.0),
    Kind(2, (4.0, 1.0, 0.1), 3.0),
    Kind(3, (1.0, 0.3), 1.0),
)


def judged(
    rates: Rates, counts: "np.ndarray[tuple[int, int], np.dtype[np.int64]]", begin: int, share: float
) -> Iterator[Alarm]:
    """The alarms of these minutes."""
    for first in range(0, len(counts), _TOGETHER):
        some = counts[first : first + _TOGETHER].tolist()
        rows = [
            (begin + first + minute, template + 1, n)
            for minute, row in enumerate(some)
            for template, n in enumerate(row)
            if n
        ]
        rates.add(rows, judged=True)
        yield from rates.close(begin + first + len(some) + 1, alarm_per_day=share)


def measured(service: int, minutes: int, seed: int, share: float) -> list[WatcherFinding]:
    """What is found in the rates and numbers of one service in a calm time, which is nothing but chance."""
    kind, name = KINDS[service % len(KINDS)], f"service-{service}"
    rates_before, numbers_before, _ = kind.past
    rng = np.random.default_rng([seed, service])
    rates, numbers = Rates.unpack(rates_before), Numbers.unpack(numbers_before)
    found = [of_alarm(name, alarm, {}) for alarm in judged(rates, kind.counts(rng, minutes), BEGIN, share)]
    for minute in range(BEGIN, BEGIN + minutes):
        shifts = numbers.step(kind.values(rng, minute), judged=True, alarm_per_day=share)
        found += [of_numbers(name, shift, {}) for shift in shifts]
    return found


def of_sessions(service: int, seed: int) -> list[WatcherFinding]:
    """What is found in the sessions of one service on a calm day."""
    kind, name = KINDS[service % len(KINDS)], f"service-{service}"
    model = kind.past[2]
    sessions = kind.sessions(np.random.default_rng([seed, service, 1]), SESSIONS)
    found = []
    for at, (events, verdict) in enumerate(zip(sessions, model.judge(sessions), strict=True)):
        if verdict.anomalous:
            at_ms = (BEGIN + at * DAY // SESSIONS) * 60_000
            segment = Segment(
                workload=name, key=str(at), source="", at_ms=(at_ms,) * len(events),
                lines=(0,) * len(events), templates=events, dropped=0,
            )  # fmt: skip
            found.append(of_session(segment, verdict, "m1", EventNames({}, {}), per_day=model.per_day))
    return found


def incidents(found: Sequence[WatcherFinding], budget: AlarmBudget) -> int:
    """The number of incidents that a deployment with these findings opens."""
    state = Incidents()
    for finding in sorted(found, key=lambda one: one.at):
        state.add(within_budget(state, events_of([], [finding]), budget)[0])
        state.close(finding.at)
    state.close(datetime.fromtimestamp(BEGIN * 60, UTC) + timedelta(days=3))
    return len(state.all())


@dataclass(frozen=True)
class FalseAlarms:
    """Incidents of a calm time: of one service that has the budget to itself, as a mean of all; and of all
    services that share it. `found`: findings of all."""

    of_one: float
    of_all: int
    found: int


def false_alarms(services: int, minutes: int, *, seed: int, per_day: float) -> FalseAlarms:
    """Of `minutes` of rates and numbers, and of a day of sessions."""
    one, every = (AlarmBudget(per_day=per_day, workloads=n) for n in (1, services))
    sessions = [of_sessions(service, seed) for service in range(services)]
    shared = [measured(service, minutes, seed, every.share) for service in range(services)]
    # What is found first does not depend on the budget, so the others find nothing by themselves either.
    alone = [
        measured(service, minutes, seed, one.share) if found else [] for service, found in enumerate(shared)
    ]
    together = [finding for found in (*sessions, *shared) for finding in found]
    return FalseAlarms(
        of_one=sum(incidents([*a, *b], one) for a, b in zip(sessions, alone, strict=True)) / services,
        of_all=incidents(together, every),
        found=len(together),
    )
