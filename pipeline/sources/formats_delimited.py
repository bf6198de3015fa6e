"""Tables as logs: CSV, TSV and the like, PostgreSQL's csvlog, W3C extended logs (IIS, CloudFront).

A sample tells the layout: the columns' separator and roles. A layout travels as text in place of a format's
name, such as `csv:comma:time,level,message,=user`, so a reader needs no header. A column is a role, `=name`
for a value of the message, or `-`. Rows of another shape, the header and `#` lines are their own messages."""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Final

import numpy as np
import polars as pl

from pipeline.errors import BadInput
from pipeline.records.levels import LEVEL_WORDS
from pipeline.records.schema import RAW_SCHEMA
from pipeline.sources.times import read_times

SEPARATORS: Final[Mapping[str, str]] = {
    "comma": ",", "tab": "\t", "semicolon": ";", "bar": "|", "space": " ",
}  # fmt: skip
_MAX_CHARS: Final = 1500
_MAX_COLUMNS: Final = 100
_SAME_SHARE: Final = 0.8  # of rows with as many columns as the header
_SURE_SHARE: Final = 0.9  # of values that tell a column without a name

_NAMES: Final[Mapping[str, str]] = {
    name: role
    for role, names in {
        "time": "time timestamp @timestamp datetime date/time ts eventtime event_time log_time created_at "
        "created"
        " timegenerated timecreated _time asctime",
        "date": "date",
        "level": "level severity log_level loglevel lvl levelname error_severity entrytype leveldisplayname"
        " priority",
        "service": "service logger component app application module program provider providername sourcename"
        " source service_name logger_name s-sitename",
        "host": "host hostname machine machinename computer server node s-ip s-computername",
        "process": "pid process thread process_id processid thread_name",
        "message": "message msg text description body log event content short_message _raw",
        "method": "method cs-method request_method verb",
        "path": "path uri url cs-uri-stem request_uri",
        "query": "cs-uri-query query_string",
        "status": "status status_code sc-status http_status",
    }.items()
    for name in names.split()
}
_ROLES: Final = frozenset({*_NAMES.values(), "clock"})
_SPEC: Final = re.compile(r"=[\w.()/@-]{1,64}|-|" + "|".join(sorted(_ROLES)))
# The columns of PostgreSQL 9.0 to 18; 13 has backend_type, 14 leader_pid and query_id
_CSVLOG: Final = (  # noqa: SIM905 - as a layout writes them
    "time,=user,=database,process,=client,-,-,=command,-,-,-,level,=state,message,=detail,=hint,"
    "=internal_query,"
    "-,=context,=query,-,-,=application,service,-,-"
).split(",")
_CSVLOG_WIDTHS: Final = (23, 24, 26)
_CSVLOG_LEVEL: Final = 11
_FIELDS: Final = "#Fields:"
_PARSED: Final = ("timestamp", "level", "host", "process", "service", "message")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLayout:
    """The columns of a table. `kind`: csv, or w3c, whose times are UTC and whose values are not quoted."""

    kind: str
    separator: str  # a name of SEPARATORS
    columns: tuple[str, ...]

    @property
    def name(self) -> str:
        """The text that `read_layout` reads."""
        return f"{self.kind}:{self.separator}:{','.join(self.columns)}"


def is_layout(name: str) -> bool:
    """Whether this is a layout and no plain name of a format."""
    return name.startswith(("csv:", "w3c:"))


@cache
def read_layout(name: str) -> TableLayout:
    """Raises BadInput for a layout that cannot be."""
    kind, _, names = name.partition(":")
    separator, _, text = names.partition(":")
    columns = tuple(text.split(","))
    bad = next((column for column in columns if not _SPEC.fullmatch(column)), None)
    roles = [column for column in columns if column in _ROLES]
    if (
        len(name) > _MAX_CHARS
        or kind not in ("csv", "w3c")
        or separator not in SEPARATORS
        or not 1 < len(columns) <= _MAX_COLUMNS
        or bad is not None
        or len(set(roles)) < len(roles)
    ):
        raise BadInput(f"the table layout {name[:80]!r} is unknown; leave the format to be recognised")
    return TableLayout(kind=kind, separator=separator, columns=columns)


# Detection


def detect_table(lines: Sequence[str], *, header: bool) -> TableLayout | None:
    """The layout of a sample of lines that are not blank: by its header, or by its values alone."""
    if not header:
        return _by_values(lines)
    for number, line in enumerate(lines):
        if line.startswith(_FIELDS):
            return _w3c(line, [row for row in lines[number + 1 :] if not row.startswith("#")])
        if not line.startswith("#"):
            if line.count(",") >= _CSVLOG_WIDTHS[0] - 1 and (layout := _by_values(lines)):
                return layout if "=internal_query" in layout.columns else None
            return _by_header(line, lines[number + 1 :])
    return None


def _w3c(line: str, rows: Sequence[str]) -> TableLayout | None:
    names = line.removeprefix(_FIELDS).split()
    tabs = sum("\t" in row for row in rows)
    return _layout("w3c", "tab" if tabs * 2 > len(rows) else "space", names)


def _by_header(line: str, rows: Sequence[str]) -> TableLayout | None:
    for separator, mark in SEPARATORS.items():
        if separator == "space" or mark not in line:
            continue
        names = [name.strip() for name in _split([line], mark)[0]]
        roles = {_NAMES.get(name.lower()) for name in names}
        is_header = roles & {"time", "date"} or {"level", "message"} <= roles
        if not is_header or any(len(name) > 64 or name[:1].isdigit() for name in names) or not rows:
            continue
        complete = _rows(rows, mark)
        same = sum(len(row) == len(names) for row in complete)
        if same >= _SAME_SHARE * len(complete):
            return _layout("csv", separator, names)
    return None


def _layout(kind: str, separator: str, names: Sequence[str]) -> TableLayout | None:
    """The first column of a role has it; the others are values of the message."""
    columns: list[str] = []
    lower = [name.lower() for name in names]
    for name, key in zip(names, lower, strict=True):
        role = _NAMES.get(key)
        if key == "time" and "date" in lower:
            role = "clock"
        if role == "date" and not {"time", "clock"} & set(lower):
            role = "time"
        plain = re.sub(r"[^\w.()/@-]+", "_", name)[:64]
        columns.append(role if role and role not in columns else f"={plain}" if plain else "-")
    layout = TableLayout(kind=kind, separator=separator, columns=tuple(columns))
    if not 1 < len(columns) <= _MAX_COLUMNS or len(layout.name) > _MAX_CHARS:
        return None
    return layout


def _by_values(lines: Sequence[str]) -> TableLayout | None:
    for separator, mark in SEPARATORS.items():
        if separator == "space":
            continue
        rows = _rows(lines, mark)
        if not rows:
            continue
        widths = [len(row) for row in rows]
        width = max(set(widths), key=widths.count)
        regular = [row for row in rows if len(row) == width]
        if len(regular) < _SURE_SHARE * len(rows) or width < 3 or width > _MAX_COLUMNS:
            continue
        values = list(zip(*regular, strict=True))
        if width in _CSVLOG_WIDTHS and separator == "comma" and _are_levels(values[_CSVLOG_LEVEL]):
            return TableLayout(kind="csv", separator=separator, columns=tuple(_CSVLOG[:width]))
        if layout := _of_values(separator, values):
            return layout
    return None


def _of_values(separator: str, values: Sequence[tuple[str, ...]]) -> TableLayout | None:
    columns = [f"=c{number}" for number in range(1, len(values) + 1)]
    time = next((n for n, column in enumerate(values) if _are_times(column)), None)
    if time is None:
        return None
    columns[time] = "time"
    level = next((n for n, column in enumerate(values) if _are_levels(column)), None)
    if level is not None:
        columns[level] = "level"
    free = [n for n in range(len(values)) if n not in (time, level)]
    longest = max(free, key=lambda n: sum(map(len, values[n])))
    columns[longest] = "message"
    return TableLayout(kind="csv", separator=separator, columns=tuple(columns))


def _are_times(values: Sequence[str]) -> bool:
    texts = pl.Series("time", [value.strip() for value in values], dtype=pl.String)
    found = read_times(texts, arrived=datetime.fromisoformat("2000-01-01T00:00:00Z"), zone="UTC")
    return found.len() - found.null_count() >= _SURE_SHARE * len(values)


def _are_levels(values: Sequence[str]) -> bool:
    # A single letter is rather a code than a level.
    levels = sum(len(value) > 1 and value.strip().lower() in LEVEL_WORDS for value in values)
    return levels >= _SURE_SHARE * len(values)


# Framing


def are_rows(lines: pl.Series, layout: TableLayout) -> pl.Series:
    """True for lines with all separators of a row."""
    marks = lines.str.count_matches(SEPARATORS[layout.separator], literal=True)
    return marks >= len(layout.columns) - 1


def within_quotes(lines: pl.Series, layout: TableLayout, *, inside: bool) -> tuple[pl.Series, bool]:
    """True for lines within quotes that an earlier line opened; and whether the last line leaves quotes open.

    `inside`: the line before left them open. A line with all separators of a row and with closed quotes is a
    row, so a stray quote costs one row."""
    if layout.kind == "w3c":
        return pl.repeat(False, lines.len(), dtype=pl.Boolean, eager=True), False
    quotes = lines.str.count_matches('"', literal=True).to_numpy().astype(np.int64)
    if not inside and not (quotes % 2).any():
        return pl.repeat(False, lines.len(), dtype=pl.Boolean, eager=True), False
    rows = are_rows(lines, layout).to_numpy() & (quotes % 2 == 0)
    count = np.cumsum(quotes) + inside
    before = np.concatenate(([int(inside)], count[:-1]))
    base = np.maximum.accumulate(np.where(rows, before, -1))
    # Since the last sure row; before the first one, since the beginning.
    base = np.concatenate(([-1], base[:-1]))
    open_before = (before - np.maximum(base, 0)) % 2 == 1
    last_base = max(int(np.where(rows, before, -1).max()), 0)
    return pl.Series(open_before & ~rows), bool((int(count[-1]) - last_base) % 2)


# Rows


def parse_rows(raw: pl.Series, layout: TableLayout, *, arrived: datetime, zone: str) -> pl.DataFrame:
    """Header columns and message of the rows of the table; message is null in others."""
    table = _columns(raw, layout)
    blank = pl.Series([None], dtype=pl.String).new_from_index(0, raw.len())
    columns = {column: table[number] for number, column in enumerate(layout.columns) if column in _ROLES}
    zone = "UTC" if layout.kind == "w3c" else zone
    if "date" in columns and "clock" in columns:
        columns["time"] = columns["date"] + " " + columns["clock"]
    times = blank.cast(RAW_SCHEMA["timestamp"])
    is_row = table[0].is_not_null()
    if "time" in columns:
        times = read_times(columns["time"], arrived=arrived, zone=zone)
    level = blank
    if "level" in columns:
        words = columns["level"].str.to_lowercase()
        level = words.replace_strict(LEVEL_WORDS, default=None, return_dtype=pl.String)
    if "status" in columns:
        level = level.zip_with(level.is_not_null(), _by_status(columns["status"]))
    is_row &= times.is_not_null() | level.is_not_null()  # the header has neither
    texts = [columns[role] for role in ("message", "method", "path", "query", "status") if role in columns]
    frame = pl.DataFrame([text.alias(f"t{number}") for number, text in enumerate(texts)]) if texts else None
    named = [
        (pl.lit(column[1:] + "=") + table[number]).alias(f"n{number}")
        for number, column in enumerate(layout.columns)
        if column.startswith("=")
    ]
    parts = (frame if frame is not None else pl.DataFrame({"t": blank})).with_columns(named)
    message = parts.select(pl.concat_str(pl.all(), separator=" ", ignore_nulls=True)).to_series()
    return pl.DataFrame(
        {
            "timestamp": times,
            "level": level,
            **{name: columns.get(name, blank) for name in ("host", "process", "service")},
            "message": message.set(~is_row, None),
        }
    ).select(_PARSED)


def _by_status(status: pl.Series) -> pl.Series:
    code = pl.col("code")
    by_code = (
        pl.when(code >= 500).then(pl.lit("error")).when(code >= 400).then(pl.lit("warning")).when(code >= 100)
    )
    frame = pl.DataFrame({"code": status.cast(pl.Int32, strict=False)})
    return frame.select(by_code.then(pl.lit("info")).alias("level")).to_series()


def _columns(raw: pl.Series, layout: TableLayout) -> list[pl.Series]:
    """One series per column; an empty value and `-` are null, as are all values of a row of another width."""
    width, mark = len(layout.columns), SEPARATORS[layout.separator]
    open_end = layout.columns[-1] == "message"
    fields = raw.str.strip_suffix("\r").str.splitn(mark, width).struct.unnest()
    table = [fields.to_series(number) for number in range(width)]
    fits = table[-1].is_not_null() & ~raw.str.starts_with("#")
    if not open_end:
        fits &= ~table[-1].str.contains(mark, literal=True).fill_null(False)
    quoted = raw.str.contains('"', literal=True) if layout.kind == "csv" else fits & False
    if quoted.any():
        at = quoted.arg_true()
        rows = _split(raw.gather(at).to_list(), mark)
        if open_end:
            rows = [
                [*row[: width - 1], mark.join(row[width - 1 :])] if len(row) > width else row for row in rows
            ]
        right = [len(row) == width for row in rows]
        fits = fits.scatter(at, pl.Series(right, dtype=pl.Boolean))
        blank = [""] * width
        cells = list(zip(*(row if ok else blank for row, ok in zip(rows, right, strict=True)), strict=True))
        table = [
            column.scatter(at, pl.Series(new, dtype=pl.String))
            for column, new in zip(table, cells, strict=True)
        ]
    # The first column tells which rows fit, so it stays a text where it is empty.
    plain = [column.str.strip_chars() for column in table]
    plain = [column.set((column == "") | (column == "-"), None) for column in plain]
    empty = pl.Series([""], dtype=pl.String).new_from_index(0, raw.len())
    first = plain[0].fill_null("") if plain[0].null_count() else plain[0]
    return [
        (first if n == 0 else column).zip_with(fits, empty.set(~fits, None)) for n, column in enumerate(plain)
    ]


def _rows(lines: Sequence[str], mark: str) -> list[list[str]]:
    """The rows of a sample, of which a quoted value may hold several lines."""
    if sum(line.count('"') for line in lines) % 2 == 0:
        try:
            return list(csv.reader(lines, delimiter=mark))
        except csv.Error:
            pass
    return _split(lines, mark)


def _split(lines: Sequence[str], mark: str) -> list[list[str]]:
    """The values of each line; quotes hold separators and line ends."""
    try:
        rows = list(csv.reader(lines, delimiter=mark))
        if len(rows) == len(lines):
            return rows
    except csv.Error:
        pass
    found: list[list[str]] = []
    for line in lines:  # some quote has no end
        try:
            found.append(next(csv.reader([line], delimiter=mark), []))
        except csv.Error:
            found.append([])
    return found
