"""The verdict for one masked line: a pure function of evidence, calibration and the training's knowledge.

The score is a logistic of a few added terms; a line is anomalous exactly when its score is at least 0.5. More
evidence never lowers the score. For all data: a new calm template is flagged exactly above the threshold, and
one with an error level or error word always. A variation of a known template needs an error-like sign *and*
unlikely words. A pattern of a baseline is never flagged. In a template that is in no baseline, an error level
is always flagged, and an error word in a rare line.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pipeline.models.evidence import Evidence
from pipeline.models.known.patterns import KnownPatterns
from pipeline.models.threshold import ANOMALOUS_SCORE, LEVEL, WORD, Calibration, level_logit, with_word
from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.verdict import UNCLASSIFIED, Reason, Verdict, reason

# Logits, beside those of levels and words in threshold.py.
_UNSEEN_WORD: Final = 3.5  # an error word this log has never used, in a known template
_VARIATION: Final = -2.5  # of a known template
_BASELINE_KNOWN: Final = -6.0
_NEWS_HALFWAY: Final = 20.0  # nats of a sentence whose score is in the middle of those of news
_NEWS_SCORES: Final = 0.05  # from that of an anomalous line upwards


def rarity(count: int, total: int) -> float:
    """0 for a line that is the whole log, 1 for a line seen once (or never)."""
    if count <= 1 or total <= 1:
        return 1.0
    return max(0.0, 1.0 - math.log(count) / math.log(total))


def is_rare(count: int, total: int) -> bool:
    """Seen at most total**0.25 times: 17 in 100,000, 5 in 1,000."""
    return rarity(count, total) >= 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What training knows of the pattern and the template of a line; the counts are of occurrences there.

    A variation of a frequent template is not rare. An error in a template that was always calm
    (`template_severe` is False) counts like one in a new template.
    """

    count: int  # of the pattern
    in_baseline: bool  # the pattern came in a baseline
    template_new: bool  # no training line has the template
    template_count: int = 0
    template_severe: bool | None = None  # it had lines at an error-like level; None: not known
    template_in_baseline: bool  # a line of it came in a baseline


def conclude(
    evidence: Evidence,
    *,
    calibration: Calibration,
    past: Past,
    severe: bool,
    level: str | None,
    template_id: int | None,
) -> Verdict:
    """The verdict for one masked line. Pure; rising evidence never lowers the score.

    `severe`: seen at an error-like level, which `level` refines.
    """
    level_severe = severe or level in ERROR_LEVELS
    total = calibration.total
    seen = max(past.count, past.template_count)
    seldom = rarity(seen, total)

    if past.count > 0 and past.in_baseline:
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
    if past.template_new:
        z = calibration.as_new(evidence, severe=level_severe, level=level)
    elif past.template_in_baseline:
        turned = level_severe and past.template_severe is False
        word = min(_variation_word(evidence), WORD if turned else _UNSEEN_WORD)
        z = min(excess, 0.0) + (0.0 if turned else _VARIATION) + word + level_logit(level_severe, level)
    else:
        rare = is_rare(seen, total)
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
    if past.template_new:
        reasons.append(reason(Reason.NEW_TEMPLATE))
    if level_severe or word > 0:
        reasons.append(reason(Reason.ERROR_SEVERITY, _severity_data(level, level_severe, evidence.severity)))
    if evidence.words and (anomalous or calibration.unusual(evidence)):
        reasons.append(reason(Reason.UNLIKELY_TOKENS, " ".join(evidence.words)))
    if not past.template_new and is_rare(past.count, total):
        reasons.append(reason(Reason.RARE, f"{past.count}/{total}"))
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


def verdict_of(row: Mapping[str, Any], template_id: int | None, knowledge: Knowledge | None) -> Verdict:
    """The verdict of one work row once its template is known: "warming" without a model.

    A template is new when the training data has no line of it, nor of this text at this severity. `row` may
    name the workload, which decides how strange a calm line has to be.
    """
    past_limit = (reason(Reason.UNCLASSIFIED),) if template_id == UNCLASSIFIED else ()
    if knowledge is None:
        reasons = (reason(Reason.WARMING), *past_limit)
        return Verdict(template_id=template_id, score=None, anomalous=None, reasons=reasons)
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
        past=_past(knowledge.known, row["pattern_id"], template_id, severe=row["severe"]),
        severe=row["severe"],
        level=row["level"],
        template_id=template_id,
    )
    verdict = _with_news(verdict, row, knowledge)
    return (
        msgspec.structs.replace(verdict, reasons=(*verdict.reasons, *past_limit)) if past_limit else verdict
    )


def _with_news(verdict: Verdict, row: Mapping[str, Any], knowledge: Knowledge) -> Verdict:
    """A calm line that training never saw, and whose words never stood so, is anomalous because it was never
    said. It opens no incident: the report lists the strangest ones, by their score."""
    known, masked = knowledge.known, row.get("masked")
    if verdict.anomalous or row["severe"] or row["pattern_id"] in known:
        return verdict
    if known.sentences is None or masked is None:  # the judge asks without the text
        return verdict
    news = known.sentences.news(masked, row.get("workload") or "")
    if news is None:
        return verdict
    data = f"{knowledge.calibration.total} {news.usual}".rstrip()
    # Rises with the strangeness, and stays below that of nearly all other anomalous lines.
    score = round(ANOMALOUS_SCORE + _NEWS_SCORES * news.nats / (news.nats + _NEWS_HALFWAY), 6)
    reasons = tuple(r for r in verdict.reasons if r.partition(":")[0] != Reason.RARE)
    said = (*reasons, reason(Reason.NEVER_SAID, data))
    return msgspec.structs.replace(verdict, score=score, anomalous=True, reasons=said)


def _past(known: KnownPatterns, pattern_id: int, template_id: int | None, *, severe: bool) -> Past:
    # Lines past a template limit share an id, and nothing else.
    template = None if template_id == UNCLASSIFIED else template_id
    count = known.count(pattern_id, severe=severe)
    template_count = known.template_count(template)
    return Past(
        count=count,
        in_baseline=known.in_baseline(pattern_id),
        # Errors and calm lines of one text have two templates, of which training knows one.
        template_new=template_count == 0 and count == 0,
        template_count=template_count,
        template_severe=None if template is None else known.template_severe(template),
        template_in_baseline=template is not None and known.template_in_baseline(template),
    )
