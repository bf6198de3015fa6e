"""Log formats: detected in a sample, parsed a column at a time.

`detect` names the formats of a sample. `parse` fills time, level, host, process, service and message.
`head_mask` marks the lines that begin a record. A line of no known format is its own message and gets the
arrival time. `parse` tries formats in the order of their table, specific before general; the order of
`detect` is by frequency."""

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import chain, groupby
from typing import Final

import numpy as np
import polars as pl

from pipeline.errors import BadInput
from pipeline.records.columns import kinds, mapped_numbers, spread
from pipeline.records.declared import MARK, Declaration, fragment
from pipeline.records.levels import SYSLOG_LEVELS
from pipeline.records.remembered import remembered
from pipeline.records.schema import RAW_SCHEMA, UTC_US
from pipeline.records.written_levels import level_of_status, levels_by_word
from pipeline.sources import formats_json as pairs
from pipeline.sources.formats_delimited import are_rows, detect_table, is_layout, parse_rows, read_layout
from pipeline.sources.formats_text import ANYTHING, BY_NAME, NAMES, TEXT_FORMATS
from pipeline.sources.order import GUESS, by_order, guesses
from pipeline.sources.times import check_zone, day_comes_first, read_form, to_utc
from pipeline.sources.wrappers import (
    WRAPPERS,
    envelope_lines,
    inner_lines,
    is_claimed,
    recognised,
    uncoloured,
    unwrap,
)

_PAIRS: Final = pairs.PAIR_FORMATS
# They begin with a written-out time or a level; other text hardly ever does.
_STRAY: Final = tuple(form.name for form in TEXT_FORMATS if form.stray)
VAGUE: Final = frozenset(("level", "dmesg"))  # too little to tell a wrapper by
TIMED: Final = tuple(name for name in _STRAY if name not in VAGUE)
_RANK: Final = {name: rank for rank, name in enumerate(NAMES)}

# Below one line in a hundred a match is more likely an accident of free text than a second format.
_MIN_SHARE: Final = 0.01
_TOGETHER: Final = 48  # text formats
# A sender may name formats, and a declaration of a user's holds his pattern.
_FORMS, _FORM_CHARS = 256, 8_192
_WITHIN: Final = frozenset(form.name for form in TEXT_FORMATS if form.whole)
# Hours and minutes, or seconds since 1970
_TIME_LIKE: Final = r"[0-9]:[0-9]{2}|[^0-9A-Za-z]1[0-9]{9}"
# The beginning of a wrapped line, an object, an element or a pair.
_STRUCTURED: Final = frozenset(NAMES[: NAMES.index("logfmt") + 1])
_STRUCTURED_HEAD: Final = (
    r"^(?:\s*[{<]|[A-Za-z_@][A-Za-z0-9_.@/-]*=|\[pod/|[0-9|]*[A-Za-z0-9][A-Za-z0-9_.@-]* +\|"
    r"|[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+(?:Z|[+-][0-9:]+)(?: |$)|[0-9]{2,6} <)"
)
# Ahead of the formats with the same date and the day first.
_MONTH_FIRST: Final = frozenset(f.name for f in TEXT_FORMATS if f.loose and f.time.startswith("%m"))
_DOUBTED: Final = _WITHIN | _MONTH_FIRST
# A line that is none of these after all may still have a later format.
_ALONE: Final = _DOUBTED | {form.name for form in TEXT_FORMATS if form.unless}
# A time within the line: the share of the lines that are left, of all lines, of the times at one place, and
# how many characters off that is. Hosts and services of different lengths stand before such a time.
_MOST, _ENOUGH, _NEARLY_ALL, _SAME_PLACE = 0.5, 0.2, 0.8, 12
# Formats whose records are several lines below a header.
BLOCKS: Final = frozenset(form.name for form in TEXT_FORMATS if form.block)
_TEXTS: Final = frozenset(f.name for f in TEXT_FORMATS)
_NAMED: Final = re.compile(r"\(\?P<(\w+)>")
_PARSED: Final = ("timestamp", "level", "host", "process", "service", "message")
_OF_HEADERS: Final = frozenset(_PARSED[:-1])
_HEAD: Final = "logweir_head"
Rows = np.ndarray[tuple[int], np.dtype[np.intp]]
_LEVEL_IN_TEXT: Final = fragment("LEVEL_IN_TEXT")
_LEVEL_CHARS: Final = 200  # of a message, where its level is looked for
# The beginnings of such messages, but for bars; it takes a tenth of the time.
_MAY_HAVE_LEVEL: Final = (
    r"^(?:[\[<({]|[IWEF][0-9]{4} |[A-Za-z_.]{1,40}=|[A-Za-z_][A-Za-z0-9_.-]{0,60}\[|(?i:trac|trc|d?bug|deb|dbg|verb"
    r"|vrb|inf|notice|warn|wrn|err|ero|severe|crit|alert|emerg|fatal|ftl|panic|fehl|schwer|aver))"
)
_CALM: Final = ("trace", "debug", "info", "notice")
_BARE_LEVEL: Final = (
    "^(trace|debug|info|notice|warn|warning|err|error|crit|critical|alert|emerg|fatal|panic)[ \t]"
)
_HEADER_CHARS: Final = 1024  # a header is shorter than this; see `_groups`


@remembered(_FORMS, _FORM_CHARS)
def _form(name: str) -> Declaration:
    """The text format of a name, or of a packed declaration. Raises BadInput."""
    if not name.startswith(MARK):
        return BY_NAME[name]
    found = Declaration.unpack(name)
    if found.zone:
        check_zone(found.zone)
    return found


def detect(lines: Sequence[str], declared: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Names of the formats in a sample of lines, most frequent first.

    The formats inside a container runtime's wrapper follow the wrapper. `declared`: packed declarations,
    which are tried before the known formats. A table has its layout as its name (formats_delimited.py).
    """
    sample = uncoloured(pl.Series("raw", [line for line in lines if line.strip()], dtype=pl.String))
    names = (*WRAPPERS, *declared, *NAMES[len(WRAPPERS) :]) if declared else NAMES
    found = _detect(sample, names) if declared else ()
    if set(found) & set(declared):
        return found
    if table := detect_table(sample.to_list(), header=True):
        return (table.name,)
    found = found or _detect(sample, names)
    # a row of a table may hold a time
    if not set(found) - _WITHIN and (table := detect_table(sample.to_list(), header=False)):
        return (table.name,)
    return found


def _detect(sample: pl.Series, names: tuple[str, ...]) -> tuple[str, ...]:
    total, left = sample.len(), sample
    claims: list[tuple[int, str]] = []
    inner: tuple[str, ...] = ()
    passed = {"": True}
    for gate, group in _together(names):
        if left.is_empty():
            break
        if gate not in passed:
            passed[gate] = bool(left.str.contains(gate).any())
        if not passed[gate]:
            continue
        which = _first_of(left, group)
        taken = np.zeros(left.len(), dtype=np.bool)
        for place in np.unique(which[which >= 0]).tolist():
            name, mine = group[place], which == place
            n = int(mine.sum())
            if n < max(1.0, total * _MIN_SHARE):
                continue
            if name in WRAPPERS:
                within = names[names.index(name) + 1 :]
                found = _detect_inside(left.filter(pl.Series(mine)), name, n / total, within)
                if found is None:
                    continue
                inner += found
            elif name in _DOUBTED and not _is_meant(left, pl.Series(mine), name, total):
                continue
            claims.append((n, name))
            taken |= mine
        if taken.any():
            left = left.filter(pl.Series(~taken))
    claims.sort(key=lambda claim: -claim[0])
    if any(name in BLOCKS for _, name in claims):  # the lines below their header look like others
        claims = [claim for claim in claims if claim[1] not in VAGUE and claim[1] not in _WITHIN]
    return tuple(dict.fromkeys((*(name for _, name in claims), *inner)))


@cache
def _together(names: tuple[str, ...]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The formats in their order, in groups that one pattern looks for: the first that a line has counts.
    With each a pattern that some line must have, if any.

    Polars keeps the last 32 compiled patterns of a thread, and compiling one takes ten times as long as
    testing a hundred lines. So a sample is tested by fewer patterns than that."""
    groups: list[tuple[str, tuple[str, ...]]] = []
    for alone, run in groupby(names, key=lambda name: name not in _TEXTS or name in _ALONE):
        some = tuple(run)
        if alone:
            groups += ((_gate(name), (name,)) for name in some)
        else:
            groups += (("", some[at : at + _TOGETHER]) for at in range(0, len(some), _TOGETHER))
    return tuple(groups)


def _gate(name: str) -> str:
    return _STRUCTURED_HEAD if name in _STRUCTURED else _TIME_LIKE if name in _WITHIN else ""


def _first_of(lines: pl.Series, names: tuple[str, ...]) -> Rows:
    """The place of the first of these formats that each line has, header and message; -1 without one."""
    pattern = _any_of(*names) if len(names) > 1 else ""
    hits = lines.str.contains(pattern) if pattern else _recognised(lines, names[0])
    found = hits.cast(pl.Int64).to_numpy() - 1
    if pattern and (rows := np.flatnonzero(found + 1)).size:
        parts = lines.gather(rows).str.extract_groups(pattern).struct.unnest()
        found[rows] = parts.select(pl.concat_list(pl.all().is_not_null()).list.arg_max()).to_series()
    return found


@remembered(_FORMS, _FORM_CHARS)
def _any_of(*names: str) -> str:
    """A pattern for lines of any of these text formats, with a group for each."""
    return "(?s)" + "|".join(f"({_NAMED.sub('(?:', BY_NAME[name].pattern)})" for name in names)


def _is_meant(remaining: pl.Series, matches: pl.Series, name: str, total: int) -> bool:
    """Whether a sample's lines have this date or time on purpose.

    The order of day and month is that of the whole sample. A time within a line is meant when most lines have
    one at about the same place."""
    if name in _MONTH_FIRST and day_comes_first(remaining):
        return False
    if not BY_NAME[name].whole:
        return True
    n = int(matches.sum())
    flush_left = int(remaining.str.contains(r"^\S").sum())
    if n < flush_left * _MOST or n < total * _ENOUGH:
        return False
    parts = _groups(remaining.filter(matches), BY_NAME[name].pattern)
    place = parts["before"].str.len_chars().cast(pl.Int64)
    is_near = (place - int(place.median() or 0)).abs() <= _SAME_PLACE  # type: ignore[arg-type] # of numbers
    return int(is_near.sum()) >= n * _NEARLY_ALL


def _detect_inside(
    lines: pl.Series, name: str, share: float, within: tuple[str, ...]
) -> tuple[str, ...] | None:
    """The formats inside a wrapper, of those `within`; None when these lines are not wrapped. `share` is
    theirs."""
    inside = envelope_lines(lines) if name == "envelope" else inner_lines(lines, (name,))
    inside = inside.filter(inside.str.strip_chars() != "")
    found = _detect(inside, within)
    telling = tuple(n for n in found if n not in VAGUE)
    claimed = head_mask(inner_lines(inside, telling), telling).mean()
    if not is_claimed(lines, name, share, claimed if isinstance(claimed, float) else 0.0):
        return None
    # a time with fewer digits than most is still a time
    return (*found, "iso") if name == "stamped" else found


def _recognised(raw: pl.Series, name: str) -> pl.Series:
    """True for lines of this format, header and message."""
    if name in WRAPPERS:
        return recognised(raw, name)
    if name in _PAIRS:
        return pairs.recognised_pairs(raw, name)
    form = _form(name)
    matches = raw.str.contains("(?s)" + form.pattern)
    return matches & ~raw.str.contains(form.unless) if form.unless else matches


def format_claims(raw: pl.Series, names: Sequence[str]) -> tuple[pl.Series, Mapping[str, int]]:
    """True for records of a known format, and the count of each format: of several the most specific.

    A record in a wrapper counts for the wrapper and for the format inside."""
    plain, inner = uncoloured(raw), inner_lines(raw, tuple(names))
    claimed = pl.repeat(value=False, n=raw.len(), dtype=pl.Boolean, eager=True)
    counts: dict[str, int] = {}
    for name in sorted(names, key=lambda name: _RANK.get(name, -1)):  # declared ones and tables come first
        if name in WRAPPERS:
            hit = recognised(plain, name)
        else:
            hit = head_mask(inner, (name,)) & ~claimed
            claimed = claimed | hit
        if hit.any():
            counts[name] = int(hit.sum())
    return claimed, counts


def head_mask(raw: pl.Series, formats: tuple[str, ...]) -> pl.Series:
    """True for lines that begin with a header of one of the formats. Wrapped lines: see `inner_lines`."""
    mask: pl.Series | None = None
    for name in _ordered(formats):
        if name in ("json", "envelope"):
            more = raw.str.contains(pairs.JSON_HEAD)
        elif name in WRAPPERS:
            continue
        elif is_layout(name):
            more = are_rows(raw, read_layout(name))
        elif name == "windows-xml":
            more = raw.str.contains(pairs.XML_HEAD)
        elif name in ("fortigate", "logfmt"):
            more = _recognised(raw, name)
        else:
            more = raw.str.contains(_form(name).head)
        mask = more if mask is None else mask | more
        if mask.all():
            break
    return (pl.Series(np.zeros(raw.len(), dtype=np.bool_)) if mask is None else mask).alias("head")


def parse(
    records: pl.DataFrame,
    formats: tuple[str, ...],
    *,
    arrived: datetime,
    zone: str = "UTC",
    headers: Set[str] = _OF_HEADERS,
) -> pl.DataFrame:
    """The rows with header columns and message filled; rows with a message only get a missing timestamp.

    A line without a time takes that of the line before it in its source, else the arrival; see `timed`. The
    order of lines settles a year that no line writes and the repeated hour of autumn (order.py).
    `arrived` is aware; `zone` is the IANA zone of header times without offset. `headers` are the columns of
    headers that the caller reads; null may stand in the others. Raises BadInput for an unknown zone or format
    name."""
    which = np.zeros(records.height, np.intp)
    return parse_each(records, [formats], which, arrived=arrived, zone=zone, headers=headers)


def parse_each(
    records: pl.DataFrame,
    formats: Sequence[tuple[str, ...]],
    which: Rows,
    *,
    arrived: datetime,
    zone: str,
    headers: Set[str] = _OF_HEADERS,
) -> pl.DataFrame:
    """`parse` of records that have different formats: `which` tells the place of those of each record.

    Each format is looked for once. Several `formats` are ordered ones (`are_ordered`)."""
    check_zone(zone)
    arrival = pl.lit(arrived).dt.convert_time_zone("UTC").cast(UTC_US)
    unread = records["message"].null_count()
    if not unread:
        return _dated(records, arrival)
    todo = records["message"].is_null()
    if unread == records.height:
        open_rows = records
    else:
        open_rows, which = records.filter(todo), which[todo.to_numpy()]
    open_rows, otherwise = _without_untimed(open_rows)
    may_have = _MayHave(tuple(map(_ordered, formats)), which)
    # A column that the producer has filled needs no header.
    wanted = frozenset(name for name in headers if open_rows[name].null_count())
    parsed = _parse_text(uncoloured(open_rows["raw"]), may_have, arrived=arrived, zone=zone, wanted=wanted)
    if (parsed[GUESS] > 0).any():
        parsed = parsed.with_columns(by_order(parsed, open_rows["source"], zone=zone))
    # values of the producer win
    complete = open_rows.with_columns([_filled(open_rows[name], parsed[name]) for name in _PARSED])
    if otherwise is not None:
        complete = complete.with_columns(_filled(complete["timestamp"], otherwise))
    if complete["timestamp"].null_count():
        earlier = pl.col("timestamp").forward_fill()
        packed = complete["source"].null_count() < complete.height
        complete = complete.with_columns(earlier.over("source") if packed else earlier)
    if unread < records.height:
        indexed = records.with_row_index("_i")
        complete = complete.with_columns(indexed.filter(todo)["_i"])
        complete = pl.concat([indexed.filter(~todo), complete.select(indexed.columns)]).sort("_i")
    complete = pl.DataFrame([complete[name] for name in RAW_SCHEMA])
    return _dated(complete, arrival)


def _without_untimed(records: pl.DataFrame) -> tuple[pl.DataFrame, pl.Series | None]:
    """The records without the times that hold only for texts without one (`timed` is false), and those."""
    if records["timed"].null_count() == records.height:
        return records, None
    untimed = pl.col("timed").eq_missing(False)
    times = records.select(pl.when(untimed).then("timestamp"))["timestamp"]
    cleared = [pl.when(~untimed).then(name).alias(name) for name in ("timestamp", "timed")]
    return records.with_columns(cleared), times


def _dated(records: pl.DataFrame, arrival: pl.Expr) -> pl.DataFrame:
    """`records` with `timed` where it is null, and `arrival` as the time of those without one."""
    timed = records["timed"]
    if timed.null_count():
        timed = _filled(timed, records["timestamp"].is_not_null())
        records = records.with_columns(timed.alias("timed"))
    return (
        records.with_columns(pl.col("timestamp").fill_null(arrival))
        if records["timestamp"].null_count()
        else records
    )


def _filled(texts: pl.Series, found: pl.Series) -> pl.Series:
    """`given` with its nulls filled from `found`."""
    return found if texts.null_count() == texts.len() else texts.zip_with(texts.is_not_null(), found)


def are_ordered(formats: tuple[str, ...]) -> bool:
    """Whether these formats are tried in one order wherever they occur: tables and declared ones are not."""
    return all(name in _RANK for name in formats)


def _ordered(formats: tuple[str, ...]) -> tuple[str, ...]:
    for name in filter(is_layout, formats):
        read_layout(name)  # raises for a damaged one
    known = (name in _RANK or name.startswith(MARK) or is_layout(name) for name in formats)
    if unknown := [name for name, is_known in zip(formats, known, strict=True) if not is_known]:
        raise BadInput(f"log format {unknown[0]!r} is unknown; known are {', '.join(NAMES)}")
    # tables and declared ones come behind the wrappers, in their own order
    return tuple(sorted(dict.fromkeys(formats), key=lambda name: _RANK.get(name, len(WRAPPERS) - 0.5)))


@dataclass(frozen=True, slots=True)
class _MayHave:
    """The formats that each text may have, in their order."""

    formats: tuple[tuple[str, ...], ...]
    which: Rows  # of these, for each text

    def names(self) -> tuple[str, ...]:
        """All of them, in their order."""
        return self.formats[0] if len(self.formats) == 1 else _ordered(tuple(chain(*self.formats)))

    def has(self, name: str) -> "np.ndarray[tuple[int], np.dtype[np.bool]]":
        """Whether each text may have this format."""
        return np.array([name in names for names in self.formats], dtype=np.bool)[self.which]

    def inside(self, wrapper: str, rows: Rows) -> "_MayHave":
        """Of what stands in the wrapper of these texts."""
        behind = (names[names.index(wrapper) + 1 :] if wrapper in names else () for names in self.formats)
        return _MayHave(tuple(behind), self.which[rows])


class _Texts:
    """A column of texts on its way through the formats."""

    def __init__(self, raw: pl.Series) -> None:
        self.raw = raw
        self.is_open = np.ones(raw.len(), dtype=np.bool)
        self.guesses = np.zeros(raw.len(), dtype=np.uint8)  # YEAR, LOCAL
        self._rows: list[Rows] = []
        self._pieces: list[pl.DataFrame] = []

    def at(self, rows: Rows) -> pl.Series:
        return self.raw if rows.size == self.raw.len() else self.raw.gather(rows)

    def take(self, rows: Rows, found: pl.DataFrame) -> None:
        """The texts in these rows that have a message."""
        if found["message"].null_count():
            hit = found["message"].is_not_null()
            rows, found = rows[hit.to_numpy()], found.filter(hit)
        if rows.size:
            self.is_open[rows] = False
            if GUESS in found.columns:
                self.guesses[rows] = found[GUESS]
            self._rows.append(rows)
            self._pieces.append(pl.DataFrame([found[name] for name in _PARSED]))

    def parsed(self) -> pl.DataFrame:
        """Columns `_PARSED` of all; a text that is left is its own message."""
        rows = np.flatnonzero(self.is_open)
        if rows.size or not self._rows:
            schema = {name: RAW_SCHEMA[name] for name in _PARSED}
            blank = [pl.lit(None, dtype=schema[name]).alias(name) for name in _PARSED[:-1]]
            left = self.at(rows).alias("message").to_frame().select(*blank, "message")
            self._rows.append(rows)
            self._pieces.append(left)
        if len(self._pieces) == 1:
            return self._pieces[0]
        return pl.concat(self._pieces)[np.argsort(np.concatenate(self._rows))]


def _parse_text(
    raw: pl.Series, may_have: _MayHave, *, arrived: datetime, zone: str, wanted: Set[str]
) -> pl.DataFrame:
    """Columns `_PARSED` and GUESS of each text; message is never null, timestamp null without a time. Of text
    formats the columns of headers that are not `wanted` are null."""
    texts = _Texts(raw)
    for name in may_have.names():
        rows = np.flatnonzero(texts.is_open & may_have.has(name))
        if not rows.size:
            continue
        found: pl.DataFrame | None
        if name in WRAPPERS:
            rows, found = _parse_wrapped(
                texts, rows, name, may_have, arrived=arrived, zone=zone, wanted=wanted
            )
        elif name in _PAIRS:
            found = pairs.parse_pairs(texts.at(rows), name, arrived=arrived, zone=zone)
        elif is_layout(name):
            found = parse_rows(texts.at(rows), read_layout(name), arrived=arrived, zone=zone)
        else:
            found = _parse_format(texts.at(rows), _form(name), arrived=arrived, zone=zone, wanted=wanted)
        if found is not None:
            texts.take(rows, found)
    _parse_strays(texts, may_have, arrived=arrived, zone=zone, wanted=wanted)
    return _trimmed(texts.parsed()).with_columns(pl.Series(GUESS, texts.guesses))


def _parse_strays(
    texts: _Texts, may_have: _MayHave, *, arrived: datetime, zone: str, wanted: Set[str]
) -> None:
    """Takes lines of a format that the sample did not show, where they begin with a written-out time or a
    level.

    A file may change its format behind the sample."""
    others = tuple(name for name in _STRAY if not may_have.has(name).all())
    rows = np.flatnonzero(texts.is_open)
    if not others or not rows.size:
        return
    rows = rows[texts.at(rows).str.contains(_any_of(*others)).to_numpy()]
    for name in others:
        some = rows[(texts.is_open & ~may_have.has(name))[rows]]
        if not some.size:
            continue
        found = _parse_format(texts.at(some), _form(name), arrived=arrived, zone=zone, wanted=wanted)
        if found is not None:
            texts.take(some, found)


def _trimmed(parsed: pl.DataFrame) -> pl.DataFrame:
    """Columns `_PARSED`; trailing blanks would make a second pattern of the same message."""
    return parsed.select(*_PARSED[:-1], pl.col("message").str.strip_chars_end())


def _parse_wrapped(
    texts: _Texts,
    rows: Rows,
    name: str,
    may_have: _MayHave,
    *,
    arrived: datetime,
    zone: str,
    wanted: Set[str],
) -> tuple[Rows, pl.DataFrame | None]:
    """The rows of wrapped lines among these, and their columns: the wrapper's time, the columns of the inner
    text, and the wrapper's names where the text has none."""
    wrapped = unwrap(texts.at(rows), name, arrived=arrived, zone=zone, with_times="timestamp" in wanted)
    if wrapped["inner"].null_count():
        hit = wrapped["inner"].is_not_null()
        rows, wrapped = rows[hit.to_numpy()], wrapped.filter(hit)
        if not rows.size:
            return rows, None
    inner = may_have.inside(name, rows)
    found = _parse_text(wrapped["inner"], inner, arrived=arrived, zone=zone, wanted=wanted)
    columns = [
        _filled(wrapped["timestamp"], found["timestamp"]).alias("timestamp"),
        *(
            _filled(found[column], wrapped[column]).alias(column)
            for column in ("level", "host", "process", "service")
            if column in wrapped.columns
        ),
        _extended(found["message"], wrapped),
        found[GUESS].set(wrapped["timestamp"].is_not_null(), 0),
    ]
    return rows, found.with_columns(columns)


def _extended(message: pl.Series, wrapped: pl.DataFrame) -> pl.Series:
    """The messages, each with what its envelope says around the line."""
    if "extra" not in wrapped.columns or wrapped["extra"].null_count() == message.len():
        return message
    both = pl.concat_str("message", "extra", separator=" ", ignore_nulls=True).alias("message")
    return pl.DataFrame([message, wrapped["extra"]]).select(both).to_series()


def _parse_format(
    raw: pl.Series, form: Declaration, *, arrived: datetime, zone: str, wanted: Set[str]
) -> pl.DataFrame | None:
    """Columns of one format; message is null for other lines. None if no line matches."""
    groups = _groups(raw, "(?s)" + form.pattern, message_only=not wanted)
    message = groups["message"]
    if form.whole:
        message = raw.set(message.is_null(), None).alias("message")
    if form.unless:
        message = message.set(raw.str.contains(form.unless), None)
    if message.null_count() == message.len():
        return None
    columns: dict[str, pl.Series] = {"message": message}
    if "timestamp" in wanted and form.clock is not None:
        there = form.zone or zone
        columns["timestamp"] = (
            read_form(groups["time"], form.time, arrived=arrived, zone=there)
            if form.has_whole_time
            else to_utc(groups, form.clock, arrived=arrived, zone=there)
        )
        columns[GUESS] = guesses(groups, form, zone=there)
    if "level" in wanted:
        columns["level"] = _level(groups, form, message)
    for name in ("host", "process", "service"):
        if name in groups.columns:
            columns[name] = groups[name]
    if "logger" in groups.columns:
        service = columns.get("service", groups["logger"])
        columns["service"] = service.zip_with(service.str.len_bytes().fill_null(0) > 0, groups["logger"])
    out = []
    for name in _PARSED:
        column = columns.get(name)
        if column is None:
            column = pl.Series([None], dtype=RAW_SCHEMA[name]).new_from_index(0, raw.len())
        elif name in ("host", "process", "service") and column.min() == "":
            column = column.set(column == "", None)  # an empty header field is an absent one
        out.append(column.alias(name))
    if GUESS in columns:
        out.append(columns[GUESS])
    return pl.DataFrame(out)


def _groups(raw: pl.Series, pattern: str, *, message_only: bool = False) -> pl.DataFrame:
    """The pattern's groups.

    Capturing costs per character. So only the beginning of a long text is matched, and the remainder appended
    to the message. A long text that does not match is matched again as a whole."""
    long = raw.str.len_bytes() > _HEADER_CHARS
    if not long.any():
        return _captured(raw, pattern, message_only=message_only)
    groups = _captured(raw.str.slice(0, _HEADER_CHARS), pattern, message_only=message_only)
    groups = groups.with_columns(groups["message"] + raw.str.slice(_HEADER_CHARS))
    missed = (long & groups["message"].is_null()).arg_true()
    if missed.len():
        recaptured = _captured(raw.gather(missed), pattern, message_only=message_only)
        groups = groups.with_columns(
            [groups[name].scatter(missed, recaptured[name]) for name in groups.columns]
        )
    return groups


def _captured(raw: pl.Series, pattern: str, *, message_only: bool = False) -> pl.DataFrame:
    """The pattern's groups. A message of any text is cut off behind the header, which is cheaper than
    capturing it. No header is captured where the message is read alone."""
    head = pattern.removesuffix(ANYTHING)
    text = pl.col(raw.name)
    if head == pattern:
        captured = spread(raw, text.str.extract_groups(pattern)).struct.unnest()
        return captured.select("message") if message_only else captured
    if message_only:
        behind = pl.when(text.str.contains(head)).then(text.str.replace(head, "")).alias("message")
        return spread(raw, behind).to_frame()
    groups = text.str.extract_groups(f"(?P<{_HEAD}>{head})")
    parsed = pl.struct(
        groups.alias("groups"), text.str.strip_prefix(groups.struct.field(_HEAD)).alias("message")
    )
    found = spread(raw, parsed).struct.unnest()
    parts = [part for part in found["groups"].struct.unnest().get_columns() if part.name != _HEAD]
    return pl.DataFrame([*parts, found["message"]])


def _level(groups: pl.DataFrame, form: Declaration, message: pl.Series) -> pl.Series:
    """By the header, else by the beginning of the message, else by a priority or a status."""
    level = pl.Series("level", [None], dtype=pl.String).new_from_index(0, groups.height)
    for name in ("level", "level_2", "level_3"):
        if name in groups.columns and groups[name].null_count() < groups.height:
            level = _filled(level, _named(groups[name], form))
    if level.null_count():
        level = _filled_by_text(level, message)
    for name, meaning in (("pri", _of_priority), ("status", level_of_status)):
        if level.null_count() and name in groups.columns and groups[name].null_count() < groups.height:
            level = _filled(level, mapped_numbers(groups[name], meaning))
    return level.alias("level")


def _of_priority(priority: int) -> str:
    return SYSLOG_LEVELS[priority % 8]


def _filled_by_text(level: pl.Series, message: pl.Series) -> pl.Series:
    """The levels, with those that stand at the beginning of a message where the header has none.

    A word in small letters without a mark is a level where most of these messages begin with one."""
    may = message.str.contains(_MAY_HAVE_LEVEL) | message.str.contains("|", literal=True)
    if level.null_count() < level.len():
        may &= level.is_null()
    hits = may.arg_true()
    if not hits.len():
        return level
    some = message.gather(hits).str.slice(0, _LEVEL_CHARS)
    parts = some.str.extract_groups(_LEVEL_IN_TEXT).struct.unnest()
    words = parts.select(pl.coalesce(pl.all())).to_series()
    bare = some.str.extract(_BARE_LEVEL)
    found = bare.drop_nulls()
    if found.len() * 2 >= level.null_count() and found.is_in(_CALM).any():
        words = words.zip_with(words.is_not_null(), bare)
    few, which = kinds(words.fill_null(""))
    levels = pl.Series([levels_by_word().get(word.lower()) for word in few.to_list()], dtype=pl.String)[which]
    return level.scatter(hits, levels)


def _named(words: pl.Series, form: Declaration) -> pl.Series:
    """The levels of these words, null for unknown words."""
    few, which = kinds(words.fill_null("") if words.null_count() else words)
    names = few.to_list()
    found = (
        [form.words.get(name) for name in names]
        if form.words
        else [levels_by_word().get(name.lower()) for name in names]
    )
    return pl.Series("level", found, dtype=pl.String)[which]
