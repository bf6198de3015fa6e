"""From evidence to one number, and the meaning of that number: calibration on held-out templates.

Known templates are answered from the cache and never reach the model. So calibration uses *held-out
templates*: normal lines of shapes that the scoring model has not seen. Surprisal and novelty both measure how
unusual a line is. Each is normalised by its held-out values; their weighted mean is added, as a logit, to the
severity prior: the normalised score. Words of trouble count less in a line that is hardly novel. A new normal
template exceeds the threshold with the wanted chance. Free of torch: the drain worker concludes too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from pipeline.models.evidence import Evidence, Normal
from pipeline.models.prediction_bounds import ParetoTail, conformal, fit_pareto, upper_bound
from pipeline.models.severity import words
from pipeline.records.levels import ERROR_LEVELS

ANOMALOUS_SCORE: Final = 0.5
CHANCE: Final = 0.05  # false alarms per new normal template, where no alert budget asks for fewer


# Weights in logits; models/verdict.py adds them up.
LEVEL: Final = 2.5
WORD: Final = 2.0
_GRAVE_EXTRA: Final = 0.5  # panic before error
_FATAL_EXTRA: Final = 0.5  # fatal and critical before error
_WARNING: Final = 0.1  # settles ties: many logs warn all day (docs/LOG.md)
_FLOOR: Final = -2.0  # a new template always ranks above a variation of a known one
_BEYOND: Final = (
    0.5  # above 1 a normalised value grows by its logarithm, so that it cannot outvote the others
)
# Of how unusual a line is. Novelty is of three shares (trigrams, words, pairs of words), surprisal one value.
_NOVELTY_WEIGHT: Final = 0.75
_SURPRISAL_LEAST: Final = -1.0  # normalised: learnt words are all alike, however unlikely held-out ones are
_FAMILIAR_TROUBLE: Final = 0.5  # share of a prior above 0 that stays where every gram of the line is known
# Least spread of surprisal (nats) and novelty: equal values must not make a hair-trigger.
_SPREADS: Final = (0.25, 0.1)
_LEAST_MARGIN: Final = 0.25  # of the threshold above the median, for the same reason
_P_LEAST: Final = 1e-9  # no tail is known further

Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Normalises a measurement by its held-out values: their median becomes 0, their 95 % point 1."""

    centre: Finite = 0.0
    spread: Annotated[float, Meta(gt=0, le=1e300)] = 1.0

    def of(self, value: float) -> float:
        """Linear up to 1."""
        z = (value - self.centre) / self.spread
        return z if z <= 1.0 else 1.0 + _BEYOND * math.log(z)

    @classmethod
    def fit(cls, values: Sequence[float], floor: float) -> "Scale":
        ordered = sorted(values)
        centre = _quantile(ordered, 0.5)
        spread = max(floor, _quantile(ordered, 0.95) - centre)
        return cls(centre=round(centre, 4), spread=round(spread, 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The meaning of evidence under one model version.

    `method` tells how the threshold was found. "conformal": a rank among the held-out templates. "pot": a
    generalised Pareto tail fitted to at least 200 of them. "student": a prediction bound from fewer. "none":
    no held-out templates, so that evidence orders calm lines but flags none.
    """

    method: Literal["conformal", "pot", "student", "none"]
    median: Finite  # Of the normalised scores of held-out templates, logits.
    threshold: Finite  # Likewise; a new calm template is flagged above it.
    held_out: int  # Templates behind the figures.
    total: int  # Training lines, counted with repetition.
    chance: Finite = CHANCE  # That a new calm normal template lies above the threshold.
    surprisal: Scale = Scale()
    novelty: Scale = Scale()
    scores: tuple[Finite, ...] = ()  # logits of the held-out templates as if new, ascending
    tail: ParetoTail | None = None  # of the scores, where they are enough

    def __post_init__(self) -> None:
        if list(self.scores) != sorted(self.scores):
            raise ValueError("its scores do not ascend")

    def normalised_score(self, evidence: Evidence) -> float:
        """Logits, without the level: rises with surprisal, novelty and prior."""
        surprisal = max(_SURPRISAL_LEAST, self.surprisal.of(evidence.surprisal))
        novelty = self.novelty.of(evidence.novelty)
        prior = evidence.prior
        if prior > 0.0:
            high = max(_SPREADS[1], self.novelty.centre + self.novelty.spread)
            foreign = min(1.0, evidence.novelty / high)
            prior *= _FAMILIAR_TROUBLE + (1.0 - _FAMILIAR_TROUBLE) * foreign
        return prior + surprisal + _NOVELTY_WEIGHT * (novelty - surprisal)

    def excess(self, evidence: Evidence) -> float:
        """Logits above the threshold: below 0 for a line as unusual as normal ones are, never below -2."""
        score = self.normalised_score(evidence)
        if self.method == "none":
            # Without held-out templates there is no scale; stay below the threshold and preserve the order.
            return max(_FLOOR, -0.01 - _WARNING - math.log1p(math.exp(-score)))
        x = score - self.threshold
        return x if x >= 0 else _FLOOR * -math.expm1(x / -_FLOOR)

    def as_new(self, evidence: Evidence, *, severe: bool, level: str | None = None) -> float:
        """The logit of a line whose template no training line has."""
        return with_word(self.excess(evidence), self.word(evidence)) + level_logit(severe, level)

    def word(self, evidence: Evidence) -> float:
        """The logit of the error word, 0 without one."""
        if evidence.severity is None:
            return 0.0
        return WORD + _GRAVE_EXTRA * (evidence.severity in words().grave)

    def unusual(self, evidence: Evidence) -> bool:
        """Whether a line scores above half of the new normal templates."""
        return self.method != "none" and self.normalised_score(evidence) > self.median

    def p_value(self, logit: float) -> float | None:
        """The chance that a new normal template scores at least `logit`; None without held-out templates.

        Conformal: for a line exchangeable with the held-out ones, P(p <= a) <= a. Beyond the largest held-out
        score the generalised Pareto tail takes over, where there is one.
        """
        if not self.scores:
            return None
        p = conformal(self.scores, logit)
        if self.tail is not None and logit > self.scores[-1]:
            p = max(_P_LEAST, min(p, self.tail.chance(logit)))
        return float(f"{p:.4g}")


def level_logit(severe: bool, level: str | None) -> float:
    """The logit of the level; `severe`: seen at an error-like level, which `level` refines."""
    if severe or level in ERROR_LEVELS:
        return LEVEL + _FATAL_EXTRA * (level in {"fatal", "critical"})
    return _WARNING * (level == "warning")


def with_word(excess: float, word: float) -> float:
    """Excess and error word together; rises with both.

    Below the threshold the word counts in full. Above it the word counts less and less, because the prior has
    counted it already.
    """
    return excess + word if excess < 0 or word == 0 else math.hypot(excess, word)


def calibrate(held_out: Sequence[Normal], *, total: int, chance: float = CHANCE) -> Calibration:
    """Calibration from one normal line per held-out template; `total`: training lines, with repetition.

    `chance`: that a new calm normal template is flagged. Lines with an error level or word are always
    flagged, so the threshold ignores them.
    """
    n = len(held_out)
    common: dict[str, Any] = {"held_out": n, "total": total, "chance": chance}
    if n < 2:
        return Calibration(method="none", median=0.0, threshold=0.0, **common)
    scaled = Calibration(
        method="student",
        median=0.0,
        threshold=0.0,
        surprisal=Scale.fit([h.evidence.surprisal for h in held_out], _SPREADS[0]),
        novelty=Scale.fit([h.evidence.novelty for h in held_out], _SPREADS[1]),
        **common,
    )
    calm = sorted(scaled.normalised_score(h.evidence) for h in held_out if h.calm)
    if len(calm) < 2:
        calm = sorted(scaled.normalised_score(h.evidence) for h in held_out)
    median = _quantile(calm, 0.5)
    bound, method = upper_bound(calm, chance)
    threshold = round(max(bound, median + _LEAST_MARGIN), 4)
    calibration = replace(scaled, method=method, median=round(median, 4), threshold=threshold)
    scores = sorted(round(calibration.as_new(h.evidence, severe=h.severe), 4) for h in held_out)
    tail = fit_pareto(scores)
    return replace(calibration, scores=tuple(scores), tail=tail)


def _quantile(ordered: Sequence[float], q: float) -> float:
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
