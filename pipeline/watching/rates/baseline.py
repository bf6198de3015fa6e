"""What all that watches rates shares: the past of one workload, how high a score has to be, and what may be told again.

Every threshold is the higher of two: the nats that a perfect model would need to keep within the alarms a day that are
allowed, over all templates and minutes; and the score that the workload's own past exceeded just that often (`Peaks`).
"""

import math
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from pipeline.records.verdict import Reason
from pipeline.watching.rates.table import TOTAL, Table
from pipeline.watching.rates.tail_bounds import Floats, Peaks

# The part of the allowed alarms a day that each kind may use.
_SHARES: Final = {Reason.RATE_BURST: 0.5, Reason.RATE_SILENCE: 0.3, Reason.RATE_MIX: 0.2}

SLOW: Final = 1 / 2880  # per minute: a level is what two days say
DAYS_28: Final = 1 / (28 * 1440)
YOUNG: Final = 60.0  # minutes of history before anything is judged
PATIENCE: Final = 240.0  # minutes of history before anything is waited for
FEW_GAPS: Final = 20.0  # returns before a template counts as one that keeps coming
# A slow swell is followed, so that a morning is no burst before the season is known. Two stages: what came in the last
# minutes counts little yet, so a burst does not make itself expected.
FAST: Final = 1 / 60  # of each stage; together two hours
_FEW: Final = 5.0  # lines, times the dispersion, of the slow level in the fast one
NEAR: Final = 1 / 10  # per minute: what comes and goes with all others
NEAR_LEAST: Final = 3.0  # lines expected of a template before it says so
FEW_TIMES: Final = 3.0  # minutes with a line before more lines can be a burst
LASTING: Final = 360.0  # minutes after which what goes on is learnt as the new level
TOGETHER: Final = 3  # bursts or silences in one minute past which they are one thing
OVER: Final = 2.0  # nats that an alarm past the budget adds to what the next one of the workload needs
NOTHING: Final = 1e-9  # lines a minute; keeps ratios finite
SEASONS: Final = ("no", "24", "168")
_FORGET_TO: Final = 60.0  # minutes' worth of the old level that is kept past LASTING
_SHORT: Final = 360.0  # minutes of history with which twice the nats are asked: its tail is not known yet
_PRIOR_DISPERSION: Final = (
    2.0  # variance over mean of counts of which little is known: log lines come in clumps
)
_PRIOR_EVENTS: Final = 10.0  # expected lines that outweigh it
# Relative variance of a level that nothing tells better: 25 % without season, 20 % with hours, 14 % with weekdays.
_UNSURE_OF: Final = np.array((0.0625, 0.04, 0.02))
_CAUSES: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """Something out of the ordinary in one minute. `template_id` None: of the workload as a whole."""

    kind: Reason
    template_id: int | None
    began: int  # epoch minutes
    minute: int
    expected: float  # lines since it began
    seen: float
    nats: float  # minus the logarithm of the bound on its probability
    bar: float  # what was needed
    others: tuple[int, ...] = ()  # templates that take part
    season: str = "no"  # "no", "24" or "168" slots stand behind `expected`


class Past:
    """The state of one workload's rates. It changes in place: a minute has hundreds of templates."""

    def __init__(self) -> None:
        self.table = Table()
        self.bursts = Peaks()
        self.silences = Peaks()
        self.mixes = Peaks()
        self.causes: dict[str, list[float]] = {}  # cause -> repeats, quiet until, last told
        self.window = -1  # epoch quarter of an hour of the running mix window
        self.windows = 0.0  # mix windows behind `usual`
        self.usual = 0.0  # mean deviance of the templates of a window, nats, and its square
        self.usual_sq = 0.0
        self.mix_open = 0.0  # minutes since a changed mix began

    def turn(self, minute: int) -> None:
        """Bring season and history to the hour of this minute."""
        if minute // 60 != self.table.hour:
            self.table.turn(minute, self.dispersion("10"))
            for peaks in (self.bursts, self.silences, self.mixes):
                peaks.forget(minute)

    # ---- how counts scatter ------------------------------------------------------------------------

    def dispersion(self, scale: str) -> Floats:
        """Variance over mean of the counts of one minute ("1"), ten ("10"), or a window's share ("15"), at least 1."""
        c = self.table.c
        known = c["var" + scale] + _PRIOR_DISPERSION * _PRIOR_EVENTS
        return np.maximum(1.0, known / (c["exp" + scale] + _PRIOR_EVENTS))

    def unsure(self) -> Floats:
        """Relative variance of each level, by what is known of its season."""
        return np.asarray(_UNSURE_OF[self.table.regimes()])

    def add_error(self, scale: str, rows: Any, seen: Floats, usual: tuple[Floats, Floats]) -> None:
        """What lies outside of what two days, two hours and the workload as a whole let expect, the least and the most."""
        c = self.table.c
        var, exp = "var" + scale, "exp" + scale
        keep = 1.0 - SLOW * int(scale)
        c[var] = np.where(rows, c[var] * keep + (seen - np.clip(seen, *usual)) ** 2, c[var])
        c[exp] = np.where(rows, c[exp] * keep + usual[1], c[exp])

    def learn_mix(self, rows: Any, error: Floats, expected: Floats, far: Floats) -> None:
        """Take in the squared errors and the deviances of a window."""
        c = self.table.c
        more = (("var15", error), ("exp15", expected), ("far15", far), ("seen15", np.ones(len(error))))
        for name, values in more:
            c[name] = np.where(rows, c[name] * (1.0 - 15 * SLOW) + values, c[name])

    def discount(self, rows: Any) -> None:
        """Keep an hour's weight of what these rows were."""
        c = self.table.c
        keep = np.minimum(1.0, _FORGET_TO / np.maximum(c["exposure"], 1.0))
        for name in ("events", "exposure"):
            c[name] = np.where(rows, c[name] * keep, c[name])
        for name in ("fast_events", "fast_exposure", "lag_events", "lag_exposure"):
            c[name][rows] = 0.0

    # ---- thresholds and causes ---------------------------------------------------------------------

    def least(self, kind: Reason, per_day: float) -> float:
        """What a bar of a kind is never below, -inf where that is not known."""
        tests = 3 * 1440 if kind is Reason.RATE_BURST else 10
        nats = math.log(tests / (per_day * _SHARES[kind]))
        return nats if nats > 0 else -math.inf  # below 0 a short history makes it less

    def silence_bar(self, a_day: float, minutes: float, per_day: float) -> float:
        """That of silences, of a past of `minutes` in which what is waited for came `a_day` times a day."""
        allowed = per_day * _SHARES[Reason.RATE_SILENCE]
        short = 1.0 + _SHORT / max(minutes, 1.0)
        return max(math.log(max(a_day, 10.0) / allowed) * short, self.silences.bar(allowed, minutes))

    def bar(self, kind: Reason, per_day: float) -> float:
        """What a score has to reach: see the module's docstring."""
        c = self.table.c
        allowed = per_day * _SHARES[kind]
        minutes = float(c["age"][TOTAL])
        short = 1.0 + _SHORT / max(minutes, 1.0)
        if kind is Reason.RATE_MIX:
            return max(math.log(96 / allowed) * short, self.mixes.bar(allowed, minutes))
        if kind is Reason.RATE_BURST:
            watched = np.count_nonzero((c["age"] >= YOUNG) & (c["gaps"] >= FEW_TIMES)) + 1
            tests = 3 * 1440 * watched  # a single minute and two sums
            return max(math.log(tests / allowed) * short, self.bursts.bar(allowed, minutes))
        regular = c["gaps"] >= FEW_GAPS
        a_day = 1440 * float((c["active"] / np.maximum(c["lively"], 1.0))[regular].sum())
        return self.silence_bar(a_day, minutes, per_day)

    def tell(self, cause: str, minute: int) -> bool:
        """Whether this cause may be told now. Each time makes the pause after it twice as long; quiet days shorten it."""
        repeats, until, last = self.causes.get(cause, [0.0, 0.0, float(minute)])
        if minute < until:
            return False
        repeats = max(0.0, repeats - max(0.0, minute - last) / 1440) + 1.0
        self.causes[cause] = [repeats, 0.0, float(minute)]
        if len(self.causes) > _CAUSES:
            for old in sorted(self.causes, key=lambda k: (self.causes[k][2], k))[: _CAUSES // 8]:
                del self.causes[old]
        return True

    def ended(self, cause: str, minute: int) -> None:
        """The next one of this cause has to wait."""
        if cause in self.causes:
            repeats, until, last = self.causes[cause]
            if until == 0.0 or until < last:
                pause = min(1440.0, 30.0 * 2.0 ** (repeats - 1.0))
                self.causes[cause] = [repeats, float(minute) + pause, last]

    # ---- wire --------------------------------------------------------------------------------------

    def pack(self) -> list[Any]:
        """For msgpack."""
        return [
            self.table.pack(), self.bursts.pack(), self.silences.pack(), self.mixes.pack(), self.causes,
            self.window, self.mix_open, self.windows, self.usual, self.usual_sq,
        ]  # fmt: skip

    @classmethod
    def unpack(cls, data: Any) -> Self:
        """Raises ValueError or TypeError when it is not what `pack` gives."""
        table, bursts, silences, mixes, causes, window, *numbers = data
        made = cls()
        made.table = Table.unpack(table)
        made.bursts, made.silences, made.mixes = map(Peaks.unpack, (bursts, silences, mixes))
        if not isinstance(causes, dict) or len(causes) > _CAUSES:
            raise ValueError("its causes are no map, or too many")
        for cause, values in causes.items():
            if not isinstance(cause, str) or len(cause) > 40 or len(values) != 3:
                raise TypeError("a cause is not readable")
            made.causes[cause] = [_number(v) for v in values]
        if not isinstance(window, int):
            raise TypeError("its window is not a number")
        made.window = window
        made.mix_open, made.windows, made.usual, made.usual_sq = (_number(v) for v in numbers)
        return made


def fast_level(events: Floats, exposure: Floats, slow: Floats, dispersion: Floats) -> Floats:
    """The level of about two hours that ended before the last minutes, shrunk to the slow one where lines are few."""
    strength = _FEW * dispersion
    return (events + strength) / (exposure + strength / np.maximum(slow, NOTHING))


def size_of(mean: Floats, events: Floats, unsure: Floats, dispersion: Floats) -> Floats:
    """Size of the negative binomial: clumps, a level that is not known better, and few lines behind it."""
    spread = dispersion - 1.0 + mean * (unsure + 1.0 / (events + 1.0))
    size: Floats = mean / np.maximum(spread, 1e-9)
    return size


def cause_of(sign: Sign) -> str:
    """The short stable name under which equal signs group: the kind, and the template where there is one."""
    return sign.kind.value if sign.template_id is None else f"{sign.kind.value}:{sign.template_id}"


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
        raise TypeError(f"{value!r} is not a number at least 0")
    return float(value)
