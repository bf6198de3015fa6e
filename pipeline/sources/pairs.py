"""Records of keys and values, in whatever notation: their time, level, origin and text, by key and value.

`read_records` fills the header columns from well-known keys, and from keys whose names and values are plain:
`EdgeStartTimestamp` with a date is a time. The key of the message begins the message, and every other pair
follows as `key=value`, so that the model sees all pairs. Book-keeping keys of known programs stay out
(`Shape`).

An *envelope* is a record whose text is the line of a program, which something else has collected.
`read_lines` gives that line, and what the record says around it. Keys of nested objects are dotted."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import Any, Final, cast

import polars as pl

from pipeline.records.declared import USUAL_LEVELS
from pipeline.records.remembered import remembered
from pipeline.records.schema import UTC_US
from pipeline.records.written_levels import level_by_number, level_of_status, levels_by_word
from pipeline.sources.formats_text import BY_NAME
from pipeline.sources.known_keys import known_keys
from pipeline.sources.times import read_times, to_utc

# The keys of a record, and the value of each as text.
Pairs = tuple[tuple[str, ...], Sequence[str]]
_Chosen = Callable[[Sequence[str]], Any]  # some values, for a template
_PLANS, _PLAN_CHARS = 256, 16_384  # senders choose the keys
_NUMBER_CHARS: Final = 8  # a level's number is shorter

ORIGINS: Final = ("host", "process", "service")

_ALIASES: Final = {
    key: (role, place) for role, keys in known_keys().roles.items() for place, key in enumerate(keys)
}
_MARKS: Final = {mark: number for number, shape in enumerate(known_keys().shape) for mark in shape.marks}
_ENVELOPE: Final = known_keys().envelope
_SHIPPED, _SHIPPING = (re.compile(pattern, re.VERBOSE) for pattern in (_ENVELOPE.shipped, _ENVELOPE.shipping))

# Other keys, by the letters and digits of their last part. Each place is behind those of the known keys.
_BY_NAME: Final = 100
_TIME_NAME: Final = re.compile(
    r"(?:time|timestamp|date|datetime)(?:utc|gmt|iso|local)?(?:unix|epoch)?(?:s|sec|seconds|ms|millis"
    r"|milliseconds|us|micros|microseconds|ns|nano|nanos|nanoseconds|unixnano)?$"
    r"|^(?:created|occurred|logged|emitted|generated|recorded|reported|received|started)at$"
)
# Times of something else than the event.
_OTHER_TIME: Final = re.compile(r"expir|birth|valid|due|deadline|next|boot|until|renew|schedul|timeout")
_LATE_TIME: Final = re.compile(r"end|finish|last|updat|modif|ingest|receiv|observ|index|complet|stop|stored")
_DURATION: Final = re.compile(
    r"respon|request|durat|elaps|laten|process|exec|cpu|wait|idle|run|up|life|down|took|total|max|min|avg|mean"
)
_LEVEL_NAME: Final = re.compile(r"^(?:log|event|syslog|msg)?(?:level|lvl|severity)(?:name|text|label|word)?$")
_STATUS_NAME: Final = re.compile(
    r"^(?:http|response|edgeresponse|originresponse|sc|server|upstream)?(?:status|statuscode|responsecode)$"
)
_REQUEST_NAME: Final = re.compile(r"request|method|verb|uri|url|httpversion")
_MANY_PARTS: Final = re.compile(r"[^a-z0-9]")
_EPOCH: Final = re.compile(r"1[0-9]{9}(?:[0-9]{3}){0,3}(?:\.[0-9]+)?$")
_DATED: Final = re.compile(
    r"[0-9]{1,4}[-/.][0-9A-Za-z]{1,3}[-/.][0-9]{1,4}|[A-Z][a-z]{2} +[0-9]{1,2}|[0-9]{8}T"
)
_CLOCK: Final = re.compile(r"[0-9]{1,2}:[0-9]{2}:[0-9]{2}")
_DAY: Final = re.compile(r"([0-9]{4})[-/.]?([0-9]{2})[-/.]?([0-9]{2})$")
_ENDS_IN_CLOCK: Final = re.compile(r"[0-9]:[0-9]{2}(?::[0-9]{2})?(?:[.,][0-9]+)?$")
_NET_DATE: Final = re.compile(r"/Date\(([0-9]+)")
_HTTP_STATUS: Final = re.compile(r"[1-5][0-9]{2}$")
_DOUBTED: Final = 2  # a number under such a key is rather a duration
_LONGEST_TIME: Final = 48
_ZONE: Final = re.compile(r"(?:Z|UTC|GMT|[+-][0-9]{2}:?[0-9]{2})$")
_ZONE_NAMES: Final = frozenset({"tz", "timezone", "zone", "utcoffset"})
_NANO_NAMES: Final = frozenset({"nanoofsecond", "nanos", "nanoseconds"})
_SECOND_NAMES: Final = frozenset({"epochsecond", "seconds"})
_POWER: Final = re.compile(r"[0-9]+(?:\.[0-9]+)?[eE]\+?[0-9]{1,2}$")

# Notations of a time other than ISO 8601 and numbers: headers of text, without a text behind them.
_NOTATIONS: Final = tuple(
    (f"{BY_NAME[name].head}$", clock)
    for name in ("rfc-2822", "rfc-850", "clf-time", "ctime", "javascript", "month-first", "go", "digits")
    if (clock := BY_NAME[name].clock)
)
_WORDS: Final = {**levels_by_word(), **{f"d{n}": "debug" for n in range(1, 6)}}  # those of MongoDB


# The header of a program: a priority or a time, and then a level behind a few words, or an object with both.
_PROGRAM_LINE: Final = re.compile(
    r"<[0-9]{1,3}>(?:1 [0-9]{4}-|[A-Z][a-z]{2} {1,2}[0-9])"
    r"|\s*(?:\x1b\[[0-9;]*m)*[\[(]?"
    r"(?:(?:[A-Z][a-z]{2},? )?(?:[0-9]{4}[-/.][0-9]{2}[-/.][0-9]{2}|[0-9]{1,2}[-/. ](?:[0-9]{2}|[A-Z][a-z]{2})[-/. ][0-9]{4}"
    r"|[A-Z][a-z]{2} {1,2}[0-9]{1,2}(?:,? [0-9]{4})?)[T ,:]{1,2})[0-9]{1,2}:[0-9]{2}:[0-9]{2}[^ ]{0,20}"
    rf"(?:\s+(?:[|\-]\s+)?[\[({{<]?[^\s]{{1,60}}){{0,4}}?(?:\s+[|\-])?\s*[\[({{<]?\s*(?:{USUAL_LEVELS}|(?<=[\[<(|])(?i:{USUAL_LEVELS}))\b"
    r"|\s*(?:time|ts|timestamp|level|lvl)=\S+ .*\b(?:level|lvl|severity|time|ts)="
    r'|\s*\{(?=.*"(?:level|severity|lvl|levelname|log\.level)"\s*:)(?=.*"(?:time|ts|timestamp|@timestamp|msg|message)"\s*:).*\}\s*$',
    re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What the keys of a record say, for all records with these keys. Places are those of the pairs."""

    keys: tuple[str, ...]
    times: tuple[tuple[int, int], ...]  # the likeliest first, with the doubt of each: 0 for a known key
    alone: tuple[tuple[int], ...]  # the places of each of these times, if it has no other parts
    levels: tuple[int, ...]
    days: tuple[int, ...]  # that a bare clock time may belong to
    zones: tuple[int, ...]
    nanos: tuple[int, ...]
    is_parted: bool  # a time may have parts in several pairs
    status: int | None  # of an answer to a request
    message: int | None
    origins: tuple[int | None, ...]  # ORIGINS
    level: str | None  # of a record without one
    packed: int | None  # the line of a program
    lines: tuple[int, ...]  # texts that may be one
    is_shipped: bool  # a collector has written it
    rest: tuple[int, ...]  # for the message, in the order of their keys
    beside: tuple[int, ...]  # for the message of an envelope's line


def _role_of(key: str) -> tuple[str, int]:
    """The role of a key, and its place among the keys of that role; ("", 0) for other keys."""
    if (found := _ALIASES.get(key)) is not None:
        return found
    lower = key.lower()
    if len(key) > 2 and (found := _ALIASES.get(lower)) and found[0] in ("time", "level", "message"):
        return found[0], _BY_NAME // 2 + found[1]
    name = _letters(key)
    depth = key.count(".")
    if _TIME_NAME.search(name) and not _OTHER_TIME.search(name):
        return "time", _BY_NAME + depth + (_BY_NAME if _LATE_TIME.search(name) else 0)
    return ("level", _BY_NAME + depth) if _LEVEL_NAME.match(name) else ("", 0)


def _letters(key: str) -> str:
    """The letters and digits of the last part of a dotted key, in lower case."""
    return _MANY_PARTS.sub("", key.rpartition(".")[2].lower())


@remembered(_PLANS, _PLAN_CHARS)
def _plan_of(order: str, *keys: str) -> _Plan:
    places: dict[str, list[tuple[int, int]]] = {}
    for at, key in enumerate(keys):
        role, place = _role_of(key)
        places.setdefault(role, []).append((place, at))
    by_role = {role: tuple(at for _, at in sorted(found)) for role, found in places.items()}
    names = list(map(_letters, keys))
    days = tuple(at for at, name in enumerate(names) if name.endswith(("date", "day")))
    zones = tuple(at for at, name in enumerate(names) if name in _ZONE_NAMES)
    seconds = any(name in _SECOND_NAMES for name in names)
    nanos = tuple(at for at, name in enumerate(names) if seconds and name in _NANO_NAMES)
    shape_number = min((_MARKS[key] for key in keys if key in _MARKS), default=None)
    shape = None if shape_number is None else known_keys().shape[shape_number]
    level = None if shape is None else "error" if shape.error and shape.error in keys else shape.level
    status = None
    if any(map(_REQUEST_NAME.search, names)):
        status = next((at for at, name in enumerate(names) if _STATUS_NAME.match(name)), None)
    first = {role: found[0] for role, found in by_role.items() if role}
    used = {first[role] for role in ("message", *ORIGINS) if role in first}
    in_order = range(len(keys)) if order else sorted(range(len(keys)), key=keys.__getitem__)
    noise = re.compile(shape.noise, re.VERBOSE) if shape else None
    rest = tuple(at for at in in_order if at not in used and not (noise and noise.search(keys[at])))
    is_shipped = any(map(_SHIPPED.match, keys))
    packed = None
    for kind in known_keys().packed:
        line = next((keys.index(key) for key in kind.lines if key in keys), None)
        if packed is None and line is not None and any(map(re.compile(kind.mark).match, keys)):
            packed = line
    return _Plan(
        keys=keys,
        times=tuple(
            (at, (_DOUBTED if _DURATION.search(names[at]) else 1) if place >= _BY_NAME else 0)
            for place, at in sorted(places.get("time", ()))
        ),
        alone=tuple((at,) for _, at in sorted(places.get("time", ()))),
        levels=by_role.get("level", ()),
        days=days,
        zones=zones,
        nanos=nanos,
        is_parted=bool(days or zones or nanos),
        status=status,
        message=first.get("message"),
        origins=tuple(first.get(role) for role in ORIGINS),
        level=level,
        packed=packed,
        lines=tuple(keys.index(key) for key in _ENVELOPE.lines if key in keys),
        is_shipped=is_shipped,
        rest=rest,
        beside=tuple(at for at in rest if not (is_shipped and _SHIPPING.match(keys[at]))),
    )


def read_records(
    rows: Sequence[Pairs | None], *, arrived: datetime, zone: str, in_order: bool = False
) -> pl.DataFrame:
    """Header columns and `message` of these records; all are null where a row is None or has no pairs.

    `in_order`: the message has the pairs as they stand, and not by the order of their keys."""
    records = _Records(rows, "as they stand" if in_order else "")
    times, used = records.times(arrived=arrived, zone=zone)
    message: list[str | None] = []
    before: tuple[_Plan | None, tuple[int, ...], int] = (None, (), -1)
    template, chosen = "", cast("_Chosen", _nothing)
    for plan, values, by_time, (_, by_level) in zip(
        records.plans, records.values, used, records.levels, strict=True
    ):
        if plan is None:
            message.append(None)
            continue
        if (
            plan is not before[0] or by_level != before[2] or by_time != before[1]
        ):  # most are like the one before
            template, chosen = _template(plan, plan.message, plan.rest, (*by_time, by_level))
            before = plan, by_time, by_level
        message.append(template % chosen(values))
    return pl.DataFrame([times, *records.header(), pl.Series("message", message, dtype=pl.String)])


def read_lines(
    rows: Sequence[Pairs | None], *, arrived: datetime, zone: str, with_times: bool = True
) -> pl.DataFrame:
    """`inner`, the program's line of each envelope, and what stands around it: header columns, and `extra`,
    which ends the message. All are null in other rows. `with_times`: whether `timestamp` is read."""
    records = _Records(rows)
    lines = records.lines()
    is_line = [line is not None for line in lines]
    records = records.those(is_line)
    if with_times:
        times, used = records.times(arrived=arrived, zone=zone)
    else:
        times, used = pl.Series("timestamp", [None] * len(rows), dtype=UTC_US), [()] * len(rows)
    inner: list[str | None] = [None] * len(rows)
    extra: list[str | None] = [None] * len(rows)
    for row, line in enumerate(lines):
        plan = records.plans[row]
        if plan is None or line is None:
            continue
        values = records.values[row]
        inner[row] = values[line]
        if line != plan.packed:
            template, chosen = _template(plan, None, plan.beside, (*used[row], line))
            extra[row] = template % chosen(values) or None
    return pl.DataFrame(
        [
            times,
            *records.header(),
            pl.Series("inner", inner, dtype=pl.String).str.strip_suffix("\n"),
            pl.Series("extra", extra, dtype=pl.String),
        ]
    )


def are_envelopes(rows: Sequence[Pairs | None]) -> pl.Series:
    """True for records whose text is the line of a program."""
    return pl.Series([line is not None for line in _Records(rows).lines()], dtype=pl.Boolean)


class _Records:
    """Rows with the plans of their keys, and their levels."""

    def __init__(self, rows: Sequence[Pairs | None], order: str = "") -> None:
        plans: dict[tuple[str, ...], _Plan] = {}
        plan: _Plan | None = None
        before: tuple[str, ...] = ()
        self.plans: list[_Plan | None] = []
        self.values: list[Sequence[str]] = []
        for pairs in rows:
            keys, values = pairs or ((), ())
            if keys is not before:  # most are like the one before
                before, plan = keys, plans.get(keys)
                if plan is None and keys:
                    plan = plans[keys] = _plan_of(order, *keys)
            self.plans.append(plan)
            self.values.append(values)
        self.levels = self._levels()  # with the place of each, -1 for none

    def those(self, chosen: Sequence[bool]) -> "_Records":
        """The same rows, of which the others are empty."""
        if all(chosen):
            return self
        some = object.__new__(_Records)
        some.values = self.values
        some.plans = [plan if takes else None for plan, takes in zip(self.plans, chosen, strict=True)]
        some.levels = [level if takes else _NONE for level, takes in zip(self.levels, chosen, strict=True)]
        return some

    def header(self) -> list[pl.Series]:
        """The columns of the header without the time."""
        columns = [pl.Series("level", [level for level, _ in self.levels], dtype=pl.String)]
        for number, name in enumerate(ORIGINS):
            found = [
                None if plan is None or (at := plan.origins[number]) is None else values[at]
                for plan, values in zip(self.plans, self.values, strict=True)
            ]
            columns.append(pl.Series(name, found, dtype=pl.String))
        return columns

    def _levels(self) -> list[tuple[str | None, int]]:
        words: dict[str, str | None] = {}
        found: list[tuple[str | None, int]] = []
        numbered: list[int] = []
        numbers: dict[str, set[str]] = {}  # by their keys
        for row, (plan, values) in enumerate(zip(self.plans, self.values, strict=True)):
            level = _NONE
            if plan is not None:
                for at in plan.levels:
                    word = values[at]
                    if word not in words:
                        words[word] = _WORDS.get(word.strip().lower())
                    if (known := words[word]) is not None:
                        level = (known, at)
                        break
                    if word[:1].isdigit() and len(word) <= _NUMBER_CHARS:
                        numbers.setdefault(plan.keys[at], set()).add(word)
                        numbered.append(row)
                        break
                if level[0] is None and (plan.status is not None or plan.level):
                    level = _otherwise(plan, values)
            found.append(level)
        known_numbers: dict[tuple[tuple[str, ...], int, str], str | None] = {}
        for row in numbered:
            plan, values = self.plans[row], self.values[row]
            assert plan is not None  # noqa: S101 - it has a level
            for at in plan.levels:
                word = values[at]
                asked = (plan.keys, at, word)
                if asked not in known_numbers:
                    known_numbers[asked] = _WORDS.get(word.strip().lower()) or _numbered(
                        plan, at, word, numbers
                    )
                if (level_ := known_numbers[asked]) is not None:
                    found[row] = (level_, at)
                    break
        return found

    def lines(self) -> list[int | None]:
        """The place of the program's line of each row, None for records that are their own."""
        return [
            None if plan is None else _line_of(plan, values, level[1] >= 0)
            for plan, values, level in zip(self.plans, self.values, self.levels, strict=True)
        ]

    def times(self, *, arrived: datetime, zone: str) -> tuple[pl.Series, list[tuple[int, ...]]]:
        """The first readable time of each row, and the places of its parts."""
        used: list[tuple[int, ...]] = [()] * len(self.plans)
        found = pl.Series("timestamp", [None], dtype=UTC_US).new_from_index(0, len(used))
        waiting = [row for row, plan in enumerate(self.plans) if plan is not None and plan.times]
        for turn in itertools.count():
            rows: list[int] = []
            texts: list[str] = []
            parts: list[tuple[int, ...]] = []
            later: list[int] = []
            for row in waiting:
                plan = self.plans[row]
                assert plan is not None  # noqa: S101 - it waits
                if turn + 1 < len(plan.times):
                    later.append(row)
                at, doubt = plan.times[turn]
                if doubt or plan.is_parted:
                    text, places = _time_text(plan, self.values[row], at, doubt)
                else:
                    text, places = self.values[row][at], plan.alone[turn]
                if text:
                    rows.append(row)
                    texts.append(text)
                    parts.append(places)
            if texts:
                read = _read_values(
                    pl.Series("timestamp", texts, dtype=pl.String), arrived=arrived, zone=zone
                )
                if len(rows) == len(used) and not read.null_count():
                    return read, parts
                readable = read.is_not_null()
                hits = pl.Series(rows, dtype=pl.UInt32).filter(readable)
                found = found.scatter(hits, read.filter(readable))
                for row, places, is_read in zip(rows, parts, readable.to_list(), strict=True):
                    if is_read:
                        used[row] = places
            waiting = [row for row in later if not used[row]]
            if not waiting:
                return found, used
        raise AssertionError("the turns end with the keys")


_NONE: Final[tuple[str | None, int]] = (None, -1)


def _otherwise(plan: _Plan, values: Sequence[str]) -> tuple[str | None, int]:
    """The level of a record that writes none: by the status of an answer, or by its program."""
    if plan.status is not None and _HTTP_STATUS.match(status := values[plan.status]):
        return level_of_status(int(status)), -1
    return plan.level, -1


def _numbered(plan: _Plan, at: int, word: str, numbers: Mapping[str, set[str]]) -> str | None:
    key = plan.keys[at]
    if not word[:1].isdigit() or len(word) > _NUMBER_CHARS or (key not in _ALIASES and "." in key):
        return None  # a battery has a level, too
    return level_by_number(word, key, plan.keys, numbers.get(key, ()))


def _line_of(plan: _Plan, values: Sequence[str], has_level: bool) -> int | None:
    if plan.packed is not None or has_level:
        return plan.packed
    if plan.is_shipped and plan.lines:
        return plan.lines[0]
    return next((at for at in plan.lines if _PROGRAM_LINE.match(values[at])), None)


def _nothing(_: Sequence[str]) -> tuple[str, ...]:
    return ()


def _template(
    plan: _Plan, first: int | None, rest: Sequence[int], used: tuple[int, ...]
) -> tuple[str, _Chosen]:
    """A text without a key and the pairs behind it that were not used, and what chooses their values."""
    places = [at for at in rest if at not in used]
    parts = [plan.keys[at].replace("%", "%%") + "=%s" for at in places]
    if first is not None:
        places, parts = [first, *places], ["%s", *parts]
    return " ".join(parts), itemgetter(*places) if places else _nothing


def _time_text(plan: _Plan, values: Sequence[str], at: int, doubt: int) -> tuple[str, tuple[int, ...]]:
    """What may be read as a time, and the places of its parts; "" for a value that leaves a doubt."""
    text = values[at]
    if doubt and not _is_moment(text, numbers=doubt < _DOUBTED) and not (plan.days and _CLOCK.match(text)):
        return "", ()
    used = [at]
    if _CLOCK.match(text):
        day = next((day for day in plan.days if day != at and _DAY.match(values[day])), None)
        if day is None:
            return text, (at,)
        text = f"{'-'.join(_DAY.match(values[day]).groups())} {text}"  # type: ignore[union-attr] # it matches
        used.append(day)
    elif plan.nanos and text.isdigit() and _letters(plan.keys[at]) in _SECOND_NAMES:
        text = f"{text}.{values[plan.nanos[0]]:0>9}"
        used.append(plan.nanos[0])
    zone = next((zone for zone in plan.zones if _ZONE.match(values[zone])), None)
    if zone is not None and _ENDS_IN_CLOCK.search(text):
        text += values[zone]
        used.append(zone)
    return text, tuple(used)


def _is_moment(text: str, *, numbers: bool) -> bool:
    """Whether a value has a date and a clock time, or is a number of seconds since 1970 of these decades."""
    if numbers and _EPOCH.match(text):
        return True
    return len(text) <= _LONGEST_TIME and bool(_DATED.search(text) and _CLOCK.search(text))


def _read_values(texts: pl.Series, *, arrived: datetime, zone: str) -> pl.Series:
    """The times of values in any notation; null for other values."""
    found = read_times(texts, arrived=arrived, zone=zone)
    if not found.null_count():
        return found
    open_ = found.is_null().arg_true()
    others = texts.gather(open_)
    plain = pl.Series("timestamp", list(map(_plain, others.to_list())), dtype=pl.String)
    read = read_times(plain, arrived=arrived, zone=zone)
    for pattern, clock in _NOTATIONS:
        if not read.null_count():
            break
        parts = plain.str.extract_groups(pattern).struct.unnest()
        read = read.zip_with(read.is_not_null(), to_utc(parts, clock, arrived=arrived, zone=zone))
    return found.scatter(open_, read)


def _plain(value: str) -> str:
    """.NET's `/Date(1763539200123)/` and Java's `1.763539200123E9` as plain numbers."""
    if dated := _NET_DATE.match(value):
        return dated[1]
    return f"{float(value):.6f}" if _POWER.match(value) else value
