"""Time of callers that belongs to the unit they call.

Packets that are lost on the way to a unit, or wait in a queue before it, lengthen no interval of that unit.
Its callers seem to have needed the time themselves, but only in requests that call it. The share of a
caller's time beyond the usual that it spent in these requests is compared with the share that normal units
let expect. What lies above moves to the unit. A caller that is slow itself is slow in all its requests, and
keeps its time.
"""

import math
from typing import Final

import polars as pl

from pipeline.watching.units.own_time import beyond_usual
from pipeline.watching.units.tails import Floats
from pipeline.watching.units.unit_lines import UnitTable

UNCERTAIN: Final = 1.0  # as many slow requests are worth half; with 3 the places are the same
LEAST_SHARE: Final = (
    0.3  # a smaller one is chance: with 0 a slow service lost its place to what it calls seldom
)
SLACK: Final = 0.02  # of a share: where nearly every request calls the unit, nothing can be told
NO_WAITS: Final = pl.DataFrame(schema={"at": pl.Int64, "to": pl.Int64, "share": pl.Float64})
_USUAL_NATS: Final = math.log(2)  # of a time at its mean; it stays


def waited_for(table: UnitTable, normal: UnitTable) -> pl.DataFrame:
    """`at`, `to` (rows of units of one window) and `share` of the own time of `at` that moves to `to`.

    At most one row for each `at`: the unit whose calls explain the most. Normal units have called it too."""
    if table is normal or table.calls.is_empty() or normal.calls.is_empty():
        return NO_WAITS
    spent = (pl.col("n") * pl.col("beyond_ms")).sum()
    slow = beyond_usual(table.times, normal.times).filter(pl.col("beyond_ms") > 0)
    sums = slow.group_by("at").agg(spent.alias("all_ms"), pl.col("n").sum().alias("requests"))
    inside = beyond_usual(table.calls, normal.times).group_by("at", "called").agg(spent.alias("inside_ms"))
    template = ["template_id"]
    usual = (
        normal.calls.group_by(*template, "called")
        .agg(pl.col("n").sum().alias("calls"))
        .join(normal.times.group_by(template).agg(pl.col("n").sum().alias("requests")), on=template)
        .select(
            *template, "called", ((pl.col("calls") + 0.5) / (pl.col("requests") + 1)).alias("usual_share")
        )
    )
    expected = (
        slow.join(usual, on=template)
        .group_by("at", "called")
        .agg((pl.col("n") * pl.col("beyond_ms") * pl.col("usual_share")).sum().alias("expected_ms"))
    )
    usual_share, own_share = (pl.col(name) / pl.col("all_ms") for name in ("expected_ms", "inside_ms"))
    certain = pl.col("requests") / (pl.col("requests") + UNCERTAIN)
    lift = (own_share - usual_share) / (1.0 + SLACK - usual_share)
    units = table.units.select("unit", "window").with_row_index("at").cast({"at": pl.Int64})
    return (
        inside.join(expected, on=["at", "called"])
        .join(sums, on="at")
        .join(units.select("at", "window"), on="at")
        .join(
            units.select(pl.col("at").alias("to"), pl.col("unit").alias("called"), "window"),
            on=["called", "window"],
        )
        .select("at", "to", (certain * lift).alias("share"))
        .filter(pl.col("share") > LEAST_SHARE)
        .sort("at", "share", "to", descending=[False, True, False])
        .unique("at", keep="first", maintain_order=True)
    )


def moved(nats: Floats, waits: pl.DataFrame) -> Floats:
    """Nats of the own time after a share of what is more than usual moved; their sum stays."""
    found = nats.copy()
    for at, to, share in waits.iter_rows():
        part = share * max(0.0, float(nats[at]) - _USUAL_NATS)
        found[at] -= part
        found[to] += part
    return found
