"""What one workload's templates did per minute so far: a table of running figures and their season by hour and weekday.

One column of floats per figure, one row per template; the first row is the workload as a whole and the second holds
every template that found no room. All sums forget exponentially. The table has at most 768 rows and 128 seasons of 168
slots, about 440 KiB: a template past that takes the place of the one with the fewest lines lately.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from pipeline.watching.rates.tail_bounds import Floats

ROWS: Final = 768
SEASONS: Final = 128
SLOTS: Final = 168  # hours of a week, UTC, from Monday 00:00
TOTAL: Final = 0  # row of the workload as a whole
OTHER: Final = 1  # row of the templates without a row
HEAD: Final = 2
NOWHERE: Final = -(2**63)  # stands for the templates of a minute that were too many to be counted apart
_NEW_ROWS: Final = 128  # templates taken in within one minute; the rest of a flood counts as OTHER
_DROP: Final = 64  # rows freed at once, so that a stream of new templates does not move the table for each

COLUMNS: Final = (
    "events", "exposure",            # slow sums: counts, and minutes weighted by the season; the level is their ratio
    "fast_events", "fast_exposure",  # the same over two hours
    "near", "near_exp",              # over ten minutes: counts and what was expected
    "var1", "exp1",                  # squared errors and expectations of minutes
    "var10", "exp10", "block", "block_exp",  # of blocks of ten minutes, and the running block
    "active", "lively",              # minutes with a line, of the minutes it could have had one
    "elapsed",                       # since its last line, in minutes in which one was to be expected
    "gaps", "gap_sum", "gap_sq", "gap_max",  # of `elapsed` at each return
    "low", "high",                   # cumulative sums for twice and for eight times the level
    "since", "run", "run_exp",       # onset of the rise under way, its lines and its expectation
    "age", "last",                   # minutes known; the last minute with a line
    "record", "top", "peak",         # highest score that was normal; score and count of the episode under way
    "shape", "regime",               # season's factor of this hour; what it rests on, see `regimes`
    "mix", "mix_exp",                # lines and expectation of the running window
    "hot", "calm", "told",           # minutes since a burst began, quiet ones of them in a row, see UNTOLD
    "mute", "mute_told",             # minutes since a silence was found
    "block_low",                     # least expectation of the running block of ten minutes; `block_exp` is the most
    "lag_events", "lag_exposure",    # first stage of the fast sums
    "var15", "exp15", "far15", "seen15",  # of windows of the mix: squared errors, expectations, deviances, their number
)  # fmt: skip
UNTOLD: Final = 0.0
TOLD: Final = 1.0
LEARNT: Final = 2.0  # an episode that only calibrates: of a baseline or of a young template

_PSEUDO: Final = 20.0  # lines' worth of the overall mean in each slot, times the dispersion
# Days of history for 24 slots, and for 168.
_HOURS_AFTER, _WEEK_AFTER = REGIMES = (2.0, 14.0)
SLOT_CAP: Final = 360.0  # minutes of a slot, six weeks of it; then its sums are halved
_WORTH: Final = 100.0  # lines in the slow sums before a template gets a season of its own
_YOUNG: Final = 60.0  # minutes
_UNLEARN: Final = 0.05  # of the errors that is kept when a season comes to be known


def slot_of(minute: int) -> int:
    """The hour of the week of an epoch minute; 1970-01-01 was a Thursday."""
    return (minute // 60 + 72) % SLOTS


class Table:
    """Rows by template id, columns as attributes of `c`. `hour` is the epoch hour that `shape` is of."""

    def __init__(self) -> None:
        self.ids: list[int] = [0, 0]  # by row; those of TOTAL and OTHER mean nothing
        self.rows: dict[int, int] = {}
        self.c: dict[str, Floats] = {}
        for name in COLUMNS:
            self.c[name] = np.zeros(HEAD)
        self.c["shape"] += 1.0
        self.season = np.full(HEAD, -1, dtype=np.int64)  # row of `sums` of each row, or -1
        self.season[TOTAL] = 0
        self.sums = np.zeros((1, SLOTS), dtype=np.float32)
        self.minutes = np.zeros((1, SLOTS), dtype=np.float32)
        self.hour = -1

    def __len__(self) -> int:
        return len(self.ids)

    def spread(self, counts: Mapping[int, int]) -> Floats:
        """The counts by row, with their sum in TOTAL; templates not met before get rows."""
        fresh = [t for t in sorted(counts) if t not in self.rows and t != NOWHERE]
        kept = fresh[:_NEW_ROWS]
        if len(self) + len(kept) > ROWS:
            self._drop(max(_DROP, len(self) + len(kept) - ROWS), set(counts))
            kept = kept[: ROWS - len(self)]
        if kept:
            self._grow(kept)
        values = np.zeros(len(self))
        for template_id, n in counts.items():
            values[self.rows.get(template_id, OTHER)] += n
        values[TOTAL] = sum(counts.values())
        return values

    def _grow(self, ids: list[int]) -> None:
        more = np.zeros(len(ids))
        for name, column in self.c.items():
            self.c[name] = np.concatenate([column, more])
        self.c["shape"][len(self) :] = 1.0
        self.season = np.concatenate([self.season, np.full(len(ids), -1, dtype=np.int64)])
        for template_id in ids:
            self.rows[template_id] = len(self.ids)
            self.ids.append(template_id)

    def _drop(self, n: int, needed: set[int]) -> None:
        """Fold the `n` rows with the fewest lines lately into OTHER; those with an open alarm or a line now stay."""
        c = self.c
        bound = (c["hot"] > 0) | (c["mute"] > 0) | np.array([t in needed for t in self.ids])
        bound[:HEAD] = True
        free = np.flatnonzero(~bound)
        order = np.lexsort((np.array(self.ids)[free], c["last"][free], c["events"][free]))
        gone = free[order[:n]]
        c["events"][OTHER] += c["events"][gone].sum()
        keep = np.ones(len(self), dtype=bool)
        keep[gone] = False
        for name, column in c.items():
            c[name] = column[keep]
        used = self.season[keep]
        seasons = np.sort(used[used >= 0])
        places = np.full(len(self.sums) + 1, -1, dtype=np.int64)
        places[seasons] = np.arange(len(seasons))
        self.season = places[used]  # -1 picks the last, which stays -1
        self.sums, self.minutes = self.sums[seasons], self.minutes[seasons]
        self.ids = [t for t, stays in zip(self.ids, keep, strict=True) if stays]
        self.rows = {t: row for row, t in enumerate(self.ids) if row >= HEAD}

    # ---- season ------------------------------------------------------------------------------------

    def turn(self, minute: int, dispersion: Floats) -> None:
        """Bring `shape` to the hour of this minute, and give seasons to templates that have grown worth one."""
        if minute // 60 == self.hour:
            return
        self.hour = minute // 60
        c = self.c
        grown = (self.season < 0) & (c["events"] >= _WORTH) & (c["age"] >= _YOUNG)
        grown[OTHER] = False
        chosen = np.flatnonzero(grown)[: SEASONS - len(self.sums)]
        if len(chosen):
            self.season[chosen] = len(self.sums) + np.arange(len(chosen))
            empty = np.zeros((len(chosen), SLOTS), dtype=np.float32)
            self.sums = np.concatenate([self.sums, empty])
            self.minutes = np.concatenate([self.minutes, empty])
        with_season = np.flatnonzero(self.season >= 0)
        # Errors made before the season was known say nothing of those made with it.
        regimes = self.regimes()
        for name in ("var1", "exp1", "var10", "exp10"):
            c[name][regimes != c["regime"]] *= _UNLEARN
        c["regime"][:] = regimes
        c["shape"][:] = 1.0
        c["shape"][with_season] = self._shapes(
            self.season[with_season], slot_of(minute), dispersion[with_season]
        )

    def _shapes(self, places: Any, slot: int, dispersion: Floats) -> Floats:
        """The factor of one slot for these seasons: 168 slots after two weeks, 24 after two days, else 1.

        A slot is shrunk to the mean of its hour, an hour to the overall mean, by pseudo-counts that grow with the
        template's dispersion: what comes in clumps needs more of them before an hour is told from chance.
        """
        sums = self.sums[places].astype(np.float64)
        minutes = self.minutes[places].astype(np.float64)
        total = minutes.sum(axis=1)
        mean = sums.sum(axis=1) / np.maximum(total, 1.0)
        strength = _PSEUDO * dispersion
        hour_sum = sums.reshape(-1, 7, 24)[:, :, slot % 24].sum(axis=1)
        hour_minutes = minutes.reshape(-1, 7, 24).sum(axis=1)
        by_hour = (hour_sum + strength) / (mean * hour_minutes[:, slot % 24] + strength)
        by_slot = (sums[:, slot] + strength * by_hour) / (mean * minutes[:, slot] + strength)
        hours = (total >= _HOURS_AFTER * 1440) & (hour_minutes.min(axis=1) > 0)
        week = (total >= _WEEK_AFTER * 1440) & (minutes.min(axis=1) > 0)
        return np.where(week, by_slot, np.where(hours, by_hour, 1.0))

    def regimes(self) -> Any:
        """By row what is known of its season: 0 nothing, 1 its 24 hours, 2 the 168 hours of its week."""
        days = self.minutes.sum(axis=1, dtype=np.float64) / 1440
        kinds = (days >= _HOURS_AFTER).astype(np.int64) + (days >= _WEEK_AFTER)
        return np.where(self.season >= 0, kinds[self.season], 0)

    def count_season(self, minute: int, values: Floats, learn: Any, n: float = 1.0) -> None:
        """Add `n` equal minutes to the slot of this one, for the rows of `learn`."""
        rows = np.flatnonzero((self.season >= 0) & learn)
        places, slot = self.season[rows], slot_of(minute)
        self.sums[places, slot] += (values[rows] * n).astype(np.float32)
        self.minutes[places, slot] += np.float32(n)
        full = self.minutes[:, slot] > SLOT_CAP
        if full.any():
            self.sums[full, slot] *= np.float32(0.5)
            self.minutes[full, slot] *= np.float32(0.5)

    # ---- wire --------------------------------------------------------------------------------------

    def pack(self) -> list[Any]:
        return [
            np.array(self.ids[HEAD:], dtype="<i8").tobytes(),
            np.stack([self.c[name] for name in COLUMNS]).astype("<f8").tobytes(),
            self.season.astype("<i8").tobytes(),
            self.sums.astype("<f4").tobytes(),
            self.minutes.astype("<f4").tobytes(),
            self.hour,
        ]

    @classmethod
    def unpack(cls, data: Any) -> "Table":
        """Raises ValueError or TypeError when it is not what `pack` gives."""
        ids, columns, season, sums, minutes, hour = data
        made = cls()
        found = np.frombuffer(ids, dtype="<i8").tolist()
        n = len(found) + HEAD
        if n > ROWS or len(set(found)) != len(found):
            raise ValueError(f"{n} rows, or a template twice")
        made.ids = [0, 0, *found]
        made.rows = {t: row for row, t in enumerate(made.ids) if row >= HEAD}
        block = np.frombuffer(columns, dtype="<f8").reshape(-1, n)
        if len(block) != len(COLUMNS):
            raise ValueError(f"{len(block)} figures of each template")
        if not np.isfinite(block).all() or (block < 0).any() or (block > 1e60).any():
            raise ValueError("a figure is negative or not finite")
        made.c = {name: row.astype(np.float64) for name, row in zip(COLUMNS, block, strict=True)}
        made.sums = np.frombuffer(sums, dtype="<f4").reshape(-1, SLOTS).astype(np.float32)
        made.minutes = np.frombuffer(minutes, dtype="<f4").reshape(-1, SLOTS).astype(np.float32)
        made.season = np.frombuffer(season, dtype="<i8").astype(np.int64)
        used = sorted(made.season[made.season >= 0].tolist())
        if (
            len(made.season) != n
            or used != list(range(len(made.sums)))
            or not 1 <= len(used) <= SEASONS
            or made.season[TOTAL] != 0
            or made.minutes.shape != made.sums.shape
        ):
            raise ValueError("its seasons do not fit its rows")
        if not all(np.isfinite(a).all() and (a >= 0).all() for a in (made.sums, made.minutes)):
            raise ValueError("a season is negative or not finite")
        if not isinstance(hour, int) or isinstance(hour, bool):
            raise TypeError("its hour is not a number")
        made.hour = hour
        return made
