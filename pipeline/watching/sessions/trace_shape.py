"""What traces show of workloads: who calls whom, and how far their clocks are apart.

A caller's events stand around those of the workload that it calls. They do so up to a constant, the
difference of the clocks. It lies between the largest "last after last" and the smallest "first before
first" of the traces (as in Cristian 1989). Below a second it is taken for none: one workload after another
would look alike.

Where neither of two stands around the other, the one without which the other is nearly never in a trace is
upstream, if it is not over before the other begins and only some of its traces have the other. A workload
that writes only when a request is over, as the access log of a gateway, has the last event of nearly all
traces. Pure.
"""

from collections import deque
from typing import Final

import polars as pl

from pipeline.watching.incidents.origins import TraceShape, Upstream

MOST_TRACES: Final = 10_000  # looked at
_MIN_TRACES: Final = 20  # with both workloads
_NEARLY: Final = 0.95
_SOME: Final = 0.9  # at most so many traces of the caller have the called one
_HALF: Final = 0.5  # of the traces: a workload that is over before another begins does not wait for it
_LEAST_MS: Final = 1_000  # of a difference between clocks
_TRIM: Final = 0.05  # of traces may stand out, on each side


def trace_shape(events: pl.DataFrame) -> TraceShape:
    """`events` of normal traces: trace, workload (name) and at_ms."""
    spans = events.group_by("trace", "workload").agg(
        pl.col("at_ms").min().alias("first"), pl.col("at_ms").max().alias("last"), pl.len().alias("events")
    )
    ends = spans.with_columns(
        ((pl.col("first") >= pl.col("last").max().over("trace")) & (pl.col("events") == 1)).alias("ends")
    )
    totals = dict(spans.group_by("workload").agg(pl.len()).iter_rows())
    pairs = ends.join(ends, on="trace", suffix="_b").filter(pl.col("workload") != pl.col("workload_b"))
    if pairs.is_empty():
        return TraceShape()
    found = pairs.group_by("workload", "workload_b").agg(
        pl.len().alias("both"),
        (pl.col("first_b") - pl.col("first")).quantile(_TRIM, "nearest").alias("room"),
        (pl.col("last_b") - pl.col("last")).quantile(1 - _TRIM, "nearest").alias("over"),
        (pl.col("last") - pl.col("first")).median().alias("span"),
        (pl.col("last_b") - pl.col("first_b")).median().alias("span_b"),
        pl.col("ends").mean().alias("ends"),
        (pl.col("last") < pl.col("first_b")).mean().alias("before"),
    )
    upstream, clocks = [], dict[str, list[tuple[str, float]]]()
    rows = {(row["workload"], row["workload_b"]): row for row in found.iter_rows(named=True)}
    for (caller, called), row in sorted(rows.items()):
        if row["both"] < _MIN_TRACES:
            continue
        ahead = _ahead(row)
        if ahead is not None or (
            _ahead(rows[called, caller]) is None and _is_upstream(row, totals[caller], totals[called])
        ):
            upstream.append(Upstream(caller=caller, called=called, traces=row["both"]))
        if ahead is not None:
            clocks.setdefault(caller, []).append((called, ahead))
            clocks.setdefault(called, []).append((caller, -ahead))
    return TraceShape(tuple(upstream), _ahead_ms(clocks, totals))


def _ahead(row: dict[str, float]) -> float | None:
    """How far ahead (ms) the second clock is, where the first workload stands around the second."""
    over, room, longer = row["over"], row["room"], row["span"] - row["span_b"]
    if longer <= 0 or room < over:
        return None
    if over <= 0 <= room:
        return 0.0
    ahead = (over + room) / 2
    return ahead if abs(ahead) >= _LEAST_MS and room - over >= longer / 2 else None


def _is_upstream(row: dict[str, float], of_caller: int, of_called: int) -> bool:
    """Where neither stands around the other."""
    if row["both"] < _NEARLY * of_called or row["before"] >= _HALF:
        return False
    return row["both"] <= _SOME * of_caller or row["ends"] >= _NEARLY


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
