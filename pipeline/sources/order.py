"""What the order of lines tells about their times: the year that no line writes, and the repeated hour of
autumn."""

from datetime import date, datetime, timedelta
from typing import Final

import polars as pl

from pipeline.records.declared import TAI_CLOCK, Declaration

GUESS: Final = "logweir_guess"  # a column of `parse`: what a line leaves open about its time
YEAR, LOCAL = 1, 2  # of GUESS: the year; the zone, which is that of the source
_HALF_A_YEAR: Final = timedelta(days=183)
_YEAR_DAYS: Final = 365.2425
_OUT_OF_ORDER: Final = timedelta(days=1)
# Lines of several threads are out of order by seconds; the hour that comes twice begins again by more.
_FALLS_BACK: Final = timedelta(minutes=2)


def guesses(groups: pl.DataFrame, form: Declaration, *, zone: str) -> pl.Series:
    """GUESS of lines with these groups of a format; `zone` is that of their source."""
    assert form.clock is not None  # noqa: S101 - else there is no time
    found = pl.Series(GUESS, [0], dtype=pl.UInt8).new_from_index(0, groups.height)
    if form.clock.missing == "year":
        found = _where_lacking(groups, ("year",), YEAR)
    if zone != "UTC" and form.clock.form and form.clock is not TAI_CLOCK and not form.has_whole_time:
        found += _where_lacking(groups, ("zone", "zone_2"), LOCAL)
    return found


def _where_lacking(groups: pl.DataFrame, names: tuple[str, ...], guess: int) -> pl.Series:
    found = pl.Series(GUESS, [guess], dtype=pl.UInt8).new_from_index(0, groups.height)
    for name in names:
        if name in groups.columns and groups[name].null_count() < groups.height:
            found = found.set(groups[name].is_not_null(), 0)
    return found


def by_order(parsed: pl.DataFrame, source: pl.Series, *, zone: str) -> pl.Series:
    """The timestamps of `parsed`, which has GUESS, as the order of lines in each source tells them.

    Lines of the source that write their year settle it for the lines behind them and ahead of the first one,
    never to a later one than guessed. Otherwise the last line
    has the latest year, and time does not fall by a year from a line to the next one."""
    times = parsed["timestamp"]
    rows = pl.DataFrame([times, parsed[GUESS], source.alias("source")]).with_row_index("row")
    timed = rows.filter(pl.col("timestamp").is_not_null()) if times.null_count() else rows
    if timed.is_empty():
        return times
    if ((timed[GUESS] & YEAR) > 0).any():
        timed = _with_years(timed, zone)
    if ((timed[GUESS] & LOCAL) > 0).any():
        timed = _with_second_hours(timed, zone)
    return times.scatter(timed["row"], timed["timestamp"])


def _with_years(timed: pl.DataFrame, zone: str) -> pl.DataFrame:
    falls = timed["timestamp"].diff() < -_HALF_A_YEAR
    if not falls.any() and ((timed[GUESS] & YEAR) > 0).all():
        return timed  # as nearly always
    time, guessed = pl.col("timestamp"), (pl.col(GUESS) & YEAR) > 0
    written = pl.when(~guessed).then(time)
    before, behind = written.forward_fill(), written.backward_fill()
    following = time.shift(-1)
    if timed["source"].n_unique() > 1:
        before, behind = before.over("source"), behind.over("source")
        following = following.over("source")
    # `following` is null at the end of a source, so that no fall reaches the source before
    fallen = (time - following > _HALF_A_YEAR).fill_null(False) & guessed
    back = fallen.cast(pl.Int64).cum_sum(reverse=True).over("source")
    # as many years back as leave it behind the written time before it, or ahead of the one behind it
    first, last = time - before + _OUT_OF_ORDER, time - behind - _OUT_OF_ORDER
    apart = pl.coalesce(_years(first).floor(), _years(last).ceil()).cast(pl.Int64).clip(0)
    years = timed.select(pl.when(guessed).then(pl.coalesce(apart, back)).otherwise(0))
    return timed.with_columns(_earlier(timed["timestamp"], years.to_series(), zone))


def _years(duration: pl.Expr) -> pl.Expr:
    return duration.dt.total_seconds() / 86_400 / _YEAR_DAYS


def _earlier(times: pl.Series, years: pl.Series, zone: str) -> pl.Series:
    """By calendar years of the zone."""
    for count in years.unique().to_list():
        if count:
            there = times.dt.convert_time_zone(zone).dt.offset_by(f"{-count}y").dt.convert_time_zone("UTC")
            times = times.zip_with(years != count, there)
    return times


def _with_second_hours(timed: pl.DataFrame, zone: str) -> pl.DataFrame:
    """Times that the clock shows twice are read as the first; those behind a fall of the clock are second."""
    times = timed["timestamp"]
    shown = times.dt.convert_time_zone(zone).dt.replace_time_zone(None)
    second = shown.dt.replace_time_zone(zone, ambiguous="latest", non_existent="null").dt.convert_time_zone(
        "UTC"
    )
    twice = (timed[GUESS] & LOCAL).cast(pl.Boolean) & (second > times).fill_null(False)
    places = twice.arg_true()
    if not places.len():
        return timed
    last: dict[tuple[str | None, date], datetime] = {}
    fallen: set[tuple[str | None, date]] = set()
    later = []
    for place, source, time in zip(
        places.to_list(), timed["source"].gather(places), times.gather(places), strict=True
    ):
        key = (source, time.date())
        if key in last and last[key] - time > _FALLS_BACK:
            fallen.add(key)
        last[key] = time
        if key in fallen:
            later.append(place)
    return timed.with_columns(times.scatter(later, second.gather(later)))
