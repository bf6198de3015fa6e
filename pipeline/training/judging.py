"""Whether a trained model may take the live one's place.

    sample --split--> held out of the fit --fit--> candidate
    candidate and live, both shown the same lines --judge--> Judgement: passed or not, with the figures

Both models answer as the pipeline does: evidence, then verdict. For held-out lines their shape is hidden from both, as
it is for a line that nobody has seen yet; lines of the current stream meet what each model really knows. A candidate
fails only where it is worse than the live model by more than a margin *and* more than chance explains, or where it is
of no use at all. No labels are needed.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Protocol, Self

import numpy as np
import polars as pl

from pipeline.errors import BadPayload
from pipeline.models import bundle as bundles
from pipeline.models.evidence import Evidence
from pipeline.models.severity import severity_words
from pipeline.models.threshold import Calibration, Mode
from pipeline.models.verdict import Knowledge, verdict_of
from pipeline.records.schema import SAMPLE_SCHEMA
from pipeline.records.verdict import Verdict, pattern_ids
from pipeline.training.comparison import auc, auc_falls, auc_upper, more_often, spearman, wilson_lower
from pipeline.training.holdout import LEARNT, SPLIT_LEAST, HeldOut, calm, split
from pipeline.training.injection import Injected, injected

__all__ = ["Examinee", "HeldOut", "Injected", "Judgement", "ModelFigures", "injected", "judge", "split"]

_RECENT_HEAD: Final = 90  # distinct lines of the stream, most frequent first ...
_RECENT_TAIL: Final = 50  # ... and some of the rest
_NEW_SHAPE: Final = -1  # a template id that no model knows
# Split conformal thresholds from 20 templates, the fewest that get one, let through a share of normal lines that is
# Beta(1, 20) distributed: above 0.15 in one of 26 sound models. What lies below is no fault of a model.
_TOLERATED: Final = 0.15
_MAJORITY: Final = 0.5  # alerts on more lines than not: what it says is not read any more
_RECENT_MARGIN: Final = 0.05  # of the records: as much again as the nominal rate of new shapes
# Of recall. Thresholds from some twenty templates differ so much that models which differ only by seed were seen 0.3
# apart (docs/LOG.md). Ranks do not depend on thresholds, so the AUC is the finer measure.
_RECALL_MARGIN: Final = 0.3
_BELOW_ALL: Final = -math.inf
_AUC_MARGIN: Final = 0.1
_AUC_LEAST: Final = 0.6  # 0.5 is a coin
# Ranks of unrelated models lie around 0; sound ones, trained on different parts of a log, were seen at 0.3.
_AGREEMENT_LEAST: Final = 0.1


class Scorer(Protocol):
    """What `LineModel` does."""

    def score(self, masked: Sequence[str]) -> list[Evidence]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Examinee:
    """A model version as the judge asks it."""

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
        held = frozenset(manifest.held_out)
        return cls(version=manifest.version, scorer=scorer, knowledge=knowledge, held_out=held)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """What one model did. Shares are 0..1; None where there was no line to ask."""

    version: str
    alert_rate_time: float | None  # of normal lines first seen in the newest part of the range
    alert_rate_template: float | None  # of normal lines of held-out templates
    alert_rate_recent: float | None  # of the calm records of the current stream, weighted by their counts
    injected_recall: float | None  # of all injected anomalies
    injected_auc: (
        float | None
    )  # of those without an error word, against lines of the stream, all as of unseen shape
    calibration: float | None  # held-out normal lines above the threshold; nominally 0.05
    time_lines: int
    template_lines: int
    recent_lines: int  # distinct
    injected_lines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The answer, with everything it rests on. `reason` is for people."""

    passed: bool
    reason: str
    candidate: ModelFigures
    live: ModelFigures | None  # None: there was none, or none that answers
    rank_agreement: float | None  # Spearman's rho of the two models' scores, -1..1
    held: str  # how lines were held out
    lines: int  # distinct lines shown
    seconds: float
    seed: int

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Raises BadPayload when the text is not a judgement."""
        try:
            data = json.loads(text)
            values = {f.name: data[f.name] for f in fields(cls)}
            values["candidate"] = _figures(values["candidate"])
            values["live"] = None if values["live"] is None else _figures(values["live"])
            return cls(**values)
        except (KeyError, TypeError, ValueError) as exc:
            raise BadPayload(f"a stored judgement is not readable: {exc!r}; judge the model again") from exc


def _figures(data: Any) -> ModelFigures:
    return ModelFigures(**{f.name: data[f.name] for f in fields(ModelFigures)})


def judge(candidate: Examinee, live: Examinee | None, held: HeldOut, recent: pl.DataFrame) -> Judgement:
    """Compares the candidate with the live model on the same lines.

    `recent` is the current stream: distinct masked lines with counts (SAMPLE_SCHEMA; may be empty). All lines are masked
    by the masks of today: a live model of older masks is asked about them as the pipeline asks it from now on.
    Deterministic but for `seconds`; shows each model at most about 400 distinct lines.
    """
    begun = time.monotonic()
    shown = _shown(held, recent)
    texts = list(dict.fromkeys([*shown.normal["masked"], *shown.usual, *(i.masked for i in shown.injected)]))
    answers = _ask(candidate, held, shown, texts)
    other = _ask(live, held, shown, texts) if live else None
    fault = _useless(answers)
    note = ""
    if other and (unusable := _useless(other)):
        note, other = f"; the live model {other.figures.version} was no measure: it {unusable}", None
    agreement = None
    if fault is None and other:
        agreement = spearman(answers.ranking, other.ranking)
        firm = live is not None and all(
            e.knowledge.calibration.method in {"conformal", "pot"} for e in (candidate, live)
        )
        fault = _worse(answers, other, agreement, firm=firm)
    mine = answers.figures
    reason = f"{mine.version} {fault}" if fault else _praise(mine, other.figures if other else None)
    return Judgement(
        passed=fault is None,
        reason=reason + note,
        candidate=mine,
        live=other.figures if other else None,
        rank_agreement=None if agreement is None else round(agreement, 4),
        held=held.how,
        lines=len(texts),
        seconds=round(time.monotonic() - begun, 3),
        seed=held.seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    """What both models are asked."""

    normal: pl.DataFrame  # held-out lines: _LINES_SCHEMA and `late`
    recent: pl.DataFrame  # calm lines of the stream: masked, pattern_id, template_id, weight
    usual: list[str]  # calm lines of the stream and, where those are few, of the sample
    injected: list[Injected]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answers:
    figures: ModelFigures
    finite: bool
    surprisals: list[float]
    flagged_normal: list[bool]  # per held-out line
    whole: list[bool]  # per held-out line: of a template held out by choice
    fair: list[bool]  # per held-out line: the weights have not seen its like
    flagged_recent: list[bool]
    found: list[bool]  # per injected line without an error word: with one, the word decides
    silent: list[float]  # how strange the injected lines without an error word are
    usual: list[float]  # and of lines of the stream
    ranking: list[float]  # scores of everything shown


def _shown(held: HeldOut, recent: pl.DataFrame) -> _Shown:
    late = held.by_time.with_columns(late=True)
    normal = pl.concat([late, held.by_template.with_columns(late=False)])
    stream = recent.select(list(SAMPLE_SCHEMA)).with_columns(pl.col("template_id").fill_null(_NEW_SHAPE))
    stream = stream.drop_nulls().filter(~pl.col("severe"))
    stream = stream.unique("pattern_id", keep="first").sort("count", "pattern_id", descending=[True, False])
    # The most frequent lines carry most of the weight; of the others some stand for all.
    head, tail = stream.head(_RECENT_HEAD), stream.slice(_RECENT_HEAD)
    rng = np.random.default_rng(held.seed)
    chosen = tail[np.sort(rng.permutation(tail.height)[:_RECENT_TAIL])]
    scale = tail.height / max(1, chosen.height)
    stream = pl.concat([head.with_columns(scale=pl.lit(1.0)), chosen.with_columns(scale=pl.lit(scale))])
    stream = stream.with_columns(weight=pl.col("count") * pl.col("scale"))
    quiet = stream.filter(pl.Series([calm(m) for m in stream["masked"]], dtype=pl.Boolean))
    quiet = quiet.select("masked", "pattern_id", "template_id", "weight")
    usual = quiet["masked"].to_list()
    usual = list(dict.fromkeys([*usual, *held.learnt[: max(0, LEARNT - len(usual))]]))
    made = injected([*normal["masked"], *usual], seed=held.seed)
    return _Shown(normal=normal, recent=quiet, usual=usual, injected=made)


def _ask(model: Examinee, held: HeldOut, shown: _Shown, texts: Sequence[str]) -> _Answers:
    evidence = dict(zip(texts, model.scorer.score(texts), strict=True))
    known = model.knowledge.known
    hiding = replace(model.knowledge, known=known.without(held.patterns, held.templates))

    def verdicts(lines: Iterable[tuple[str, int, int]], knowledge: Knowledge) -> list[Verdict]:
        """Of (masked, pattern, template), at no error level."""
        found = []
        for masked, pattern, template in lines:
            row = {**asdict(evidence[masked]), "pattern_id": pattern, "severe": False, "level": None}
            found.append(verdict_of(row, template, knowledge))
        return found

    names = ("masked", "pattern_id", "template_id")
    normal = verdicts(shown.normal.select(names).iter_rows(), hiding)
    stream = verdicts(shown.recent.select(names).iter_rows(), model.knowledge)
    masked = [i.masked for i in shown.injected]
    made = [
        (m, p, known.template_of(p) or _NEW_SHAPE) for m, p in zip(masked, pattern_ids(masked), strict=True)
    ]
    anomalies = verdicts(made, model.knowledge)
    # Where what was learnt alone decides, against usual lines: held-out ones are news themselves. A line of its baseline is
    # never flagged, so it ranks below all others.
    strange = {m: _strange(e, model.knowledge.calibration) for m, e in evidence.items()}
    usual = [strange[m] for m in shown.usual]
    baseline = model.knowledge.calibration.mode is Mode.BASELINE
    silent = [
        _BELOW_ALL if baseline and known.count(p) else strange[m]
        for m, p, _ in made
        if severity_words(m) is None
    ]
    found_silent = [
        bool(v.anomalous) for v, (m, _, _) in zip(anomalies, made, strict=True) if severity_words(m) is None
    ]
    flagged = [bool(v.anomalous) for v in normal]
    calibration = model.knowledge.calibration
    learnt = known.without(model.held_out, frozenset())
    fair = [
        learnt.count(p) == 0 and (not whole or learnt.template_count(t) == 0)
        for p, t, whole in shown.normal.select("pattern_id", "template_id", "whole").iter_rows()
    ]
    above = [
        calibration.normalised_score(evidence[m]) > calibration.threshold
        for m, unseen in zip(shown.normal["masked"], fair, strict=True)
        if unseen
    ]
    late = shown.normal["late"].to_list()
    weights = shown.recent["weight"].to_list()
    flagged_recent = [bool(v.anomalous) for v in stream]
    found = [bool(v.anomalous) for v in anomalies]
    scaled = model.knowledge.calibration.method != "none"
    surprisals = [evidence[m].surprisal for m in texts]
    figures = ModelFigures(
        version=model.version,
        alert_rate_time=_share([f for f, is_late in zip(flagged, late, strict=True) if is_late]),
        alert_rate_template=_share([f for f, is_late in zip(flagged, late, strict=True) if not is_late]),
        alert_rate_recent=_share(flagged_recent, weights),
        injected_recall=_share(found),
        injected_auc=round(auc(silent, usual), 4) if usual else None,
        calibration=_share(above) if scaled else None,
        time_lines=sum(late),
        template_lines=len(late) - sum(late),
        recent_lines=len(stream),
        injected_lines=len(found),
    )
    return _Answers(
        figures=figures,
        finite=all(map(math.isfinite, surprisals)),
        surprisals=surprisals,
        flagged_normal=flagged,
        whole=[not is_late for is_late in late],
        fair=fair,
        flagged_recent=flagged_recent,
        found=found_silent,
        silent=silent,
        usual=usual,
        ranking=[_score(v) for v in (*normal, *stream, *anomalies)],
    )


def _strange(evidence: Evidence, calibration: Calibration) -> float:
    """What a calm line of an unseen shape is ranked by; of an older model, whose scale ends, what it rests on."""
    return evidence.surprisal if calibration.novelty is None else calibration.normalised_score(evidence)


def _score(verdict: Verdict) -> float:
    return -1.0 if verdict.score is None else verdict.score


def _share(hits: Sequence[bool], weights: Sequence[float] | None = None) -> float | None:
    if not hits:
        return None
    heavy = weights or [1.0] * len(hits)
    return round(sum(w for h, w in zip(hits, heavy, strict=True) if h) / sum(heavy), 4)


def _useless(answers: _Answers) -> str | None:
    """What makes a model unfit whatever stands beside it."""
    mine = answers.figures
    if not answers.finite:
        return "gives scores that are not finite numbers"
    if len(set(answers.surprisals)) < 2:
        return f"gives all {len(answers.surprisals)} lines the same surprisal"
    if answers.usual and auc_upper(answers.silent, answers.usual) < _AUC_LEAST:
        return (
            f"cannot tell faults from normal lines: it ranks an injected anomaly above a normal line in "
            f"{_percent(mine.injected_auc)} of {len(answers.silent)} x {len(answers.usual)} pairs"
        )
    flagged = answers.flagged_recent
    if (mine.alert_rate_recent or 0.0) > _MAJORITY and wilson_lower(sum(flagged), len(flagged)) > _MAJORITY:
        return f"alerts on {_percent(mine.alert_rate_recent)} of the current stream's calm records"
    # Drawn from the very sample: a change in the log is no excuse here, as it is for lines held out by time.
    # What the weights have seen of it by way of a parent can only make a model look better.
    rows = list(zip(answers.flagged_normal, answers.whole, answers.fair, strict=True))
    for flagged in ([f for f, whole, _ in rows if whole], [f for f, *counts in rows if all(counts)]):
        if wilson_lower(sum(flagged), len(flagged)) > _MAJORITY:
            return f"alerts on {_percent(_share(flagged))} of {len(flagged)} held-out normal lines"
    return None


def _worse(mine: _Answers, live: _Answers, agreement: float | None, *, firm: bool) -> str | None:
    """In what the candidate is worse than the live model, by more than the margins and more than chance.

    `firm`: both thresholds are quantiles of enough held-out templates. From fewer, a threshold is a small-sample bound
    that moves with the seed alone (recall 0 % and 36 % of the same log); ranks still tell such models apart.
    """
    a, b = mine.figures, live.figures
    faults: list[str] = []
    # Only lines that neither has learnt: one that the live model has seen is easier for it.
    fair = [i for i, (x, y) in enumerate(zip(mine.fair, live.fair, strict=True)) if x and y]
    ours, theirs = [mine.flagged_normal[i] for i in fair], [live.flagged_normal[i] for i in fair]
    if more_often(ours, theirs) and wilson_lower(sum(ours), len(ours)) > _TOLERATED:
        faults.append(
            f"alerts on {_percent(_share(ours))} of {len(fair)} held-out normal lines, "
            f"the live model {b.version} on {_percent(_share(theirs))}"
        )
    more = (a.alert_rate_recent or 0.0) - (b.alert_rate_recent or 0.0)
    if more > _RECENT_MARGIN and more_often(mine.flagged_recent, live.flagged_recent):
        faults.append(
            f"alerts on {_percent(a.alert_rate_recent)} of the current stream's calm records, "
            f"the live model {b.version} on {_percent(b.alert_rate_recent)}"
        )
    # Whoever alerts on more normal lines also finds more; what the candidate gave up there is no loss (Youden's index).
    gave_up = max(0.0, (_share(theirs) or 0.0) - (_share(ours) or 0.0), -more)
    fewer = (_share(live.found) or 0.0) - (_share(mine.found) or 0.0) - gave_up
    if firm and fewer > _RECALL_MARGIN and more_often(live.found, mine.found):
        faults.append(
            f"finds {_percent(_share(mine.found))} of {len(mine.found)} injected anomalies without an error word, "
            f"the live model {b.version} {_percent(_share(live.found))}"
        )
    if (
        a.injected_auc is not None
        and b.injected_auc is not None
        and b.injected_auc - a.injected_auc > _AUC_MARGIN
        and auc_falls(mine.silent, mine.usual, live.silent, live.usual)
    ):
        faults.append(
            f"ranks injected anomalies above normal lines in {_percent(a.injected_auc)} of pairs, "
            f"the live model {b.version} in {_percent(b.injected_auc)}"
        )
    if agreement is not None and agreement < _AGREEMENT_LEAST and len(mine.ranking) >= SPLIT_LEAST:
        faults.append(
            f"orders the lines unlike the live model {b.version}: rank agreement {agreement:.2f}, at least {_AGREEMENT_LEAST} is wanted"
        )
    return "; ".join(faults) or None


def _praise(mine: ModelFigures, live: ModelFigures | None) -> str:
    rows: list[tuple[str, Callable[[ModelFigures], float | None]]] = [
        (f"alerts on {{}} of {mine.template_lines + mine.time_lines} held-out normal lines", _held_rate),
        ("alerts on {} of the current stream's calm records", lambda f: f.alert_rate_recent),
        (f"finds {{}} of {mine.injected_lines} injected anomalies", lambda f: f.injected_recall),
    ]
    said = []
    for words, of in rows:
        if of(mine) is not None:
            said.append(words.format(_percent(of(mine))) + (f" (live {_percent(of(live))})" if live else ""))
    against = f"no worse than {live.version}" if live else "usable, with no live model to compare with"
    return f"{mine.version} is {against}: it " + ", ".join(said)


def _held_rate(f: ModelFigures) -> float | None:
    n = f.time_lines + f.template_lines
    hits = (f.alert_rate_time or 0.0) * f.time_lines + (f.alert_rate_template or 0.0) * f.template_lines
    return hits / n if n else None


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.1f} %"
