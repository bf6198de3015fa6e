"""The rows of a sample that the weights and the severity prior may learn. Pure.

Lines of a baseline are all learnt. Of stored results, which no person declared normal, only common calm
templates are, so that a fault cannot pass for normal. Whole templates are held out: they find the threshold
of the model that did not learn them, and its judge shows them.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import polars as pl

from pipeline.errors import TrainingFailed
from pipeline.models.severity import severity_words
from pipeline.models.verdict import is_rare
from pipeline.records.schema import SAMPLE_SCHEMA

if TYPE_CHECKING:
    from pipeline.models.fitting import TrainConfig

_HOLD_OUT_LEAST: Final = 20  # templates; a 5 % quantile needs 19
_FEW: Final = 60  # templates; of fewer a third is held out, because 20 would leave too little to learn from
_HOLD_OUT_MOST: Final = 400  # scoring more would cost seconds; a tail is fitted to at least 200
_TYPICAL: Final = 0.05  # of the records; a template with more is typical of the log and must be learnt


def checked_sample(sample: pl.DataFrame, config: "TrainConfig") -> pl.DataFrame:
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


def learnable(frame: pl.DataFrame, total: int, known_normal: frozenset[int] = frozenset()) -> pl.DataFrame:
    """The rows for the weights: all of a baseline, only common calm templates of results."""
    # A fault may be logged at a calm level; its words show it.
    worded = pl.Series([severity_words(m) is not None for m in frame["masked"]], dtype=pl.Boolean)
    normal = frame["baseline"] | frame["pattern_id"].is_in(sorted(known_normal))
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
    lines = frame.filter(_of(common) | pl.col("baseline")).height
    if lines < enough:
        for row in rows[len(common) :]:
            if lines >= max(frame.height // 2, 2):
                break
            common.append(row)
            lines += row["lines"]
    return frame.filter(_of(common) | normal)


def _of(templates: Sequence[Mapping[str, Any]]) -> pl.Expr:
    return pl.col("template_id").is_in([row["template_id"] for row in templates])


def with_text(frame: pl.DataFrame, tokens: tuple[str, ...]) -> pl.DataFrame:
    """Without lines of mask tokens only, which have nothing to learn and no surprisal."""
    bare = pl.col("masked").str.replace_many(list(tokens), [""] * len(tokens))
    worded = frame.filter(bare.str.contains(r"\S"))
    if worded.is_empty():
        raise TrainingFailed(
            f"none of the {frame.height} distinct lines holds text beside mask tokens; check the masks"
        )
    return worded


def cap(frame: pl.DataFrame, limit: int, seed: int) -> pl.DataFrame:
    """At most `limit` lines, drawn without replacement by sqrt(count) (Efraimidis and Spirakis 2006)."""
    if frame.height <= limit:
        return frame
    draw = np.random.default_rng(seed).random(frame.height)
    keys = draw ** (1.0 / np.sqrt(frame["count"].to_numpy().astype(np.float64)))
    chosen = np.sort(np.argsort(-keys)[:limit])
    return frame[chosen]


def held_out(frame: pl.DataFrame, seed: int) -> list[int]:
    """The templates that neither the weights nor novelty nor the prior learn, so that they show how an unseen
    normal template scores.

    A fifth, 20 at least and 400 at most; of few templates a third. A template is drawn by the lowest hash of
    its patterns, so that every training with the same seed holds out the same lines, whatever the ids of
    their templates.
    """
    templates = (
        frame.with_columns(lot=pl.Series(lots(frame["pattern_id"].to_numpy(), seed), dtype=pl.Float64))
        .group_by("template_id")
        .agg(pl.col("count").sum(), pl.col("lot").min())
        .sort("lot")
    )
    n = templates.height
    most = n // 3 if n < _FEW else min(_HOLD_OUT_MOST, max(_HOLD_OUT_LEAST, n // 5))
    small = templates.filter(pl.col("count") <= max(_TYPICAL, 1.0 / n) * pl.col("count").sum())
    return small["template_id"].head(most).to_list()


def lots(keys: npt.NDArray[np.uint64], seed: int) -> npt.NDArray[np.float64]:
    """A uniform number in (0, 1) for each pattern id, always the same (splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        z = keys + np.uint64((seed * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    lots: npt.NDArray[np.float64] = ((z >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53
    return lots


def taught(frame: pl.DataFrame, fitted: pl.DataFrame, limit: int, seed: int) -> pl.DataFrame:
    """The rows for the severity prior: those of the weights, and all others at an error level."""
    normal = frame.join(fitted, on="pattern_id", how="semi")
    bad = frame.filter("severe").join(fitted, on="pattern_id", how="anti")
    return pl.concat([normal, cap(bad, limit, seed)])
