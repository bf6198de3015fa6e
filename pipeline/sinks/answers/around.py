"""Which of the lines near to hits stand around them. A frame has some hundred lines for each hit."""

from datetime import timedelta
from typing import Final

import polars as pl

# Neighbours in a source are not further away in time: else months are read for five lines.
NEIGHBOURHOOD: Final = timedelta(days=1)
# Physical lines to look at on each side, at least, for one record of context: a stack trace is one record.
_REACH: Final = 200


def blocks_of(hits: pl.DataFrame, records: int) -> tuple[int, list[str], list[int]]:
    """Where lines near to the hits are: the length of a block of line numbers, and pairs of a reading of a
    source and a number of a block."""
    reach = max(_REACH, 20 * records)
    pairs = {
        (key, at)
        for key, block in zip(_keys(hits), (hits["line"].cast(pl.Int64) // reach).to_list(), strict=True)
        for at in (block - 1, block, block + 1)
        if at >= 0
    }
    keys, blocks = zip(*sorted(pairs), strict=True)
    return reach, list(keys), list(blocks)


def with_context(neighbours: pl.DataFrame, hits: pl.DataFrame, records: int) -> pl.DataFrame:
    """The hits and up to so many records before and after each in its source, by line number.

    Adds the columns `hit` (Boolean) and `place` (the hits' groups in their order, UInt32): records that are
    around several hits stand once, in the group of the first. `neighbours` holds the lines near to the
    hits; a hit that is not among them stands alone."""
    if hits.is_empty():
        return hits.with_columns(hit=pl.lit(value=True), place=pl.lit(0, pl.UInt32))
    alone = hits.join(neighbours.select("record_id"), on="record_id", how="anti")
    numbered = hits.select("record_id").with_row_index("place")
    placed = _ordered(pl.concat([neighbours, alone])).join(numbered, on="record_id", how="left")
    hit = pl.col("place").is_not_null()
    at = pl.int_range(pl.len()).over("key")
    placed = placed.with_columns(hit.alias("hit"), at.alias("at"))
    # A record belongs to a hit before it or behind it, whichever is near enough.
    hit_at = pl.when("hit").then("at")
    after = pl.col("at") - hit_at.forward_fill().over("key")
    before = hit_at.backward_fill().over("key") - pl.col("at")
    follows, leads = ((gap <= records).fill_null(value=False) for gap in (after, before))
    behind, ahead = pl.col("place").forward_fill().over("key"), pl.col("place").backward_fill().over("key")
    group = pl.when(follows).then(behind).otherwise(ahead)
    return (
        placed.with_columns(group.alias("place"))
        .filter(follows | leads)
        .sort("place", "at")
        .drop("key", "at")
    )


def texts_around(
    neighbours: pl.DataFrame, hits: pl.DataFrame, records: int
) -> dict[str, tuple[list[str], list[str]]]:
    """The raw texts of up to so many records before and after each hit in its source, by the hit's record
    id. A hit that is not stored has no neighbours."""
    neighbours = _ordered(neighbours)
    found: dict[str, tuple[list[str], list[str]]] = {}
    keys, ids, raws = (neighbours[name].to_list() for name in ("key", "record_id", "raw"))
    wanted = set(hits["record_id"])
    for at, record_id in enumerate(ids):
        if record_id in wanted:
            places = range(max(0, at - records), min(len(ids), at + records + 1))
            same = [place for place in places if keys[place] == keys[at]]
            found[record_id] = (
                [raws[place] for place in same if place < at],
                [raws[place] for place in same if place > at],
            )
    return found


def _ordered(neighbours: pl.DataFrame) -> pl.DataFrame:
    """With `key`, in the order of key and line."""
    return neighbours.with_columns(_keys(neighbours).alias("key")).sort("key", "line", "record_id")


def _keys(frame: pl.DataFrame) -> pl.Series:
    """The part of an id that all records of one reading of one source share."""
    return frame["record_id"].str.replace("-[^-]*$", "")
