"""One variable of a template: the distribution of its values, and windows that are compared with it.

A window holds the values of one or more minutes, at least WINDOW of them. Its median and its 90 % quantile
are compared, as logarithms, with those of the last hours, and with those of the same hour of the days before
where these are known. The smaller of the two deviations counts. Its scale is that of earlier windows, so a
variable that jumps all day has to jump further. Student's tail makes it nats: few windows give few.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec

from pipeline.watching.numbers.sketch import Sketch, merged_sketch, pack_sketch, quantiles, unpack_sketch
from pipeline.watching.rates.detection import LAST_MINUTE, EpochMinute, Finite, Positive, TemplateId
from pipeline.watching.values.bins import EXACT, value_of
from pipeline.watching.values.sampling import SLOT_S
from pipeline.watching.values.typed import NAME_CHARS, ValueKind

WINDOW: Final = 12  # values: the 90 % quantile is then the second largest
LASTING: Final = 360  # minutes; after them a shift is the new level
SLOTS: Final = 60 // SLOT_S  # of a minute
HOUR: Final = 60 * SLOTS
_LONGEST: Final = HOUR  # slots of a window; one that is still too small is only learnt
_HALF_LIFE: Final = 4.0 * HOUR  # of the distribution that windows are compared with
_DAY: Final = 24 * HOUR
_HOUR_REMAINS: Final = 0.7  # of an hour's sketch from one day to the next: half of it after two days
_KNOWN: Final = 50.0  # values in a sketch before it is compared with
_TAIL_KNOWN: Final = 300.0  # values before its tail is
_FEWEST: Final = 4  # windows before one is judged
_FREEDOM: Final = 20.0  # at most: deviations have heavier tails than normal ones
_EXPERIENCE: Final = 288.0  # windows of which the scale is a mean
_LEAST_SCALE: Final = 0.1  # of a logarithm, the width of a bin
# Nats of a window that add nothing to the sum. Those of a window by chance are exponential with mean 1, so
# the sum has about the tail of one window.
_ALLOWANCE: Final = 4.0
_CUT: Final = 5.0  # scales at which a deviation is learnt
# Least factors of the median and of the 90 % quantile; a fall is seldom trouble.
_RISE: Final = (math.log(2.0), math.log(2.5))
_FALL: Final = (math.log(4.0), math.log(5.0))
# Added to both sides of a ratio: differences of less are of no interest.
_GRAIN: Final = {
    ValueKind.DURATION: 0.002,
    ValueKind.TIME: 0.002,
    ValueKind.SIZE: 128.0,
    ValueKind.COUNT: 2.0,
}
_BAD_GRAIN: Final = 0.02  # of the share of bad statuses and codes
_BAD_RISE: Final = 0.1
_BAD_STATUS: Final = 400
_SHARES: Final = (0.5, 0.9)
_HILL: Final = 0.95  # the tail begins at this quantile
_LEAST_TAIL: Final = 0.1  # exponent's inverse; a bin is as wide
_FAR: Final = math.log(3.0)  # of an outlier from the largest value known


EpochSlot = Annotated[int, msgspec.Meta(ge=0, le=SLOTS * (LAST_MINUTE + 1))]
Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS)]


class Deviation(NamedTuple):
    """A window's difference from the past. `place`: index of the quantile, 0 the median; of statuses and
    codes the values are shares of bad ones. Of an outlier `was` is the value that 99 % are below, and `now`
    the outlier."""

    nats: float
    place: int
    was: float
    now: float
    n: int
    began: int


class JudgedWindow(NamedTuple):
    """A closed window; None: nothing to say."""

    shift: Deviation | None
    outlier: Deviation | None  # the largest value, far above all others
    n: int


class Variable(msgspec.Struct, array_like=True, kw_only=True):
    """State of one variable. Times are slots of SLOT_S seconds since the epoch, `episode` is a minute;
    `hours`: packed sketches by hour of the day (UTC)."""

    template_id: TemplateId
    name: Name
    kind: ValueKind
    since: EpochSlot
    seen: EpochSlot
    counts: Sketch = msgspec.field(default_factory=dict)
    hours: Annotated[dict[Annotated[int, msgspec.Meta(ge=0, le=23)], bytes], msgspec.Meta(max_length=24)] = (
        msgspec.field(default_factory=dict)
    )
    hour: Annotated[int, msgspec.Meta(ge=-1)] = -1  # epoch hour of `hour_counts`
    hour_counts: Sketch = msgspec.field(default_factory=dict)
    updated: EpochSlot = 0
    windows: Positive = 0.0
    typical: Positive = 0.0  # values of a window
    squares: tuple[Finite, Finite] = (0.0, 0.0)  # mean squared deviations of the two quantiles
    window: Sketch = msgspec.field(default_factory=dict)
    began: EpochSlot = 0  # of the window, 0 where it is empty
    score: Positive = 0.0  # cumulative sum of the nats of windows that deviate to the same side
    rising: bool = True
    episode: EpochMinute = 0  # since when the level is another one, 0 where it is not
    level: Finite = 0.0  # the largest deviation of the episode that was looked at for an alarm
    calm: int = 0
    kept_back: bool = False  # the episode was reported, but is no alarm so far

    @property
    def cause(self) -> str:
        """The part of a cause that tells the variable."""
        return f"{self.template_id}:{self.name}"

    @property
    def values(self) -> float:
        """Weight of its values in the last hours."""
        return sum(self.counts.values())

    def take(self, slot: int, counts: Mapping[int, float]) -> bool:
        """Add the values of a slot; whether the window is to be closed."""
        self.seen = max(self.seen, slot)
        self.began = self.began or max(1, slot)
        self.window = merged_sketch(self.window, counts)
        return sum(self.window.values()) >= WINDOW or slot - self.began >= _LONGEST

    def judge(self) -> JudgedWindow:
        """Compare the window with the past. Changes nothing."""
        n = round(sum(self.window.values()))
        if n < WINDOW:
            return JudgedWindow(None, None, n)
        known = self.windows >= _FEWEST and self.values >= _KNOWN
        return JudgedWindow(self._shift(n) if known else None, self._outlier(n), n)

    def escalates(self, shift: Deviation) -> bool:
        """Whether this window of an episode is far beyond the last one that was reported, or none was; it is
        the measure then."""
        size = abs(distance(self.kind, shift.was, shift.now))
        if self.level and size < self.level + _FAR:
            return False
        self.level = size
        return True

    def cumulate(self, shift: Deviation | None) -> float:
        """The cumulative sum with this window: CUSUM. A window without a deviation counts as 0 nats."""
        if shift is None:
            self.score = max(0.0, self.score - _ALLOWANCE)
            return 0.0
        rising = shift.now >= shift.was
        before = self.score if rising is self.rising else 0.0
        self.rising = rising
        self.score = max(0.0, before + shift.nats - _ALLOWANCE)
        return self.score + _ALLOWANCE

    def _shift(self, n: int) -> Deviation | None:
        usual = self._usual_hour()
        now = measures(self.kind, self.window)
        best: Deviation | None = None
        for place, (value, square) in enumerate(zip(now, self.squares, strict=False)):
            was, deviation = self._nearest(place, value, usual)
            if abs(deviation) < self._least(place, deviation, was, value):
                continue
            variance = max(square, _LEAST_SCALE**2) * max(1.0, self.typical / n) * (1.0 + 1.0 / self.windows)
            nats = student_tail_nats(
                abs(deviation) / math.sqrt(variance), min(_FREEDOM, max(2.0, self.windows - 1.0))
            )
            if best is None or nats > best.nats:
                best = Deviation(nats, place, was, value, n, self.began)
        return best

    def _nearest(self, place: int, value: float, usual: Sketch | None) -> tuple[float, float]:
        """The value that a quantile had, and how far the logarithm is from it: of the distribution that is
        nearer."""
        found = []
        for sketch in (self.counts, usual):
            if sketch:
                was = measures(self.kind, sketch)[place]
                found.append((was, distance(self.kind, was, value)))
        if len(found) > 1 and found[0][1] * found[1][1] <= 0:
            return found[0][0], 0.0  # between the two
        return min(found, key=lambda one: abs(one[1]))

    def _least(self, place: int, deviation: float, was: float, value: float) -> float:
        """The least deviation that is worth a word."""
        if self.kind in EXACT:
            return 0.0 if value - was >= _BAD_RISE else math.inf
        return _RISE[place] if deviation > 0 else _FALL[place]

    def _outlier(self, n: int) -> Deviation | None:
        """By the tail index of Hill: above a high quantile, logarithms of values are exponential."""
        if self.kind in EXACT or self.values < _TAIL_KNOWN:
            return None
        grain = _GRAIN[self.kind]
        largest = value_of(self.kind, max(self.window))
        tail, most, known = quantiles(self.kind, self.counts, (_HILL, 0.99, 1.0))
        if math.log((largest + grain) / (known + grain)) < _FAR:
            return None
        weight = excess = 0.0
        for number, n_of_bin in self.counts.items():
            value = value_of(self.kind, number)
            if value > tail:
                weight += n_of_bin
                excess += n_of_bin * math.log((value + grain) / (tail + grain))
        scale = max(_LEAST_TAIL, excess / weight if weight else 0.0)
        nats = math.log((largest + grain) / (tail + grain)) / scale - math.log(1.0 - _HILL) - math.log(n)
        return Deviation(nats, 0, most, largest, n, self.began)

    def _usual_hour(self) -> Sketch | None:
        """The sketch of this hour of the days before, None while it is not known."""
        if self.began - self.since < _DAY:
            return None
        sketch = self._of_hour(self.began // HOUR % 24)
        return sketch if sum(sketch.values()) >= _KNOWN else None

    def _of_hour(self, slot: int) -> Sketch:
        """The sketch of an hour of the day; a damaged one is empty."""
        try:
            return unpack_sketch(self.hours[slot]) if slot in self.hours else {}
        except msgspec.DecodeError:
            return {}

    def learn(self) -> None:
        """The window becomes part of the distribution."""
        slot, n = self.seen, sum(self.window.values())
        if n >= WINDOW:
            # Values of windows that were too short are a past without a scale.
            if self.counts and self.windows:
                self._learn_scale(self._usual_hour())
            self.windows += 1.0
            self.typical += (n - self.typical) / min(self.windows, _EXPERIENCE)
        remaining = 0.5 ** (max(0, slot - self.updated) / _HALF_LIFE) if self.updated else 1.0
        self.counts = merged_sketch(self.counts, self.window, remaining)
        self.updated = max(self.updated, slot)
        if self.hour != self.began // HOUR:
            self._turn_hour()
        self.hour_counts = merged_sketch(self.hour_counts, self.window)
        self.drop_window()

    def _learn_scale(self, usual: Sketch | None) -> None:
        squares = list(self.squares)
        for place, value in enumerate(measures(self.kind, self.window)):
            _, deviation = self._nearest(place, value, usual)
            square = deviation**2
            if self.windows >= 2 * _FEWEST:
                square = min(square, _CUT**2 * max(squares[place], _LEAST_SCALE**2))
            squares[place] += (square - squares[place]) / min(self.windows, _EXPERIENCE)
        self.squares = (squares[0], squares[1])

    def _turn_hour(self) -> None:
        """The hour that is over becomes part of its hour of the day."""
        if self.hour_counts:
            slot = self.hour % 24
            self.hours[slot] = pack_sketch(
                merged_sketch(self._of_hour(slot), self.hour_counts, _HOUR_REMAINS)
            )
        self.hour, self.hour_counts = self.began // HOUR, {}

    def drop_window(self) -> None:
        """Forget the values of the window."""
        self.window, self.began = {}, 0

    def renew(self) -> None:
        """Another level begins: nothing of the distribution remains but the scale of its deviations."""
        self.counts = {}
        self.hours, self.hour_counts = {}, {}
        self.end_episode()

    def end_episode(self) -> None:
        """The level is the usual one again."""
        self.episode, self.level, self.calm, self.score, self.kept_back = 0, 0.0, 0, 0.0, False


def measures(kind: ValueKind, sketch: Mapping[int, float]) -> Sequence[float]:
    """Median and 90 % quantile; of statuses and codes the share of bad ones."""
    if kind not in EXACT:
        return quantiles(kind, sketch, _SHARES)
    least = _BAD_STATUS if kind is ValueKind.STATUS else 1
    bad = sum(weight for number, weight in sketch.items() if number >= least)
    return (bad / sum(sketch.values()),)


def distance(kind: ValueKind, was: float, now: float) -> float:
    """Logarithm of the ratio, with the grain of the kind."""
    grain = _BAD_GRAIN if kind in EXACT else _GRAIN[kind]
    return math.log((now + grain) / (was + grain))


def student_tail_nats(t: float, freedom: float) -> float:
    """-log of an upper bound of both tails of Student's distribution beyond t, for more than one degree of
    freedom.

    The bound is that of Mills: the density times s / t, integrated from t on."""
    if t <= 1.0:
        return 0.0
    constant = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    log = constant + math.log(freedom / ((freedom - 1) * t)) - (freedom - 1) / 2 * math.log1p(t * t / freedom)
    return max(0.0, -log - math.log(2.0))
