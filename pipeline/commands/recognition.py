"""How the times of an input are recognised, from the first records of each file, and what a user should know.

A missing year, date or zone is guessed, and a record without a time gets that of its arrival. A note says so
before somebody believes the clock times of a report."""

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final

import polars as pl

from pipeline.errors import BadInput
from pipeline.records.batch import utc_now
from pipeline.records.declared import MARK, Declaration, FormatChoice, choice, faults
from pipeline.sources import formats
from pipeline.sources.chunks import Chunk
from pipeline.sources.formats_delimited import is_guessed
from pipeline.sources.formats_text import NAMES
from pipeline.sources.times import ambiguous_words, check_zone, minutes_of
from pipeline.units import listed, plural

SAMPLE_RECORDS: Final = 200
_REGEX_ERROR: Final = re.compile(r"\n *error: (.+)")
# Of short files whose first characters differ in digits alone one is looked at closely; so many shapes are
# remembered.
_SHORT, _HEAD_CHARS, _SHAPES = 4, 60, 1_000
_NAMED: Final = 3  # files in a note; the others are counted
# A time without a year moves by whole years with the time of arrival, one without a date by just this.
_LATER: Final = timedelta(days=4 * 365 + 1 + 3)
_ELSEWHERE: Final = ("Etc/GMT-5", "Etc/GMT-6")  # the second one where the zone is the first


def choice_of(args: argparse.Namespace) -> FormatChoice:
    """The formats that the flags --formats, --format and --time declare. Raises BadInput."""
    found = choice(files=args.formats or (), forced=args.format, time=args.time)
    for packed in found.declared:
        declaration = Declaration.unpack(packed)
        if wrong := broken(declaration):
            raise BadInput(f"format {declaration.name!r}: {wrong[0]}")
    if found.forced and not found.forced.startswith(MARK) and found.forced not in NAMES:
        raise BadInput(f"--format {found.forced!r} is unknown; `logweir formats` lists the known ones")
    return found


def broken(declaration: Declaration) -> list[str]:
    """Why a declaration cannot be used, a sentence each."""
    wrong = faults(declaration)
    try:
        pl.Series([""]).str.contains("(?s)" + declaration.pattern)
    except pl.exceptions.ComputeError as exc:
        why = _REGEX_ERROR.search(str(exc))
        return [*wrong, f"the pattern does not compile: {why[1] if why else exc}"]
    head = declaration.pattern.partition("(?P<message>")[0]
    try:
        pl.Series([""]).str.contains(head)
    except pl.exceptions.ComputeError:
        wrong.append("the group 'message' stands inside of another one; close that before it")
    if declaration.zone:
        try:
            check_zone(declaration.zone)
        except BadInput as exc:
            wrong.append(str(exc))
    return wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesFound:
    """The times of a sample. A guessed part stands in no line."""

    records: int
    timed: int  # records with a time
    years: frozenset[int] = frozenset()  # those that were guessed
    dates: bool = False  # some dates were guessed
    zones: bool = False  # some times have no zone
    words: frozenset[str] = frozenset()  # abbreviations of several zones; the likeliest was taken


def times_found(
    records: pl.DataFrame,
    names: tuple[str, ...],
    *,
    arrived: datetime,
    zone: str,
    precedent: TimesFound | None = None,
) -> TimesFound:
    """`records`: RAW_SCHEMA, unparsed; `names`: their formats; `arrived`: aware. `precedent`: the answer for
    records that differ in digits alone; it holds for these if all of them have a time. Raises BadInput.

    A part of a time is a guess if it changes with the arrival or with the zone of the source. So every format
    is asked the same question, wherever it keeps its time.
    """
    here = formats.parse(records, names, arrived=arrived, zone=zone)
    timed = here["timed"]
    if not timed.any():
        return TimesFound(records=records.height, timed=0)
    if precedent is not None and timed.all():
        return replace(precedent, records=records.height, timed=records.height)
    rows = _guesses(records, names, here, arrived=arrived, zone=zone)
    (found,) = _sums(rows.with_columns(pl.lit("").alias("source"))).values()
    return found


def _guesses(
    records: pl.DataFrame, names: tuple[str, ...], here: pl.DataFrame, *, arrived: datetime, zone: str
) -> pl.DataFrame:
    """For each record: `timed`; `year`, the guessed one or null; whether its date (`no_date`) and its zone
    (`no_zone`) are guesses; `word`, the abbreviation of several zones or null. `here`: the parsed records."""
    elsewhere = next(z for z in _ELSEWHERE if z != zone)
    later = formats.parse(records, names, arrived=arrived + _LATER, zone=zone)["timestamp"]
    there = formats.parse(records, names, arrived=arrived, zone=elsewhere)["timestamp"]
    timed, time = here["timed"], here["timestamp"]
    moved = (later - time).dt.total_hours()
    by_date = (moved - _LATER // timedelta(hours=1)).abs() < 24  # a change of summer time is an hour
    no_date, no_year = timed & (moved != 0) & by_date, timed & (moved != 0) & ~by_date
    return pl.DataFrame(
        {
            "source": records["source"],
            "timed": timed,
            "year": time.dt.year().set(~no_year, None),
            "no_date": no_date,
            "no_zone": timed & (there != time),
            "word": ambiguous_words(records["raw"], zone=zone).set(~timed, None),
        }
    )


def _sums(rows: pl.DataFrame) -> dict[str, TimesFound]:
    """By source."""
    grouped = rows.group_by("source", maintain_order=True).agg(
        pl.len(),
        pl.col("timed").sum(),
        pl.col("year").drop_nulls().unique(),
        pl.col("no_date", "no_zone").any(),
        pl.col("word").drop_nulls().unique(),
    )
    return {
        source: TimesFound(
            records=n, timed=timed, years=frozenset(years), dates=dates, zones=zones, words=frozenset(words)
        )
        for source, n, timed, years, dates, zones, words in grouped.iter_rows()
    }


@dataclass(slots=True, kw_only=True)
class TimeNotes:
    """Collects what is to be said about the times of several files."""

    zone: str  # of times without one, as the settings name it
    of_stdin: bool = False  # its names are no files that a command can read
    found: dict[str, TimesFound] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)  # files read as tables whose columns no header names
    _by_shape: dict[object, TimesFound] = field(default_factory=dict)  # of short files, by their shape

    def see(self, name: str, chunk: Chunk) -> None:
        """The first chunk of a file tells how its times are; further ones may hold another year."""
        earlier, now = self.found.get(name), utc_now()
        if earlier is None:
            self.tables += [name] if any(map(is_guessed, chunk.formats)) else []
            self.found[name] = self._times(chunk, now)
        elif earlier.years:
            year = chunk.latest(arrived=now, zone=self.zone).year
            self.found[name] = replace(earlier, years=earlier.years | {year})

    def see_all(self, records: pl.DataFrame, names: tuple[str, ...]) -> None:
        """As `see`, for whole files of the same formats; `source` tells the file of each record."""
        now = utc_now()
        here = formats.parse(records, names, arrived=now, zone=self.zone)
        rows = _guesses(records, names, here, arrived=now, zone=self.zone)
        sums = _sums(rows)
        self.found |= sums
        self.tables += sums if any(map(is_guessed, names)) else []

    def _times(self, chunk: Chunk, now: datetime) -> TimesFound:
        """The times of a file. Of many short files that are alike but for their numbers, one is looked at."""
        sample = chunk.records.head(SAMPLE_RECORDS)
        shape = None
        if sample.height <= _SHORT:
            heads = sample["raw"].str.head(_HEAD_CHARS).str.replace_all(r"[0-9]", "0")
            shape = (chunk.formats, *heads)
        precedent = self._by_shape.get(shape)
        found = times_found(sample, chunk.formats, arrived=now, zone=self.zone, precedent=precedent)
        # A guessed year differs from file to file.
        sure = found.timed == found.records and not found.years
        if shape is not None and sure and len(self._by_shape) < _SHAPES:
            self._by_shape[shape] = found
        return found

    def notes(self) -> list[str]:
        """One sentence for each kind, about all files that it is true of."""
        found = self.found
        years = sorted({year for t in found.values() for year in t.years}, reverse=True)
        untimed = [name for name, t in found.items() if t.records and not t.timed]
        look = f"`logweir formats {untimed[0] if untimed else ''}`"
        if self.of_stdin:
            look = "`logweir formats FILE` for a file of them"
        kinds = (
            (
                self.tables,
                "read as a table by the values of its columns, because no header names them; --formats takes a "
                "format of your own",
            ),
            (
                untimed,
                "no time recognised, so no clock times are shown and incidents cannot be told apart; name "
                f"the time's form with --time, or see {look}",
            ),
            (
                [name for name, t in found.items() if t.years],
                f"times have no year; {listed(map(str, years))} "
                f"{'was' if len(years) == 1 else 'were'} guessed",
            ),
            (
                [name for name, t in found.items() if t.dates],
                "times have no date; the latest one was guessed",
            ),
            (
                # A zone that was named in the settings is no guess.
                [name for name, t in found.items() if t.zones and self.zone == "UTC"],
                "times have no zone and are read as UTC; --time-zone names another",
            ),
            *(
                (
                    [name for name, t in found.items() if word in t.words],
                    f"the zone {word} of the times names several and is read as {offset_text(word, self.zone)}; "
                    "--time-zone names another",
                )
                for word in sorted({word for t in found.values() for word in t.words})
            ),
        )
        return [f"{_files(names)}: {sentence}" for names, sentence in kinds if names]


def offset_text(word: str, zone: str) -> str:
    """UTC+05:30, as the abbreviation of several zones is meant."""
    minutes = minutes_of(word, zone) or 0
    return f"UTC{'-' if minutes < 0 else '+'}{abs(minutes) // 60:02d}:{abs(minutes) % 60:02d}"


def _files(names: Iterable[str]) -> str:
    """A file by its name; several as a number and some names, without folders."""
    several = list(names)
    if len(several) == 1:
        return several[0]
    short = list(dict.fromkeys(name.rpartition("/")[2] for name in several))
    more = ", ..." if len(short) > _NAMED else ""
    return f"{plural(len(several), 'file')} ({', '.join(short[:_NAMED])}{more})"
