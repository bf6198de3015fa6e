"""From evidence to verdict: calibration, severity words and the pure function `conclude`.

Known templates are answered from the cache and never reach the model, so the threshold is
calibrated on *held-out templates*: lines of shapes the scoring model had not seen, all normal.
The score is a logistic of a few added terms; a line is anomalous exactly when its score is at
least 0.5, and no term can lower the score when its evidence grows. Free of torch on purpose: the
drain worker concludes too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from pipeline.errors import BadBundle
from pipeline.models.severity import GRAVE_WORDS
from pipeline.records import ERROR_LEVELS, Reason, Verdict, reason

ANOMALOUS_SCORE: Final = 0.5


class Mode(StrEnum):
    """What the training sample is."""

    BASELINE = "baseline"  # known to be normal
    SELF = "self"  # the very lines that are scored; faults may hide in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the model saw in one masked line.

    `surprise` is the mean NLL in nats of the worst tokens (0 for a line of mask tokens only);
    `words` are whole words of the masked line, most surprising first; `unseen` are words that no
    training line holds; `tokens` counts the scored tokens; `severity` is the error word found by
    `severity_words`.
    """

    surprise: float
    words: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    tokens: int = 0
    severity: str | None = None


# One-sided 95 % points of Student's t for 1..18 degrees of freedom (standard tables): with fewer
# than 19 held-out templates no empirical quantile reaches 5 %, so a normal prediction bound is used.
_T95: Final = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833,
    1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734,
)  # fmt: skip
_MIN_SPREAD: Final = 0.25  # nats; equal held-out surprises must not make a hair-trigger threshold
_QUANTILES: Final = 101  # kept in the manifest: enough for percent steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What surprise means under one model version.

    `method` is "conformal" (empirical quantile of at least 19 held-out templates), "student"
    (95 % prediction bound from 2..18 of them) or "none" (fewer: surprise orders lines but flags
    none by itself). `quantiles` are evenly spaced quantiles of the held-out surprises.
    """

    mode: Mode
    method: str
    median: float  # nats
    threshold: float  # nats; about 5 % of unseen normal templates lie above it
    held_out: int  # templates behind the figures
    total: int  # training lines, counted with repetition
    quantiles: tuple[float, ...] = ()

    def p_value(self, surprise: float) -> float:
        """Conformal p-value: the share of unseen normal templates at least this surprising."""
        if not self.quantiles:
            return 1.0
        share = sum(q >= surprise for q in self.quantiles) / len(self.quantiles)
        return (1 + share * self.held_out) / (1 + self.held_out)

    def grade(self, surprise: float) -> float:
        """-1..3; 0 at the median of unseen normal templates, 1 at the threshold."""
        if self.method == "none":
            # Without held-out templates there is no scale; stay below the threshold and keep the order.
            return surprise / (1.0 + surprise) - 1.0
        spread = max(self.threshold - self.median, _MIN_SPREAD)
        return max(-1.0, min(3.0, (surprise - self.median) / spread))

    def to_json(self) -> dict[str, Any]:
        return {
            "mode": self.mode.value,
            "method": self.method,
            "median": self.median,
            "threshold": self.threshold,
            "held_out": self.held_out,
            "total": self.total,
            "quantiles": list(self.quantiles),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Calibration":
        """Raises BadBundle when a field is missing or not a number."""
        try:
            numbers = [float(q) for q in data["quantiles"]]
            made = cls(
                mode=Mode(data["mode"]),
                method=str(data["method"]),
                median=float(data["median"]),
                threshold=float(data["threshold"]),
                held_out=int(data["held_out"]),
                total=int(data["total"]),
                quantiles=tuple(numbers),
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise BadBundle(f"the calibration in a manifest is not readable: {exc!r}; train again") from exc
        if made.method not in {"conformal", "student", "none"} or not all(
            math.isfinite(v) for v in (made.median, made.threshold, *numbers)
        ):
            raise BadBundle(
                f"the calibration in a manifest has method {made.method!r} or a value that is not finite"
            )
        return made


def calibrate(surprises: Sequence[float], *, mode: Mode, total: int) -> Calibration:
    """Calibration from one surprise per held-out template (nats), `total` training lines."""
    ordered = sorted(surprises)
    n = len(ordered)
    if n < 2:
        return Calibration(mode=mode, method="none", median=0.0, threshold=0.0, held_out=n, total=total)
    median = _quantile(ordered, 0.5)
    if n >= 19:
        method = "conformal"
        # Split conformal: the ceil((n + 1)(1 - alpha))-th smallest bounds the next one at 1 - alpha.
        threshold = ordered[min(n, math.ceil((n + 1) * 0.95)) - 1]
    else:
        method = "student"
        mean = sum(ordered) / n
        sd = math.sqrt(sum((v - mean) ** 2 for v in ordered) / (n - 1))
        threshold = mean + _T95[n - 2] * sd * math.sqrt(1 + 1 / n)
    count = min(n, _QUANTILES)
    quantiles = tuple(round(_quantile(ordered, i / max(1, count - 1)), 4) for i in range(count))
    return Calibration(
        mode=mode,
        method=method,
        median=round(median, 4),
        threshold=round(max(threshold, median + _MIN_SPREAD), 4),
        held_out=n,
        total=total,
        quantiles=quantiles,
    )


def _quantile(ordered: Sequence[float], q: float) -> float:
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


# --- verdict ------------------------------------------------------------------------------------

# Weights of the score in logits. What they are chosen to guarantee, whatever the data:
# a new template is flagged by surprise alone exactly above the threshold (-1 + grade), by an error
# level or an error word always; a variation of a known template only by an error-like sign *and*
# surprise; a pattern of a baseline never.
_LEVEL: Final = 2.5
_WORD: Final = 2.0
_GRAVE_EXTRA: Final = 0.5  # panic before error
_FATAL_EXTRA: Final = 0.5  # fatal and critical before error
_WARNING: Final = 0.5
_UNSEEN_WORD: Final = 3.5  # an error word this log has never used, in a known template
_NEW: Final = -1.0
_BASELINE_VARIATION: Final = -3.5
_SELF_KNOWN: Final = -2.0
_BASELINE_KNOWN: Final = -6.0


def rarity(count: int, total: int) -> float:
    """0 for a line that is the whole log, 1 for a line seen once (or never)."""
    if count <= 1 or total <= 1:
        return 1.0
    return max(0.0, 1.0 - math.log(count) / math.log(total))


def is_rare(count: int, total: int) -> bool:
    """Seen at most total**0.25 times: 17 in 100,000, 5 in 1,000."""
    return rarity(count, total) >= 0.75


def conclude(
    evidence: Evidence,
    *,
    calibration: Calibration,
    known_count: int,
    template_new: bool,
    severe: bool,
    level: str | None,
    template_id: int,
    template_count: int | None = None,
    template_severe: bool | None = None,
) -> Verdict:
    """The verdict for one masked line. Pure; rising evidence never lowers the score.

    `known_count`: occurrences of the pattern in training, 0 when it was not there. `template_new`:
    no training line has its template. `severe`: seen at an error-like level (`level` refines it).
    `template_count`: occurrences of the template in training, where known; a variation of a frequent
    template is then not rare. `template_severe`: whether training saw the template at an error-like
    level, where known; an error in a template that was always calm counts like one in a new template.

    In Mode.SELF every distinct line is to be scored, those of the training too.
    """
    level_severe = severe or level in ERROR_LEVELS
    total = calibration.total
    baseline = calibration.mode is Mode.BASELINE
    grade = calibration.grade(evidence.surprise)
    rare_count = max(known_count, template_count or 0)

    severity_word = evidence.severity
    severity = _LEVEL * level_severe + _FATAL_EXTRA * (level in {"fatal", "critical"})
    if level == "warning" and not level_severe:
        severity = _WARNING

    if known_count > 0 and baseline:
        z = _BASELINE_KNOWN + rarity(rare_count, total) + 0.5 * level_severe
        return Verdict(template_id=template_id, score=_logistic(z), anomalous=False, reasons=())

    rare = template_new or is_rare(rare_count, total)
    word_weight = 0.0
    if severity_word:
        word_weight = _WORD + _GRAVE_EXTRA * (severity_word in GRAVE_WORDS)
    if template_new:
        z = _NEW + grade
    elif baseline:
        turned = level_severe and template_severe is False
        z = (_NEW if turned else _BASELINE_VARIATION) + min(grade, 1.0)
        word_weight = min(_variation_word(evidence), _WORD if turned else _UNSEEN_WORD)
    else:
        z = _SELF_KNOWN + rarity(rare_count, total) + (grade if rare else min(grade, 1.0))
    z += severity + word_weight

    score = _logistic(z)
    anomalous = score >= ANOMALOUS_SCORE
    reasons: list[str] = []
    if template_new:
        reasons.append(reason(Reason.NEW_TEMPLATE))
    if level_severe or word_weight > 0:
        reasons.append(reason(Reason.ERROR_SEVERITY, _severity_data(level, level_severe, severity_word)))
    if evidence.words and (grade > 0 or anomalous):
        reasons.append(reason(Reason.UNLIKELY_TOKENS, " ".join(evidence.words)))
    if not template_new and is_rare(known_count, total):
        reasons.append(reason(Reason.RARE, f"{known_count}/{total}"))
    return Verdict(template_id=template_id, score=score, anomalous=anomalous, reasons=tuple(reasons))


def _variation_word(evidence: Evidence) -> float:
    """An error word weighs in a variation of a known template only where it was not expected."""
    if evidence.severity is None:
        return 0.0
    head = evidence.severity.split()[-1]
    if any(head in w.lower() for w in evidence.unseen):
        return _UNSEEN_WORD
    return _LEVEL if any(head in w.lower() for w in evidence.words) else 0.0


def _severity_data(level: str | None, level_severe: bool, word: str | None) -> str:
    if level_severe and level in ERROR_LEVELS:
        return level
    return word or (level or "")


def _logistic(z: float) -> float:
    return round(1.0 / (1.0 + math.exp(-z)), 6)
