"""The time that a unit itself needed for a request: what a line says it took, less what it waited for others.

A line with a duration ends when it was written, so it is an interval of its trace. Another unit's interval in
the same trace that begins within it is waiting, and so is the time that a proxy says its upstream took. The
difference to what is usual for the template stays with the unit that became slow, where the durations of all
its callers grow as well.
"""

from typing import Any, Final

import numpy as np
import polars as pl

from pipeline.watching.sessions.keys import extract
from pipeline.watching.units.tails import Floats

# Milliseconds, unless the text says otherwise or the name is one of nginx, which writes seconds.
_NAMED: Final = (
    r"(?i)(?:^|[^a-z])((?:[a-z]+[_.-]?)*?(?:duration|elapsed|latency|took)"
    r"|(?:request|response|upstream|process(?:ing)?|total|query|exec(?:ution)?|service|run)[_.-]?time)"
    r"""(?:[_.-]?(ms|us|ns|s|sec|seconds))?["']?[=:] ?["']?"""
    r"([0-9]+(?:\.[0-9]+)?) ?(ms|us|µs|ns|s|sec|seconds)?(?:[^0-9a-z.:-]|$)"
)
_PROSE: Final = r"(?i)\b(?:in|after|took) ([0-9]+(?:\.[0-9]+)?) ?(ms|us|µs|s|sec|seconds)\b"
_UPSTREAM: Final = (
    r"""(?i)\b(upstream_(?:response|service)_time|target_processing_time|urt)"""
    r"""["']?[=:] ?["']?([0-9]+(?:\.[0-9]+)?) ?(ms|us|s)?(?:[^0-9a-z.:]|$)"""
)
_SECONDS: Final = r"(?i)^(?:request|upstream|response)_time$"
_HINT: Final = r"(?i)duration|elapsed|latency|took|time|in [0-9]|after [0-9]"
_MS: Final = {"ms": 1.0, "us": 1e-3, "µs": 1e-3, "ns": 1e-6, "s": 1e3, "sec": 1e3, "seconds": 1e3}
MAX_SPANS: Final = 1_000_000  # lines with a duration and a trace, 50 MB; of more, whole traces are drawn
MOST_MS: Final = 3_600_000.0  # a longer one is a clock or a counter
SLACK_MS: Final = 5  # clocks of one host, and the write of a line
BASE: Final = 1.25  # of the logarithmic classes that times are counted in
USUAL: Final = 0.95  # the quantile of normal times above which a time is in excess
# A span: its trace or request (hash), end (epoch), length, and the part that an upstream took.
SPANS: Final[dict[str, Any]] = {
    "request": pl.UInt64,
    "end_ms": pl.Int64,
    "ms": pl.Float64,
    "upstream_ms": pl.Float64,
}


def spans_of(lines: pl.DataFrame) -> pl.DataFrame:
    """SPANS of lines with `message` and `timestamp`, null where a line has no duration or no trace."""
    blank = pl.DataFrame(schema=SPANS).clear(lines.height)
    rows = lines.select(pl.col("message").str.contains(_HINT).fill_null(value=False)).to_series().arg_true()
    if rows.is_empty():
        return blank
    few = lines.select("message", "timestamp")[rows]
    total = pl.col("message").str.replace_all(_UPSTREAM, " ")
    named, prose = total.str.extract_groups(_NAMED), total.str.extract_groups(_PROSE)
    name, suffix, value, unit = (named.struct.field(str(at)) for at in (1, 2, 3, 4))
    upstream = pl.col("message").str.extract_groups(_UPSTREAM)
    upstream_name, took, took_unit = (upstream.struct.field(str(at)) for at in (1, 2, 3))
    timed = few.with_columns(
        pl.coalesce(
            _ms(value, pl.coalesce(unit, suffix), name.str.contains(_SECONDS)),
            _ms(prose.struct.field("1"), prose.struct.field("2"), pl.lit(value=False)),
        ).alias("ms"),
        # Envoy writes milliseconds; nginx and balancers of clouds seconds.
        _ms(took, took_unit, ~upstream_name.str.contains("(?i)service")).alias("upstream_ms"),
    )
    good = timed.select((pl.col("ms") <= MOST_MS) & pl.col("timestamp").is_not_null()).to_series()
    good = good.fill_null(value=False)
    timed, rows = timed.filter(good), rows.filter(good)
    traced = extract(timed.select("message", "timestamp"))
    spans = pl.DataFrame(
        {
            "request": traced.to_frame()
            .select(pl.when(pl.col(traced.name).is_not_null()).then(pl.all().hash()))
            .to_series(),
            "end_ms": timed["timestamp"].dt.epoch("ms"),
            "ms": timed["ms"],
            "upstream_ms": timed["upstream_ms"],
        }
    ).with_columns(pl.when(pl.col("request").is_not_null()).then(pl.all()))
    return blank.with_columns(blank[name_].scatter(rows, spans[name_]) for name_ in SPANS)


def _ms(value: pl.Expr, unit: pl.Expr, seconds: pl.Expr) -> pl.Expr:
    """Milliseconds; a value without a unit is in seconds or milliseconds."""
    unit = pl.coalesce(unit, pl.when(seconds).then(pl.lit("s")).otherwise(pl.lit("ms")))
    return value.cast(pl.Float64) * unit.str.to_lowercase().replace_strict(_MS)


def own_times(spans: pl.DataFrame) -> pl.DataFrame:
    """unit, window, template_id, level (logarithmic class) and n, of spans with these keys and SPANS."""
    rows = spans.with_row_index("row").with_columns((pl.col("end_ms") - pl.col("ms")).alias("begin_ms"))
    others = rows.select("unit", "window", "request", "begin_ms", "end_ms", "ms")
    inner = rows.join(others, on=["window", "request"], suffix="_o").filter(
        (pl.col("unit") != pl.col("unit_o"))
        & (pl.col("begin_ms_o") >= pl.col("begin_ms") - SLACK_MS)
        & (pl.col("begin_ms_o") < pl.col("end_ms"))
        # Of two that begin together the shorter one is inside the other.
        & ((pl.col("begin_ms_o") > pl.col("begin_ms") + SLACK_MS) | (pl.col("ms_o") < pl.col("ms")))
    )
    wait = pl.min_horizontal("end_ms", "end_ms_o") - pl.max_horizontal("begin_ms", "begin_ms_o")
    waits = inner.group_by("row").agg(wait.sum().alias("wait"))
    waited = pl.max_horizontal(pl.col("wait").fill_null(0.0), pl.col("upstream_ms").fill_null(0.0))
    own = pl.max_horizontal(0.0, pl.col("ms") - waited)
    level = ((own + 1).log(BASE)).round().cast(pl.Int32).alias("level")
    key = ("unit", "window", "template_id", "level")
    timed = rows.join(waits, on="row", how="left").select(*key[:3], level)
    return timed.group_by(key).agg(pl.len().cast(pl.Int64).alias("n")).sort(key)


def excess(times: pl.DataFrame, normal: pl.DataFrame, size: int) -> Floats:
    """log(1 + s/u) of each of `size` units: s is the time above the usual, u all the time that a normal unit
    needs itself. `times`, `normal`: at, template_id, level, n."""
    found = np.zeros(size)
    if times.is_empty() or normal.is_empty():
        return found
    sums = (
        beyond_usual(times, normal).group_by("at").agg((pl.col("n") * pl.col("beyond_ms")).sum().alias("ms"))
    )
    found[sums["at"].to_numpy()] = np.log1p(sums["ms"].to_numpy() / _needed_ms(normal))
    return found


def _needed_ms(normal: pl.DataFrame) -> float:
    """The median of the time that normal units need themselves. A request is known up to SLACK_MS."""
    needed = pl.lit(BASE).pow(pl.col("level")) - 1 + SLACK_MS
    sums = normal.group_by("at").agg((pl.col("n") * needed).sum().alias("ms"))["ms"]
    return float(np.median(sums.to_numpy()))


def beyond_usual(times: pl.DataFrame, normal: pl.DataFrame) -> pl.DataFrame:
    """Rows of `times` of templates that `normal` has, with `beyond_ms`: milliseconds above what is usual."""
    usual = (
        normal.group_by("template_id", "level")
        .agg(pl.col("n").sum())
        .sort("template_id", "level")
        .with_columns((pl.col("n").cum_sum() / pl.col("n").sum()).over("template_id").alias("share"))
        .filter(pl.col("share") >= USUAL)
        .group_by("template_id")
        .agg(pl.col("level").min().alias("usual"))
    )
    above = pl.lit(BASE).pow(pl.col("level")) - pl.lit(BASE).pow(pl.col("usual"))
    return times.join(usual, on="template_id").with_columns(above.clip(lower_bound=0.0).alias("beyond_ms"))
