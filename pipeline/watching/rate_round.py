"""A round's work on rates and numbers: counts lines per minute, and looks at workloads whose minutes are
complete."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from pipeline.errors import BadPayload
from pipeline.logs import logger
from pipeline.records.batch import Purpose
from pipeline.watching.callbacks import ANY_FAILURE, passes
from pipeline.watching.numbers.alarms import NumberAlarm
from pipeline.watching.numbers.numbers import Numbers
from pipeline.watching.observation import Lane
from pipeline.watching.rates.minute_counts import MinuteCounts
from pipeline.watching.rates.rates import Alarm, GoesOn, Rates
from pipeline.watching.state import WatcherState
from pipeline.watching.verdicts import of_alarm, of_numbers
from pipeline.watching.view import Changes, Spare, View

T = TypeVar("T")

MAX_RATED: Final = 50  # workloads of one round: some of their states have 100 KiB
MAX_WORKLOADS: Final = 10_000
MAX_RATE_BYTES: Final = 128 << 20  # of the states of all rates and numbers
FORGET_MS: Final = 30 * 86_400_000  # after so long without a line a workload is forgotten


@dataclass(slots=True, kw_only=True)
class RateRound:
    """The work of one round on rates, of `budget_s` at most. `old_s`: the same for workloads that are not
    live, whose minutes can wait. `finite`: an end will come. `end`: nothing more comes, all minutes count.
    `spare`: WAITING drops the counts of the workloads that are due."""

    state: WatcherState
    view: View
    clock: Callable[[], float]  # seconds
    budget_s: float
    alarm_per_day: float  # share of the alarm budget of a workload and a kind of finding
    old_s: float
    finite: bool
    end: bool
    spare: Spare = Spare.NOTHING
    changes: Changes = field(default_factory=Changes)

    def run(self) -> Changes:
        """Raises RedisUnavailable."""
        all_counts, changes = self.view.minute_counts, self.changes
        # A batch that is stuck must not look like a silence, so time stands still for it.
        now_ms = min(self.view.now_ms, self.view.in_flight.get(Lane.FRESH, self.view.now_ms))
        due = self._count(now_ms // 60_000)
        # The workloads that waited longest come first, so each has its turn.
        due.sort(key=lambda name: all_counts[name].last_round)
        changes.more = len(due) > MAX_RATED
        states = self.state.rates(due[:MAX_RATED])
        # Those of workloads without waiting values are neither judged nor learnt from.
        distributions = self.state.distributions([n for n in due[:MAX_RATED] if all_counts[n].has_values])
        alarms: list[tuple[str, Alarm]] = []
        shifts: list[tuple[str, NumberAlarm]] = []
        began = self.clock()
        for n, workload in enumerate(due[:MAX_RATED]):
            counts = all_counts[workload]
            goes_on = partial(self._goes_on, began + (self.budget_s if counts.live else self.old_s))
            if n and not goes_on():
                changes.more = True
                continue
            changes.minute_counts[workload] = counts
            waiting = counts.lines
            if self.spare is Spare.WAITING:
                self._give_up(workload, counts, waiting)
                continue
            rates = self._readable("rates", Rates.unpack, workload, states.get(workload))
            try:
                found = self._rates(counts, rates, now_ms // 60_000, goes_on)
                alarms += [(workload, alarm) for alarm in found]
                blob = changes.rates[workload] = rates.pack()
                found_numbers = self._numbers(workload, counts, rates, distributions.get(workload))
                shifts += [(workload, shift) for shift in found_numbers]
                counts.size = len(blob) + counts.numbers_size
            except ANY_FAILURE as exc:  # costs this workload's minutes, not those of other workloads
                if passes(exc):
                    raise
                logger(workload=workload).exception("watch.failed", part="rates")
                self._give_up(workload, counts, waiting)
            changes.more |= counts.behind or self._ends(counts)
        self._forget()
        named = [*(alarm.template_id for _, alarm in alarms), *(alarm.template_id for _, alarm in shifts)]
        texts = self.state.texts(one for one in named if one is not None)
        changes.found = [of_alarm(workload, alarm, texts) for workload, alarm in alarms]
        changes.found += [of_numbers(workload, alarm, texts) for workload, alarm in shifts]
        return changes

    def _give_up(self, workload: str, counts: MinuteCounts, lines: int) -> None:
        counts.forget()
        self.changes.failed[workload] += lines

    def _goes_on(self, until: float) -> bool:
        return self.clock() < until

    def _rates(self, counts: MinuteCounts, rates: Rates, minute: int, goes_on: GoesOn) -> list[Alarm]:
        """Judge the lines of complete minutes."""
        late, out_of_range = rates.late, rates.out_of_range
        alarms = counts.judge(
            rates, minute, finite=self.finite, end=self.end, goes_on=goes_on, alarm_per_day=self.alarm_per_day
        )
        counts.left_out.late += rates.late - late
        counts.left_out.out_of_range += rates.out_of_range - out_of_range
        return alarms

    def _numbers(
        self, workload: str, counts: MinuteCounts, rates: Rates, blob: bytes | None
    ) -> list[NumberAlarm]:
        """Judge the values of complete minutes."""
        learnt, judged = counts.complete_values(
            counts.last_round, finite=self.finite, end=self.end, undecided=rates.undecided
        )
        if not learnt and not judged:
            return []
        numbers = self._readable("numbers", Numbers.unpack, workload, blob)
        without = numbers.without
        numbers.step(learnt.items(), judged=False)
        alarms = numbers.step(judged.items(), judged=True, alarm_per_day=self.alarm_per_day)
        counts.left_out.values += round(numbers.without - without)
        packed = self.changes.distributions[workload] = numbers.pack()
        counts.numbers_size = len(packed)
        return alarms

    def _readable(
        self, what: str, unpack: Callable[[bytes | None], T], workload: str, blob: bytes | None
    ) -> T:
        """A new state in place of a damaged one."""
        try:
            return unpack(blob)
        except BadPayload as exc:
            logger(workload=workload).warning("watch.damaged", what=what, why=str(exc))
            self.changes.failed[workload] += 1
            return unpack(None)

    def _count(self, minute: int) -> list[str]:
        """Count the lines of this round's observations; returns the workloads whose rates are due."""
        view, changes = self.view, self.changes
        for observation in view.observed:
            if observation.rates:
                name = observation.workload
                counts = changes.minute_counts[name] = view.minute_counts.setdefault(name, MinuteCounts())
                counts.observe(observation, judged=observation.purpose is Purpose.SCORE)
        for name, counts in view.minute_counts.items():
            if counts.ahead and not view.more:
                counts.advance(view.in_flight)
                changes.minute_counts[name] = counts
        return [
            name
            for name, counts in view.minute_counts.items()
            if counts.is_due(minute, view.now_ms, finite=self.finite) or self._ends(counts)
        ]

    def _ends(self, counts: MinuteCounts) -> bool:
        return self.end and bool(counts.waiting or counts.after)

    def _forget(self) -> None:
        """Forget workloads without lines for FORGET_MS, and past the limits the longest idle ones."""
        all_counts, changes = self.view.minute_counts, self.changes
        oldest = sorted(all_counts, key=lambda name: all_counts[name].newest_ms)
        expired = {name for name in oldest if self.view.now_ms - all_counts[name].newest_ms > FORGET_MS}
        surplus = max(0, len(oldest) - MAX_WORKLOADS)
        room = MAX_RATE_BYTES - sum(all_counts[name].size for name in oldest[surplus:])
        while room < 0:
            room += all_counts[oldest[surplus]].size
            surplus += 1
        if lost := len(set(oldest[:surplus]) - expired):
            changes.grown["workloads"] = lost
        changes.forgotten = sorted(expired.union(oldest[:surplus]))
        for name in changes.forgotten:
            changes.minute_counts.pop(name, None)
            changes.rates.pop(name, None)
            changes.distributions.pop(name, None)
