"""The rows of a sample that the weights and the severity prior may learn. Pure.

Of an unlabelled log (Mode.SELF) only common calm templates are learnt, so that a fault cannot pass for
normal. Whole templates are held out to find the threshold.
"""

from typing import Final

import numpy as np
import polars as pl

from pipeline.errors import TrainingFailed
from pipeline.models.fitting import TrainConfig
from pipeline.models.severity import severity_words
from pipeline.models.threshold import Mode
from pipeline.models.verdict import is_rare
from pipeline.records.schema import SAMPLE_SCHEMA

_HOLD_OUT: Final = 20  # templates; a 5 % quantile needs 19
_FOLDS_BELOW: Final = 60  # templates; with fewer, holding out 20 would leave too little to learn from
_HOLD_OUT_MOST: Final = 400  # scoring more would cost seconds; a tail is fitted to at least 200


def checked_sample(sample: pl.DataFrame, config: TrainConfig) -> pl.DataFrame:
    missing = [c for c in SAMPLE_SCHEMA if c not in sample.columns]
    if missing:
        raise TrainingFailed(
            f"the training sample lacks the columns {missing}; it needs {list(SAMPLE_SCHEMA)}"
        )
    frame = sample.select([pl.col(c).cast(t) for c, t in SAMPLE_SCHEMA.items()]).drop_nulls()
    frame = frame.unique("pattern_id", keep="first").sort("count", "pattern_id", descending=[True, False])
    total = int(frame["count"].sum())
    if frame.height < config.min_distinct or total < config.min_records:
        raise TrainingFailed(
            f"the sample holds {frame.height} distinct lines in {total} records; at least "
            f"{config.min_distinct} distinct lines and {config.min_records} records are needed: "
            "collect more lines and train again"
        )
    return frame


def learnable(
    frame: pl.DataFrame, mode: Mode, total: int, known_normal: frozenset[int] = frozenset()
) -> pl.DataFrame:
    """The rows for the weights: all of a baseline, only common calm templates of an unlabelled log."""
    if mode is Mode.BASELINE:
        return frame
    # A fault may be logged at a calm level; its words show it.
    worded = pl.Series([severity_words(m) is not None for m in frame["masked"]], dtype=pl.Boolean)
    normal = frame["pattern_id"].is_in(sorted(known_normal))
    templates = (
        frame.with_columns(bad=(pl.col("severe") | worded) & ~normal)
        .group_by("template_id")
        .agg(pl.col("count").sum().alias("n"), pl.col("bad").any(), pl.len().alias("lines"))
    )
    templates = templates.sort("bad", "n", "template_id", descending=[False, True, False])
    rows = templates.to_dicts()
    common = [r for r in rows if not r["bad"] and not is_rare(r["n"], total)]
    # Of a log of rare or error lines only, the most frequent half stands for normal, calm lines first.
    enough = max(5, frame.height // 10)
    lines = sum(r["lines"] for r in common)
    if lines < enough:
        for row in rows[len(common) :]:
            if lines >= max(frame.height // 2, 2):
                break
            common.append(row)
            lines += row["lines"]
    return frame.filter(pl.col("template_id").is_in([r["template_id"] for r in common]) | normal)


def with_text(frame: pl.DataFrame, tokens: tuple[str, ...]) -> pl.DataFrame:
    """Without lines of mask tokens only, which have nothing to learn and no surprisal."""
    bare = pl.col("masked").str.replace_many(list(tokens), [""] * len(tokens))
    worded = frame.filter(bare.str.contains(r"\S"))
    if worded.is_empty():
        raise TrainingFailed(
            f"none of the {frame.height} distinct lines holds text beside mask tokens; check the masks"
        )
    return worded


def without(frame: pl.DataFrame, held_out: frozenset[int]) -> pl.DataFrame:
    remaining = frame.filter(~pl.col("pattern_id").is_in(sorted(held_out))) if held_out else frame
    if remaining.is_empty():
        raise TrainingFailed(
            f"all {frame.height} lines that could be learnt are held out for the judge; hold out fewer"
        )
    return remaining


def cap(frame: pl.DataFrame, limit: int, seed: int) -> pl.DataFrame:
    """At most `limit` lines, drawn without replacement by sqrt(count) (Efraimidis and Spirakis 2006)."""
    if frame.height <= limit:
        return frame
    draw = np.random.default_rng(seed).random(frame.height)
    keys = draw ** (1.0 / np.sqrt(frame["count"].to_numpy().astype(np.float64)))
    chosen = np.sort(np.argsort(-keys)[:limit])
    return frame[chosen]


def folds(frame: pl.DataFrame, seed: int) -> tuple[list[list[int]], str]:
    """Template ids to hold out together, and how that was done in words."""
    ids = np.random.default_rng(seed).permutation(frame["template_id"].unique().sort().to_numpy())
    if len(ids) < 2:
        return [], "one template: nothing to hold out, surprisal flags no line by itself"
    if len(ids) >= _FOLDS_BELOW:
        count = min(_HOLD_OUT_MOST, max(_HOLD_OUT, len(ids) // 5))
        return [ids[:count].tolist()], f"{count} of {len(ids)} templates"
    count = min(3, len(ids))
    return [ids[i::count].tolist() for i in range(count)], f"{count} folds by template"


def taught(frame: pl.DataFrame, fitted: pl.DataFrame, limit: int, seed: int) -> pl.DataFrame:
    """The rows for the severity prior: those of the weights, and all others at an error level."""
    normal = frame.join(fitted, on="pattern_id", how="semi")
    bad = frame.filter("severe").join(fitted, on="pattern_id", how="anti")
    return pl.concat([normal, cap(bad, limit, seed)])
