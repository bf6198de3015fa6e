"""The alert budget: how often new normal templates come, and the chance of a false alarm that it allows.

A detector judges every template that it has not learnt. In a log that grows by 1,000 normal templates a day,
a threshold at 5 % raises fifty false alarms a day. People set the budget; the training data tells the growth.
"""

import math
from datetime import datetime
from typing import Final

import polars as pl

from pipeline.models.threshold import CHANCE

_TEMPLATES_LEAST: Final = 20  # with a time; fewer show no growth
_DAY_S: Final = 86_400.0


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
    span_s = (end - begin).total_seconds()
    if span_s <= 0:
        return None
    early = int((first <= begin + (end - begin) / 2).sum())
    growth = math.log2(len(first) / early)  # at least one is early: the first
    more: float = len(first) * ((1.0 + _DAY_S / span_s) ** min(growth, 1.0) - 1.0)
    return round(more / max(1, workloads), 3)


def chance_within(alerts_per_day: float, novel: float | None) -> float:
    """The chance of a false alarm per new normal template that a budget allows, 5 % at most.

    Above 5 % the threshold would lie among ordinary lines.
    """
    if novel is None or novel * CHANCE <= alerts_per_day:
        return CHANCE
    return alerts_per_day / novel
