"""Typed values in the text of a record: durations in seconds, sizes in bytes, counts, statuses and codes.

A number has a type by its unit (`12ms`, `3.5 MiB`), by its key (`status=500`, `"duration_ms": 12`), by the
noun behind it (`120 records`), or by its place in a line of HTTP. Every other number may be an id and is no
value. Keys that name ids, ports, times of day and places in a file are none either.
"""

import re
from enum import StrEnum
from typing import Final, NamedTuple

from pipeline.records.remembered import remembered

MAX_CHARS: Final = 1_000  # of a record that are looked at: behind them stand stack traces
MAX_VALUES: Final = 6  # of one record
NAME_CHARS: Final = 32


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


class ValueKind(StrEnum):
    """The type of a value."""

    DURATION = "duration"  # seconds
    TIME = "time"  # a duration under a key that does not tell the unit
    SIZE = "size"  # bytes
    COUNT = "count"
    STATUS = "status"  # of HTTP
    CODE = "code"  # of an exit, or of an error


# A StrEnum is hashed and formatted by functions of Python, so plain texts stand in what runs for each record.
DURATION, TIME, SIZE, COUNT, STATUS, CODE = (kind.value for kind in ValueKind)
Quantity = tuple[str, float, str]  # kind, value, key ("" for none)


class TypedValue(NamedTuple):
    """`name`: its key, else its kind and place among those of its kind without one: `duration#1`."""

    name: str
    kind: str  # of ValueKind
    value: float


_DURATIONS: Final = {
    1e-9: "ns nanos nanoseconds",
    1e-6: "us µs μs micros microseconds",
    1e-3: "ms msec msecs millis millisecond milliseconds",
    1.0: "s sec secs second seconds",
    60.0: "m min mins minute minutes",
    3600.0: "h hr hrs hour hours",
}
_SIZES: Final = {
    1.0: "B byte bytes Bytes",
    1e3: "kB KB kb",
    1e6: "MB mb",
    1e9: "GB gb",
    1e12: "TB",
    1024.0: "KiB Ki K",
    1024.0**2: "MiB Mi M",
    1024.0**3: "GiB Gi G",
    1024.0**4: "TiB Ti",
}
_UNITS: Final[dict[str, tuple[str, float]]] = {
    word: (kind, scale)
    for kind, units in ((DURATION, _DURATIONS), (SIZE, _SIZES))
    for scale, words in units.items()
    for word in words.split()
}
_ADJACENT: Final = frozenset({"m", "h", "M", "K", "G", "Ki", "Mi", "Gi"})  # never behind a space
# Dates, clocks, addresses and versions go on in front of a number or behind it. A digit stands first in the
# pattern, because a search for a set of characters is fast. Hours and minutes with seconds come second.
_NUMBER: Final = re.compile(
    r"[0-9](?<![\w.\-/].)(?<![0-9][:,].)(?:"
    r"(?:[0-9]{0,2}(?:,[0-9]{3})++|[0-9]*+(?:\.[0-9]++)?+(?:[eE][-+]?[0-9]{1,3})?+)()"
    r"(?:( ?)([A-Za-z\u00b5\u03bc]{1,20}+)(?:/s)?)?"
    r"|[0-9]{0,5}[hm](?:[0-9]{1,6}m)?[0-9]+(?:\.[0-9]+)?s)"
    r"(?![.:/\-]?\w)"
)
_LONG: Final = re.compile(r"(?:([0-9]+)h)?(?:([0-9]+)m)?([0-9.]+)s")
_KEY_BACKWARDS: Final = re.compile(r"[A-Za-z0-9_.\-]*[A-Za-z]")
_KEY_CHARS: Final = NAME_CHARS + 8
_BEFORE: Final = frozenset("=:\"' ")
_QUOTES: Final = "\"' "
_METHODS: Final = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "PATCH", "OPTIONS"})
_STATUS_CHARS: Final = 3
_MOST_PATH: Final = 400
_NOUN: Final = re.compile(r"[a-z]{3,}s")
_WORDS: Final = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
# Words of a key that say that its value is no quantity.
_IDS: Final = _words(
    "id ids pid ppid tid uid gid port seq sequence offset line lineno no ver version v thread trace span parent ts"
    " time timestamp date epoch addr address hash token session user account order block key node host year month"
    " day index idx position page partition generation term zxid color lat lon ip mac serial number nr type class"
    " nonce checksum crc pointer ptr fd inode rank core cpu slot shard bucket x y z"
)
_OF_COUNT: Final = _words("count counts total totals num records rows items entries")
_OF_DURATION: Final = _words(
    "duration latency elapsed took time delay wait rt cost spent runtime uptime age rtt seconds"
)
_OF_SIZE: Final = _words("bytes size len length")
_OF_CODE: Final = _words("code rc errno ret retcode")
_MEASURES: Final = _words(
    "amount quantity temperature percent load usage used free depth rate ratio lag active pending open queued speed"
    " attempts score balance"
)
_SHORT: Final = 3  # characters of words that are seldom plurals
_MOST_TIME: Final = 1e8  # under a key without a unit; more is a time of day
_MOST_CODE: Final = 999
_HTTP_STATUS: Final = (100, 599)


class _Typed(NamedTuple):
    kind: str
    scale: float
    unit: bool = True  # False: the key does not tell the unit


@remembered(4_096, _KEY_CHARS)
def key_type(key: str) -> _Typed | None:
    """The type of a number without a unit under this key; None where it is no quantity."""
    words = [word.lower() for word in _WORDS.findall(key)]
    last, named = (words[-1] if words else ""), set(words)
    if last in _UNITS and (len(last) > 1 or (last == "s" and len(words) > 1)):
        return _Typed(*_UNITS[last])
    if "status" in named:
        return _Typed(CODE if "exit" in named else STATUS, 1.0)
    for kind, meant, unit in (
        (CODE, _OF_CODE, True),
        (SIZE, _OF_SIZE, True),
        (COUNT, _OF_COUNT, True),
        (TIME, _OF_DURATION, False),
    ):
        if named & meant:
            return _Typed(kind, 1.0, unit)
    measure = last in _MEASURES or (last.endswith("s") and len(last) > _SHORT)
    return _Typed(COUNT, 1.0) if measure and not named & _IDS else None


def typed_values(text: str) -> list[TypedValue]:
    """The values in the text of a record, at most MAX_VALUES, in their order."""
    found: list[TypedValue] = []
    status_end = -2
    for match in _NUMBER.finditer(text, 0, MAX_CHARS):
        begin, end = match.start(), match.start(1)
        number = text[begin:end] if end >= 0 else ""
        if end == begin + _STATUS_CHARS and number.isdecimal() and _is_status(text, begin):
            kind, value, key = STATUS, float(number), ""
            status_end = end
        elif begin == status_end + 1 and number.isdecimal() and match[3] not in _UNITS:
            kind, value, key = SIZE, float(number), ""  # of the answer
        else:
            before = text[begin - 1 : begin]
            quantity = _quantity(match, number, _key_before(text, begin) if before in _BEFORE else "")
            if quantity is None:
                continue
            kind, value, key = quantity
        name = key or f"{kind}#{1 + sum(one.kind == kind and '#' in one.name for one in found)}"
        found.append(TypedValue(name, kind, value))
        if len(found) == MAX_VALUES:
            break
    return found


def _is_status(text: str, begin: int) -> bool:
    """Whether this number stands behind the version of HTTP, or behind a method and a path."""
    if begin < _STATUS_CHARS or text[begin - 1] != " " or not "1" <= text[begin] <= "5":
        return False
    before = text.rfind(" ", max(0, begin - _MOST_PATH), begin - 1)
    word = text[before + 1 : begin - 1]
    if word.startswith("HTTP/"):
        return True
    method = text[text.rfind(" ", 0, max(0, before)) + 1 : max(0, before)]
    return word.startswith("/") and method.lstrip("\"'([") in _METHODS


def _key_before(text: str, begin: int) -> str:
    before = text[max(0, begin - _KEY_CHARS) : begin].rstrip(_QUOTES)
    if not before.endswith(("=", ":")):
        return ""
    found = _KEY_BACKWARDS.match(before[:-1].rstrip(_QUOTES)[::-1])
    return "" if found is None else found[0][:NAME_CHARS][::-1]


def _quantity(match: "re.Match[str]", number: str, key: str) -> Quantity | None:
    """The value of one number, None where it is no quantity."""
    if not number:
        found = _LONG.match(match[0])
        parts = found.groups(0) if found is not None else (0, 0, 0)
        return DURATION, 3600.0 * int(parts[0]) + 60.0 * int(parts[1]) + float(parts[2]), key
    space, word = match[2], match[3]
    if word is not None:
        unit = _UNITS.get(word)
        if unit is not None and not (space and word in _ADJACENT):
            return unit[0], _number(number) * unit[1], key
        if not space:
            return None  # `3rd`, `2x`
        if not key and "." not in number and _NOUN.fullmatch(word):
            return COUNT, _number(number), ""
    return _keyed(number, _number(number), key) if key else None


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _keyed(number: str, value: float, key: str) -> Quantity | None:
    typed, fraction = key_type(key), "." in number
    if typed is None:
        return None
    kind = typed.kind
    if kind == STATUS and not _HTTP_STATUS[0] <= value <= _HTTP_STATUS[1]:
        kind = CODE
    if kind in (STATUS, CODE):
        return None if fraction or value > _MOST_CODE else (kind, value, key)
    if not typed.unit:
        return None if value > _MOST_TIME else (kind, value, key)
    return kind, value * typed.scale, key
