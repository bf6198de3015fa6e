"""Whether a trained model may replace the live one.

    sample --split--> held out of the fit --fit--> candidate
    candidate and live, both shown the same lines --judge--> Judgement: passed or not, with the figures

Both models answer as the pipeline does: evidence, then verdict. The shape of held-out lines is hidden from
both, as on its first appearance; lines of the current stream meet everything that each model knows. A
candidate fails only where it is worse than the live model by more than a margin *and* by more than chance
explains, or where it is unusable. No labels are needed.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol, Self

import msgspec
import numpy as np
import polars as pl

from pipeline.models import bundle as bundles
from pipeline.models.evidence import Evidence
from pipeline.models.severity import severity_words
from pipeline.models.threshold import Mode
from pipeline.models.verdict import Knowledge, verdict_of
from pipeline.records.schema import SAMPLE_SCHEMA
from pipeline.records.verdict import pattern_ids
from pipeline.training.comparison import auc, auc_falls, auc_upper, more_often, spearman, wilson_lower
from pipeline.training.holdout import LEARNT, SPLIT_LEAST, HeldOut, calm
from pipeline.training.injection import injected

_RECENT_HEAD: Final = 90  # Distinct lines of the stream, most frequent first ...
_RECENT_TAIL: Final = 50  # ... and some of the others
_NEW_SHAPE: Final = -1  # A template id that no model knows.
# A split conformal threshold from 20 templates, the fewest possible, lets through a share of normal lines
# that is Beta(1, 20) distributed: above 0.15 in one of 26 sound models. A share below is no fault of a model.
_TOLERATED: Final = 0.15
_MAJORITY: Final = 0.5  # a model that alerts on most lines is ignored by people
_RECENT_MARGIN: Final = 0.05  # of the records: as much again as the nominal rate of new shapes
# Of recall. Thresholds from some twenty templates vary: models that differ only by seed were seen 0.3 apart
# (docs/LOG.md). Ranks do not depend on thresholds, so the AUC is the finer measure.
_RECALL_MARGIN: Final = 0.3
_AUC_MARGIN: Final = 0.1
_AUC_LEAST: Final = 0.6  # 0.5 is a coin
# Ranks of unrelated models lie around 0; sound ones, trained on different parts of a log, were seen at 0.3.
_AGREEMENT_LEAST: Final = 0.1

_NORMAL, _RECENT, _INJECTED = (pl.col("part") == part for part in ("normal", "recent", "injected"))
_SILENT: Final = _INJECTED & ~pl.col("error_word")  # in the others the error word decides, not the model


class Scorer(Protocol):
    """The part of `LineModel` that a judge needs."""

    def score(self, masked: Sequence[str]) -> list[Evidence]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Examinee:
    """A model version as the judge sees it."""

    version: str
    scorer: Scorer
    knowledge: Knowledge
    held_out: frozenset[int] = frozenset()  # patterns it knows but its weights never saw

    @classmethod
    def load(cls, bundle: Path, *, device: str = "cpu", threads: int | None = 1) -> Self:
        """Verifies and loads a bundle, with torch. Raises BadBundle."""
        from pipeline.models.line import LineModel  # torch

        scorer = LineModel.load(bundle, device=device, threads=threads)
        manifest = bundles.load_manifest(bundle)
        knowledge = Knowledge(calibration=manifest.calibration, known=bundles.load_known(bundle))
        held_out = frozenset(manifest.held_out)
        return cls(version=manifest.version, scorer=scorer, knowledge=knowledge, held_out=held_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """The figures of one model. Shares are 0..1; None where there was no line to ask."""

    version: str
    alert_rate_time: float | None  # Of normal lines first seen in the newest part of the range.
    alert_rate_template: float | None  # Of normal lines of held-out templates.
    alert_rate_recent: float | None  # Of the calm records of the current stream, weighted by their counts.
    injected_recall: float | None  # Of all injected anomalies.
    injected_auc: float | None  # Of those without an error word, against lines of the stream, all as unseen.
    calibration: float | None  # Held-out normal lines above the threshold; nominally 0.05.
    time_lines: int
    template_lines: int
    recent_lines: int  # distinct
    injected_lines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The decision and all its grounds. `reason` is for people."""

    passed: bool
    reason: str
    candidate: ModelFigures
    live: ModelFigures | None  # None: there was none, or none that answers
    rank_agreement: float | None  # Spearman's rho of the two models' scores, -1..1
    held: str  # how lines were held out
    lines: int  # distinct lines shown
    seconds: float
    seed: int


def judge(candidate: Examinee, live: Examinee | None, held_out: HeldOut, recent: pl.DataFrame) -> Judgement:
    """Compares the candidate with the live model on the same lines.

    `recent` is the current stream: distinct masked lines with counts (SAMPLE_SCHEMA; may be empty). Today's
    masks apply to all lines, also for a live model of older masks: the pipeline asks that model the same from
    now on. Deterministic but for `seconds`; shows each model at most about 400 distinct lines.
    """
    began = time.monotonic()
    lines, usual = _shown(held_out, recent)
    answers = _ask(candidate, held_out, lines, usual)
    other = _ask(live, held_out, lines, usual) if live else None
    fault = _useless(answers)
    note = ""
    if other and (unusable := _useless(other)):
        note, other = f"; the live model {other.figures.version} was no measure: it {unusable}", None
    agreement = None
    if fault is None and other:
        agreement = spearman(answers.lines["score"].to_list(), other.lines["score"].to_list())
        firm = live is not None and all(
            e.knowledge.calibration.method in {"conformal", "pot"} for e in (candidate, live)
        )
        fault = _worse(answers, other, agreement, firm=firm)
    figures = answers.figures
    reason = f"{figures.version} {fault}" if fault else _praise(figures, other.figures if other else None)
    return Judgement(
        passed=fault is None,
        reason=reason + note,
        candidate=figures,
        live=other.figures if other else None,
        rank_agreement=None if agreement is None else round(agreement, 4),
        held=held_out.how,
        lines=len(answers.surprisals),
        seconds=round(time.monotonic() - began, 3),
        seed=held_out.seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answers:
    """The answers of one model."""

    figures: ModelFigures
    lines: pl.DataFrame  # of `_shown`, with the columns that `_ask` adds
    usual: list[float]  # normalised scores of calm lines of the stream
    surprisals: list[float]  # of all distinct lines

    def flags(self, which: pl.Expr | pl.Series) -> list[bool]:
        return self.lines.filter(which)["anomalous"].to_list()

    @property
    def silent(self) -> list[float]:
        return self.lines.filter(_SILENT)["rank"].to_list()


def _shown(held_out: HeldOut, recent: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """The lines that both models are asked about, and the calm lines that rank injected anomalies.

    Columns: `part` ("normal": held out, "recent": calm lines of the stream, "injected"), masked, pattern_id,
    template_id, `whole` (the whole template is held out), `late` (held out by time), `weight`, `error_word`.
    """
    normal = pl.concat(
        [held_out.by_time.with_columns(late=True), held_out.by_template.with_columns(late=False)]
    )
    normal = normal.with_columns(part=pl.lit("normal"), weight=pl.lit(1.0))
    stream = recent.select(list(SAMPLE_SCHEMA)).with_columns(pl.col("template_id").fill_null(_NEW_SHAPE))
    stream = stream.drop_nulls().filter(~pl.col("severe"))
    stream = stream.unique("pattern_id", keep="first").sort("count", "pattern_id", descending=[True, False])
    # The most frequent lines carry most of the weight; a sample stands for the others.
    head, tail = stream.head(_RECENT_HEAD), stream.slice(_RECENT_HEAD)
    rng = np.random.default_rng(held_out.seed)
    drawn = tail[np.sort(rng.permutation(tail.height)[:_RECENT_TAIL])]
    scale = tail.height / max(1, drawn.height)
    stream = pl.concat([head.with_columns(scale=pl.lit(1.0)), drawn.with_columns(scale=pl.lit(scale))])
    stream = stream.filter(pl.Series([calm(m) for m in stream["masked"]], dtype=pl.Boolean))
    stream = stream.with_columns(
        part=pl.lit("recent"),
        weight=pl.col("count") * pl.col("scale"),
        whole=pl.lit(value=False),
        late=pl.lit(value=False),
    )
    frequent = stream["masked"].to_list()
    usual = list(dict.fromkeys([*frequent, *held_out.learnt[: max(0, LEARNT - len(frequent))]]))
    anomalies = [i.masked for i in injected([*normal["masked"], *usual], seed=held_out.seed)]
    anomaly_lines = pl.DataFrame(
        {
            "part": "injected",
            "masked": anomalies,
            "pattern_id": pl.Series(pattern_ids(anomalies), dtype=pl.UInt64),
            "template_id": pl.Series([_NEW_SHAPE] * len(anomalies), dtype=pl.Int64),
            "whole": False,
            "late": False,
            "weight": 1.0,
        }
    )
    lines = pl.concat([frame.select(anomaly_lines.columns) for frame in (normal, stream, anomaly_lines)])
    words = [severity_words(m) is not None for m in lines["masked"]]
    return lines.with_columns(error_word=pl.Series(words, dtype=pl.Boolean)), usual


def _ask(model: Examinee, held_out: HeldOut, shown: pl.DataFrame, usual: Sequence[str]) -> _Answers:
    """Adds a model's answers to the lines.

    `anomalous` and `score` of the verdict; `rank`: the normalised score; `above`: whether that exceeds the
    threshold; `fair`: the weights have not seen the like of a held-out line.
    """
    texts = list(dict.fromkeys([*shown["masked"], *usual]))
    evidence = dict(zip(texts, model.scorer.score(texts), strict=True))
    knowledge, calibration = model.knowledge, model.knowledge.calibration
    patterns, learnt = knowledge.known, knowledge.known.without(model.held_out, frozenset())
    hiding = replace(knowledge, known=patterns.without(held_out.patterns, held_out.templates))
    ranks = {masked: calibration.normalised_score(e) for masked, e in evidence.items()}
    answers: list[tuple[bool, float, float, bool, bool]] = []
    for row in shown.iter_rows(named=True):
        masked, pattern, template = row["masked"], row["pattern_id"], row["template_id"]
        if row["part"] == "injected":
            template = patterns.template_of(pattern) or _NEW_SHAPE
        work_row = {
            **msgspec.structs.asdict(evidence[masked]),
            "pattern_id": pattern,
            "severe": False,
            "level": None,
        }
        verdict = verdict_of(work_row, template, hiding if row["part"] == "normal" else knowledge)
        # A line of its baseline is never flagged, so it ranks below all others.
        never = (
            row["part"] == "injected" and calibration.mode is Mode.BASELINE and patterns.count(pattern) > 0
        )
        unseen = not learnt.count(pattern) and not (row["whole"] and learnt.template_count(template))
        answers.append(
            (
                bool(verdict.anomalous),
                -1.0 if verdict.score is None else verdict.score,
                -math.inf if never else ranks[masked],
                ranks[masked] > calibration.threshold,
                row["part"] == "normal" and unseen,
            )
        )
    columns = {
        "anomalous": pl.Boolean,
        "score": pl.Float64,
        "rank": pl.Float64,
        "above": pl.Boolean,
        "fair": pl.Boolean,
    }
    lines = shown.hstack(pl.DataFrame(answers, schema=columns, orient="row"))
    usual_ranks = [ranks[masked] for masked in usual]
    silent = lines.filter(_SILENT)["rank"].to_list()
    figures = ModelFigures(
        version=model.version,
        injected_auc=round(auc(silent, usual_ranks), 4) if usual else None,
        **_figures(lines, scaled=calibration.method != "none"),
    )
    return _Answers(
        figures=figures, lines=lines, usual=usual_ranks, surprisals=[e.surprisal for e in evidence.values()]
    )


def _figures(lines: pl.DataFrame, *, scaled: bool) -> dict[str, Any]:
    flagged, late, weight = pl.col("anomalous"), pl.col("late"), pl.col("weight").filter(_RECENT)
    shares = lines.select(
        alert_rate_time=flagged.filter(_NORMAL & late).mean(),
        alert_rate_template=flagged.filter(_NORMAL & ~late).mean(),
        alert_rate_recent=weight.filter(flagged.filter(_RECENT)).sum() / weight.sum(),
        injected_recall=flagged.filter(_INJECTED).mean(),
        calibration=pl.col("above").filter(pl.col("fair")).mean() if scaled else pl.lit(None),
    )
    counts = lines.select(
        time_lines=(_NORMAL & late).sum(),
        template_lines=(_NORMAL & ~late).sum(),
        recent_lines=_RECENT.sum(),
        injected_lines=_INJECTED.sum(),
    )
    rounded = {
        name: None if share is None or math.isnan(share) else round(share, 4)
        for name, share in shares.row(0, named=True).items()
    }
    return rounded | counts.row(0, named=True)


def _share(hits: Sequence[bool]) -> float | None:
    return round(sum(hits) / len(hits), 4) if hits else None


def _useless(answers: _Answers) -> str | None:
    """Why a model is unfit by itself, without a comparison; None for a usable one."""
    figures = answers.figures
    if not all(map(math.isfinite, answers.surprisals)):
        return "gives scores that are not finite numbers"
    if len(set(answers.surprisals)) < 2:
        return f"gives all {len(answers.surprisals)} lines the same surprisal"
    silent = answers.silent
    if answers.usual and auc_upper(silent, answers.usual) < _AUC_LEAST:
        return (
            f"cannot tell faults from normal lines: it ranks an injected anomaly above a normal line in "
            f"{_percent(figures.injected_auc)} of {len(silent)} x {len(answers.usual)} pairs"
        )
    flagged = answers.flags(_RECENT)
    if (figures.alert_rate_recent or 0.0) > _MAJORITY and wilson_lower(
        sum(flagged), len(flagged)
    ) > _MAJORITY:
        return f"alerts on {_percent(figures.alert_rate_recent)} of the current stream's calm records"
    # Lines held out by template come from the very sample: unlike those held out by time, no change in the
    # log excuses an alert on them. Lines that the weights know through a parent can only make a model look
    # better.
    by_template = _NORMAL & ~pl.col("late")
    for which in (by_template, by_template & pl.col("fair")):
        flagged = answers.flags(which)
        if wilson_lower(sum(flagged), len(flagged)) > _MAJORITY:
            return f"alerts on {_percent(_share(flagged))} of {len(flagged)} held-out normal lines"
    return None


def _worse(candidate: _Answers, live: _Answers, agreement: float | None, *, firm: bool) -> str | None:
    """Where the candidate is worse than the live model by more than the margins and more than chance.

    `firm`: both thresholds are quantiles of enough held-out templates. From fewer, a threshold is a
    small-sample bound that moves with the seed alone (recall 0 % and 36 % of the same log); ranks still tell
    such models apart.
    """
    a, b = candidate.figures, live.figures
    faults: list[str] = []
    # Only lines that neither has learnt: a line that the live model has seen is easier for it.
    fair = candidate.lines["fair"] & live.lines["fair"]
    flagged, flagged_live = candidate.flags(fair), live.flags(fair)
    if more_often(flagged, flagged_live) and wilson_lower(sum(flagged), len(flagged)) > _TOLERATED:
        faults.append(
            f"alerts on {_percent(_share(flagged))} of {len(flagged)} held-out normal lines, "
            f"the live model {b.version} on {_percent(_share(flagged_live))}"
        )
    more = (a.alert_rate_recent or 0.0) - (b.alert_rate_recent or 0.0)
    if more > _RECENT_MARGIN and more_often(candidate.flags(_RECENT), live.flags(_RECENT)):
        faults.append(
            f"alerts on {_percent(a.alert_rate_recent)} of the current stream's calm records, "
            f"the live model {b.version} on {_percent(b.alert_rate_recent)}"
        )
    # A model that alerts on more normal lines also finds more, so that part of the recall is no merit
    # (Youden's index).
    no_merit = max(0.0, (_share(flagged_live) or 0.0) - (_share(flagged) or 0.0), -more)
    found, found_live = candidate.flags(_SILENT), live.flags(_SILENT)
    fewer = (_share(found_live) or 0.0) - (_share(found) or 0.0) - no_merit
    if firm and fewer > _RECALL_MARGIN and more_often(found_live, found):
        faults.append(
            f"finds {_percent(_share(found))} of {len(found)} injected anomalies without an error word, "
            f"the live model {b.version} {_percent(_share(found_live))}"
        )
    if (
        a.injected_auc is not None
        and b.injected_auc is not None
        and b.injected_auc - a.injected_auc > _AUC_MARGIN
        and auc_falls(candidate.silent, candidate.usual, live.silent, live.usual)
    ):
        faults.append(
            f"ranks injected anomalies above normal lines in {_percent(a.injected_auc)} of pairs, "
            f"the live model {b.version} in {_percent(b.injected_auc)}"
        )
    if agreement is not None and agreement < _AGREEMENT_LEAST and candidate.lines.height >= SPLIT_LEAST:
        faults.append(
            f"orders the lines unlike the live model {b.version}: rank agreement {agreement:.2f}, "
            f"at least {_AGREEMENT_LEAST} is wanted"
        )
    return "; ".join(faults) or None


def _praise(candidate: ModelFigures, live: ModelFigures | None) -> str:
    rows: list[tuple[str, Callable[[ModelFigures], float | None]]] = [
        (
            f"alerts on {{}} of {candidate.template_lines + candidate.time_lines} held-out normal lines",
            _held_rate,
        ),
        ("alerts on {} of the current stream's calm records", lambda f: f.alert_rate_recent),
        (f"finds {{}} of {candidate.injected_lines} injected anomalies", lambda f: f.injected_recall),
    ]
    clauses = []
    for words, of in rows:
        if of(candidate) is not None:
            clauses.append(
                words.format(_percent(of(candidate))) + (f" (live {_percent(of(live))})" if live else "")
            )
    against = f"no worse than {live.version}" if live else "usable, with no live model to compare with"
    return f"{candidate.version} is {against}: it " + ", ".join(clauses)


def _held_rate(f: ModelFigures) -> float | None:
    n = f.time_lines + f.template_lines
    hits = (f.alert_rate_time or 0.0) * f.time_lines + (f.alert_rate_template or 0.0) * f.template_lines
    return hits / n if n else None


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.1f} %"
