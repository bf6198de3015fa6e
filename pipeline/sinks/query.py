"""Questions about stored Parquet results: the newest that match, and the records around them."""

from typing import Final, TypeVar

import polars as pl

from pipeline.records.result_query import ResultQuery

# Physical lines to look at on each side, at least, for one record of context: a stack trace is one record.
_REACH: Final = 200

Frame = TypeVar("Frame", pl.DataFrame, pl.LazyFrame)


def matching(stored: pl.LazyFrame, query: ResultQuery) -> pl.DataFrame:
    """The newest records that match, oldest first, in the columns of `stored` (RESULT_SCHEMA)."""
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
    return stored.filter(*wanted).sort("timestamp", "record_id").tail(query.limit).collect()


def with_context(stored: pl.LazyFrame, hits: pl.DataFrame, records: int) -> pl.DataFrame:
    """The hits and up to so many records before and after each in its source, by line number.

    Adds the columns `hit` (Boolean) and `place` (the hits' groups in their order, UInt32): records that are
    around several hits stand once, in the group of the first. `stored` and `hits` have RESULT_SCHEMA."""
    numbered = _keyed(hits).with_row_index("place")
    if numbered.is_empty():
        return numbered.with_columns(pl.lit(value=True).alias("hit"))
    reach = max(_REACH, 20 * records)
    block = pl.col("line").cast(pl.Int64) // reach
    blocks = numbered.select("key", pl.concat_list(block - 1, block, block + 1).alias("block"))
    near = (
        _keyed(stored.filter(pl.col("source").is_in(hits["source"].unique().implode())))
        .with_columns(block.alias("block"))
        .join(blocks.explode("block").unique().lazy(), on=["key", "block"], how="semi")
        .drop("block")
        .sort("key", "line", "record_id")
        .collect()
    )
    near = near.with_columns(pl.col("record_id").is_in(numbered["record_id"].implode()).alias("hit"))
    at = pl.int_range(pl.len()).over("key")
    placed = near.with_columns(at.alias("at")).join(
        numbered.select("record_id", "place"), on="record_id", how="left"
    )
    # A record belongs to a hit before it or behind it, whichever is near enough.
    hit_at = pl.when("hit").then("at")
    last, following = hit_at.forward_fill().over("key"), hit_at.backward_fill().over("key")
    after, before = pl.col("at") - last, following - pl.col("at")
    is_near = (after <= records).fill_null(value=False) | (before <= records).fill_null(value=False)
    behind = pl.col("place").forward_fill().over("key")
    ahead = pl.col("place").backward_fill().over("key")
    group = pl.when((after <= records).fill_null(value=False)).then(behind).otherwise(ahead)
    kept = placed.with_columns(group.alias("place")).filter(is_near)
    return kept.sort("place", "at").drop("key", "at")


def _keyed(frame: Frame) -> Frame:
    """With `key`: what all records of one reading of one source share in their ids."""
    return frame.with_columns(pl.col("record_id").str.replace("-[^-]*$", "").alias("key"))
