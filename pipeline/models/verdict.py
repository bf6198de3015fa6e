"""The verdict for one masked line: a pure function of evidence, calibration and the training's knowledge.

The score is a logistic of a few added terms; a line is anomalous exactly when its score is at least 0.5. More
evidence never lowers the score. For all data: a new calm template is flagged exactly above the threshold, and
one with an error level or error word always. A variation of a known template needs an error-like sign *and*
unlikely words. A pattern of a baseline is never flagged. Without a baseline an error level is always flagged,
and an error word in a rare line.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pipeline.models.bundle import KnownPatterns
from pipeline.models.evidence import Evidence
from pipeline.models.threshold import ANOMALOUS_SCORE, LEVEL, WORD, Calibration, Mode, level_logit, with_word
from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.verdict import UNCLASSIFIED, Reason, Verdict, reason

# Logits, beside those of levels and words in threshold.py.
_UNSEEN_WORD: Final = 3.5  # an error word this log has never used, in a known template
_VARIATION: Final = -2.5  # of a known template
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
    seldom = rarity(max(known_count, template_count or 0), total)

    if known_count > 0 and baseline:
        z = _BASELINE_KNOWN + seldom + 0.5 * level_severe
        return Verdict(
            template_id=template_id,
            score=_logistic(z),
            anomalous=False,
            reasons=(),
            p_value=calibration.p_value(z),
        )

    excess = calibration.excess(evidence)
    word = calibration.word(evidence)
    if template_new:
        z = calibration.as_new(evidence, severe=level_severe, level=level)
    elif baseline:
        turned = level_severe and template_severe is False
        word = min(_variation_word(evidence), WORD if turned else _UNSEEN_WORD)
        z = min(excess, 0.0) + (0.0 if turned else _VARIATION) + word + level_logit(level_severe, level)
    else:
        rare = is_rare(max(known_count, template_count or 0), total)
        z = (
            with_word(excess if rare else min(excess, 0.0), word)
            + seldom
            - 1.0
            + level_logit(level_severe, level)
        )
        if level_severe or (rare and word > 0):
            z = max(z, 0.0)  # never missed, however likely the words

    score = _logistic(z)
    anomalous = score >= ANOMALOUS_SCORE
    reasons: list[str] = []
    if template_new:
        reasons.append(reason(Reason.NEW_TEMPLATE))
    if level_severe or word > 0:
        reasons.append(reason(Reason.ERROR_SEVERITY, _severity_data(level, level_severe, evidence.severity)))
    if evidence.words and (anomalous or calibration.unusual(evidence)):
        reasons.append(reason(Reason.UNLIKELY_TOKENS, " ".join(evidence.words)))
    if not template_new and is_rare(known_count, total):
        reasons.append(reason(Reason.RARE, f"{known_count}/{total}"))
    return Verdict(
        template_id=template_id,
        score=score,
        anomalous=anomalous,
        reasons=tuple(reasons),
        p_value=calibration.p_value(z),
    )


def _variation_word(evidence: Evidence) -> float:
    """The logit of an error word in a variation of a known template: 0 for a word expected there."""
    if evidence.severity is None:
        return 0.0
    head = evidence.severity.split()[-1]
    if any(head in w.lower() for w in evidence.unseen):
        return _UNSEEN_WORD
    return LEVEL if any(head in w.lower() for w in evidence.words) else 0.0


def _severity_data(level: str | None, level_severe: bool, word: str | None) -> str:
    if level_severe and level in ERROR_LEVELS:
        return level
    return word or (level or "")


def _logistic(z: float) -> float:
    return round(1.0 / (1.0 + math.exp(-z)), 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knowledge:
    """The parts of a model version that a verdict needs: all but the network."""

    calibration: Calibration
    known: KnownPatterns


def verdict_of(row: Mapping[str, Any], template_id: int, knowledge: Knowledge | None) -> Verdict:
    """The verdict of one work row once its template is known: "warming" without a model.

    A template is new when the training data has no line of it, nor of this text at this severity.
    """
    past_limit = (reason(Reason.UNCLASSIFIED),) if template_id == UNCLASSIFIED else ()
    if knowledge is None:
        reasons = (reason(Reason.WARMING), *past_limit)
        return Verdict(template_id=template_id, score=None, anomalous=None, reasons=reasons)
    count = knowledge.known.template_count(template_id) if template_id != UNCLASSIFIED else 0
    familiar = knowledge.known.count(row["pattern_id"], severe=row["severe"])
    verdict = conclude(
        Evidence(
            surprisal=row["surprisal"],
            words=tuple(row["words"]),
            unseen=tuple(row["unseen"]),
            tokens=row["tokens"],
            severity=row["severity"],
            novelty=row["novelty"],
            prior=row["prior"],
        ),
        calibration=knowledge.calibration,
        known_count=familiar,
        # Errors and calm lines of one text have two templates, of which training knows one.
        template_new=count == 0 and familiar == 0,
        severe=row["severe"],
        level=row["level"],
        template_id=template_id,
        template_count=count,
        template_severe=knowledge.known.template_severe(template_id),
    )
    return (
        msgspec.structs.replace(verdict, reasons=(*verdict.reasons, *past_limit)) if past_limit else verdict
    )
