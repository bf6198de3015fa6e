"""What traces show of workloads: who calls whom, and how far their clocks are apart.

A caller's events stand around those of the workload that it calls. They do so up to a constant, the
difference of the clocks. It lies between the largest "last after last" and the smallest "first before
first" of the traces (as in Cristian 1989). Below a second it is taken for none: one workload after another
would look alike.

A caller that writes only when its request is over, as an access log does, ends after what it calls. So
where neither of two stands around the other, the one that ends last is the caller, if most traces of the
other one have it. One that is asked next is in fewer of them. Work that begins after the last
event of the workload that is in most traces, as from a queue, is a trace of its own.

Parent spans (parent_spans.py) decide before all of that, where records carry them. Pure.
"""

from collections import deque
from collections.abc import Mapping
from typing import Final

import polars as pl

from pipeline.watching.incidents.origins import TraceShape, Upstream

MOST_TRACES: Final = 10_000  # looked at
_MIN_TRACES: Final = 20  # with both workloads
_NEARLY: Final = 0.9
_SHARE: Final = 0.25  # of the traces of the called one have the caller: others may call it too
_LEAST_MS: Final = 1_000  # of a difference between clocks
_TRIM: Final = 0.05  # of traces may stand out, on each side


def trace_shape(events: pl.DataFrame, calls: Mapping[tuple[str, str], int] | None = None) -> TraceShape:
    """`events` of normal traces: trace, workload (name) and at_ms. `calls`: the traces in which the first
    workload is the parent of the second."""
    if events.is_empty():
        return TraceShape()
    spans = (
        _cut(events)
        .group_by("trace", "workload")
        .agg(pl.col("at_ms").min().alias("first"), pl.col("at_ms").max().alias("last"))
    )
    totals = dict(spans.group_by("workload").agg(pl.len()).iter_rows())
    pairs = spans.join(spans, on="trace", suffix="_b").filter(pl.col("workload") != pl.col("workload_b"))
    if pairs.is_empty():
        return TraceShape()
    found = pairs.group_by("workload", "workload_b").agg(
        pl.len().alias("both"),
        (pl.col("first_b") - pl.col("first")).quantile(_TRIM, "nearest").alias("room"),
        (pl.col("last_b") - pl.col("last")).quantile(1 - _TRIM, "nearest").alias("over"),
        (pl.col("last") - pl.col("first")).median().alias("span"),
        (pl.col("last_b") - pl.col("first_b")).median().alias("span_b"),
        (pl.col("last") >= pl.col("last_b")).mean().alias("ends"),
    )
    upstream, clocks = _by_parents(calls or {}), dict[str, list[tuple[str, float]]]()
    decided = {frozenset((one.caller, one.called)) for one in upstream}
    rows = {(row["workload"], row["workload_b"]): row for row in found.iter_rows(named=True)}
    for (caller, called), row in sorted(rows.items()):
        if row["both"] < _MIN_TRACES:
            continue
        ahead = _ahead(row)
        around = ahead is not None or (
            _ahead(rows[called, caller]) is None and _ends_after(row, rows[called, caller], totals[called])
        )
        if around and frozenset((caller, called)) not in decided:
            upstream.append(Upstream(caller=caller, called=called, traces=row["both"]))
        if ahead is not None:
            clocks.setdefault(caller, []).append((called, ahead))
            clocks.setdefault(called, []).append((caller, -ahead))
    return TraceShape(tuple(upstream), _ahead_ms(clocks, totals))


def _by_parents(calls: Mapping[tuple[str, str], int]) -> list[Upstream]:
    """Of two that call each other the one that does so more often is the caller."""
    return [
        Upstream(caller=caller, called=called, traces=traces)
        for (caller, called), traces in sorted(calls.items())
        if traces >= _MIN_TRACES and traces > calls.get((called, caller), 0)
    ]


def _cut(events: pl.DataFrame) -> pl.DataFrame:
    """With what comes after the end of the root as traces of their own."""
    ends = events.group_by("trace", "workload").agg(pl.col("at_ms").max().alias("end"))
    last = pl.col("end") == pl.col("end").max().over("trace")
    found = ends.with_columns(last.alias("last")).group_by("workload").agg(pl.len(), pl.col("last").mean())
    root = found.sort("len", "last", "workload", descending=[True, True, False])["workload"][0]
    ends = ends.filter(pl.col("workload") == root).select("trace", "end")
    later = (pl.col("at_ms") > pl.col("end")).fill_null(value=False)
    return events.join(ends, on="trace", how="left").with_columns(
        pl.struct("trace", later.alias("later")).alias("trace")
    )


def _ahead(row: dict[str, float]) -> float | None:
    """How far ahead (ms) the second clock is, where the first workload stands around the second."""
    over, room, longer = row["over"], row["room"], row["span"] - row["span_b"]
    if longer <= 0 or room < over:
        return None
    if over <= 0 <= room:
        return 0.0
    ahead = (over + room) / 2
    return ahead if abs(ahead) >= _LEAST_MS and room - over >= longer / 2 else None


def _ends_after(row: dict[str, float], other: dict[str, float], of_called: int) -> bool:
    """Where neither stands around the other."""
    often = row["both"] >= _SHARE * of_called
    return often and row["ends"] >= _NEARLY and other["ends"] < _NEARLY


def _ahead_ms(clocks: dict[str, list[tuple[str, float]]], totals: dict[str, int]) -> dict[str, int]:
    """How far ahead each clock is of that of the workload with the most traces that it is connected with."""
    found: dict[str, int] = {}
    for begin in sorted(clocks, key=lambda name: (-totals[name], name)):
        if begin in found:
            continue
        found[begin] = 0
        waiting = deque([begin])
        while waiting:
            name = waiting.popleft()
            for other, ahead in sorted(clocks[name]):
                if other not in found:
                    found[other] = found[name] + round(ahead)
                    waiting.append(other)
    return {name: ahead for name, ahead in found.items() if ahead}
