"""Tables as logs: CSV, TSV and the like, PostgreSQL's csvlog, W3C extended logs (IIS, CloudFront).

A sample tells the layout: the columns' separator and roles. A layout travels as text in place of a format's
name, such as `csv:comma:time,level,message,=user`, so a reader needs no header. A column is a role, `=name`
for a value of the message, or `-`. Rows of another shape are their own messages.

A header is part of the record behind it. Its layout holds from that record on, so that the records of a batch
and the layout before them tell how each is read."""

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import polars as pl

from pipeline.errors import BadInput
from pipeline.records.columns import mapped_numbers
from pipeline.records.remembered import remembered
from pipeline.records.schema import RAW_SCHEMA
from pipeline.records.written_levels import level_of_status, levels_by_word
from pipeline.sources.known_keys import known_keys
from pipeline.sources.times import read_times

SEPARATORS: Final[Mapping[str, str]] = {
    "comma": ",", "tab": "\t", "semicolon": ";", "bar": "|", "space": " ",
}  # fmt: skip
_MAX_CHARS: Final = 1500
_LAYOUTS: Final = 512
_MAX_COLUMNS: Final = 100
_SAME_SHARE: Final = 0.8  # of rows with as many columns as the header
_SURE_SHARE: Final = 0.9  # of values that tell a column without a name

_NAMES: Final = {name: role for role, names in known_keys().columns.items() for name in names}
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
_DATE_LINE: Final = re.compile(r"#Date:\s*([0-9]{4}-[0-9]{2}-[0-9]{2})")
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
# What the line before leaves open: nothing, quotes of a value, or the record that a header begins.
_NOTHING, _QUOTES, _HEADER = 0, 1, 2
_NAME: Final = re.compile(r"[^\W\d][\w ./()@#%&:-]{0,63}")  # of a column
_PARSED: Final = ("timestamp", "level", "host", "process", "service", "message")
_FIRST_STATUS: Final = 100
_NUMBERED: Final = re.compile("=c[0-9]+")  # a column without a name


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLayout:
    """The columns of a table. `kind`: csv, or w3c, whose times are UTC and whose `#` lines are its header."""

    kind: str
    separator: str  # a name of SEPARATORS
    columns: tuple[str, ...]
    date: str = ""  # of `#Date:`, for rows that have only a clock time

    @property
    def name(self) -> str:
        """The text that `read_layout` reads."""
        date = f"@{self.date}" if self.date else ""
        return f"{self.kind}{date}:{self.separator}:{','.join(self.columns)}"


def is_layout(name: str) -> bool:
    """Whether this is a layout and not the plain name of a format."""
    return name.startswith(("csv:", "w3c:", "w3c@"))


def is_guessed(name: str) -> bool:
    """Whether it is a layout whose columns no header names."""
    return is_layout(name) and any(map(_NUMBERED.fullmatch, read_layout(name).columns))


def with_layout(formats: tuple[str, ...], layout: str) -> tuple[str, ...]:
    """The formats with another layout of their table; "" for the same one."""
    return tuple(layout if layout and is_layout(name) else name for name in formats)


@remembered(_LAYOUTS, _MAX_CHARS)
def read_layout(name: str) -> TableLayout:
    """Raises BadInput for a layout that cannot be."""
    kind, _, names = name.partition(":")
    kind, _, date = kind.partition("@")
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
        or (date and not _DATE.fullmatch(date))
    ):
        raise BadInput(f"the table layout {name[:80]!r} is unknown; leave the format to be recognised")
    return TableLayout(kind=kind, separator=separator, columns=columns, date=date)


# Detection


def detect_table(lines: Sequence[str], *, header: bool) -> TableLayout | None:
    """The layout of a sample of lines that are not blank: by its header, or by its values alone."""
    if not header:
        return _by_values(lines)
    for number, line in enumerate(lines):
        if line.startswith(_FIELDS):
            rows = [row for row in lines[number + 1 :] if not row.startswith("#")]
            return _w3c(lines[: number + 1], rows)
        if not line.startswith("#"):
            # The first line of a row may end within its message.
            if line.count(",") > _CSVLOG_LEVEL and (layout := _by_values(lines)):
                if "=internal_query" in layout.columns:
                    return layout
                if line.count(",") >= _CSVLOG_WIDTHS[0] - 1:
                    return None
            return _by_header(line, lines[number + 1 :])
    return None


def _w3c(header: Sequence[str], rows: Sequence[str], before: TableLayout | None = None) -> TableLayout | None:
    """The layout of a header's `#` lines; `before` it was another one."""
    date = before.date if before else ""
    layout = before
    for line in header:
        if found := _DATE_LINE.match(line):
            date = found[1]
        elif line.startswith(_FIELDS):
            tabs = sum("\t" in row for row in rows)
            names = line.removeprefix(_FIELDS).split()
            layout = _layout("w3c", "tab" if tabs * 2 > len(rows) else "space", names) or layout
    if layout is None:
        return None
    return replace(layout, date=date if "date" not in layout.columns and "time" in layout.columns else "")


def _by_header(line: str, rows: Sequence[str]) -> TableLayout | None:
    for separator, mark in SEPARATORS.items():
        layout = _csv_header(line, separator) if separator != "space" and mark in line else None
        if layout is None or not rows:
            continue
        end = next((n for n, row in enumerate(rows) if _csv_header(row, separator)), len(rows))
        complete = _rows(rows[:end], mark)
        # The Event Viewer of Windows names no column for the message, the last one.
        if "message" not in layout.columns and _are_wide(complete, len(layout.columns) + 1):
            layout = replace(layout, columns=(*layout.columns, "message"))
        same = [row for row in complete if len(row) == len(layout.columns)]
        if not _are_wide(complete, len(layout.columns)):
            continue
        if "time" in layout.columns and "date" not in layout.columns:
            at = layout.columns.index("time")
            if not _are_times([row[at] for row in same], _SAME_SHARE):
                continue
        return layout
    return None


def _are_wide(rows: Sequence[Sequence[str]], width: int) -> bool:
    return sum(len(row) == width for row in rows) >= _SAME_SHARE * len(rows)


def _csv_header(line: str, separator: str) -> TableLayout | None:
    """The layout of a line that is nothing but names of columns."""
    names = [name.strip() for name in _split([line], SEPARATORS[separator])[0]]
    roles = set(map(_NAMES.get, map(_key, names)))
    is_header = roles & {"time", "date"} or {"level", "message"} <= roles
    return _layout("csv", separator, names) if is_header and all(map(_NAME.fullmatch, names)) else None


def _key(name: str) -> str:
    return name.lower().replace(" ", "_")


def _layout(kind: str, separator: str, names: Sequence[str]) -> TableLayout | None:
    """The first column of a role has it; the others are values of the message."""
    columns: list[str] = []
    lower = list(map(_key, names))
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
        if sum(map(_is_broken, regular)) > len(regular) - _SURE_SHARE * len(regular):
            continue
        if width in _CSVLOG_WIDTHS and separator == "comma" and _are_levels(values[_CSVLOG_LEVEL]):
            return TableLayout(kind="csv", separator=separator, columns=tuple(_CSVLOG[:width]))
        if layout := _of_values(separator, values):
            return layout
    return None


def _is_broken(row: Sequence[str]) -> bool:
    """Whether a separator stands within brackets: then it is one of a text, and the row is not one."""
    return any(cell.count(one) != cell.count(other) for cell in row for one, other in ("[]", "()", "{}"))


def _of_values(separator: str, values: Sequence[tuple[str, ...]]) -> TableLayout | None:
    columns = [f"=c{number}" for number in range(1, len(values) + 1)]
    times = [n for n, column in enumerate(values) if _are_times(column)]
    if not times:
        return None
    columns[times[0]] = "time"
    # The same word in all rows may be a type, such as SYSTEM.
    levels = [n for n, column in enumerate(values) if _are_levels(column)]
    level = next((n for n in levels if len(set(values[n])) > 1), levels[0] if levels else None)
    if level is not None:
        columns[level] = "level"
    free = [n for n in range(len(values)) if n not in (*times, level)]
    if not free:
        return None
    longest = max(free, key=lambda n: sum(map(len, values[n])))
    columns[longest] = "message"
    # Without a level the other columns have to be values and not parts of a sentence.
    if level is None and any(_are_words(values[n]) for n in free if n != longest):
        return None
    return TableLayout(kind="csv", separator=separator, columns=tuple(columns))


def _are_times(values: Sequence[str], share: float = _SURE_SHARE) -> bool:
    texts = pl.Series("time", [value.strip() for value in values], dtype=pl.String)
    found = read_times(texts, arrived=datetime.fromisoformat("2000-01-01T00:00:00Z"), zone="UTC")
    return found.len() - found.null_count() >= share * len(values)


def _are_words(values: Sequence[str]) -> bool:
    return sum(" " in value.strip() for value in values) > len(values) - _SURE_SHARE * len(values)


def _are_levels(values: Sequence[str]) -> bool:
    # A single letter is rather a code than a level.
    levels = sum(len(value) > 1 and value.strip().lower() in levels_by_word() for value in values)
    return levels >= _SURE_SHARE * len(values)


# Framing


def are_rows(lines: pl.Series, layout: TableLayout) -> pl.Series:
    """True for lines with all separators of a row."""
    marks = lines.str.count_matches(SEPARATORS[layout.separator], literal=True)
    return marks >= len(layout.columns) - 1


def are_headers(lines: pl.Series, layout: TableLayout) -> pl.Series:
    """True for lines of a header: `#` lines of W3C, and lines of names alone."""
    if layout.kind == "w3c":
        return lines.str.starts_with("#")
    mark = SEPARATORS[layout.separator]
    likely = (lines.str.contains(mark, literal=True) & ~lines.str.contains("[0-9]{2}")).arg_true()
    are = [_csv_header(line, layout.separator) is not None for line in lines.gather(likely).to_list()]
    none = pl.repeat(False, lines.len(), dtype=pl.Boolean, eager=True)
    return none.scatter(likely, pl.Series(are, dtype=pl.Boolean))


def belong_before(lines: pl.Series, layout: TableLayout, *, state: int) -> tuple[pl.Series, int]:
    """True for lines that belong to the record of the line before: within quotes, or behind a header.

    `state`: what this function has returned beside the lines before, 0 at the beginning."""
    quoted, is_open = _within_quotes(lines, layout, inside=state == _QUOTES)
    headers = are_headers(lines, layout) & ~quoted
    if state != _HEADER and not headers.any():
        return quoted, _QUOTES if is_open else _NOTHING
    behind = headers.shift(1, fill_value=state == _HEADER)
    return quoted | behind, _HEADER if headers[-1] else _QUOTES if is_open else _NOTHING


def _within_quotes(lines: pl.Series, layout: TableLayout, *, inside: bool) -> tuple[pl.Series, bool]:
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


class _Headed(NamedTuple):
    """A record that begins with a header."""

    row: int
    lines: int  # of the header
    text: str  # without the header, "" for a header alone
    layout: TableLayout  # from here on


def _headed(raw: pl.Series, layout: TableLayout) -> list[_Headed]:
    found: list[_Headed] = []
    firsts = raw.str.extract(r"^([^\n]*)")
    for row in are_headers(firsts, layout).arg_true().to_list():
        lines = raw[row].split("\n")
        are = are_headers(pl.Series(lines, dtype=pl.String), layout).to_list()
        count = are.index(False) if False in are else len(lines)
        text = "\n".join(lines[count:])
        if layout.kind == "w3c":
            layout = _w3c(lines[:count], [text], layout) or layout
        else:
            named = _csv_header(lines[count - 1], layout.separator)
            if named is not None and (*named.columns, "message") != layout.columns:
                layout = named
        found.append(_Headed(row, count, text, layout))
    return found


def past_headers(records: pl.DataFrame, formats: tuple[str, ...]) -> tuple[pl.DataFrame, str]:
    """Records of a table whose `line` is that of their row, and the layout behind the last one; "" for none.

    `formats`: with the layout in front of the records."""
    table = next(filter(is_layout, formats), "")
    found = _headed(records["raw"], read_layout(table)) if table else []
    if not found:
        return records, table
    rows = pl.Series([one.row for one in found], dtype=pl.UInt32)
    moved = [one.lines if one.text else 0 for one in found]
    line = records["line"].scatter(rows, records["line"].gather(rows) + pl.Series(moved, dtype=pl.UInt64))
    return records.with_columns(line), found[-1].layout.name


def parse_rows(raw: pl.Series, layout: TableLayout, *, arrived: datetime, zone: str) -> pl.DataFrame:
    """Header columns and message of the rows of the table; message is null in others.

    `layout`: that of the first rows, up to a record with another header."""
    headed = _headed(raw, layout)
    if not headed:
        return _parse_rows(raw, layout, arrived=arrived, zone=zone)
    texts = raw.scatter(
        pl.Series([one.row for one in headed], dtype=pl.UInt32),
        pl.Series([one.text for one in headed], dtype=pl.String),
    )
    pieces = []
    begins = [(0, layout), *((one.row, one.layout) for one in headed)]
    for (begin, of_rows), (end, _) in pairwise([*begins, (raw.len(), layout)]):
        if end > begin:
            pieces.append(_parse_rows(texts.slice(begin, end - begin), of_rows, arrived=arrived, zone=zone))
    return pl.concat(pieces)


def _parse_rows(raw: pl.Series, layout: TableLayout, *, arrived: datetime, zone: str) -> pl.DataFrame:
    table = _columns(raw, layout)
    blank = pl.Series([None], dtype=pl.String).new_from_index(0, raw.len())
    columns = {column: table[number] for number, column in enumerate(layout.columns) if column in _ROLES}
    zone = "UTC" if layout.kind == "w3c" else zone
    if "date" in columns and "clock" in columns:
        columns["time"] = columns["date"] + " " + columns["clock"]
    elif layout.date and "time" in columns:
        columns["time"] = layout.date + " " + columns["time"]
    times = blank.cast(RAW_SCHEMA["timestamp"])
    is_row = table[0].is_not_null()
    if "time" in columns:
        times = read_times(columns["time"], arrived=arrived, zone=zone)
    level = blank
    if "level" in columns:
        words = columns["level"].str.to_lowercase()
        level = words.replace_strict(levels_by_word(), default=None, return_dtype=pl.String)
    if "status" in columns:
        level = level.zip_with(level.is_not_null(), mapped_numbers(columns["status"], _of_status))
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


def _of_status(status: int) -> str | None:
    return level_of_status(status) if status >= _FIRST_STATUS else None  # another number under that name


def _columns(raw: pl.Series, layout: TableLayout) -> list[pl.Series]:
    """One series per column; an empty value and `-` are null, as are all values of a row of another width."""
    width, mark = len(layout.columns), SEPARATORS[layout.separator]
    open_end = layout.columns[-1] == "message"
    raw = raw.str.strip_suffix("\r")
    if mark == " ":
        raw = raw.str.strip_chars().str.replace_all(" {2,}", " ")
    fields = raw.str.splitn(mark, width).struct.unnest()
    table = [fields.to_series(number) for number in range(width)]
    fits = table[-1].is_not_null() & ~raw.str.starts_with("#")
    if not open_end:
        fits &= ~table[-1].str.contains(mark, literal=True).fill_null(False)
    quoted = raw.str.contains('"', literal=True)
    if quoted.any():
        at = quoted.arg_true()
        texts = raw.gather(at).to_list()
        rows = [
            row if len(row) == width else text.split(mark)  # a quote that is none
            for row, text in zip(_split(texts, mark), texts, strict=True)
        ]
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
    """The rows of a sample, of which a quoted value may hold several lines, without one that has no end."""
    closed = np.flatnonzero(np.cumsum([line.count('"') for line in lines]) % 2 == 0)
    end = int(closed[-1]) + 1 if closed.size else 0
    if 2 * end > len(lines):
        try:
            return list(csv.reader(lines[:end], delimiter=mark))
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
