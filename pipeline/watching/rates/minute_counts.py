"""Line counts of one workload by minute and template that its rate detector has not received yet.

The detector's state is large and a minute is long, so counts gather here and move to the detector about once
a minute. Counts newer than a batch that is still in flight stay here: half a minute would look like a
silence.

A log with one line an hour has years of minutes to judge. A round therefore ends when its time is up; the
next round continues, and the counts that the detector has not taken wait here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, cast

from pipeline.errors import BadPayload
from pipeline.records.left_out import LeftOut
from pipeline.records.wire import Codec
from pipeline.watching.observation import Lane, Observation
from pipeline.watching.rates.detection import LAST_MINUTE
from pipeline.watching.rates.rates import Alarm, GoesOn, Rates
from pipeline.watching.rates.sender_clock import FUTURE, LIVE, SPREAD, middle_minute
from pipeline.watching.rates.source_clocks import SourceClocks, minutes_to_move
from pipeline.watching.values.sampling import SLOT_S

SILENT_MS: Final = 86_400_000  # a workload without any line for a day is silent, which is no news any more
EXTRA_ROUNDS: Final = (
    3  # minutes without new counts that are still judged: a file that was read is judged to its end
)
ENDS_PART: Final = (
    10  # a stream at least so many session gaps long has at most a tenth of itself near its end
)
MOST_COUNTS: Final = 2_000  # pairs of minute and template that may gather; the detector takes 4,096 at once
# Pairs of a workload past which nothing is read until its detector takes some. A batch may bring twice that.
MOST_WAITING: Final = 2 * MOST_COUNTS
# Pairs of a finite log that wait for its end: a few MiB. Its batches come in any order (files are read side
# by side, and what came before the first model is judged last), so an earlier look would call lines late.
MOST_HELD: Final = 200_000
MOST_AHEAD: Final = 32  # batches that wait for their predecessors; beyond, the newest two become one

SLOTS: Final = 60 // SLOT_S  # of a minute

# Per lane, when its oldest batch in flight was accepted; lanes without one are absent.
Waiting = Mapping[Lane, int]
Counts = dict[tuple[int, int], int]  # (minute, template) -> lines
Values = dict[tuple[int, int, str, str], dict[int, int]]  # (slot, template, name, kind) -> values by bin


@dataclass(slots=True, kw_only=True)
class MinuteCounts:
    """The counts of a workload between two rounds. Minutes and times of lines are event time."""

    at_ms: int | None = None  # Watermark: newest line before which no batch is missing.
    began_ms: int | None = None  # Oldest line that was judged.
    newest_ms: int = 0  # When its newest batch was accepted.
    last_round: int = 0  # Minute of Redis time of the last round.
    size: int = 0  # Bytes of the detector's packed state, with that of the numbers.
    numbers_size: int = 0
    live: bool = False  # Silences show without new lines (`Rates.live`).
    awaits: int = 0  # Minute in which a run of a daily job would be missed (`Rates.awaits`).
    after: int = 0  # Rounds still to come although nothing came.
    behind: bool = False  # The last round ran out of time.
    ahead: list[tuple[Lane, int, int]] = field(default_factory=list)  # (lane, accepted, newest line).
    counts: Counts = field(default_factory=dict)
    learnt: Counts = field(default_factory=dict)  # of lines that are only learnt from
    values: Values = field(default_factory=dict)
    learnt_values: Values = field(default_factory=dict)
    lead: int = 0  # Minutes by which its lines are ahead of the clock (`Rates.ahead`).
    learnt_lead: int = 0
    sources: SourceClocks = field(default_factory=dict)
    left_out: LeftOut = field(default_factory=LeftOut)

    def observe(self, observation: Observation, *, judged: bool) -> None:
        """Count a batch. Lines that are only learnt from move no time: a baseline may be of any time."""
        self.newest_ms = max(self.newest_ms, observation.accepted_ms)
        move = self._note_clock(observation, judged=judged)
        into = self.counts if judged else self.learnt
        for minute, template_id, n in observation.rates.rows():
            key = minute + move, template_id
            into[key] = into.get(key, 0) + n
        values = self.values if judged else self.learnt_values
        for slot, *of, bins, counts in observation.values.rows():
            key_of_values = cast("tuple[int, int, str, str]", (slot + move * SLOTS, *of))
            sums = values.setdefault(key_of_values, {})
            for number, n in zip(bins, counts, strict=False):
                sums[number] = sums.get(number, 0) + n
        if not judged or not observation.rates:
            return
        oldest = (int(observation.rates["minute"][0]) + move) * 60_000
        self.began_ms = oldest if self.began_ms is None else min(self.began_ms, oldest)
        # One line of a broken clock must not make every minute look complete.
        newest_ms = min(observation.newest_ms + move * 60_000, self._edge_ms(observation))
        self.ahead.append((observation.lane, observation.accepted_ms, newest_ms))
        if len(self.ahead) > MOST_AHEAD:
            self.ahead.sort(key=lambda entry: entry[1])
            (_, _, before), (lane, accepted, last) = self.ahead[-2:]
            self.ahead[-2:] = [(lane, accepted, max(before, last))]

    def _edge_ms(self, observation: Observation) -> int:
        """The last time that a line of this batch may have."""
        return observation.accepted_ms + (self.lead + FUTURE) * 60_000

    def _note_clock(self, observation: Observation, *, judged: bool) -> int:
        """Count the lines that are ahead of the clock; returns the minutes to add to the batch's times."""
        now = observation.accepted_ms // 60_000
        if observation.newest_ms > now * 60_000 + FUTURE * 60_000:
            for minute, _, n in observation.rates.rows():
                if minute > now + FUTURE:
                    self.left_out.count_ahead(n, minute - now)
        if not judged or observation.lane is not Lane.FRESH or not observation.rates:
            return 0
        lead = observation.newest_ms // 60_000 - now
        if not -LIVE <= lead - self.lead <= FUTURE:  # one line of a broken clock says nothing of the others
            lead = middle_minute((minute, n) for minute, _, n in observation.rates.rows()) - now
        return minutes_to_move(
            self.sources, observation.source, lead=lead, ahead=self.lead, round_minute=self.last_round
        )

    def advance(self, waiting: Waiting) -> None:
        """Move the watermark: batches accepted before the oldest one in flight are complete."""
        ahead = []
        for lane, accepted, at_ms in self.ahead:
            if accepted >= waiting.get(lane, accepted + 1):
                ahead.append((lane, accepted, at_ms))
            else:
                self.at_ms = at_ms if self.at_ms is None else max(self.at_ms, at_ms)
        self.ahead = ahead

    def end_ms(self, timeout_ms: int) -> int | None:
        """If the stream ended now, sessions after this time may lack their end.

        None if most sessions would: a short stream is all end.
        """
        last = max((at for _, _, at in self.ahead), default=self.at_ms)
        last = last if self.at_ms is None or last is None else max(last, self.at_ms)
        if last is None or self.began_ms is None or last - self.began_ms < ENDS_PART * timeout_ms:
            return None
        return last - timeout_ms

    @property
    def waiting(self) -> int:
        """Counts that wait here."""
        return len(self.counts) + len(self.learnt) + len(self.values) + len(self.learnt_values)

    @property
    def lines(self) -> int:
        """Lines that wait here."""
        return sum(self.counts.values()) + sum(self.learnt.values())

    @property
    def full(self) -> bool:
        """Whether too many counts wait for the end of a finite log."""
        return len(self.counts) + len(self.learnt) > MOST_HELD

    def is_due(self, minute: int, now_ms: int, *, finite: bool = False) -> bool:
        """Whether its rates or values are judged in this minute. `finite`: rates wait for the end of the
        log."""
        if finite:
            return self.behind or self.full or len(self.values) + len(self.learnt_values) > MOST_COUNTS
        if self.behind or self.waiting > MOST_COUNTS:
            return True
        goes_on = self.live and (now_ms - self.newest_ms < SILENT_MS or minute <= self.awaits + LIVE)
        return minute > self.last_round and bool(self.counts or self.learnt or self.after or goes_on)

    def judge(
        self,
        rates: Rates,
        minute: int,
        *,
        finite: bool = False,
        end: bool = False,
        goes_on: GoesOn | None = None,
        alarm_per_day: float = math.inf,
    ) -> list[Alarm]:
        """Move the complete counts to the detector at this minute of Redis time, and return its alarms.

        Minutes that may still miss a batch stay, unless nothing more will come (`end`) or too many counts
        wait. `finite`: the end will come; of its counts only the older half of too many is judged before.
        Once `goes_on` says no, the next call continues at once (`behind`).
        """
        goes_on = goes_on or _always
        self.last_round, handed = max(self.last_round, minute), True
        if finite and not (end or self.full or self.behind):
            return []
        began = not rates.behind
        if began:
            handed = self._hand_over(rates, minute, goes_on, finite=finite, end=end)
        close = partial(rates.close, alarm_per_day=alarm_per_day)
        alarms = close(self.last_round, goes_on, finite=finite, end=end) if handed else []
        # The last minutes too, unless a continued round has judged them already.
        if end and handed and not rates.behind and (began or self.after):
            self.last_round, self.after = self.last_round + EXTRA_ROUNDS, 0
            alarms += close(self.last_round, goes_on, end=True)
        self.behind = rates.behind or not handed
        self.live, self.awaits = rates.live, rates.awaits
        self._follow(rates)
        return alarms

    def _follow(self, rates: Rates) -> None:
        if rates.ahead < self.lead:
            self.at_ms = None  # of the earlier clock
        self.lead, self.learnt_lead = rates.ahead, rates.learnt_ahead

    def _hand_over(self, rates: Rates, minute: int, goes_on: GoesOn, *, finite: bool, end: bool) -> bool:
        """Move the complete counts, oldest minutes first; False if time ran out before the last one."""
        everything = end or finite or len(self.counts) > MOST_COUNTS
        until, horizon = self._complete_until(minute)
        # The detector decides about lines that are further ahead, so they do not wait here.
        complete = sorted(key for key in self.counts if everything or not until < key[0] <= horizon)
        if finite and not end:
            complete = complete[: len(complete) // 2]
        self.after = EXTRA_ROUNDS if complete or self.learnt else max(0, self.after - 1)
        for counts, keys, judged in (
            (self.learnt, sorted(self.learnt), False),
            (self.counts, complete, True),
        ):
            at = 0
            while at < len(keys):
                room = rates.room(judged=judged)
                if room:
                    rows = [(*key, counts.pop(key)) for key in keys[at : at + room]]
                    rates.add(rows, judged=judged)
                    at += room
                elif goes_on():
                    rates.make_room(goes_on, judged=judged)
                else:
                    return False
        return True

    @property
    def has_values(self) -> bool:
        """Whether values of numbers wait."""
        return bool(self.values or self.learnt_values)

    def complete_values(
        self, minute: int, *, finite: bool = False, end: bool = False, undecided: bool = False
    ) -> tuple[Values, Values]:
        """Take the values of complete minutes, in the order of time: those that are only learnt, and the
        others.

        Values that are ahead of the clock wait while it is `undecided` which clock is right, then they are
        dropped, as where too many wait. Those of a `finite` log are never dropped."""
        until, horizon = self._complete_until(minute)
        full = self.waiting > MOST_COUNTS
        if end or (finite and full):
            until = horizon = learnt_until = LAST_MINUTE
        else:
            until = horizon if full else min(until, horizon)
            learnt_until = horizon - self.lead + self.learnt_lead
        complete, self.values = _taken(self.values, until)
        learnt, self.learnt_values = _taken(self.learnt_values, learnt_until)
        if full or not (finite or undecided):
            self.values = self._dropped(self.values, horizon + SPREAD)
            self.learnt_values = self._dropped(self.learnt_values, learnt_until + SPREAD)
        return learnt, complete

    def _dropped(self, values: Values, horizon: int) -> Values:
        """These values without those that are ahead of the clock, which are counted."""
        kept = {key: counts for key, counts in values.items() if key[0] // SLOTS <= horizon}
        gone = (counts for key, counts in values.items() if key not in kept)
        self.left_out.values += sum(sum(counts.values()) for counts in gone)
        return kept

    def _complete_until(self, minute: int) -> tuple[int, int]:
        """The last complete minute by the watermark, and the last that a clock may show."""
        at = -1 if self.at_ms is None else self.at_ms // 60_000
        return at, max(minute, self.newest_ms // 60_000) + self.lead + FUTURE

    def forget(self) -> None:
        """Drop the waiting counts."""
        self.counts, self.learnt, self.behind = {}, {}, False
        self.values, self.learnt_values = {}, {}

    def pack(self) -> bytes:
        return _CODEC.pack(self)

    @classmethod
    def unpack(cls, blob: bytes) -> "MinuteCounts":
        """Raises BadPayload."""
        return _CODEC.unpack(blob)


# A newer version is as unreadable as a damaged one: the watcher starts anew and waits for no newer worker.
_CODEC: Final = Codec(MinuteCounts, version=1, what="the minute counts of a workload", newer=BadPayload)


def _taken(values: Values, until: int) -> tuple[Values, Values]:
    """The values up to the minute `until` in the order of time, and the others."""
    taken = {key: values[key] for key in sorted(values) if key[0] // SLOTS <= until}
    return taken, {key: counts for key, counts in values.items() if key not in taken}


def _always() -> bool:
    return True
