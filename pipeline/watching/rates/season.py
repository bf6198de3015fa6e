"""The season of each template: lines by hour of the week, and the factor of the current hour.

A template has no season at first, 24 hours after two days, and the 168 hours of the week after two weeks.
"""

import math
from typing import Any, Final

import numpy as np

from pipeline.watching.rates.columns import HEAD, OTHER, TOTAL, Columns
from pipeline.watching.rates.tail_bounds import Bools, Floats

SEASONS: Final = 128
SLOTS: Final = 168  # Hours of a week, UTC, from Monday 00:00.
KINDS: Final = ("no", "24", "168")  # Seasonality kinds by number: slots that the factor rests on.
_DAYS: Final = (2.0, 14.0)  # Of history for 24 slots, and for 168.
_PSEUDO: Final = 20.0  # Lines' worth of the overall mean in each slot, times the dispersion.
_SLOT_CAP: Final = 360.0  # Minutes of a slot, six weeks of it; then its sums halve.
# Relative variance of a level by seasonality kind: 25 % without, 20 % with hours, 14 % with weekdays.
_UNSURE: Final = np.array((0.0625, 0.04, 0.02))


def slot_of(minute: int) -> int:
    """The hour of the week of an epoch minute; 1970-01-01 was a Thursday."""
    return (minute // 60 + 72) % SLOTS


class Season(Columns):
    """`sums` and `minutes`: (SLOTS, seasons), so that an hour lies in one piece; `place`: each row's index in
    them, -1 without a season; `rows`: the row of each season."""

    factor: Floats  # seasonal factor of the hour
    factor_kind: Floats  # seasonality kind that the factor rests on

    def __init__(self) -> None:
        super().__init__()
        self.factor += 1.0
        self.place = np.array([0, -1], dtype=np.int64)
        self.sums = np.zeros((SLOTS, 1), dtype=np.float32)
        self.minutes = np.zeros((SLOTS, 1), dtype=np.float32)
        self.hour = -1  # epoch hour of the factors
        self._follow()

    def turn(self, minute: int, worth: Bools, dispersion: Floats) -> Bools:
        """Set the factors of this hour. Rows `worth` a season get one. Returns rows whose kind changed."""
        self.hour = minute // 60
        fresh = worth & (self.place < 0)
        fresh[OTHER] = False
        chosen = np.flatnonzero(fresh)[: SEASONS - len(self.rows)]
        if len(chosen):
            self.place[chosen] = len(self.rows) + np.arange(len(chosen))
            empty = np.zeros((SLOTS, len(chosen)), dtype=np.float32)
            self.sums = np.concatenate([self.sums, empty], axis=1)
            self.minutes = np.concatenate([self.minutes, empty], axis=1)
            self._follow()
        kinds = self.kinds()
        changed: Bools = kinds != self.factor_kind
        self.factor_kind[:] = kinds
        self.factor[:] = 1.0
        self.factor[self.rows] = self._factors(slot_of(minute), dispersion[self.rows])
        return changed

    def factors_of(self, slots: Any, dispersion: Floats) -> Floats:
        """The factors of these slots: (slots, seasons). `dispersion`: by row."""
        return self._factors(slots, dispersion[self.rows])

    def _factors(self, slot: Any, dispersion: Floats, seasons: slice = slice(None)) -> Floats:
        """The factors of one slot by season, or of several: (slots, seasons).

        A slot shrinks to the mean of its hour, an hour to the overall mean, by pseudo-counts. These grow with
        the dispersion: clumps need more lines before an hour differs from chance.
        """
        sums, minutes, total = self.sums[:, seasons], self.minutes[:, seasons], self._history[seasons]
        mean = sums.sum(axis=0, dtype=np.float64) / np.maximum(total, 1.0)
        strength = _PSEUDO * dispersion
        hour_sum = sums.reshape(7, 24, -1)[:, slot % 24].sum(axis=0, dtype=np.float64)
        hour_minutes = minutes.reshape(7, 24, -1).sum(axis=0, dtype=np.float64)
        by_hour = (hour_sum + strength) / (mean * hour_minutes[slot % 24] + strength)
        by_slot = (sums[slot] + strength * by_hour) / (mean * minutes[slot] + strength)
        hours = (total >= _DAYS[0] * 1440) & (hour_minutes.min(axis=0) > 0)
        week = (total >= _DAYS[1] * 1440) & (minutes.min(axis=0) > 0)
        return np.where(week, by_slot, np.where(hours, by_hour, 1.0))

    def factors(self, place: int, dispersion: Floats) -> Floats:
        """The factors of all SLOTS for the season at this place. `dispersion`: of its row, as an array."""
        one = slice(place, place + 1)
        return self._factors(np.arange(SLOTS), dispersion, one)[:, 0]

    def kinds(self) -> Any:
        """The seasonality kind of each row: an index of KINDS."""
        days = self._history / 1440
        kinds = (days >= _DAYS[0]).astype(np.int64) + (days >= _DAYS[1])
        return np.where(self.place >= 0, kinds[self.place], 0)

    def unsure(self) -> Floats:
        """Relative variance of each level."""
        return np.asarray(_UNSURE[self.kinds()])

    def advance(self, minute: int, counts: Floats, learn: Bools, n: float = 1.0) -> None:
        """Add `n` minutes with these counts each to the slot of this one, for the rows of `learn`."""
        slot, taught = slot_of(minute), learn[self.rows]
        self.sums[slot] += (counts[self.rows] * n * taught).astype(np.float32)
        self.minutes[slot] += np.float32(n) * taught
        self._history += n * taught
        full = self.minutes[slot] > _SLOT_CAP
        if full.any():
            self.sums[slot, full] *= np.float32(0.5)
            self.minutes[slot, full] *= np.float32(0.5)
            self._follow()

    def advance_idle(self, minute: int, n: int, learn: Bools) -> None:
        """`n` minutes of one hour without any line."""
        self.advance(minute, np.zeros(len(self.place)), learn, n)

    def advance_hours(self, slots: Any, lengths: Floats) -> None:
        """Minutes without any line, so many in each of these slots, none of which is named twice."""
        self.minutes[slots] += lengths[:, None].astype(np.float32)
        self._history += lengths.sum()
        full = self.minutes[slots] > _SLOT_CAP
        if full.any():
            remaining = np.where(full, np.float32(0.5), np.float32(1.0))
            self.sums[slots] *= remaining
            self.minutes[slots] *= remaining
            self._follow()

    def idle_limit(self, minute: int, learn: Bools) -> float:
        """Minutes until a slot is full or a kind changes: `advance_idle` is exact up to there."""
        taught = learn[self.rows]
        if not taught.any():
            return math.inf
        limit = int(_SLOT_CAP - self.minutes[slot_of(minute)][taught].max()) + 1
        return min(limit, _until_kind_changes(self._history[taught]))

    def same_kinds(self) -> float:
        """Minutes of learning in which no kind changes."""
        return _until_kind_changes(self._history)

    def grow(self, n: int) -> None:
        super().grow(n)
        self.factor[-n:] = 1.0
        self.place = np.concatenate([self.place, np.full(n, -1, dtype=np.int64)])

    def compact(self, keep: Bools) -> None:
        super().compact(keep)
        used = self.place[keep]
        seasons = np.sort(used[used >= 0])
        places = np.full(len(self.rows) + 1, -1, dtype=np.int64)
        places[seasons] = np.arange(len(seasons))
        self.place = places[used]  # -1 picks the last, which stays -1
        # A copy in one piece: fancy indexing of columns leaves the hours scattered.
        self.sums, self.minutes = (
            np.ascontiguousarray(array[:, seasons]) for array in (self.sums, self.minutes)
        )
        self._follow()

    def _follow(self) -> None:
        """Brings up to date what the others tell: the row of each season, and its minutes in all."""
        rows = np.flatnonzero(self.place >= 0)
        self.rows = rows[np.argsort(self.place[rows])]
        self._history = self.minutes.sum(axis=0, dtype=np.float64)

    def pack(self) -> tuple[bytes, bytes, bytes]:
        """place (int64), sums and minutes (float32, season by season), little-endian."""
        sums, minutes = (array.T.astype("<f4").tobytes() for array in (self.sums, self.minutes))
        return self.place.astype("<i8").tobytes(), sums, minutes

    def unpack(self, place: bytes, sums: bytes, minutes: bytes) -> None:
        """The inverse of `pack`, after that of the columns. Raises ValueError."""
        self.place = np.frombuffer(place, dtype="<i8").astype(np.int64)
        self.sums, self.minutes = (
            np.ascontiguousarray(np.frombuffer(data, dtype="<f4").reshape(-1, SLOTS).T.astype(np.float32))
            for data in (sums, minutes)
        )
        used = sorted(self.place[self.place >= 0].tolist())
        if (
            len(self.place) != len(self.factor)
            or len(self.place) < HEAD
            or self.place.min() < -1
            or used != list(range(self.sums.shape[1]))
            or not 1 <= len(used) <= SEASONS
            or self.place[TOTAL] != 0
            or self.minutes.shape != self.sums.shape
        ):
            raise ValueError("its seasons do not fit its rows")
        if not all(np.isfinite(a).all() and (a >= 0).all() for a in (self.sums, self.minutes)):
            raise ValueError("a season is negative or not finite")
        self._follow()


def _until_kind_changes(history: Floats) -> float:
    """Minutes until one of these histories is long enough for another kind."""
    limits = [days * 1440 - history[history < days * 1440].max(initial=-math.inf) for days in _DAYS]
    return math.ceil(limit) if (limit := min(limits)) < math.inf else math.inf
