"""Texts of key-value pairs: JSON, logfmt, the notation of FortiGate, and Windows events as XML.

Each notation has a function that gives the pairs of a text; `parse_pairs` reads all alike (pairs.py)."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from html import unescape
from typing import Any, Final

import msgspec
import polars as pl

from pipeline.sources.pairs import Pairs, are_envelopes, read_lines, read_records
from pipeline.sources.protocols.json_text import FAULTS, json_of

JSON_HEAD: Final = r'^\{\s*"[^"]+"\s*:'
JSON_LINE: Final = r'(?s)^\s*\{\s*"[^"]+"\s*:.*\}\s*$'
_JSON: Final = re.compile(r'\s*\{\s*"[^"]+"\s*:')
QUOTED_COLOURS: Final = r"\\u001[bB]\[[0-9;:?]*[A-Za-z]"  # within JSON
_WHOLE_COLOURS: Final = rf"((?:^|[^\\])(?:\\\\)*){QUOTED_COLOURS}"
_COLOUR_MARK: Final = r"\\u001[bB]\["
COLOURS: Final = r"\x1b\[[0-9;:?]*[A-Za-z]"

_KEY: Final = r"[A-Za-z_@][A-Za-z0-9_.@/-]*"
_PAIR: Final = rf'{_KEY}=(?:"(?:[^"\\]|\\.)*(?:"|$)|[^ "]*)'
# The text itself may stand without quotes.
LOGFMT_LINE: Final = (
    rf'(?s)^(?:{_PAIR} +)+(?:{_PAIR}\s*|(?:msg|message)=[^ "].*)$'
    r'|^(?:msg|message)=[^ "].* (?:level|lvl|severity)=[A-Za-z]'
)
# key=value text is logfmt only with one of these keys
LOGFMT_MARK: Final = r"(?:^| )(?:msg|message|level|lvl|severity)="
_LOGFMT: Final = re.compile(rf'({_KEY})=(?:"([^"\\]*(?:\\.[^"\\]*)*)(?:"|$)|([^ "]*))', re.DOTALL)
_LOGFMT_TEXT: Final = re.compile(r'(?:^| )(msg|message)=(?=[^ "])')
_ESCAPED: Final = re.compile(r'\\(["\\])')

# Firewalls of Fortinet write the date and the time as two pairs.
FORTIGATE_LINE: Final = (
    r"^(?:<[0-9]{1,3}>)?(?:[A-Za-z_]+=[^ ]+ ){0,8}date=[0-9]{4}-[0-9]{2}-[0-9]{2}"
    r" time=[0-9]{2}:[0-9]{2}:[0-9]{2} [A-Za-z_]+="
)
# Its keys that mean something else here, and their names in the message.
_FORTIGATE_KEYS: Final = {
    "devname": "host", "service": "dstservice", "app": "appname", "hostname": "urlhost", "name": "objname",
    "logdesc": "text",
}  # fmt: skip

XML_HEAD: Final = r"^\s*<Event[\s>]"
XML_LINE: Final = r"(?s)^\s*<Event[\s>].*</Event>\s*$"

_MEMBERS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXT: Final = msgspec.json.Decoder(str)
_ANY: Final = msgspec.json.Decoder()
_QUOTE, _BRACKETS = ord('"'), b"{["
_MAX_DEPTH: Final = 8  # deeper objects stay compact JSON
_LONG: Final = 16_384  # a text that ends within an object may be the beginning of a line longer than a record
_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?|[{}\[\],]', re.DOTALL)
_LAST_MEMBER: Final = re.compile(r'[,\s]*"([^"\\]+)"\s*:\s*(.*)', re.DOTALL)
_HALF_ESCAPE: Final = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?$")


def parse_pairs(raw: pl.Series, name: str, *, arrived: datetime, zone: str) -> pl.DataFrame:
    """Header columns and message of the texts in this notation; message is null in the others."""
    return read_records(_pairs_of_texts(raw, name), arrived=arrived, zone=zone, in_order=name != "json")


def parse_envelopes(raw: pl.Series, *, arrived: datetime, zone: str, with_times: bool) -> pl.DataFrame:
    """The columns of `read_lines`: of JSON objects around a line of a program."""
    return read_lines(_pairs_of_texts(raw, "json"), arrived=arrived, zone=zone, with_times=with_times)


def hold_lines(raw: pl.Series) -> pl.Series:
    """True for JSON objects around a line of a program."""
    return are_envelopes(_pairs_of_texts(raw, "json"))


def recognised_pairs(raw: pl.Series, name: str) -> pl.Series:
    """True for texts of this notation."""
    match name:
        case "json":
            return raw.str.contains(JSON_LINE)
        case "windows-xml":
            return raw.str.contains(XML_LINE)
        case "fortigate":
            return raw.str.contains(FORTIGATE_LINE)
        case _:
            return raw.str.contains(LOGFMT_LINE) & raw.str.contains(LOGFMT_MARK)


def _pairs_of_texts(raw: pl.Series, name: str) -> Sequence[Pairs | None]:
    """The pairs of each text. Rows with the same keys share them, and values are tuples: the collector of
    garbage looks at lists and at new tuples again and again, which takes a quarter of the time."""
    if name == "json":
        if raw.str.contains(_COLOUR_MARK).any():
            raw = raw.str.replace_all(_WHOLE_COLOURS, "${1}")
        read: Callable[[str], Pairs | None] = _JsonReader().pairs
    else:
        read = _READERS[name]
        raw = raw.set(~recognised_pairs(raw, name), None)
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    rows: list[Pairs | None] = []
    for text in raw.to_list():
        pairs = None if text is None else read(text)
        if pairs is not None:
            keys, values = pairs
            pairs = known.setdefault(keys, keys), tuple(values)
        rows.append(pairs)
    return rows


# JSON


class _JsonReader:
    """Objects to pairs. It remembers those of nested values, because many records name the same pod."""

    def __init__(self) -> None:
        self._nested: dict[tuple[str, bytes], Pairs] = {}

    def pairs(self, text: str) -> Pairs | None:
        """None for any other text."""
        try:
            return self._members(text)
        except FAULTS:
            if len(text) < _LONG or not _JSON.match(text):
                return None
        whole, key, value = _halves(text.lstrip())
        try:
            keys, values = self._members(whole)
        except FAULTS:
            return None
        return ((*keys, key), [*values, value]) if keys and key else None

    def _members(self, text: str) -> Pairs:
        keys: list[str] = []
        values: list[str] = []
        for key, raw in _MEMBERS.decode(text).items():
            value = bytes(raw)
            first = value[0]
            if first == _QUOTE:
                keys.append(key)
                values.append(_TEXT.decode(value))
            elif first in _BRACKETS:
                nested = self._nested.get((key, value))
                if nested is None:
                    nested = self._nested[key, value] = _flat({key: _ANY.decode(value)})
                keys += nested[0]
                values += nested[1]
            elif value != b"null":
                keys.append(key)
                values.append(value.decode())
        return tuple(keys), values


def _scalar(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json_of(value)


def _flat(members: Mapping[str, Any]) -> Pairs:
    pairs = list(_flatten(members, "", 0))
    return tuple(key for key, _ in pairs), [value for _, value in pairs]


def _flatten(value: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, dict) and item and depth < _MAX_DEPTH:
            yield from _flatten(item, f"{prefix}{key}.", depth + 1)
        elif key == "MESSAGE" and not prefix and (text := _bytes_as_text(item)) is not None:
            yield key, text
        elif (scalar := _scalar(item)) is not None:
            yield prefix + key, scalar


def _bytes_as_text(numbers: Any) -> str | None:
    """The text of journald's list of bytes; None for other values."""
    if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 256 for n in numbers):
        return None
    return re.sub(COLOURS, "", bytes(numbers).decode("utf-8", "backslashreplace"))


def _halves(text: str) -> tuple[str, str, str]:
    """Of an object that is cut off: its whole members as an object, the key of the last one, and the
    beginning of its value."""
    depth, last = 0, 1
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark in "{[":
            depth += 1
        elif mark in "}]":
            depth -= 1
        elif mark == "," and depth == 1:
            last = token.start()
    found = _LAST_MEMBER.match(text, last)
    key, value = (found[1], found[2]) if found else ("", text[last:].lstrip(", "))
    with suppress(*FAULTS):  # a value of another kind stays as it is written
        value = _TEXT.decode(_HALF_ESCAPE.sub("", value) + '"')
    return text[:last] + "}", key, value


# Other notations


def _logfmt_pairs(text: str) -> Pairs:
    bare = None
    if ' msg="' not in text and ' message="' not in text and (bare := _LOGFMT_TEXT.search(text)):
        end = _end_of_text(text, bare.end())
        whole, text = text[bare.end() : end], f"{text[: bare.start()]}{text[end:]}"
    found = _LOGFMT.findall(text)
    keys = [key for key, _, _ in found]
    values = [quoted or plain for _, quoted, plain in found]
    if "\\" in text:
        values = [_unescaped(quoted) or plain for _, quoted, plain in found]
    if bare:
        keys.append(bare[1])
        values.append(whole)
    return tuple(keys), values


def _unescaped(value: str) -> str:
    return _ESCAPED.sub(r"\1", value).replace("\\n", "\n") if "\\" in value else value


def _end_of_text(text: str, at: int) -> int:
    """Where the pairs behind a text without quotes begin: the last ones, without other words between them."""
    begin, behind = len(text), at
    for found in _LOGFMT.finditer(text, at):
        if text[found.start() - 1] != " ":
            continue
        if begin == len(text) or text[behind : found.start()].strip():
            begin = found.start()
        behind = found.end()
    return len(text[:begin].rstrip()) if not text[behind:].strip() else len(text)


def _fortigate_pairs(text: str) -> Pairs:
    keys, values = _logfmt_pairs(text)
    return tuple(_FORTIGATE_KEYS.get(key, key) for key in keys), values


# No parser of XML: an entity could make a short text long, and a damaged event would be lost.
_XML_FIELDS: Final = tuple(
    (key if key == "EventID" else f"Event.System.{key}", re.compile(pattern))
    for key, pattern in (
        ("Provider.Name", r"<Provider\b[^>]*?\bName=(?:'([^']*)'|\"([^\"]*)\")"),
        ("EventID", r"<EventID\b[^>]*>([^<]*)<"),
        ("Level", r"<Level>([^<]*)<"),
        ("TimeCreated.SystemTime", r"<TimeCreated\b[^>]*?\bSystemTime=(?:'([^']*)'|\"([^\"]*)\")"),
        ("Execution.ProcessID", r"<Execution\b[^>]*?\bProcessID=(?:'([^']*)'|\"([^\"]*)\")"),
        ("Computer", r"<Computer>([^<]*)<"),
    )
)
_XML_MESSAGE: Final = re.compile(r"<RenderingInfo\b.*?<Message>([^<]*)<", re.DOTALL)
_XML_DATA: Final = re.compile(r"<Data(?:\s+Name=(?:'([^']*)'|\"([^\"]*)\"))?\s*>([^<]*)</Data>")


def _event_pairs(text: str) -> Pairs:
    found: dict[str, str] = {}
    for key, pattern in _XML_FIELDS:
        if field := pattern.search(text):
            found[key] = unescape(next(filter(None, field.groups()), ""))
    if rendered := _XML_MESSAGE.search(text):
        found["message"] = unescape(rendered[1]).strip()
    else:
        for number, data in enumerate(_XML_DATA.finditer(text), 1):
            if value := unescape(data[3]).strip():
                found[f"data.{data[1] or data[2] or number}"] = value
    return tuple(found), list(found.values())


_READERS: Final[Mapping[str, Callable[[str], Pairs]]] = {
    "windows-xml": _event_pairs,
    "fortigate": _fortigate_pairs,
    "logfmt": _logfmt_pairs,
}
PAIR_FORMATS: Final = ("json", *_READERS)
