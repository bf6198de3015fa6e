"""What a committed batch adds to the sums of its model version, from which `drift.py` works out the drift."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import polars as pl

from pipeline.controller.drift import BINS, COUNTERS
from pipeline.records.columns import any_of_each, gathered, heights_of, nulls_of, numbers_of
from pipeline.records.verdict import Reason

_WORD: Final = r"\S*[\p{L}\p{N}]\S*"
_MASK: Final = r"<[A-Z0-9_]+>"


def measure_all(batches: Sequence[pl.DataFrame], works: Sequence[pl.DataFrame]) -> list[dict[str, int]]:
    """Counters of each committed batch, named as in COUNTERS; empty for one without verdicts (warming).

    A batch is its rows, RESULT_SCHEMA, and its work, WORK_SCHEMA of detect.py. Rows of the work that the
    cache answered have no `tokens`, so they are no scored words. A record counts as one line however many
    physical lines it spans, or one long stack trace would outweigh everything around it.
    """
    rows = gathered(batches, ["score", "reasons", "anomalous"])
    batch = numbers_of(heights_of(batches))
    if rows["score"].null_count():
        is_judged = rows["score"].is_not_null()
        batch, rows = batch[is_judged.to_numpy()], rows.filter(is_judged)
    new = pl.col("reasons").list.contains(Reason.NEW_TEMPLATE.value).fill_null(value=False)
    judged = rows.select("score", new.alias("novel"), pl.col("anomalous").fill_null(value=False))

    def sums(chosen: pl.Series) -> list[int]:
        return [int(n) for n in np.bincount(batch, weights=chosen.to_numpy(), minlength=len(batches))]

    places = np.clip(np.floor(judged["score"].to_numpy() * BINS), 0, BINS - 1).astype(np.int64)
    bins = np.bincount(batch * BINS + places, minlength=BINS * len(batches)).reshape(-1, BINS).tolist()
    lines = np.bincount(batch, minlength=len(batches)).tolist()
    novel = sums(judged["novel"])
    anomalous = sums(judged["anomalous"])
    tokens = gathered(works, ["tokens"])["tokens"]
    has_tokens = any_of_each(~nulls_of(tokens), heights_of(works))
    words = [_scored_words(works[n]) if some else (0, 0) for n, some in enumerate(has_tokens)]
    counts = zip(lines, novel, anomalous, words, bins, strict=True)
    return [
        dict(zip(COUNTERS, (n, *about, *scored, *by_bin), strict=True)) if n else {}
        for n, *about, scored, by_bin in counts
    ]


def _scored_words(work: pl.DataFrame) -> tuple[int, int]:
    """The words that a model scored, and those of them that no training has seen."""
    scored = work.filter(pl.col("tokens").is_not_null())
    return _words(scored["masked"]), int(scored["unseen"].list.len().sum())


def _words(masked: pl.Series) -> int:
    if masked.is_empty():
        return 0
    return int(masked.str.replace_all(_MASK, " ").str.count_matches(_WORD).sum())
