"""The alert budget: how often new normal templates come, and the chance of a false alarm that it allows.

A detector judges every template that it has not learnt. In a log that grows by 1,000 normal templates a day,
a threshold at 5 % raises fifty false alarms a day. People set the budget; the training data tells the growth.
"""

import math
from datetime import datetime
from typing import Any, Final

import polars as pl

from pipeline.models.severity import severity_words
from pipeline.models.threshold import CHANCE

_TEMPLATES_LEAST: Final = 20  # with a time; fewer show no growth
_DAY_S: Final = 86_400.0
# A habit has at least _HABIT_LINES lines, over half of a sample of an hour or more, or over half a day: few
# faults last that long. Of more templates the most frequent ones are kept.
_HABIT_LINES: Final = 3
_HABIT_SHARE: Final = 0.5
_HABIT_S: Final = 43_200.0
_HABIT_LEAST_S: Final = 3_600.0
_HABITS_MOST: Final = 2_000
_OUTSIDE: Final = 0.02  # of the patterns at either end


def novel_per_day(sample: pl.DataFrame, *, workloads: int) -> float | None:
    """Templates that a workload will show for the first time on the day after the sample; None without times.

    `sample`: `template_id` and, where the store has them, `first_seen` and `last_seen` of normal patterns.
    The number of templates by time t grows like t**b (Heaps' law), with b from the second half of the sample.
    A linear rate would overestimate: the first hour of a recording shows most templates.
    """
    if "first_seen" not in sample.columns:
        return None
    last = "last_seen" if "last_seen" in sample.columns else "first_seen"
    first = (
        sample.drop_nulls("first_seen").group_by("template_id").agg(pl.col("first_seen").min())["first_seen"]
    )
    begin, end = first.min(), sample[last].max()
    if not isinstance(begin, datetime) or not isinstance(end, datetime) or len(first) < _TEMPLATES_LEAST:
        return None
    spanned_s = (end - begin).total_seconds()
    if spanned_s <= 0:
        return None
    early = int((first <= begin + (end - begin) / 2).sum())
    growth = math.log2(len(first) / early)  # at least one is early: the first
    more: float = len(first) * ((1.0 + _DAY_S / spanned_s) ** min(growth, 1.0) - 1.0)
    return round(more / max(1, workloads), 3)


def span_s(sample: pl.DataFrame) -> float:
    """Seconds that nearly all patterns of a sample span; 0 for one without times.

    Lines without a time stand at the moment of their arrival, which may be years away from the others."""
    if not {"first_seen", "last_seen"} <= set(sample.columns):
        return 0.0
    begin: Any = sample["first_seen"].quantile(_OUTSIDE, "nearest")  # the stubs know numbers only
    end: Any = sample["last_seen"].quantile(1.0 - _OUTSIDE, "nearest")
    if not isinstance(begin, datetime) or not isinstance(end, datetime):
        return 0.0
    return (end - begin).total_seconds()


def errors_per_day(sample: pl.DataFrame) -> dict[int, float]:
    """Lines a day of error-like templates that came all through a sample or for half a day; none of a sample
    without times.

    One that came in a single stretch of it is no habit. `sample`: `template_id`, `masked`, `severe`, `count`
    and, where the store has them, `first_seen` and `last_seen`."""
    spanned_s = span_s(sample)
    if spanned_s < _HABIT_LEAST_S:
        return {}
    timed = sample.drop_nulls(["first_seen", "last_seen"])
    worded = pl.Series("worded", [severity_words(m) is not None for m in timed["masked"]], dtype=pl.Boolean)
    came = (
        timed.with_columns(worded)
        .filter(pl.col("severe") | pl.col("worded"))
        .group_by("template_id")
        .agg(
            pl.col("count").sum(),
            (pl.col("last_seen").max() - pl.col("first_seen").min()).dt.total_seconds().alias("spread"),
        )
        .filter(
            (pl.col("count") >= _HABIT_LINES) & (pl.col("spread") >= min(_HABIT_SHARE * spanned_s, _HABIT_S))
        )
        .sort("count", "template_id", descending=[True, False])
        .head(_HABITS_MOST)
    )
    rows = came.select("template_id", "count").iter_rows()
    return {template_id: round(count * _DAY_S / spanned_s, 3) for template_id, count in rows}


def chance_within(news_per_day: float, novel: float | None) -> float:
    """The chance of a false alarm per new normal template that a budget allows, 5 % at most.

    Above 5 % the threshold would lie among ordinary lines.
    """
    if novel is None or novel * CHANCE <= news_per_day:
        return CHANCE
    return news_per_day / novel
