"""The recorded faults of this repository, judged line by line: which fault shows at all, and what is flagged
besides.

Learnt is the healthy recording alone. A fault is found when a record that the labels name is flagged; a false
alarm is a distinct masked line of the other recording, seen outside every fault's window and never named,
that is flagged."""

import statistics
from collections.abc import Sequence
from typing import Any, Final

import polars as pl

from bench._baselines import keyword_rule, trigram_novelty
from bench._learnt import learn_and_score, verdicts
from bench._triage_data import recorded
from bench._triage_split import tree_of
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.records.verdict import pattern_ids

_KEYS: Final = ["masked", "severe"]


def measure(*, seeds: int) -> dict[str, Any]:
    """Ours (mean over the seeds) and the baselines in the same terms."""
    masks = MaskSet.load()
    rows = recorded(masks)
    healthy, observed = rows.filter("healthy"), rows.filter(~pl.col("healthy"))
    tree = tree_of(*(healthy.unique(_KEYS, maintain_order=True)[key].to_list() for key in _KEYS))
    lines = observed.unique(_KEYS, keep="first", maintain_order=True).select(*_KEYS, "level")
    learnt = _placed(healthy.group_by(_KEYS, maintain_order=True).agg(pl.len().alias("count")), tree)
    lines = _placed(lines, tree)
    masked = lines["masked"].to_list()
    runs: list[dict[str, Any]] = []
    for seed in range(1, seeds + 1):
        evidence, knowledge = learn_and_score(learnt, masked, seed=seed, baseline=True)
        judged = verdicts(lines, evidence, knowledge)
        runs.append(_found(observed, lines, [bool(v.anomalous) for v in judged]))
    known = set(learnt.select(_KEYS).iter_rows())
    rules = {
        "cache_only": [key not in known for key in lines.select(_KEYS).iter_rows()],
        "new_template": lines["template_id"].is_null().to_list(),
        "keywords": [v > 0 for v in keyword_rule(masked, lines["level"].to_list())],
        "trigram_novelty": [v > 0 for v in trigram_novelty(healthy["masked"].unique().to_list(), masked)],
    }
    return {
        **{name: round(statistics.fmean(run[name] for run in runs), 4) for name in runs[0]},
        "seeds": seeds,
        "baselines": {name: _found(observed, lines, flags) for name, flags in rules.items()},
    }


def _placed(lines: pl.DataFrame, tree: Any) -> pl.DataFrame:
    placed = [tree.match(m, severe=s) for m, s in lines.select(_KEYS).iter_rows()]
    return lines.with_columns(
        template_id=pl.Series(placed, dtype=pl.Int64),
        pattern_id=pl.Series(pattern_ids(lines["masked"].to_list()), dtype=pl.UInt64),
    )


def _found(observed: pl.DataFrame, lines: pl.DataFrame, flags: Sequence[bool]) -> dict[str, Any]:
    judged = observed.join(lines.select(*_KEYS, flagged=pl.Series(flags, dtype=pl.Boolean)), on=_KEYS)
    named = judged.drop_nulls("fault")
    by_line = judged.group_by("masked").agg(
        (pl.col("fault").is_null().all() & ~pl.col("window").all()).alias("calm"), pl.col("flagged").any()
    )
    calm = by_line.filter("calm")
    return {
        "faults": named["fault"].n_unique(),
        "faults_found": named.filter("flagged")["fault"].n_unique(),
        "fault_records": named.height,
        "fault_record_recall": round(named.filter("flagged").height / max(1, named.height), 4),
        "distinct_false_alarms": calm.filter("flagged").height,
        "distinct_normal": calm.height,
    }
