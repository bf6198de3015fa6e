"""Rates of one workload: lines by template and minute, and alarms about their number. A pure state machine.

`observe` takes counts by minute of event time; `close` judges the minutes that are complete and returns
alarms. Event time makes a replay judge a log as it would have been judged live. The caller's clock has two
uses. In a live stream it moves the watermark: a minute is complete once the clock has passed it by the
stream's usual lag. A line later than the clock has a wrong time, unless most
lines are later (sender_clock.py).

Memory is bounded: a state packs into at most 640 KiB. The work of one call is bounded for a caller that says
when its time is up; the next call does the remaining work, with the same result.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
import polars as pl

from pipeline.errors import BadPayload
from pipeline.records.verdict import Reason
from pipeline.records.wire import Codec
from pipeline.watching.rates.columns import UNCOUNTED
from pipeline.watching.rates.detection import LAST_MINUTE, DailyRun, Detection
from pipeline.watching.rates.detector import Detector, PackedDetector
from pipeline.watching.rates.pending import MAX_COUNT, PENDING, PendingBuffer
from pipeline.watching.rates.sender_clock import FUTURE, LIVE, Ahead

VERSION: Final = 4
MAX_PACKED: Final = 640 << 10

_LATENESS: Final = 1  # Allowed lateness: minutes after its end in which a minute's lines may still come.
_LATENESS_REPLAY: Final = 5  # Minutes of event time; a replay is in no hurry, and its files may overlap.
_QUIET: Final = 2  # Minutes of the caller's clock without lines after which a replay is at its end.
_OUT_OF_RANGE: Final = 120  # Minutes behind: not late but out of range.
_STEPS: Final = 60  # Empty minutes judged one by one; a longer gap goes on by hours.
_WEEK: Final = 7 * 1440  # Minutes of a gap that are judged.
_PER_MINUTE: Final = 1024  # Templates counted apart in one minute.
_FOUND: Final = 64  # Detections after which a `close` ends; the next one continues.
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_COUNTS: Final = ("minute", "template_id", "n")

# Whether there is time for more work.
GoesOn = Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One deviation of a workload's rates, alerted once while it lasts.

    `expected` and `seen` are lines from `began` to `at`, of the template or of the workload; for a
    composition shift those of the template that moved most. `p_value` bounds the chance of it by the
    workload's own past, per minute and template. `score` is 0.5 at the threshold and rises towards 1. `cause`
    is equal for equal deviations.
    """

    kind: Reason
    template_id: int | None
    began: datetime
    at: datetime
    expected: float
    seen: float
    p_value: float
    score: float
    cause: str
    sentence: str
    per_day: float  # findings as unlikely that the workload has a day by chance; 0: not left to chance


class _Packed(msgspec.Struct, array_like=True, frozen=True):
    """The wire form of Rates."""

    late: int
    out_of_range: int
    now: int
    heard: int
    lag: int
    live: bool
    scored: PendingBuffer
    baseline: PendingBuffer
    found: list[Detection]
    detector: PackedDetector


# A newer version is as unreadable as a damaged one: the watcher starts anew and waits for no newer worker.
_CODEC: Final = Codec(_Packed, version=VERSION, what="a state of rates", newer=BadPayload)


class Rates:
    """State of one workload. Not thread-safe.

    `late` counts lines that came after their minute was judged, `out_of_range` lines whose time cannot be.
    """

    def __init__(self) -> None:
        self.late = 0
        self.out_of_range = 0
        self.detector = Detector()
        self._scored = PendingBuffer()
        self._baseline = PendingBuffer()
        self._found: list[Detection] = []
        self._now = -1  # of the last close
        self._heard = -1  # of the last close that found lines
        self._lag = 0
        self._live = False

    @property
    def ahead(self) -> int:
        """Minutes by which the lines are ahead of the caller's clock."""
        return self._scored.clock.ahead

    @property
    def learnt_ahead(self) -> int:
        """`ahead` of the lines that are only learnt."""
        return self._baseline.clock.ahead

    @property
    def undecided(self) -> bool:
        """Whether lines further ahead wait until it is known which clock is right."""
        return bool(self._scored.clock.rounds or self._baseline.clock.rounds)

    @property
    def live(self) -> bool:
        """Whether silences show without new lines: then `close` has to be called every minute."""
        return self._live

    @property
    def awaits(self) -> int:
        """The minute in which a run of a daily job would be missed; 0 if none is awaited."""
        return self.detector.daily_runs.next_missed()

    @property
    def behind(self) -> bool:
        """Whether the last `close` ran out of time: the next one continues where it stopped."""
        return any(buffer.until is not None for buffer in (self._baseline, self._scored))

    # ---- counts ------------------------------------------------------------------------------------

    def room(self, *, judged: bool) -> int:
        """How many counts fit in now without judging any at once."""
        return max(0, PENDING // 2 - (self._scored if judged else self._baseline).entries())

    def make_room(self, goes_on: GoesOn, *, judged: bool) -> None:
        """Judge the oldest pending minutes, complete or not, for as long as there is time."""
        self._relieve(self._scored if judged else self._baseline, judged, goes_on)

    def observe(self, counts: pl.DataFrame, *, judged: bool) -> None:
        """Add lines (minute, template_id, n; any order, repeated rows add up). `judged` False: only learnt.

        Raises BadPayload when a column is missing or no number.
        """
        self.add(_rows(counts), judged=judged)

    def add(self, counts: Iterable[tuple[int, int, int]], *, judged: bool) -> None:
        """`observe` for counts (minute, template id, n) in this order, each n above 0."""
        buffer = self._scored if judged else self._baseline
        size = buffer.entries()
        for minute, template_id, n in counts:
            if not 0 <= minute <= LAST_MINUTE or not -(2**63) <= template_id < 2**63:
                self.out_of_range += n
                continue
            buffer.latest = max(buffer.latest, minute)
            minutes = buffer.pending
            if buffer.closed is not None and minute <= buffer.closed:
                if minute > buffer.closed - _OUT_OF_RANGE:
                    self.late += n
                    if judged and self._live:  # wait longer from now on
                        self._lag = min(LIVE, max(self._lag, self._now - minute))
                    continue
                minutes = buffer.out_of_range
            else:
                buffer.fresh = True
                buffer.clock.lines += n
                buffer.oldest, buffer.newest = min(buffer.oldest, minute), max(buffer.newest, minute)
            lines = minutes.setdefault(minute, {})
            row, counted = template_id, template_id in lines
            if not counted and len(lines) >= _PER_MINUTE:
                row, counted = UNCOUNTED, UNCOUNTED in lines
            lines[row] = min(lines.get(row, 0) + n, MAX_COUNT)
            size += not counted
            if size > PENDING // 2:
                self._relieve(buffer, judged, _always)
                size = buffer.entries()

    def _relieve(self, buffer: PendingBuffer, judged: bool, goes_on: GoesOn) -> None:
        """Too much waits: judge the oldest minutes at once, and drop lines out of range."""
        if not buffer.pending or len(buffer.out_of_range) > len(buffer.pending):
            self.out_of_range += buffer.drop_out_of_range()
        while buffer.pending and buffer.entries() > PENDING // 4:
            if not self._advance(buffer, min(buffer.pending), judged, goes_on):
                return

    # ---- judging -----------------------------------------------------------------------------------

    def close(
        self,
        now_minute: int,
        goes_on: GoesOn | None = None,
        *,
        finite: bool = False,
        end: bool = False,
        alarm_per_day: float = math.inf,
    ) -> list[Alarm]:
        """Judge the minutes complete at this minute of the caller's clock (the wall's, or event time itself).

        `goes_on` is asked after every step of the work. Once it says no, or many alarms were found, they are
        returned and `behind` is true; the next call continues with the same minutes, and its own is ignored.
        `finite`: the log has an end, so its lines ahead of the clock wait for it. `end`: this is the end, and
        every line is judged. `alarm_per_day`: a finding that comes more often by chance is reported again
        when it has become less likely.
        """
        self.detector.alarm_per_day = alarm_per_day
        buffers = ((self._baseline, False), (self._scored, True))
        if not self.behind:
            now = max(0, min(now_minute, LAST_MINUTE))
            for buffer, judged in buffers:
                if not (finite or end):
                    self._follow(buffer, now, judged)
                if not end:
                    self._leave_ahead(buffer, now)
                self._go_back(buffer)
                buffer.until = self._watermark(buffer, now + buffer.clock.ahead, judged, end=end)
                buffer.fresh, buffer.oldest, buffer.newest, buffer.latest = False, LAST_MINUTE, -1, -1
            self._now = now + self.ahead
        asked = goes_on or _always
        for buffer, judged in buffers:
            if buffer.until is not None:
                # What was found is marked as reported, so none of it may be lost.
                if not self._advance(
                    buffer, buffer.until, judged, lambda: len(self._found) < _FOUND and asked()
                ):
                    break
                buffer.until = None
        alarms, self._found = [_alarm(detection) for detection in self._found], []
        return alarms

    def _follow(self, buffer: PendingBuffer, now: int, judged: bool) -> None:
        """Decide about lines that are ahead of the clock. Where most lines are, the clock goes ahead."""
        known = buffer.known(now)
        lines = {minute: sum(counts.values()) for minute, counts in buffer.pending.items()}
        decision = buffer.clock.decide(now, lines, buffer.closed)
        if decision is Ahead.DROP:
            self.out_of_range += buffer.drop_ahead(now)
        last, next_one = (
            max(known, default=buffer.closed),
            min(lines.keys() - set(known), default=LAST_MINUTE),
        )
        jumps = decision is Ahead.FOLLOW and last is not None and next_one - last > FUTURE
        if buffer.clock.falls_back(now, buffer.latest) or jumps:
            # The clock was set: no line is missing between the times before and after. The levels stay.
            self._advance(buffer, max(known, default=-1), judged, _always)
            buffer.closed = buffer.gap = None

    def _leave_ahead(self, buffer: PendingBuffer, now: int) -> None:
        """Lines ahead of the clock, which wait, are not new yet."""
        edge = buffer.clock.edge(now)
        if buffer.newest > edge:
            buffer.newest = max(buffer.known(now), default=-1)
            buffer.fresh = buffer.newest >= 0
        if buffer.closed is not None and buffer.closed > edge:
            # An earlier clock of the caller was wrong. The levels stay; time begins anew.
            buffer.closed = buffer.gap = None

    def _go_back(self, buffer: PendingBuffer) -> None:
        """Lines far behind, and no others for two rounds: time goes back to an older log."""
        if not buffer.out_of_range:
            return
        if buffer.pending or buffer.fresh:
            self.out_of_range += buffer.drop_out_of_range()
            buffer.rounds_out_of_range = 0
            return
        buffer.rounds_out_of_range += 1
        if buffer.rounds_out_of_range >= 2:
            buffer.pending, buffer.out_of_range, buffer.rounds_out_of_range = buffer.out_of_range, {}, 0
            buffer.closed = buffer.gap = None
            buffer.fresh, buffer.oldest, buffer.newest = True, min(buffer.pending), max(buffer.pending)

    def _watermark(self, buffer: PendingBuffer, now: int, judged: bool, *, end: bool) -> int | None:
        """The last minute that is complete, None when nothing is new. `now`: with the lead of the lines."""
        last = max((m for m in buffer.pending if end or m <= now + FUTURE), default=None)
        if not judged:  # baseline lines have no deadline
            if buffer.fresh and not end:
                return -1 if last is None else last - _LATENESS_REPLAY
            return last
        if buffer.fresh:
            lag = max(0, now - buffer.newest)
            spread = max(lag, min(LIVE, now - buffer.oldest))
            self._live = lag <= LIVE
            self._lag = min(LIVE, max(spread, self._lag - (now > self._now)))
            self._heard = now
        elif self._now >= 0 and not self._now <= now <= self._now + LIVE:
            self._live = False  # the caller was away, or its clock jumped: missing lines may still come
        if self._live:
            watermark = now - 1 - _LATENESS - self._lag
            return max(watermark, last) if end and last is not None else watermark
        if end or last is None or not 0 <= now - self._heard < _QUIET:
            return last
        return last - _LATENESS_REPLAY

    def _advance(self, buffer: PendingBuffer, watermark: int, judged: bool, goes_on: GoesOn) -> bool:
        """Judge the minutes up to the watermark, empty ones too; False if time ran out."""
        while buffer.pending:
            minute = min(buffer.pending)
            if minute > watermark:
                break
            if not self._empty(buffer, minute - 1, judged, goes_on):
                return False
            counts = buffer.pending.pop(minute)
            buffer.closed, buffer.gap = minute, None
            self._found += self.detector.step(minute, counts, judged=judged)
            if not goes_on():
                return False
        return not (judged and self._live) or self._empty(buffer, watermark, judged, goes_on)

    def _empty(self, buffer: PendingBuffer, until: int, judged: bool, goes_on: GoesOn) -> bool:
        """Judge the minutes without lines up to `until`; False if time ran out before the last one."""
        if buffer.closed is None or until <= buffer.closed:
            return True
        detector = self.detector
        before = buffer.closed if buffer.gap is None else min(buffer.gap, buffer.closed)
        minute, last = buffer.closed + 1, min(until, before + _WEEK)
        one_by_one = min(last, before + _STEPS)
        while minute <= last:
            if minute <= one_by_one:
                n = detector.step_idle(minute, one_by_one - minute + 1, judged=judged)
                if not n:
                    self._found += detector.step(minute, {}, judged=judged)
                    n = 1
            else:
                n = detector.skip_hours(minute, last - minute + 1, judged=judged)
                if not n:
                    n = min(last, minute - minute % 60 + 59) - minute + 1
                    self._found += detector.skip(minute, n, judged=judged)
            minute += n
            if not goes_on() and minute <= until:
                buffer.closed, buffer.gap = minute - 1, before
                return False
        if until > last:
            detector.pause(until)
        buffer.closed, buffer.gap = until, None
        return True

    # ---- wire --------------------------------------------------------------------------------------

    def pack(self) -> bytes:
        """At most `MAX_PACKED` bytes; `unpack` gives a state that behaves as this one."""
        return _CODEC.pack(
            _Packed(
                late=self.late,
                out_of_range=self.out_of_range,
                now=self._now,
                heard=self._heard,
                lag=self._lag,
                live=self._live,
                scored=self._scored.ordered(),
                baseline=self._baseline.ordered(),
                found=self._found,
                detector=self.detector.packed(),
            )
        )

    @classmethod
    def unpack(cls, blob: bytes | None) -> "Rates":
        """A new state for None. Raises BadPayload when the bytes are not one of `pack`."""
        state = cls()
        if blob is None:
            return state
        if len(blob) > MAX_PACKED:
            raise BadPayload(f"a state of rates has {len(blob)} bytes; the most is {MAX_PACKED}")
        packed = _CODEC.unpack(blob)
        try:
            state.detector = Detector.of(packed.detector)
        except ValueError as exc:  # of numpy, for arrays of a wrong length, and of the columns
            raise BadPayload(f"a state of rates of {len(blob)} bytes is not readable: {exc}") from exc
        state.late, state.out_of_range = packed.late, packed.out_of_range
        state._now, state._heard, state._lag, state._live = packed.now, packed.heard, packed.lag, packed.live
        state._scored, state._baseline, state._found = packed.scored, packed.baseline, packed.found
        return state


def _rows(counts: pl.DataFrame) -> list[tuple[int, int, int]]:
    """The counts in order of minute and template. Lists: Polars is far slower for the few rows of a batch."""
    columns = []
    for name in _COUNTS:
        if name not in counts.columns or not counts.schema[name].is_integer():
            raise BadPayload(f"the counts of a workload need integers as {name}; they are {counts.schema}")
        columns.append(counts[name].to_list())
    return sorted(row for row in zip(*columns, strict=True) if None not in row and row[2] > 0)


def _always() -> bool:
    return True


# ---- alarms ----------------------------------------------------------------------------------------


def _alarm(found: Detection) -> Alarm:
    began, at = (_EPOCH + timedelta(minutes=minute) for minute in (found.began, found.minute))
    return Alarm(
        kind=found.kind,
        template_id=found.template_id,
        began=began,
        at=at,
        expected=round(found.expected, 3),
        seen=found.seen,
        p_value=math.exp(-min(found.nats, 690.0)),
        score=round(found.nats / (found.nats + max(found.threshold, 1e-9)), 6),
        cause=found.cause,
        sentence=_sentence(found, began, at),
        per_day=found.per_day,
    )


def _sentence(found: Detection, began: datetime, at: datetime) -> str:
    who = "the workload" if found.template_id is None else f"template {found.template_id}"
    others = ", ".join(str(t) for t in found.others)
    first = f"{began:%Y-%m-%d %H:%M} UTC"
    span = f"in the minute {first}" if at <= began else f"from {first} to {at:%H:%M}"
    season = {"24": " at these hours", "168": " at these hours of the week"}.get(found.season, "")
    usual = f"{found.expected:.1f}" if found.expected < 10 else f"{found.expected:.0f}"
    match found.kind:
        case Reason.RATE_SILENCE if found.run:
            return _missed_run(found.run, who, others)
        case Reason.RATE_SILENCE:
            if others:
                return f"many templates stopped together after {first} ({others} and more)"
            absence = "nothing at all came" if found.template_id is None else f"{who} did not come"
            return f"{absence} {span}; its past expects {usual} lines{season}"
        case Reason.RATE_MIX:
            movers = f"; most of all {others}" if others else ""
            return f"the mix of templates changed {span}{movers}"
        case Reason.RATE_BURST if not found.expected:
            new = f"many new templates ({others} and more) came" if others else f"{who} is new and came"
            return f"{new} {found.seen:.0f} times {span}"
        case _:
            more = f" (templates {others} and more together)" if others else ""
            return f"{who} came {found.seen:.0f} times {span}; its past expects {usual}{season}{more}"


def _missed_run(run: DailyRun, who: str, others: str) -> str:
    first, last = (_EPOCH + timedelta(minutes=minute) for minute in (run.first, run.last))
    usual = f"at {first:%H:%M}" if first == last else f"between {first:%H:%M} and {last:%H:%M}"
    more = f"; {others} did not come either" if others else ""
    return f"{who} did not come on {last:%Y-%m-%d}: on {run.days} days before it came {usual} UTC{more}"
