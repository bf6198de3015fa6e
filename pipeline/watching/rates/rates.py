"""Rates of one workload: lines by template and minute, and what is wrong with their number. A pure state machine.

`observe` takes counts by minute of event time, `close` judges the minutes that are complete and gives alarms. Time is
event time, so a replay of an old log is judged as it would have been. The caller's clock serves for two things: while
the stream is live, a minute is complete when the clock has passed it by the stream's usual lag; and a time past the
clock is a wrong one. Whatever arrives, memory is bounded, a state packs into at most 640 KiB; and so is the work of one
call, for a caller that says when its time is up: what is left is done by the next one, and comes to the same.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgpack
import polars as pl

from pipeline.errors import BadPayload
from pipeline.records.verdict import Reason
from pipeline.watching.rates.baseline import Sign, cause_of
from pipeline.watching.rates.pending import LAST_MINUTE, MAX_COUNT, PENDING, Track, lines, whole
from pipeline.watching.rates.profile import Profile
from pipeline.watching.rates.table import NOWHERE

VERSION: Final = 1
MAX_PACKED: Final = 640 << 10
ALARMS_PER_DAY: Final = 1.0  # false ones, of a workload

_GRACE: Final = 1  # minutes after its end in which a minute's lines may still come
_GRACE_REPLAY: Final = 5  # minutes of event time; a replay is in no hurry, and its files may overlap
_QUIET: Final = 2  # minutes of the caller's clock without lines after which a replay is at its end
_LIVE: Final = 15  # minutes of lag up to which a stream is live
FUTURE: Final = 10  # minutes that clocks of other machines may be ahead of ours
_FAR: Final = 120  # minutes behind: not late but of another time
_STEPS: Final = 60  # empty minutes judged one by one; a longer gap goes on by hours
_WEEK: Final = 7 * 1440  # minutes of a gap that are looked at
_PER_MINUTE: Final = 1024  # templates counted apart in one minute
_FOUND: Final = 64  # alarms that wait for `close`
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_COUNTS: Final = ("minute", "template_id", "n")

# Whether there is time for more work.
GoesOn = Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One thing that is wrong with a workload's rates, told once while it lasts.

    `expected` and `seen` are lines from `began` to `at`, of the template or of the workload; for a changed mix those of
    the template that moved most. `p_value` bounds the chance of it by the workload's own past, per minute and template;
    `score` is 0.5 at the threshold and rises towards 1. `cause` is equal for equal things.
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


class Rates:
    """State of one workload. Not thread-safe. `late` and `stray` count lines that came after their minute was judged,
    and lines whose time cannot be."""

    def __init__(self, *, alarms_per_day: float = ALARMS_PER_DAY) -> None:
        self.alarms_per_day = alarms_per_day
        self.late = 0
        self.stray = 0
        self._profile = Profile()
        self._scored = Track()
        self._baseline = Track()
        self._found: list[Sign] = []
        self._now = -1  # of the last close
        self._heard = -1  # of the last close that found lines
        self._lag = 0
        self._live = False

    @property
    def live(self) -> bool:
        """Whether silences show without new lines: then `close` has to be called every minute."""
        return self._live

    @property
    def behind(self) -> bool:
        """Whether the last `close` ran out of time: the next one goes on where it stopped."""
        return any(track.until is not None for track in (self._baseline, self._scored))

    # ---- taking in ---------------------------------------------------------------------------------

    def room(self, *, judged: bool) -> int:
        """How many counts can be taken in now without judging any at once."""
        return max(0, PENDING // 2 - (self._scored if judged else self._baseline).entries())

    def make_room(self, goes_on: GoesOn, *, judged: bool) -> None:
        """Judge the oldest minutes that wait, whole or not, for as long as there is time."""
        self._relieve(self._scored if judged else self._baseline, judged, goes_on)

    def observe(self, counts: pl.DataFrame, *, judged: bool) -> None:
        """Add lines (columns minute, template_id, n; any order, repeated rows add up). `judged` False: only learnt.

        Raises BadPayload when a column is missing or no number.
        """
        track = self._scored if judged else self._baseline
        size = track.entries()
        for minute, template_id, n in _rows(counts):
            if not 0 <= minute <= LAST_MINUTE or not -(2**63) <= template_id < 2**63:
                self.stray += n
                continue
            place = track.pending
            if track.closed is not None and minute <= track.closed:
                if minute > track.closed - _FAR:
                    self.late += n
                    if judged and self._live:  # wait longer from now on
                        self._lag = min(_LIVE, max(self._lag, self._now - minute))
                    continue
                place = track.away
            else:
                track.fresh = True
                track.oldest, track.newest = min(track.oldest, minute), max(track.newest, minute)
            held = place.setdefault(minute, {})
            row, known = template_id, template_id in held
            if not known and len(held) >= _PER_MINUTE:
                row, known = NOWHERE, NOWHERE in held
            held[row] = min(held.get(row, 0) + n, MAX_COUNT)
            size += not known
            if size > PENDING // 2:
                self._relieve(track, judged, _always)
                size = track.entries()

    def _relieve(self, track: Track, judged: bool, goes_on: GoesOn) -> None:
        """Too much waits: judge the oldest minutes at once, and drop what is of another time."""
        if not track.pending or len(track.away) > len(track.pending):
            self.stray += lines(track.away)
            track.away = {}
        while track.pending and track.entries() > PENDING // 4:
            if not self._advance(track, min(track.pending), judged, goes_on):
                return

    # ---- judging -----------------------------------------------------------------------------------

    def close(self, now_minute: int, goes_on: GoesOn | None = None) -> list[Alarm]:
        """Judge what is complete at this minute of the caller's clock (the wall's, or event time itself).

        `goes_on` is asked after every step of the work. Once it says no, what was found so far is returned and `behind` is
        true; the next call only goes on with the same minutes, and its own minute is not looked at.
        """
        tracks = ((self._baseline, False), (self._scored, True))
        if not self.behind:
            now = max(0, min(now_minute, LAST_MINUTE))
            for track, judged in tracks:
                self._drop_future(track, now)
                self._other_time(track)
                track.until = self._horizon(track, now, judged)
                track.fresh, track.oldest, track.newest = False, LAST_MINUTE, -1
            self._now = now
        for track, judged in tracks:
            if track.until is not None:
                if not self._advance(track, track.until, judged, goes_on or _always):
                    break
                track.until = None
        alarms, self._found = [_alarm(sign) for sign in self._found], []
        return alarms

    def _drop_future(self, track: Track, now: int) -> None:
        for minute in [m for m in track.pending if m > now + FUTURE]:
            self.stray += sum(track.pending.pop(minute).values())
        if track.newest > now + FUTURE:
            track.newest = max(track.pending, default=-1)
            track.fresh = bool(track.pending)
        if track.closed is not None and track.closed > now + FUTURE:
            # An earlier clock of the caller was wrong. What was learnt stays; time begins anew.
            track.closed = track.gap = None

    def _other_time(self, track: Track) -> None:
        """Lines far behind, and nothing else for two rounds: an older log is read now, so time goes back to it."""
        if not track.away:
            return
        if track.pending or track.fresh:
            self.stray += lines(track.away)
            track.away, track.away_rounds = {}, 0
            return
        track.away_rounds += 1
        if track.away_rounds >= 2:
            track.pending, track.away, track.away_rounds = track.away, {}, 0
            track.closed = track.gap = None
            track.fresh, track.oldest, track.newest = True, min(track.pending), max(track.pending)

    def _horizon(self, track: Track, now: int, judged: bool) -> int | None:
        """The last minute that is complete, None when nothing is new."""
        if not judged:  # nobody waits for what is only learnt
            if track.fresh:
                return max(track.pending, default=-1) - _GRACE_REPLAY
            return max(track.pending, default=None)
        if track.fresh:
            lag = max(0, now - track.newest)
            spread = max(lag, min(_LIVE, now - track.oldest))
            self._live = lag <= _LIVE
            self._lag = min(_LIVE, max(spread, self._lag - (now > self._now)))
            self._heard = now
        elif self._now >= 0 and not self._now <= now <= self._now + _LIVE:
            self._live = False  # the caller was away, or its clock jumped: what is missing may still come
        if self._live:
            return now - 1 - _GRACE - self._lag
        last = max(track.pending, default=None)
        if last is None or not 0 <= now - self._heard < _QUIET:
            return last
        return last - _GRACE_REPLAY

    def _advance(self, track: Track, horizon: int, judged: bool, goes_on: GoesOn) -> bool:
        """Judge the minutes up to `horizon`, those without lines too; False when there was no time for all of them."""
        while track.pending:
            minute = min(track.pending)
            if minute > horizon:
                break
            if not self._empty(track, minute - 1, judged, goes_on):
                return False
            counts = track.pending.pop(minute)
            track.closed, track.gap = minute, None
            self._keep(self._profile.step(minute, counts, judged=judged, per_day=self.alarms_per_day))
            if not goes_on():
                return False
        return not (judged and self._live) or self._empty(track, horizon, judged, goes_on)

    def _empty(self, track: Track, until: int, judged: bool, goes_on: GoesOn) -> bool:
        """The minutes without any line up to `until`; False when there was no time for all of them."""
        if track.closed is None or until <= track.closed:
            return True
        profile, per_day = self._profile, self.alarms_per_day
        before = track.closed if track.gap is None else min(track.gap, track.closed)
        minute, last = track.closed + 1, min(until, before + _WEEK)
        one_by_one = min(last, before + _STEPS)
        while minute <= last:
            if minute <= one_by_one:
                n = profile.idle(minute, one_by_one - minute + 1, judged=judged, per_day=per_day)
                if not n:
                    self._keep(profile.step(minute, {}, judged=judged, per_day=per_day))
                    n = 1
            else:
                n = min(last, minute - minute % 60 + 59) - minute + 1
                self._keep(profile.skip(minute, n, judged=judged, per_day=per_day))
            minute += n
            if not goes_on() and minute <= until:
                track.closed, track.gap = minute - 1, before
                return False
        if until > last:
            profile.pause(until)
        track.closed, track.gap = until, None
        return True

    def _keep(self, signs: list[Sign]) -> None:
        self._found += signs[: max(0, _FOUND - len(self._found))]

    # ---- wire --------------------------------------------------------------------------------------

    def pack(self) -> bytes:
        """At most `MAX_PACKED` bytes of msgpack; `unpack` gives a state that behaves as this one."""
        tracks = [self._scored.pack(), self._baseline.pack()]
        clock = [self.late, self.stray, self._now, self._heard, self._lag, self._live]
        found = [
            [
                s.kind.value,
                s.template_id,
                s.began,
                s.minute,
                s.expected,
                s.seen,
                s.nats,
                s.bar,
                s.others,
                s.season,
            ]
            for s in self._found
        ]
        return bytes(msgpack.packb([VERSION, clock, tracks, found, self._profile.pack()]))

    @classmethod
    def unpack(cls, blob: bytes | None, *, alarms_per_day: float = ALARMS_PER_DAY) -> "Rates":
        """A new state for None. Raises BadPayload when the bytes are not one of `pack`."""
        made = cls(alarms_per_day=alarms_per_day)
        if blob is None:
            return made
        if len(blob) > MAX_PACKED:
            raise BadPayload(f"a state of rates has {len(blob)} bytes; the most is {MAX_PACKED}")
        try:
            version, *rest = msgpack.unpackb(blob, strict_map_key=False)
            if version != VERSION:
                raise BadPayload(f"a state of rates has version {version!r}; this build reads {VERSION}")
            clock, tracks, found, profile = rest
            made.late, made.stray, made._now, made._heard, made._lag = (whole(v) for v in clock[:5])
            made._live = bool(clock[5])
            scored, baseline = tracks
            made._scored, made._baseline = Track.unpack(scored), Track.unpack(baseline)
            made._found = [_sign(data) for data in found]
            made._profile = Profile.unpack(profile)
        # numpy and msgpack raise several unrelated classes on damaged bytes.
        except (
            ValueError,
            TypeError,
            LookupError,
            OverflowError,
            AttributeError,
            msgpack.UnpackException,
        ) as exc:
            raise BadPayload(f"a state of rates of {len(blob)} bytes is not readable: {exc}") from exc
        return made


def _rows(counts: pl.DataFrame) -> list[tuple[int, int, int]]:
    """The counts in order of minute and template. As lists: for the few rows of a batch Polars' own way is far slower."""
    columns = []
    for name in _COUNTS:
        if name not in counts.columns or not counts.schema[name].is_integer():
            raise BadPayload(
                f"the counts of a workload need whole numbers as {name}; they are {counts.schema}"
            )
        columns.append(counts[name].to_list())
    return sorted(row for row in zip(*columns, strict=True) if None not in row and row[2] > 0)


def _always() -> bool:
    return True


def _sign(data: Any) -> Sign:
    kind, template_id, began, minute, expected, seen, nats, bar, others, season = data
    figures = [float(v) for v in (expected, seen, nats, bar)]
    if not all(map(math.isfinite, figures)) or not isinstance(season, str):
        raise ValueError("an alarm is not readable")
    return Sign(
        kind=Reason(kind),
        template_id=None if template_id is None else whole(template_id),
        began=whole(began, 0, LAST_MINUTE),
        minute=whole(minute, 0, LAST_MINUTE),
        expected=figures[0], seen=figures[1], nats=figures[2], bar=figures[3],
        others=tuple(whole(t) for t in others), season=season,
    )  # fmt: skip


# ---- what is told ----------------------------------------------------------------------------------


def _alarm(sign: Sign) -> Alarm:
    began = _EPOCH + timedelta(minutes=sign.began)
    at = _EPOCH + timedelta(minutes=sign.minute)
    return Alarm(
        kind=sign.kind,
        template_id=sign.template_id,
        began=began,
        at=at,
        expected=round(sign.expected, 3),
        seen=sign.seen,
        p_value=math.exp(-min(sign.nats, 690.0)),
        score=round(sign.nats / (sign.nats + max(sign.bar, 1e-9)), 6),
        cause=cause_of(sign),
        sentence=_sentence(sign, began, at),
    )


def _sentence(sign: Sign, began: datetime, at: datetime) -> str:
    who = "the workload" if sign.template_id is None else f"template {sign.template_id}"
    others = ", ".join(str(t) for t in sign.others)
    first = f"{began:%Y-%m-%d %H:%M} UTC"
    span = f"in the minute {first}" if at <= began else f"from {first} to {at:%H:%M}"
    season = {"24": " at these hours", "168": " at these hours of the week"}.get(sign.season, "")
    usual = f"{sign.expected:.1f}" if sign.expected < 10 else f"{sign.expected:.0f}"
    match sign.kind:
        case Reason.RATE_SILENCE:
            if others:
                return f"many templates stopped together after {first} ({others} and more)"
            what = "nothing at all came" if sign.template_id is None else f"{who} did not come"
            return f"{what} {span}; its past expects {usual} lines{season}"
        case Reason.RATE_MIX:
            return (
                f"the mix of templates changed {span}; most of all {others}"
                if others
                else f"the mix of templates changed {span}"
            )
        case _:
            more = f" (templates {others} and more together)" if others else ""
            return f"{who} came {sign.seen:.0f} times {span}; its past expects {usual}{season}{more}"
