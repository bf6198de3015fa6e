"""Whether a trained model may replace the live one.

Both models answer the same lines as the pipeline does: evidence, then verdict. Two figures decide: the share
of normal lines that a model alerts on, and the share of injected anomalies that it finds, where it flags them
or ranks them above four fifths of normal lines that are new. Anomalies with an error word do not count,
because the word decides there. A difference counts only as far as a binomial bound proves it. Since the other
evidence outvotes the network, it is also asked separately: a line that was learnt must surprise it less than
the same words in another order."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol, Self

import msgspec
import numpy as np
import polars as pl

from pipeline.models import bundle as bundles
from pipeline.models.evidence import Evidence
from pipeline.models.known.patterns import load_known
from pipeline.models.selection import learnable
from pipeline.models.severity import severity_words
from pipeline.models.verdict import Knowledge, verdict_of
from pipeline.records.verdict import pattern_ids
from pipeline.training.injection import injected

_STREAM: Final = 140  # distinct lines: most frequent first, and a sample of the others for the last third
_HELD_OUT: Final = 80  # templates; a share of 5 % is then known to about 5 points
_LEARNT: Final = 40
_SHUFFLES: Final = 5  # of each learnt line: a log of few templates has few of them
_WORDS_LEAST: Final = 4  # different ones of a line that is shuffled
_ENOUGH: Final = 20  # lines; a share of fewer does not justify refusing a model
_MAJORITY: Final = 0.5  # a model that alerts on most lines is ignored by people
_RANKED: Final = 0.2  # the p-value of an injected anomaly that is found, flagged or not
_MUTE: Final = 0.1  # of the injected anomalies; sound models of small logs were seen at a third
# Thresholds from some twenty templates vary: models that differ only by seed were seen 0.3 apart
# (docs/LOG.md).
_FOUND_MARGIN: Final = 0.3
_ALERTS_MARGIN: Final = 0.05  # as much again as the nominal rate of new shapes
_NETWORK_LEAST: Final = 0.85  # 0.5 is a coin; sound networks were seen above 0.95, random ones below 0.7
_NETWORK_MARGIN: Final = 0.15
_Z: Final = 2.326  # one-sided 99 % of the normal distribution
_FIRM: Final = {
    "conformal",
    "pot",
}  # thresholds of enough held-out templates; from fewer, a model may be mute


class Scorer(Protocol):
    """The part of `LineModel` that a judge needs."""

    def score(self, masked: Sequence[str]) -> list[Evidence]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Examinee:
    """A model version as the judge sees it."""

    version: str
    scorer: Scorer
    knowledge: Knowledge
    held_out: frozenset[int] = frozenset()  # patterns that it knows and has not learnt

    @classmethod
    def load(cls, bundle: Path, *, device: str = "cpu", threads: int | None = 1) -> Self:
        """Verifies and loads a bundle, with torch. Raises BadBundle."""
        from pipeline.models.line import LineModel  # torch

        scorer = LineModel.load(bundle, device=device, threads=threads)
        manifest = bundles.load_manifest(bundle)
        knowledge = Knowledge(calibration=manifest.calibration, known=load_known(bundle))
        held_out = frozenset(manifest.held_out)
        return cls(version=manifest.version, scorer=scorer, knowledge=knowledge, held_out=held_out)

    @property
    def firm(self) -> bool:
        return self.knowledge.calibration.method in _FIRM


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """The figures of one model. Shares are 0..1; None where there was no line to ask."""

    version: str
    alerts_stream: float | None  # of the calm records of the current stream, weighted by their counts
    alerts_held_out: float | None  # of normal lines of templates that the candidate has not learnt
    found: float | None  # of injected anomalies without an error word
    network: float | None  # of learnt lines, that surprise it less than their words in another order
    stream_lines: int  # distinct
    held_out_lines: int
    injected_lines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The decision and all its grounds. `reason` is for people."""

    passed: bool
    reason: str
    candidate: ModelFigures
    live: ModelFigures | None  # None: there was none, or none that answers
    lines: int  # distinct lines shown
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class _Rate:
    """A share of lines, and what a binomial bound proves of it."""

    hits: int
    n: int

    @property
    def share(self) -> float | None:
        return round(self.hits / self.n, 4) if self.n else None

    @property
    def least(self) -> float:
        return bounds(self.hits, self.n)[0]

    @property
    def most(self) -> float:
        return bounds(self.hits, self.n)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answers:
    """The answers of one model."""

    figures: ModelFigures
    firm: bool
    surprisals: Sequence[float]
    alerts: _Rate  # of the lines of the stream
    held_out: _Rate  # of the held-out lines, alerts
    found: _Rate
    network: _Rate  # of learnt lines that surprise it less than their words in another order


def judge(
    candidate: Examinee, live: Examinee | None, sample: pl.DataFrame, recent: pl.DataFrame, *, seed: int
) -> Judgement:
    """Compares the candidate with the live model on the same lines.

    `sample` is what the candidate was trained from, `recent` the current stream (SAMPLE_SCHEMA both; `recent`
    may be empty). Today's masks apply to all lines, also for a live model of older masks: the pipeline asks
    that model the same from now on. Deterministic but for `seconds`; shows each model some 400 distinct
    lines.
    """
    began = time.monotonic()
    lines = _shown(sample, candidate.held_out, recent, seed)
    answers = _ask(candidate, lines)
    other, fault, note = None, _useless(answers), ""
    if live is not None:
        other = _ask(live, lines)
        if unfit := _useless(other):
            note, other = f"; the live model {live.version} could not serve as a measure: it {unfit}", None
        elif fault is None:
            fault = _worse(answers, other)
    figures = answers.figures
    reason = f"{figures.version} {fault}" if fault else _praise(figures, other.figures if other else None)
    return Judgement(
        passed=fault is None,
        reason=reason + note,
        candidate=figures,
        live=other.figures if other else None,
        lines=lines["masked"].n_unique(),
        seconds=round(time.monotonic() - began, 3),
        seed=seed,
    )


def _shown(sample: pl.DataFrame, held_out: frozenset[int], recent: pl.DataFrame, seed: int) -> pl.DataFrame:
    """The lines that both models are asked about.

    Columns: `part` ("stream": calm lines of the current stream, "held-out", "learnt", their words "shuffled",
    "injected"), masked, pattern_id, template_id, `weight`.
    """
    held = sample.filter(pl.col("pattern_id").is_in(sorted(held_out)))
    one_of_each = held.sort("count", "pattern_id", descending=[True, False])
    one_of_each = one_of_each.unique("template_id", keep="first", maintain_order=True)
    learnt = learnable(sample, int(sample["count"].sum()))
    learnt = learnt.filter(~pl.col("template_id").is_in(held["template_id"].unique().to_list()))
    stream = recent.unique("pattern_id", keep="first").sort("count", "pattern_id", descending=[True, False])
    # The most frequent lines carry most of the weight; a sample stands for the others.
    head, tail = stream.head(_STREAM * 2 // 3), stream.slice(_STREAM * 2 // 3)
    drawn = tail.sample(min(tail.height, _STREAM // 3), seed=seed)
    scale = tail.height / max(1, drawn.height)
    parts = [
        _calm("stream", head, 1.0),
        _calm("stream", drawn, scale),
        _calm("held-out", one_of_each.sort("pattern_id")).head(_HELD_OUT),
        _calm("learnt", learnt.sort("count", "pattern_id", descending=[True, False]).head(2 * _LEARNT)).head(
            _LEARNT
        ),
    ]
    learnt = parts[-1].filter(pl.col("masked").str.split(" ").list.n_unique() >= _WORDS_LEAST)
    learnt = pl.concat([learnt] * _SHUFFLES)
    shuffled = learnt.with_columns(
        part=pl.lit("shuffled"),
        masked=pl.Series(_shuffled(learnt["masked"].to_list(), seed), dtype=pl.String),
    )
    parts = [*parts[:-1], learnt, shuffled]
    normal = [masked for part in parts[:-1] for masked in part["masked"]]
    anomalies = [i.masked for i in injected(normal, seed=seed) if severity_words(i.masked) is None]
    ids = pl.Series(pattern_ids(anomalies), dtype=pl.UInt64)
    injections = pl.DataFrame({"masked": pl.Series(anomalies, dtype=pl.String), "pattern_id": ids})
    nowhere = injections.select(
        pl.lit("injected").alias("part"),
        "masked",
        "pattern_id",
        pl.lit(None, dtype=pl.Int64).alias("template_id"),
        pl.lit(1.0).alias("weight"),
    )
    return pl.concat([*parts, nowhere])


def _shuffled(lines: Sequence[str], seed: int) -> list[str]:
    """The words of each line in another order."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.permutation(line.split(" ")).tolist()) for line in lines]


def _calm(part: str, frame: pl.DataFrame, scale: float = 1.0) -> pl.DataFrame:
    """The lines with text and neither an error level nor an error word."""
    calm = [severity_words(m) is None and any(map(str.isalpha, m)) for m in frame["masked"]]
    return frame.filter(pl.Series(calm, dtype=pl.Boolean) & ~frame["severe"]).select(
        pl.lit(part).alias("part"),
        "masked",
        pl.col("pattern_id").cast(pl.UInt64),
        pl.col("template_id").cast(pl.Int64),
        (pl.col("count") * scale).cast(pl.Float64).alias("weight"),
    )


def _ask(model: Examinee, lines: pl.DataFrame) -> _Answers:
    """The shape of held-out lines is hidden, as on its first appearance; other lines meet all that is
    known."""
    texts = list(dict.fromkeys(lines["masked"]))
    evidence = dict(zip(texts, model.scorer.score(texts), strict=True))
    known = model.knowledge.known
    held = lines.filter(pl.col("part") == "held-out")
    hidden = frozenset(held["pattern_id"]), frozenset(held["template_id"])
    hiding = replace(model.knowledge, known=known.without(*hidden))
    flagged = []
    for row in lines.iter_rows(named=True):
        pattern, template = row["pattern_id"], row["template_id"]
        work_row = msgspec.structs.asdict(evidence[row["masked"]])
        work_row |= {"pattern_id": pattern, "severe": False, "level": None}
        if row["part"] == "injected":
            template = known.template_of(pattern)
        knowledge = hiding if row["part"] == "held-out" else model.knowledge
        verdict = verdict_of(work_row, template, knowledge)
        # Where a log says many new things, its alert budget lets hardly a line pass.
        ranked = row["part"] == "injected" and verdict.p_value is not None and verdict.p_value <= _RANKED
        flagged.append(bool(verdict.anomalous) or ranked)
    surprisals = [evidence[masked].surprisal for masked in lines["masked"]]
    lines = lines.with_columns(flagged=pl.Series(flagged), surprisal=pl.Series(surprisals, dtype=pl.Float64))
    stream, held, learnt, shuffled, wrong = (
        lines.filter(pl.col("part") == part)
        for part in ("stream", "held-out", "learnt", "shuffled", "injected")
    )
    less = int((learnt["surprisal"] < shuffled["surprisal"]).sum())
    alerts, held_out, found = (
        _Rate(int(some["flagged"].sum()), some.height) for some in (stream, held, wrong)
    )
    network = _Rate(less, learnt.height)
    weight = float(stream["weight"].sum())
    figures = ModelFigures(
        version=model.version,
        alerts_stream=round(float(stream.filter("flagged")["weight"].sum()) / weight, 4) if weight else None,
        alerts_held_out=held_out.share,
        found=found.share,
        network=network.share,
        stream_lines=alerts.n,
        held_out_lines=held_out.n,
        injected_lines=found.n,
    )
    return _Answers(
        figures=figures,
        firm=model.firm,
        surprisals=surprisals,
        alerts=alerts,
        held_out=held_out,
        found=found,
        network=network,
    )


def _useless(model: _Answers) -> str | None:
    """Why a model is unfit, without a comparison; None for a usable one."""
    figures = model.figures
    if not all(map(math.isfinite, model.surprisals)):
        return "gives scores that are not finite numbers"
    if len(set(model.surprisals)) < 2:
        return f"gives all {len(model.surprisals)} lines the same surprisal"
    if model.network.most < _NETWORK_LEAST:
        return (
            f"has a network of noise: of {model.network.n} learnt lines {_percent(figures.network)} surprise it less "
            "than their words in another order"
        )
    if (figures.alerts_stream or 0.0) > _MAJORITY and model.alerts.least > _MAJORITY:
        return f"alerts on {_percent(figures.alerts_stream)} of the current stream's calm records"
    if model.held_out.least > _MAJORITY:
        return f"alerts on {_percent(figures.alerts_held_out)} of {model.held_out.n} held-out normal lines"
    if model.firm and model.found.n >= _ENOUGH and model.found.most < _MUTE:
        return f"is mute: it finds {_percent(figures.found)} of {model.found.n} injected anomalies"
    return None


def _worse(candidate: _Answers, live: _Answers) -> str | None:
    """Where the candidate is worse than the live model by more than a margin and by more than chance."""
    a, b = candidate.figures, live.figures
    faults = []
    more = (a.alerts_stream or 0.0) - (b.alerts_stream or 0.0)
    if more > _ALERTS_MARGIN and candidate.alerts.least > live.alerts.most:
        faults.append(
            f"alerts on {_percent(a.alerts_stream)} of the current stream's calm records, the live model "
            f"{b.version} on {_percent(b.alerts_stream)}"
        )
    fewer = (b.found or 0.0) - (a.found or 0.0)
    certain = (candidate.firm and live.firm) or candidate.found.most < _MUTE
    if certain and fewer > _FOUND_MARGIN and candidate.found.most < live.found.least:
        faults.append(
            f"finds {_percent(a.found)} of {a.injected_lines} injected anomalies, the live model {b.version} "
            f"{_percent(b.found)}"
        )
    noisier = (b.network or 0.0) - (a.network or 0.0)
    if noisier > _NETWORK_MARGIN and candidate.network.most < live.network.least:
        faults.append(
            f"has a network that distinguishes {_percent(a.network)} of learnt lines from their words in another order, the "
            f"live model {b.version} {_percent(b.network)}"
        )
    return "; ".join(faults) or None


def _praise(candidate: ModelFigures, live: ModelFigures | None) -> str:
    def clause(words: str, share: float | None, other: float | None) -> str:
        return words.format(_percent(share)) + (f" (live {_percent(other)})" if live else "")

    against = f"no worse than {live.version}" if live else "usable, with no live model to compare with"
    clauses = [
        clause(words, getattr(candidate, name), getattr(live, name, None))
        for name, words in (
            ("alerts_stream", "alerts on {} of the current stream's calm records"),
            ("alerts_held_out", f"on {{}} of {candidate.held_out_lines} held-out normal lines"),
            ("found", f"finds {{}} of {candidate.injected_lines} injected anomalies"),
        )
        if getattr(candidate, name) is not None
    ]
    return f"{candidate.version} is {against}: it " + ", ".join(clauses)


def bounds(hits: int, n: int) -> tuple[float, float]:
    """One-sided 99 % bounds of a binomial share (score interval; Wilson, JASA 1927). (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    share, z2 = hits / n, _Z * _Z
    middle = share + z2 / (2 * n)
    spread = _Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, (middle - spread) / (1 + z2 / n)), min(1.0, (middle + spread) / (1 + z2 / n))


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.1f} %"
