"""From evidence to one number, and what that number means: calibration on held-out templates.

Known templates are answered from the cache and never reach the model, so everything is calibrated on *held-out
templates*: lines of shapes the scoring model had not seen, all normal. Surprise and novelty are two measurements of
the same thing, how strange a line is; each is put on the scale of the held-out ones, and their mean is added, as a
logit, to the severity prior. The threshold is the value that a new normal template exceeds with the wanted chance.
Free of torch on purpose: the drain worker concludes too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from pipeline.errors import BadBundle
from pipeline.models.evidence import Evidence, Normal
from pipeline.models.severity import GRAVE_WORDS
from pipeline.models.tails import ParetoTail, bound, conformal, tail_of
from pipeline.records.levels import ERROR_LEVELS

ANOMALOUS_SCORE: Final = 0.5
CHANCE: Final = 0.05  # of a new normal template to be flagged, where no budget asks for less


class Mode(StrEnum):
    """What the training sample is."""

    BASELINE = "baseline"  # known to be normal
    SELF = "self"  # the very lines that are scored; faults may hide in it


# Weights in logits; how they hang together stands in models/verdict.py.
LEVEL: Final = 2.5
WORD: Final = 2.0
_GRAVE_EXTRA: Final = 0.5  # panic before error
_FATAL_EXTRA: Final = 0.5  # fatal and critical before error
_WARNING: Final = 0.1  # settles ties: many logs warn all day (docs/LOG.md)
_FLOOR: Final = -2.0  # however little speaks for it, a new template is more than a variation of a known one
_BEYOND: Final = (
    0.5  # past its scale a measurement counts on by its logarithm: it must not outvote the others
)
_SPREADS: Final = (
    0.25,
    0.1,
)  # least of surprisal (nats) and novelty: equal values must not make a hair-trigger
_LEAST_MARGIN: Final = 0.25  # of the threshold above the median, for the same reason
_SCORES_MOST: Final = 400  # kept in the manifest, about 4 KiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Where the held-out values of a measurement lie: 0 is their median, 1 their 95 % point."""

    centre: float = 0.0
    spread: float = 1.0

    def of(self, value: float) -> float:
        """From -1 upwards; linear up to 1."""
        z = (value - self.centre) / self.spread
        return max(-1.0, z) if z <= 1.0 else 1.0 + _BEYOND * math.log(z)

    @classmethod
    def fit(cls, values: Sequence[float], least: float) -> "Scale":
        ordered = sorted(values)
        centre = _quantile(ordered, 0.5)
        spread = max(least, _quantile(ordered, 0.95) - centre)
        return cls(centre=round(centre, 4), spread=round(spread, 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What evidence means under one model version.

    `method` says how the threshold was found: "conformal" (a rank among the held-out templates), "pot" (a Pareto
    tail fitted to at least 200 of them), "student" (a prediction bound from fewer) or "none" (no scale: evidence
    orders calm lines but flags none). `scores` are the logits of the held-out templates, all as if new.
    """

    mode: Mode
    method: str
    median: float  # of the normalised_score of held-out templates, logits
    threshold: float  # likewise; a new calm template is flagged above it
    held_out: int  # templates behind the figures
    total: int  # training lines, counted with repetition
    chance: float = CHANCE  # that a new calm normal template lies above the threshold
    surprisal: Scale = Scale()
    novelty: Scale | None = Scale()  # None under a model made before there was such
    scores: tuple[float, ...] = ()  # ascending
    tail: ParetoTail | None = None  # of the scores, where they are enough

    def normalised_score(self, evidence: Evidence) -> float:
        """Logits, without the level: rises with surprisal, novelty and prior."""
        if self.novelty is None:
            return max(-1.0, min(3.0, (evidence.surprisal - self.surprisal.centre) / self.surprisal.spread))
        odd = (self.surprisal.of(evidence.surprisal) + self.novelty.of(evidence.novelty)) / 2.0
        return evidence.prior + odd

    def excess(self, evidence: Evidence) -> float:
        """Logits above the threshold: below 0 for a line as strange as normal ones are, never below -2."""
        strange = self.normalised_score(evidence)
        if self.method == "none":
            # Without held-out templates there is no scale; stay below the threshold and keep the order.
            return max(_FLOOR, -0.01 - _WARNING - math.log1p(math.exp(-strange)))
        x = strange - self.threshold
        return x if x >= 0 else _FLOOR * -math.expm1(x / -_FLOOR)

    def as_new(self, evidence: Evidence, *, severe: bool, level: str | None = None) -> float:
        """The logit of a line whose template no training line has."""
        return with_word(self.excess(evidence), self.word(evidence)) + level_logit(severe, level)

    def word(self, evidence: Evidence) -> float:
        """What an error word adds."""
        if evidence.severity is None:
            return 0.0
        return WORD + _GRAVE_EXTRA * (evidence.severity in GRAVE_WORDS)

    def unusual(self, evidence: Evidence) -> bool:
        """Whether a line is stranger than half of the new normal templates."""
        return self.method != "none" and self.normalised_score(evidence) > self.median

    def p_value(self, logit: float) -> float | None:
        """The chance that a new normal template scores at least `logit`; None where nothing was held out.

        Conformal: for a line exchangeable with the held-out ones, P(p <= a) <= a. Beyond the largest of them by the
        Pareto tail, where there is one.
        """
        if not self.scores:
            return None
        p = conformal(self.scores, logit)
        if self.tail is not None and logit > self.scores[-1]:
            p = max(_P_LEAST, min(p, self.tail.chance(logit)))
        return float(f"{p:.4g}")

    def to_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode.value,
            "method": self.method,
            "median": self.median,
            "threshold": self.threshold,
            "held_out": self.held_out,
            "total": self.total,
            "chance": self.chance,
            "surprisal": [self.surprisal.centre, self.surprisal.spread],
            "novelty": None if self.novelty is None else [self.novelty.centre, self.novelty.spread],
            "scores": list(self.scores),
            "tail": None if self.tail is None else self.tail.to_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Calibration":
        """Raises BadBundle when a field is missing or not a number."""
        try:
            made = cls(**_fields(data) if "scores" in data else _older(data))
        except (KeyError, TypeError, ValueError) as exc:
            raise BadBundle(f"the calibration in a manifest is not readable: {exc!r}; train again") from exc
        scales = [v for s in (made.surprisal, made.novelty) if s is not None for v in (s.centre, s.spread)]
        numbers = (made.median, made.threshold, *scales, *made.scores)
        if (
            made.method not in _METHODS
            or not all(map(math.isfinite, numbers))
            or min(scales[1::2]) <= 0
            or list(made.scores) != sorted(made.scores)
        ):
            raise BadBundle(
                f"the calibration in a manifest has method {made.method!r} or values that cannot be"
            )
        return made


def level_logit(severe: bool, level: str | None) -> float:
    """What the level adds, in logits; `severe`: seen at an error-like level, which `level` refines."""
    if severe or level in ERROR_LEVELS:
        return LEVEL + _FATAL_EXTRA * (level in {"fatal", "critical"})
    return _WARNING * (level == "warning")


def with_word(excess: float, word: float) -> float:
    """An error word on top of what stands above the threshold: in full below it, less and less above, where the prior
    has counted it already. Rises with both."""
    return excess + word if excess < 0 or word == 0 else math.hypot(excess, word)


_METHODS: Final = frozenset({"conformal", "pot", "student", "none"})
_P_LEAST: Final = 1e-9  # no tail is known further


def _fields(data: dict[str, Any]) -> dict[str, Any]:
    novelty, tail = data["novelty"], data["tail"]
    return {
        "mode": Mode(data["mode"]),
        "method": str(data["method"]),
        **{name: float(data[name]) for name in ("median", "threshold", "chance")},
        **{name: int(data[name]) for name in ("held_out", "total")},
        "surprisal": _scale(data["surprisal"]),
        "novelty": None if novelty is None else _scale(novelty),
        "scores": tuple(float(v) for v in data["scores"]),
        "tail": None if tail is None else ParetoTail.from_json(tail),
    }


def _scale(pair: Any) -> Scale:
    centre, spread = (float(v) for v in pair)
    return Scale(centre=centre, spread=spread)


def _older(data: dict[str, Any]) -> dict[str, Any]:
    """Fields of a manifest from before there was anything but surprisal: its median and threshold are in nats."""
    median, threshold = float(data["median"]), float(data["threshold"])
    none = data["method"] == "none"
    scale = Scale(centre=median, spread=max(threshold - median, _SPREADS[0]))
    made = Calibration(
        mode=Mode(data["mode"]), method=str(data["method"]), median=0.0, threshold=1.0,
        held_out=int(data["held_out"]), total=int(data["total"]), surprisal=Scale() if none else scale, novelty=None,
    )  # fmt: skip
    seen = sorted(made.excess(Evidence(surprisal=float(q))) for q in data["quantiles"])
    return {f: getattr(made, f) for f in made.__slots__} | {"scores": tuple(seen)}


def calibrate(held: Sequence[Normal], *, mode: Mode, total: int, chance: float = CHANCE) -> Calibration:
    """Calibration from one normal line per held-out template; `total`: training lines, with repetition.

    `chance`: that a new calm normal template is flagged. EncodedLines with an error level or word are flagged whatever is
    normal, so they have no part in the threshold.
    """
    n = len(held)
    rest: dict[str, Any] = {"mode": mode, "held_out": n, "total": total, "chance": chance}
    if n < 2:
        return Calibration(method="none", median=0.0, threshold=0.0, **rest)
    rest |= {
        "surprisal": Scale.fit([h.evidence.surprisal for h in held], _SPREADS[0]),
        "novelty": Scale.fit([h.evidence.novelty for h in held], _SPREADS[1]),
    }
    scaled = Calibration(method="student", median=0.0, threshold=0.0, **rest)
    calm = sorted(scaled.normalised_score(h.evidence) for h in held if h.calm)
    if len(calm) < 2:
        calm = sorted(scaled.normalised_score(h.evidence) for h in held)
    median = _quantile(calm, 0.5)
    found, method = bound(calm, chance)
    made = Calibration(
        method=method,
        median=round(median, 4),
        threshold=round(max(found, median + _LEAST_MARGIN), 4),
        **rest,
    )
    scores = sorted(round(made.as_new(h.evidence, severe=h.severe), 4) for h in held)
    tail = tail_of(scores)
    if n > _SCORES_MOST:
        scores = [_quantile(scores, i / (_SCORES_MOST - 1)) for i in range(_SCORES_MOST)]
    return replace(made, scores=tuple(scores), tail=tail)


def _quantile(ordered: Sequence[float], q: float) -> float:
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
