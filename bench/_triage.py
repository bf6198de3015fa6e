"""One repeat of the triage protocol: split, learn, score the unseen lines by the product's own path, and by
the peers.

The product's path is `trainer.fit` to a bundle, `LineModel.score`, `detect.judge`; what ranks is the
verdict's score. The ablation asks the same verdict with evidence taken away, so it shows what each term adds
where it is used."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import polars as pl
import torch
from msgspec.structs import replace

from bench import _baselines as baselines
from bench._learnt import learn_and_score, verdicts
from bench._nulog import NuLog
from bench._ranking import auroc, average_precision
from bench._triage_data import TriageSet
from bench._triage_split import leave_out
from pipeline.models.evidence import Evidence
from pipeline.models.prior import SeverityPrior
from pipeline.models.verdict import Knowledge
from pipeline.records.verdict import Verdict

OURS: Final = "ours"
BASELINES: Final = ("cache_only", "trigram_novelty", "rarity", "keywords", "nulog")
# Cumulative, in this order; the last is the verdict itself.
ABLATION: Final = ("surprise", "novelty", "prior", "rarity", "level")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """What one split gave: scores by name, one per test line, and what our threshold said."""

    anomalous: list[bool]
    scores: dict[str, list[float]]
    flagged: list[bool]
    # Whether a line is normal and says so: no error level, no error word. What is flagged of these is a false
    # alarm.
    calm: list[bool]
    p_values: list[float | None]
    chance: float  # of a false alarm per new calm template that the threshold was made for
    lines: list[str]
    evidence: list[Evidence]

    def auroc(self) -> dict[str, float]:
        return {name: auroc(values, self.anomalous) for name, values in self.scores.items()}

    def average_precision(self) -> dict[str, float]:
        return {name: average_precision(values, self.anomalous) for name, values in self.scores.items()}

    def calm_shares(self) -> tuple[float, float]:
        """Of the calm lines: the share that is flagged, and the share with a p-value of at most 1 %."""
        rows = [(f, p) for f, p, calm in zip(self.flagged, self.p_values, self.calm, strict=True) if calm]
        count = max(1, len(rows))
        return sum(f for f, _ in rows) / count, sum(p is not None and p <= 0.01 for _, p in rows) / count

    def flagged_share(self, *, anomalous: bool) -> float:
        hits = [f for f, bad in zip(self.flagged, self.anomalous, strict=True) if bad is anomalous]
        return sum(hits) / len(hits)


def repeat(
    triage: TriageSet, *, seed: int, peers: bool = True, threads: int = 1, edition: str = "causal"
) -> Repeat | None:
    """Runs one split of the set. None where the set is too small to be split. `peers`: NuLog too, which costs
    half as much time as our own training."""
    torch.set_num_threads(threads)
    split = leave_out(triage.patterns, seed=seed)
    if split is None:
        return None
    masked = split.test["masked"].to_list()
    learnt = split.sample["masked"].to_list()
    evidence, knowledge = learn_and_score(split.sample, masked, seed=seed, baseline=True, edition=edition)
    if triage.foreign is not None:
        evidence = _with_prior(evidence, masked, triage.foreign)
    judged = verdicts(split.test, evidence, knowledge)
    scores = {OURS: _scores(judged)}
    scores |= _ablation(split.test, evidence, knowledge)
    scores |= _terms(split.test, evidence)
    scores["cache_only"] = baselines.cache_only(masked)
    scores["trigram_novelty"] = baselines.trigram_novelty(learnt, masked)
    scores["rarity"] = baselines.rarity(split.test["count"].to_list())
    scores["keywords"] = baselines.keyword_rule(masked, split.test["level"].to_list())
    if peers:
        nulog = NuLog().fit(
            learnt, split.sample["count"].to_list(), seed=seed, budget_s=0.0
        )  # its least steps
        scores["nulog"] = nulog.score(masked)
    return Repeat(
        anomalous=split.test["anomalous"].to_list(),
        scores=scores,
        flagged=[bool(v.anomalous) for v in judged],
        calm=[
            not bad and not severe and e.severity is None
            for bad, severe, e in zip(split.test["anomalous"], split.test["severe"], evidence, strict=True)
        ],
        p_values=[v.p_value for v in judged],
        chance=knowledge.calibration.chance,
        lines=masked,
        evidence=evidence,
    )


def _with_prior(evidence: Sequence[Evidence], masked: Sequence[str], foreign: pl.DataFrame) -> list[Evidence]:
    prior = SeverityPrior.fit(
        foreign["masked"].to_list(), foreign["severe"].to_list(), foreign["count"].to_list()
    )
    return [replace(e, prior=p) for e, p in zip(evidence, prior.score(masked), strict=True)]


def _scores(judged: Sequence[Verdict]) -> list[float]:
    return [-1.0 if v.score is None else v.score for v in judged]


def _ablation(
    test: pl.DataFrame, evidence: Sequence[Evidence], knowledge: Knowledge
) -> dict[str, list[float]]:
    """Each step gives the verdict one more term back."""
    bare = test.with_columns(severe=pl.lit(value=False), level=pl.lit(None, dtype=pl.String))
    unplaced = bare.with_columns(template_id=pl.lit(None, dtype=pl.Int64))
    steps: dict[str, tuple[pl.DataFrame, Callable[[Evidence], Evidence]]] = {
        "novelty": (unplaced, lambda e: replace(e, prior=0.0, severity=None)),
        "prior": (unplaced, lambda e: e),
        "rarity": (bare, lambda e: e),
        "level": (test, lambda e: e),
    }
    found = {
        "+" + name: _scores(verdicts(rows, list(map(cut, evidence)), knowledge))
        for name, (rows, cut) in steps.items()
    }
    return {"+surprise": [e.surprisal for e in evidence], **found}


def _terms(test: pl.DataFrame, evidence: Sequence[Evidence]) -> dict[str, list[float]]:
    """Each term by itself."""
    return {
        "=surprise": [e.surprisal for e in evidence],
        "=novelty": [e.novelty for e in evidence],
        "=prior": [e.prior for e in evidence],
        "=severity_word": [float(e.severity is not None) for e in evidence],
        "=level": [float(bad) for bad in test["severe"]],
    }


def table(repeats: Sequence[Repeat]) -> dict[str, Any]:
    """Mean AUROC and AP by scorer over the repeats, and what our threshold flags."""
    areas, precisions = [r.auroc() for r in repeats], [r.average_precision() for r in repeats]
    return {
        "auroc": {name: sum(a[name] for a in areas) / len(areas) for name in areas[0]},
        "ap": {name: sum(p[name] for p in precisions) / len(precisions) for name in precisions[0]},
        "anomalies_flagged": sum(r.flagged_share(anomalous=True) for r in repeats) / len(repeats),
        "normal_flagged": sum(r.flagged_share(anomalous=False) for r in repeats) / len(repeats),
        "calm_flagged": sum(r.calm_shares()[0] for r in repeats) / len(repeats),
        "calm_nominal": sum(r.chance for r in repeats) / len(repeats),
        "calm_at_1_percent": sum(r.calm_shares()[1] for r in repeats) / len(repeats),
    }
