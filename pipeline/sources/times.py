"""Header times to aware UTC, a column at a time.

A format's pattern captures the parts of a time (`time`, `fraction`, `millis`, `year`, `zone`); the format's
`Clock` combines the parts. An unreadable time is null, never an error; the caller fills in the arrival time.
"""

import re
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import polars as pl

from pipeline.errors import BadInput
from pipeline.records.columns import kinds, repeats
from pipeline.records.declared import (
    EPOCH_CLOCK,
    ISO_CLOCK,
    NUMBERS,
    TAI_CLOCK,
    Clock,
    time_parts,
    zone_words,
)
from pipeline.records.remembered import remembered
from pipeline.records.schema import UTC_US

_OFFSET: Final = re.compile(r"(?:UTC|GMT)?([+-])(\d{1,2}):?(\d{2})?")
_IANA: Final = re.compile(r"[A-Z][A-Za-z_]+/[A-Za-z0-9_+/-]{1,60}")
_ZONES: Final = 16  # different IANA names in a column; there is hardly ever more than one
_FIRST: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST: Final = datetime(2261, 1, 1, tzinfo=UTC)  # the last whole year that nanosecond readers can hold
_LAST_MICROS: Final = int(_LAST.timestamp()) * 1_000_000
# A clock may run ahead this far. Beyond it, a missing year is the year before.
_FUTURE: Final = timedelta(days=1)
# Share of distinct seconds up to which each is parsed once; the second value is for clocks without a year.
_REPEATED: Final = (0.2, 0.7)
_BESIDE: Final = ("year", "zone", "zone_2", "half")
_YEARS_BACK: Final = 8  # 29 February comes back within eight years, also across 2100

_ISO_PARTS: Final = (
    r"^\[?(?P<time>[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{1,2}:[0-9]{2}:[0-9]{2})"
    r"(?:[.,](?P<fraction>[0-9]+))?"
    r"(?: ?\(?(?P<zone>[A-Z][A-Za-z_]*(?:[/+-][A-Za-z0-9_:/+-]+)?|[+-][0-9]{2}(?::?[0-9]{2})?)\)?)?"
    r"(?:\[[A-Za-z_/]+\])?\]?$"
)
_LOOSE: Final = (  # in this order
    (r"(\pL)\.", "${1}"),
    ("[-.]", "/"),
    (",", " "),
    ("([0-9])[T_]([0-9])", "${1} ${2}"),
    ("  +", " "),
)
_DATE_PARTS: Final = (
    r"(?:^|[^0-9])(?P<first>[0-9]{1,2})(?P<mark>[./-])(?P<second>[0-9]{1,2})[./-](?:(?:19|20)[0-9]{2}|[0-9]{2}),?[ T]"
    r"[0-9]{1,2}:[0-9]{2}:[0-9]{2}(?:[.,:][0-9]+)?(?: ?(?P<half>[AaPp])\.?[Mm])?"
)
_MONTHS: Final = 12
_HEAD_CHARS: Final = 200  # of a line, where its time is
# Months as other languages shorten them
_FOREIGN: Final[Mapping[str, str]] = {
    "jan": "janv|ene|gen", "feb": "févr|fevr|fév", "mar": "mars|mär|mrz", "apr": "avr|abr", "may": "mai|mag|maj|mei",
    "jun": "juin|giu", "jul": "juil|lug", "aug": "août|aout|ago", "sep": "sept|set", "oct": "okt|ott|out",
    "dec": "déc|dez|dic",
}  # fmt: skip
_EPOCH_PARTS: Final = r"^(?P<time>[1-9][0-9]{8,18})(?:\.(?P<fraction>[0-9]+))?$"
_CLOCK_PARTS: Final = r"[0-9]{1,2}:[0-9]{2}:[0-9]{2})(?:[.,](?P<fraction>[0-9]{1,9}))?"
# Of values, each with its clock. A month comes before its day only where AM or PM says that it is American.
_VALUES: Final = (
    (_ISO_PARTS, ISO_CLOCK),
    (_EPOCH_PARTS, EPOCH_CLOCK),
    (rf"^(?P<time>[0-9]{{4}}/[0-9]{{2}}/[0-9]{{2}} {_CLOCK_PARTS}$", Clock(form="%Y/%m/%d %H:%M:%S")),
    (rf"^(?P<time>[0-9]{{1,2}}\.[0-9]{{1,2}}\.[0-9]{{4}} {_CLOCK_PARTS}$", Clock(form="%d.%m.%Y %H:%M:%S")),
    (
        rf"^(?P<time>[0-9]{{1,2}}/[0-9]{{1,2}}/[0-9]{{4}} {_CLOCK_PARTS} ?(?P<half>[AP]M)$",
        Clock(form="%m/%d/%Y %I:%M:%S%p"),
    ),
)


def check_zone(zone: str) -> str:
    """The zone itself. Raises BadInput for other than IANA names."""
    try:
        ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
        raise BadInput(f"time zone {zone!r} is unknown; give an IANA name such as Europe/Berlin") from exc
    return zone


def to_utc(parts: pl.DataFrame, clock: Clock, *, arrived: datetime, zone: str) -> pl.Series:
    """UTC_US column of the times in `parts`; null for unreadable times."""
    seconds = _seconds(parts, clock, arrived=arrived, zone=zone)
    fraction = _fraction(parts)
    utc = seconds if fraction is None else seconds + fraction
    if utc.null_count() == utc.len():
        return utc.cast(UTC_US).alias("timestamp")
    micros = utc.to_physical()  # some exceed Python's datetime
    if micros.min() < 0 or micros.max() >= _LAST_MICROS:  # type: ignore[operator] # of numbers
        utc = utc.set(((utc < _FIRST) | (utc >= _LAST)).fill_null(True), None)
    return utc.cast(UTC_US).alias("timestamp")


def _seconds(parts: pl.DataFrame, clock: Clock, *, arrived: datetime, zone: str) -> pl.Series:
    """The times in whole seconds. Repeated texts without year and zone are parsed once."""
    alone = all(n not in parts.columns or parts[n].null_count() == parts.height for n in _BESIDE)
    if alone and clock.form and repeats(parts["time"], _REPEATED[clock.missing == "year"]):
        times = parts["time"]
        few, which = kinds(times.fill_null("") if times.null_count() else times)
        return _written(few.alias("time").to_frame(), clock, arrived=arrived, zone=zone)[which]
    return _written(parts, clock, arrived=arrived, zone=zone)


def _written(parts: pl.DataFrame, clock: Clock, *, arrived: datetime, zone: str) -> pl.Series:
    text = parts["time"]
    if not clock.form:
        return _epoch(text).dt.replace_time_zone("UTC")
    if clock is TAI_CLOCK:
        return _tai(text).dt.replace_time_zone("UTC")
    if "half" in parts.columns:
        text = text + parts["half"].fill_null("")
    if clock.missing == "year":
        return _with_year(parts, clock, arrived=arrived, zone=zone)
    if clock.missing == "date":
        return _with_date(parts, clock, arrived=arrived, zone=zone)
    if clock is ISO_CLOCK:
        text = text.str.replace("T", " ", literal=True)
    if clock.loose:
        return _localise(_loosely(text, clock.form), parts, zone)
    return _localise(_naive(text, clock.form), parts, zone)


def _loosely(text: pl.Series, form: str) -> pl.Series:
    for pattern, plain in _LOOSE:
        text = text.str.replace_all(pattern, plain)
    text = text.str.to_uppercase()
    form = form.replace("-", "/")
    naive = _naive(text, form)
    halves = text.str.contains("[AP]M$")
    if halves.any():
        words = text.str.replace(" ?([AP]M)$", " ${1}")
        half = _naive(words, form.replace("%H", "%I") + " %p")
        naive = half.zip_with(halves.fill_null(False), naive)
    return naive


def day_comes_first(lines: pl.Series) -> bool:
    """Whether the dates of these lines are day, month, year, and not month, day, year.

    A number above 12 decides, then the number that changes more often. If neither does, slashes with AM or PM
    are American and all others are not."""
    dates = lines.str.extract_groups(_DATE_PARTS).struct.unnest()
    dates = dates.filter(pl.col("first").is_not_null())
    first, second = (dates[name].cast(pl.Int32) for name in ("first", "second"))
    over = int((first > _MONTHS).sum()), int((second > _MONTHS).sum())
    if over[0] != over[1]:
        return over[0] > over[1]
    if first.n_unique() != second.n_unique():
        return first.n_unique() > second.n_unique()
    american = (dates["mark"] == "/") & dates["half"].is_not_null()
    return not american.any()


def read_times(text: pl.Series, *, arrived: datetime, zone: str) -> pl.Series:
    """Times in values of JSON, logfmt and tables: ISO 8601, epoch numbers in any usual unit, usual dates."""
    result: pl.Series | None = None
    for pattern, clock in _VALUES:
        if result is not None and result.null_count() == text.null_count():
            break
        parts = text.str.extract_groups(pattern).struct.unnest()
        found = to_utc(parts, clock, arrived=arrived, zone=zone)
        result = found if result is None else result.zip_with(result.is_not_null(), found)
    assert result is not None  # noqa: S101 - the loop runs at least once
    return result.alias("timestamp")


def read_form(text: pl.Series, form: str, *, arrived: datetime, zone: str) -> pl.Series:
    """Times of a declared form: strptime, "iso" or "epoch". Raises BadInput for an unknown directive."""
    if form in NUMBERS:
        return read_times(text, arrived=arrived, zone=zone)
    pattern, plain, missing = time_parts(form)
    parts = text.str.extract_groups(f"^{pattern}$").struct.unnest()
    pieces = [name for name in parts.columns if name not in ("fraction", "zone")]
    time = parts.select(pl.concat_str(pieces).alias("time")).to_series()
    found = parts.drop(pieces).with_columns(time)
    return to_utc(found, Clock(form=plain, missing=missing), arrived=arrived, zone=zone)


def _naive(text: pl.Series, form: str) -> pl.Series:
    found = text.str.strptime(pl.Datetime("us"), form, strict=False)
    if "%b" in form and found.null_count() > text.null_count():
        english = text.str.replace(r"([A-Za-z])\.", "${1}")
        for month, words in _FOREIGN.items():
            english = english.str.replace(rf"(?i)\b(?:{words})\b", month)
        found = found.zip_with(
            found.is_not_null(), english.str.strptime(pl.Datetime("us"), form, strict=False)
        )
    return found


def _tai(labels: pl.Series) -> pl.Series:
    """Naive UTC of labels of daemontools: seconds behind 2**62 + 10, then nanoseconds, as hexadecimal."""
    seconds = labels.str.slice(1, 15).str.to_integer(base=16, strict=False) - 10
    micros = labels.str.slice(16, 8).str.to_integer(base=16, strict=False) // 1000
    # the first digit is 4: 2**62
    return (seconds * 1_000_000 + micros).cast(pl.Datetime("us"))


def _epoch(text: pl.Series) -> pl.Series:
    """Naive UTC of an epoch number; its size tells the unit until the year 5138."""
    number = pl.col("n")
    micros = (
        pl.when(number < 10**11)
        .then(number * 1_000_000)
        .when(number < 10**14)
        .then(number * 1000)
        .when(number < 10**17)
        .then(number)
        .otherwise(number // 1000)
    )
    frame = pl.DataFrame({"n": text.cast(pl.Int64, strict=False)})
    return frame.select(micros.cast(pl.Datetime("us"))).to_series()


def _fraction(parts: pl.DataFrame) -> pl.Series | None:
    """Duration of the digits after the seconds, None without such a group; `millis` is not padded."""
    if "millis" in parts.columns:
        micros = pl.col("millis").cast(pl.Int64, strict=False) * 1000
    elif "fraction" in parts.columns:
        digits = pl.col("fraction").str.slice(0, 6).str.pad_end(6, "0")
        micros = digits.cast(pl.Int64, strict=False)
    else:
        return None
    return parts.select(micros.fill_null(0).cast(pl.Duration("us"))).to_series()


def _localise(naive: pl.Series, parts: pl.DataFrame, zone: str) -> pl.Series:
    """Aware UTC, by the written zone or else by the zone of the source."""
    words = parts["zone"] if "zone" in parts.columns else None
    if "zone_2" in parts.columns:
        words = parts["zone_2"] if words is None else words.zip_with(words.is_not_null(), parts["zone_2"])
    if words is None or words.null_count() == words.len():
        return _in_zone(naive, zone)
    distinct = words.unique().drop_nulls().to_list()
    offsets = {word: found for word in distinct if (found := minutes_of(word, zone)) is not None}
    minutes = words.replace_strict(offsets, default=None, return_dtype=pl.Int64)
    utc = (naive - (minutes * 60_000_000).cast(pl.Duration("us"))).dt.replace_time_zone("UTC")
    if not minutes.null_count():
        return utc
    named = [word for word in distinct if word not in offsets and _is_zone(word)]
    for word in named[:_ZONES]:
        utc = _in_zone(naive, word).zip_with((words == word).fill_null(False), utc)
    return utc.zip_with(utc.is_not_null(), _in_zone(naive, zone)) if utc.null_count() else utc


@remembered(1_000, 80)
def minutes_of(word: str, zone: str) -> int | None:
    """East of Greenwich, as a written zone says. None for other words, and for an abbreviation of several
    zones of which `zone`, that of the source, is one."""
    if word in ("Z", "UTC", "GMT"):
        return 0
    if meant := zone_words().get(word):
        own = {_offset_of(zone, month) for month in (1, 7)} if zone != "UTC" else set()
        return None if len(meant) > 1 and own.intersection(meant) else meant[0]
    if found := _OFFSET.fullmatch(word):
        sign, hours, minutes = found.groups()
        total = int(hours) * 60 + int(minutes or 0)
        return -total if sign == "-" else total
    return None


def _offset_of(zone: str, month: int) -> int:
    offset = datetime(2026, month, 1, tzinfo=ZoneInfo(zone)).utcoffset()
    return 0 if offset is None else int(offset.total_seconds()) // 60


@remembered(1_000, 80)
def _is_zone(word: str) -> bool:
    try:
        return _IANA.fullmatch(word) is not None and ZoneInfo(word) is not None
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return False


def _in_zone(naive: pl.Series, zone: str) -> pl.Series:
    """Local to UTC. A doubled hour means the first; a skipped hour takes the offset before the gap."""
    if zone == "UTC":
        return naive.dt.replace_time_zone("UTC")
    local = naive.dt.replace_time_zone(zone, ambiguous="earliest", non_existent="null")
    utc = local.dt.convert_time_zone("UTC")
    if utc.null_count() > naive.null_count():
        hour = timedelta(hours=1)
        before = (naive - hour).dt.replace_time_zone(zone, ambiguous="earliest", non_existent="null")
        utc = utc.zip_with(utc.is_not_null(), before.dt.convert_time_zone("UTC") + hour)
        # a zone that skipped a whole day (Samoa, 2011): the digits as UTC
        utc = utc.zip_with(utc.is_not_null(), naive.dt.replace_time_zone("UTC"))
    return utc


def _with_year(parts: pl.DataFrame, clock: Clock, *, arrived: datetime, zone: str) -> pl.Series:
    """The written year, else the latest year at most a day in the future."""
    text, form = parts["time"], "%Y " + clock.form
    limit = arrived + _FUTURE
    utc: pl.Series | None = None
    readable = text.len() - _naive("2000 " + text, form).null_count()
    for year in range(limit.year + 1, limit.year - _YEARS_BACK, -1):
        found = _localise(_naive(f"{year} " + text, form), parts, zone)
        found = found.set((found > limit).fill_null(False), None)
        utc = found if utc is None else utc.zip_with(utc.is_not_null(), found)
        if utc.len() - utc.null_count() == readable:
            break
    assert utc is not None  # noqa: S101 - the range is never empty
    if "year" in parts.columns and parts["year"].null_count() < parts.height:
        written = _localise(_naive(parts["year"] + " " + text, form), parts, zone)
        utc = written.zip_with(written.is_not_null(), utc)
    return utc


def _with_date(parts: pl.DataFrame, clock: Clock, *, arrived: datetime, zone: str) -> pl.Series:
    """Time of day alone: today, or yesterday if today is more than an hour ahead."""
    today: date = arrived.astimezone(ZoneInfo(zone)).date()
    form = "%Y-%m-%d " + clock.form
    now = _localise(_naive(f"{today} " + parts["time"], form), parts, zone)
    # calendar arithmetic: correct near midnight in every zone
    before = datetime.combine(today, time()) - timedelta(days=1)
    then = _localise(_naive(f"{before:%Y-%m-%d} " + parts["time"], form), parts, zone)
    ahead = (now > arrived + timedelta(hours=1)).fill_null(False)
    return then.zip_with(ahead, now)


def ambiguous_words(lines: pl.Series, *, zone: str) -> pl.Series:
    """For each line the abbreviation behind its time that names several zones, of which the likeliest is
    meant; null for other lines. `zone`: that of the source, which may settle it."""
    words = [
        word for word, meant in zone_words().items() if len(meant) > 1 and minutes_of(word, zone) is not None
    ]
    return lines.str.slice(0, _HEAD_CHARS).str.extract(
        rf":[0-9]{{2}}(?:[.,][0-9]+)?(?: [AP]M)? ?[\[(]?({'|'.join(words)})\b"
    )
