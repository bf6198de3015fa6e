"""HDFS by its lines alone: a block is as anomalous as its most anomalous line.

Half of the normal blocks teach (Mode.BASELINE); the other half and all anomalous blocks are ranked. Anomalous
blocks of HDFS are told by the order and number of their lines more than by new ones (bench/_sequences.py), so
a line model can find a part of them only."""

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from bench._learnt import learn_and_score, verdicts
from bench._ranking import auroc
from bench._triage_split import tree_of
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.models.threshold import Mode
from pipeline.records.schema import SAMPLE_SCHEMA
from pipeline.records.verdict import pattern_ids
from pipeline.watching.sessions.keys import extract


def measure(data: Path, *, seeds: int, edition: str) -> dict[str, Any]:
    """Of blocks, means over the seeds: AUROC, and the shares of anomalous and of normal ones with a flagged
    line."""
    rows = pl.read_csv(data / "hdfs" / "HDFS_2percent_events.csv.gz", infer_schema=False)
    labels = pl.read_csv(data / "hdfs" / "HDFS_2percent_labels.csv.gz", infer_schema=False)
    lines = pl.DataFrame(
        {
            "block": pl.Series(extract(rows.select(message="m_message")), dtype=pl.String),
            "masked": MaskSet.load().mask(rows["m_message"])["masked"],
        }
    )
    wrong = labels.select(block="seq_id", anomalous=pl.col("anomaly") == "1")
    judged = lines.join(wrong, on="block")
    runs = [_one(judged, seed, edition) for seed in range(1, seeds + 1)]
    return {name: round(statistics.fmean(run[name] for run in runs), 4) for name in runs[0]}


def _one(lines: pl.DataFrame, seed: int, edition: str) -> dict[str, float]:
    normal = lines.filter(~pl.col("anomalous"))["block"].unique().sort().to_numpy()
    drawn = np.random.default_rng(seed).permutation(normal)[: len(normal) // 2].tolist()
    teaches = pl.col("block").is_in(drawn)
    taught = lines.filter(teaches).group_by("masked").agg(pl.len().alias("count")).sort("masked")
    tested = lines.filter(~teaches)
    texts = taught["masked"].to_list()
    tree = tree_of(texts, [False] * len(texts))
    asked = _placed(tested.select("masked").unique().sort("masked"), tree)
    evidence, knowledge = learn_and_score(
        _placed(taught, tree).select(list(SAMPLE_SCHEMA)),
        asked["masked"].to_list(),
        seed=seed,
        mode=Mode.BASELINE,
        edition=edition,
    )
    found = verdicts(asked, evidence, knowledge)
    asked = asked.with_columns(
        score=pl.Series([v.score or 0.0 for v in found]),
        flagged=pl.Series([bool(v.anomalous) for v in found]),
    )
    blocks = (
        tested.join(asked.select("masked", "score", "flagged"), on="masked")
        .group_by("block")
        .agg(pl.col("score").max(), pl.col("flagged").any(), pl.col("anomalous").first())
    )
    bad, good = blocks.filter("anomalous"), blocks.filter(~pl.col("anomalous"))
    return {
        "auroc": auroc(blocks["score"].to_list(), blocks["anomalous"].to_list()),
        "anomalous_flagged": bad.filter("flagged").height / bad.height,
        "normal_flagged": good.filter("flagged").height / good.height,
    }


def _placed(lines: pl.DataFrame, tree: Any) -> pl.DataFrame:
    """With pattern and template ids; all at a calm level, because HDFS writes its faults at INFO."""
    masked = lines["masked"].to_list()
    found = [tree.match(line, severe=False) for line in masked]
    return lines.with_columns(
        pattern_id=pl.Series(pattern_ids(masked), dtype=pl.UInt64),
        template_id=pl.Series([1 << 40 if t is None else t for t in found], dtype=pl.Int64),
        severe=pl.lit(value=False),
        level=pl.lit(None, dtype=pl.String),
    )
