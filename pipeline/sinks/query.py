"""Questions about stored Parquet results: the newest that match, and the records around them."""

from typing import Final, TypeVar

import polars as pl

from pipeline.records.result_query import ResultQuery

# Physical lines to look at on each side, at least, for one record of context: a stack trace is one record.
_REACH: Final = 200

Frame = TypeVar("Frame", pl.DataFrame, pl.LazyFrame)


def matching(stored: pl.LazyFrame, query: ResultQuery) -> pl.DataFrame:
    """The newest records that match, oldest first, in the columns of `stored` (RESULT_SCHEMA)."""
    return stored.filter(*conditions(query)).sort("timestamp", "record_id").tail(query.limit).collect()


def conditions(query: ResultQuery) -> list[pl.Expr]:
    """The conditions of a query on columns of RESULT_SCHEMA; its limit is none of them."""
    wanted: list[pl.Expr] = []
    if query.since is not None:
        wanted.append(pl.col("timestamp") >= query.since)
    if query.until is not None:
        wanted.append(pl.col("timestamp") < query.until)
    if query.workloads is not None:
        wanted.append(pl.col("workload").is_in(query.workloads))
    if query.level is not None:
        wanted.append(pl.col("level").is_in(query.levels))
    if query.template_id is not None:
        wanted.append(pl.col("template_id") == query.template_id)
    if query.anomalous:
        wanted.append(pl.col("anomalous"))
    if query.text is not None:
        text = pl.col("message").str.to_lowercase()
        wanted.append(text.str.contains(query.text.lower(), literal=True))
    return wanted


def with_context(stored: pl.LazyFrame, hits: pl.DataFrame, records: int) -> pl.DataFrame:
    """The hits and up to so many records before and after each in its source, by line number.

    Adds the columns `hit` (Boolean) and `place` (the hits' groups in their order, UInt32): records that are
    around several hits stand once, in the group of the first. `stored` and `hits` have RESULT_SCHEMA."""
    if hits.is_empty():
        return hits.with_columns(hit=pl.lit(value=True), place=pl.lit(0, pl.UInt32))
    numbered = hits.select("record_id").with_row_index("place")
    placed = _near(stored, hits, records).join(numbered, on="record_id", how="left")
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


def around(stored: pl.LazyFrame, hits: pl.DataFrame, records: int) -> dict[str, tuple[list[str], list[str]]]:
    """The text of up to so many records before and after each hit in its source, by the hit's record id.

    `hits` needs the columns record_id, source and line. A hit that is not stored has no neighbours."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    if hits.is_empty():
        return found
    near = _near(stored.select("record_id", "source", "line", "raw"), hits, records)
    keys, ids, raws = (near[name].to_list() for name in ("key", "record_id", "raw"))
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


def _near(stored: pl.LazyFrame, hits: pl.DataFrame, records: int) -> pl.DataFrame:
    """The stored records in the neighbourhood of the hits, in the order of key and line."""
    reach = max(_REACH, 20 * records)
    block = pl.col("line").cast(pl.Int64) // reach
    blocks = _keyed(hits.select("record_id", "line")).select(
        "key", pl.concat_list(block - 1, block, block + 1).alias("block")
    )
    return (
        _keyed(stored.filter(pl.col("source").is_in(hits["source"].unique().implode())))
        .with_columns(block.alias("block"))
        .join(blocks.explode("block").unique().lazy(), on=["key", "block"], how="semi")
        .drop("block")
        .sort("key", "line", "record_id")
        .collect()
    )


def _keyed(frame: Frame) -> Frame:
    """With `key`: what all records of one reading of one source share in their ids."""
    return frame.with_columns(pl.col("record_id").str.replace("-[^-]*$", "").alias("key"))
