"""Leave-pattern-out: which normal patterns a repeat may learn from, and which it must rank among the
anomalous ones.

Whole templates are held out, so that no line of a held-out shape is in the training sample. The test lines
are looked up in a template tree of the training lines alone, as the product does with an unseen line."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from pipeline.drain.templates import DEPTH, Templates
from pipeline.records.schema import SAMPLE_SCHEMA
from pipeline.records.verdict import pattern_ids
from pipeline.settings import Settings

HELD_SHARE: Final = 0.4  # of the normal templates
LEAST_TEMPLATES: Final = 4  # normal ones; fewer leave nothing to hold out or nothing to learn from
LEAST_ANOMALIES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """`sample`: SAMPLE_SCHEMA, what is learnt. `test`: PATTERN_SCHEMA with pattern_id and template_id, null
    where no line of `sample` has the template."""

    sample: pl.DataFrame
    test: pl.DataFrame


def template_ids(masked: Sequence[str], severe: Sequence[bool]) -> list[int]:
    """The template of each line in one tree of all of them."""
    return _placed(tree_of(masked, severe), masked, severe)


def tree_of(masked: Sequence[str], severe: Sequence[bool]) -> Templates:
    """A template tree with the product's settings that has learnt these lines."""
    settings = Settings()
    tree = Templates(similarity=settings.drain.similarity, depth=DEPTH, per_workload=len(masked) + 1)
    for line, bad in zip(masked, severe, strict=True):
        tree.learn(line, severe=bad, workload="")
    return tree


def leave_out(patterns: pl.DataFrame, *, seed: int) -> Split | None:
    """One random split; None where there are too few templates or anomalous patterns."""
    normal, anomalous = patterns.filter(~pl.col("anomalous")), patterns.filter("anomalous")
    own = template_ids(normal["masked"].to_list(), normal["severe"].to_list())
    normal = normal.with_columns(template_id=pl.Series(own, dtype=pl.Int64))
    ids = normal["template_id"].unique().sort().to_numpy()
    if len(ids) < LEAST_TEMPLATES or anomalous.height < LEAST_ANOMALIES:
        return None
    held = np.random.default_rng(seed).permutation(ids)[: max(1, round(HELD_SHARE * len(ids)))].tolist()
    kept = normal.filter(~pl.col("template_id").is_in(held))
    tree = tree_of(kept["masked"].to_list(), kept["severe"].to_list())
    test = pl.concat([normal.filter(pl.col("template_id").is_in(held)).drop("template_id"), anomalous])
    return Split(
        sample=_with_ids(kept.drop("template_id"), tree)
        .with_columns(baseline=pl.lit(value=True))
        .select(list(SAMPLE_SCHEMA)),
        test=_with_ids(test, tree),
    )


def _with_ids(patterns: pl.DataFrame, tree: Templates) -> pl.DataFrame:
    masked = patterns["masked"].to_list()
    return patterns.with_columns(
        pattern_id=pl.Series(pattern_ids(masked), dtype=pl.UInt64),
        template_id=pl.Series(_placed(tree, masked, patterns["severe"].to_list()), dtype=pl.Int64),
    )


def _placed(tree: Templates, masked: Sequence[str], severe: Sequence[bool]) -> list[int | None]:
    return [tree.match(line, severe=bad) for line, bad in zip(masked, severe, strict=True)]
