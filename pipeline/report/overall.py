"""What holds for a log as a whole though no line of it stands out: facts of a run, which raise no alarm.

* Requests are slow: the durations of one template, written with a unit, have a median above SLOW_S.
* Many answers or lines of a file are bad. Lines without a time have no rate that could be watched, so the
  shares of failed answers and of lines at error levels are judged over the whole file. Alone a share of MANY
  is said; with a baseline only a clear rise above it.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

import polars as pl

from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.schema import is_timed, of_lines
from pipeline.units import clipped, visible
from pipeline.watching.numbers.alarms import quantity
from pipeline.watching.values.sampling import value_texts
from pipeline.watching.values.typed import DURATION, MAX_CHARS, ValueKind, typed_values

SLOW_S: Final = 2.0
MANY: Final = 0.2  # of the answers or lines of a file
RISE: Final = 2.0  # times the share of the baseline, and
POINTS: Final = 0.1  # so much more
SIGMAS: Final = 4.0  # of a share by chance
LEAST: Final = 50  # answers or lines of a file
LEAST_DURATIONS: Final = 20
SHOWN: Final = 10
_UNTIMED: Final = 0.9  # share of the lines of a file without times
_TEMPLATES: Final = 200  # the most frequent ones that speak of requests
_READ: Final = 1_000  # records of a template whose durations are read
_TEXT_CHARS: Final = 120
_STATUS: Final = (
    r"(?:HTTP/[\d.]+\"?\s+|\b(?:GET|HEAD|POST|PUT|DELETE|PATCH|OPTIONS)\s+/\S*\s+"
    r"|\bstatus(?:_?[Cc]ode)?[\"']?\s?[=:]\s?[\"']?)([1-5])\d\d\b"
)
_REQUEST: Final = re.compile(
    r"\b(?:GET|HEAD|POST|PUT|DELETE|PATCH|OPTIONS)\b|HTTP/\d|(?<![a-z])(?:requests?|responses?|query|queries|rpc)(?![a-z])",
    re.IGNORECASE,
)
# Words of a key whose duration is set by somebody, or is that of something else.
_NO_LENGTH: Final = re.compile(
    r"timeout|interval|ttl|age|uptime|delay|retry|sleep|wait|expir|keep_?alive|deadline", re.IGNORECASE
)
# What is counted of the lines of a file, and in words.
_BAD: Final[Mapping[str, tuple[str, str]]] = {
    "5xx": ("answers", "answers have a status of 500 or more"),
    "4xx": ("answers", "answers have a status of 400 to 499"),
    "errors": ("untimed", "lines are at error levels"),
    "warnings": ("untimed", "lines are warnings"),
}
_ALONE: Final = frozenset({"5xx", "errors"})  # said without a baseline too


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One sentence about a run, and the figures in it."""

    kind: str  # "slow", or of _BAD
    workload: str
    source: str | None  # the file of a share
    template_id: int | None  # of slow requests
    value: float  # the median in seconds, or the share
    of: int  # durations that were read, or lines and answers
    baseline: float | None  # the share there; None without one
    text: str


def overall_facts(
    results: pl.LazyFrame, baseline: pl.LazyFrame | None, templates: pl.DataFrame
) -> list[Fact]:
    """The facts of a run, at most SHOWN of each sort, the worst first.

    `results` and `baseline` are of RESULT_SCHEMA; `templates` needs `template_id`, `template` and `count`."""
    slow = sorted(_slow(results, templates), key=lambda fact: (-fact.value, fact.workload, fact.text))
    shares = sorted(_shares(results, baseline), key=lambda fact: (-fact.value, fact.text))
    return [*shares[:SHOWN], *slow[:SHOWN]]


# ---- durations of requests -------------------------------------------------------------------------


def _slow(results: pl.LazyFrame, templates: pl.DataFrame) -> Iterator[Fact]:
    texts = {
        row["template_id"]: row
        for row in templates.sort("count", "template_id", descending=[True, False]).iter_rows(named=True)
        if row["template_id"] > 0 and row["count"] >= LEAST_DURATIONS and _REQUEST.search(row["template"])
    }
    steps = {number: -(-texts[number]["count"] // _READ) for number in list(texts)[:_TEMPLATES]}
    if not steps:
        return
    # In a map: with `replace_strict` in the filter itself, Polars 2.1 took 1.9 GiB for 6 million records.
    step = pl.col("template_id").map_batches(
        lambda ids: ids.replace_strict(steps, default=1, return_dtype=pl.UInt64),
        return_dtype=pl.UInt64,
        is_elementwise=True,
    )
    records = (
        results.filter(pl.col("template_id").is_in(list(steps)))
        .filter(pl.col("record_id").hash(seed=0) % step == 0)
        .select("workload", "template_id", "raw", "message")
        .collect(engine="streaming")
    )
    durations: dict[tuple[str, int], dict[str, list[float]]] = {}
    for workload, number, text in zip(
        records["workload"].fill_null(""), records["template_id"], value_texts(records), strict=True
    ):
        for name, kind, value in typed_values(text):
            if kind == DURATION and not _NO_LENGTH.search(name):
                durations.setdefault((workload, number), {}).setdefault(name, []).append(value)
    for (workload, number), by_name in durations.items():
        # A duration that never varies is a setting.
        measured = [v for v in by_name.values() if len(v) >= LEAST_DURATIONS and len(set(v)) > 2]
        longest = max(measured, key=median, default=[])
        if longest and median(longest) > SLOW_S:
            yield _slow_fact(workload, number, texts[number]["template"], longest)


def _slow_fact(workload: str, number: int, template: str, values: list[float]) -> Fact:
    middle = median(values)
    said = clipped(visible(template), _TEXT_CHARS)
    return Fact(
        kind="slow",
        workload=workload,
        source=None,
        template_id=number,
        value=round(middle, 3),
        of=len(values),
        baseline=None,
        text=f"requests of {clipped(visible(workload), 80)} take {quantity(ValueKind.DURATION, middle)}, the median of "
        f"{len(values):,} durations in `{said}`",
    )


# ---- shares of files without times -----------------------------------------------------------------


def _shares(results: pl.LazyFrame, baseline: pl.LazyFrame | None) -> Iterator[Fact]:
    found = _counted(results, "workload", "source")
    files = found.filter(pl.col("untimed") >= _UNTIMED * pl.col("lines"))
    if files.is_empty():
        return
    normal = None if baseline is None else _counted(baseline, "workload")
    for row in files.iter_rows(named=True):
        before = None
        if normal is not None:
            same = normal.filter(pl.col("workload") == row["workload"])
            before = (normal if same.is_empty() else same).sum().row(0, named=True)
        for kind, (among, words) in _BAD.items():
            n, of = row[kind], row[among]
            usual = before[kind] / before[among] if before is not None and before[among] >= LEAST else None
            if of < LEAST or not _stands_out(kind, n / of, of, usual):
                continue
            name = clipped(visible(row["source"] or row["workload"]), 80)
            rise = "" if usual is None else f", {_percent(usual)} in the baseline"
            yield Fact(
                kind=kind,
                workload=row["workload"],
                source=row["source"],
                template_id=None,
                value=round(n / of, 4),
                of=of,
                baseline=None if usual is None else round(usual, 4),
                text=f"{_percent(n / of)} of the {of:,} {words} in {name}{rise}",
            )


def _stands_out(kind: str, share: float, of: int, usual: float | None) -> bool:
    """`usual`: the share of a baseline, None without one that has enough such lines."""
    if usual is None:
        return share >= MANY and kind in _ALONE
    chance = SIGMAS * math.sqrt(max(usual, 1 / of) / of)
    return share >= RISE * usual and share - usual >= max(POINTS, chance)


def _counted(lines: pl.LazyFrame, *by: str) -> pl.DataFrame:
    """By file or workload: its lines, those without a time, and of the latter the answers and what is bad."""
    untimed = is_timed().not_()
    status = pl.when(untimed).then(pl.col("raw").str.head(MAX_CHARS).str.extract(_STATUS))
    level = pl.when(untimed).then(pl.col("level"))
    return (
        lines.filter(of_lines())
        .with_columns(pl.col("workload").fill_null(""), status.alias("status"), level.alias("level"))
        .group_by(by)
        .agg(
            pl.len().alias("lines"),
            untimed.sum().alias("untimed"),
            pl.col("status").count().alias("answers"),
            (pl.col("status") == "5").sum().alias("5xx"),
            (pl.col("status") == "4").sum().alias("4xx"),
            pl.col("level").is_in(list(ERROR_LEVELS)).sum().alias("errors"),
            (pl.col("level") == "warning").sum().alias("warnings"),
        )
        .sort(by)
        .collect(engine="streaming")
    )


def _percent(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.1 else 1}f} %"
