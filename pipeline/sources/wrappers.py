"""Wrappers around a line of a log: terminal colours, and the prefixes of container tools.

A wrapper is taken off before the formats look at a line. Wrappers nest in the order of `WRAPPERS`: Compose
may hold lines with a time of Docker. The raw column stays as it was read."""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import polars as pl

from pipeline.records.schema import UTC_US
from pipeline.sources import formats_json as pairs
from pipeline.sources.formats_text import CRI
from pipeline.sources.times import ISO_CLOCK, read_times, to_utc

WRAPPERS: Final = ("compose", "kubectl", "docker", "cri", "stamped", "envelope")
OWNED: Final = ("compose", "kubectl")  # several services write into one stream, each line under its name
STAMPING: Final = ("docker", "cri", "stamped")  # wrappers with a time, which wins over the inner one

_SOME_DAY: Final = datetime(2000, 1, 1, tzinfo=UTC)  # for a detection, which needs no times
_ESCAPE: Final = r"\x1b\["
_COLOURS: Final = r"\x1b\[[0-9;:?]*[A-Za-z]"
_QUOTED_COLOURS: Final = r"\\u001[bB]\[[0-9;:?]*[A-Za-z]"  # within JSON

# `docker compose logs`: `web-1  | text`; `docker service logs`; PM2: `0|web  | text`.
_COMPOSE: Final = r"(?:[0-9]{1,4}\|)?(?P<service>[A-Za-z0-9][A-Za-z0-9_.@-]{0,127}) +\|(?: |$)"
_KUBECTL: Final = r"\[pod/(?P<host>[^/\] \n]+)/(?P<service>[^\] \n]+)\](?: |$)"  # `kubectl logs --prefix`
# `kubectl logs --timestamps`, `docker logs --timestamps`: nanoseconds, which programs hardly ever write
_STAMP: Final = (
    r"(?P<time>[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2})\.(?P<fraction>[0-9]{7,9})"
    r"(?P<zone>Z|[+-][0-9]{2}:[0-9]{2})(?: |$)"
)
PREFIXES: Final = {"compose": _COMPOSE, "kubectl": _KUBECTL, "stamped": _STAMP}
# Compose numbers its containers, so such a name is no column of a table.
_NUMBERED: Final = r"^(?:[0-9]+\||[^ |]+(?:[-_]|\.)[0-9]+)"

# A collector's object around a line of a program: Fluent Bit, CloudWatch, Cloud Logging. `_INNER` has the
# line. A `message` beside other keys of the program is no such line.
_ENVELOPE_LINE: Final = r"(?s)^\s*\{.*\}\s*$"
_OUTER: Final = r'"(?:date"\s*:\s*[0-9]|kubernetes"\s*:\s*\{|stream"\s*:\s*"std(?:out|err)")'
_STAMPED: Final = r'"ingestionTime"\s*:\s*[0-9]'
_ENVELOPE_MARK: Final = (
    rf'(?s)"textPayload"\s*:\s*"|"log"\s*:\s*".*{_OUTER}|{_OUTER}.*"log"\s*:\s*"'
    rf'|"message"\s*:\s*".*{_STAMPED}|{_STAMPED}.*"message"\s*:\s*"'
)
_INNER: Final = ("textPayload", "log", "message")
# As Fluent Bit writes them, without blanks. None overlaps `_LOG_MEMBER`. Each costs a tenth of a pattern.
_LOG_MEMBER: Final = '"log":"'
_OUTER_MEMBERS: Final = (',"kubernetes":{', ',"stream":"stdout",', ',"stream":"stderr",')
_ALIKE: Final = 512  # objects that are decoded in one call; one with other members has all of them read alone
# Of an object that others may be like. A collector writes a dozen; each costs a field of a struct.
_MOST_MEMBERS: Final = 64
# A collector writes a few. Senders choose the keys, and a layout is a class with a decoder.
_LAYOUTS: Final = 64

# One CRI line: a full one loses its prefix, a partial one also its line end.
_CRI_PREFIX: Final = (
    r"(?m)^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]+(?:Z|[+-][0-9]{2}:[0-9]{2}) (?:stdout|stderr) "
    r"(?:F(?: |$)|P ?([^\n]*)(?:\n|\z))"
)


def uncoloured(raw: pl.Series) -> pl.Series:
    """The texts without terminal colours; the same series when it has none."""
    return raw.str.replace_all(_COLOURS, "") if raw.str.contains(_ESCAPE).any() else raw


def recognised(raw: pl.Series, name: str) -> pl.Series:
    """True for lines with this wrapper."""
    if name == "docker":
        return raw.str.contains(pairs.DOCKER_LINE)
    if name == "cri":
        return raw.str.contains("(?s)" + CRI.pattern)
    if name == "envelope":
        return _are_envelopes(raw)
    return raw.str.contains("^" + PREFIXES[name])


def is_claimed(lines: pl.Series, name: str, share: float, inside: float) -> bool:
    """Whether a sample's lines with this prefix really have a wrapper.

    `share`: of such lines in the sample; `inside`: of those with a known format behind the prefix. A table
    with bars looks like Compose, and a plain time in nanoseconds like Docker's."""
    if name == "compose":
        numbered = lines.str.contains(_NUMBERED).mean()
        return share >= 0.5 and (inside >= 0.5 or (isinstance(numbered, float) and numbered >= 0.5))
    return name != "stamped" or inside >= 0.5


def owners(raw: pl.Series, name: str) -> pl.Series:
    """The prefix of each line in a wrapper of `OWNED`; null for lines without one."""
    return uncoloured(raw).str.extract(f"^({PREFIXES[name]})").str.strip_chars_end()


def inner_lines(raw: pl.Series, formats: tuple[str, ...]) -> pl.Series:
    """Physical lines without colours and wrappers, exact enough for `formats.head_mask`."""
    return behind_prefixes(uncoloured(raw), formats)


def behind_prefixes(inner: pl.Series, formats: tuple[str, ...]) -> pl.Series:
    """Physical lines that have no colours, without their wrappers."""
    for name in WRAPPERS:
        if name not in formats or name == "envelope":  # a line of an envelope is a record, whatever is inside
            continue
        if name == "cri":
            inner = inner.str.replace(CRI.head, "")
        elif name == "docker":
            text = inner.str.extract(pairs.DOCKER_HEAD)
            text = (
                text.str.replace_all(_QUOTED_COLOURS, "")
                .str.replace_all(r"\\t", "\t")
                .str.replace_all(r"\\[nr]", "")
                .str.replace_all(r'\\(["\\])', "$1")
            )
            inner = text.zip_with(text.is_not_null(), inner)
        else:
            inner = inner.str.replace("^" + PREFIXES[name], "")
    return inner


def envelope_lines(raw: pl.Series) -> pl.Series:
    """The first line of the text inside each envelope."""
    inner = _unwrap_envelopes(raw, arrived=_SOME_DAY, zone="UTC", with_times=False)["inner"].drop_nulls()
    return inner.str.split("\n").list.first()


def unwrap(
    raw: pl.Series, name: str, *, arrived: datetime, zone: str = "UTC", with_times: bool = True
) -> pl.DataFrame:
    """`inner` text (null for other records), `timestamp`, `host` and `service` of records in a wrapper.

    The three may be null; an envelope has `level` and `process` too. Every line of a record loses its
    prefix. `with_times`: whether the caller reads times; an envelope's `timestamp` is null otherwise."""
    if name == "envelope":
        return _unwrap_envelopes(raw, arrived=arrived, zone=zone, with_times=with_times)
    blank = pl.Series([None], dtype=pl.String).new_from_index(0, raw.len())
    columns = {"host": blank, "service": blank}
    if name == "docker":
        wrapped = pairs.unwrap_docker(raw)
        inner = uncoloured(wrapped["inner"])
        time = read_times(wrapped["time"], arrived=arrived, zone="UTC")
    elif name == "cri":
        parts = raw.str.extract_groups(CRI.head).struct.unnest()
        time = to_utc(parts, ISO_CLOCK, arrived=arrived, zone="UTC")
        inner = raw.str.replace_all(_CRI_PREFIX, "${1}").set(parts["time"].is_null(), None)
    else:
        pattern = PREFIXES[name]
        parts = raw.str.extract_groups("^" + pattern).struct.unnest()
        inner = raw.str.replace_all("(?m)^" + pattern, "").set(parts.to_series(0).is_null(), None)
        time = blank.cast(UTC_US)
        if "time" in parts.columns:
            time = to_utc(parts, ISO_CLOCK, arrived=arrived, zone="UTC")
        columns |= {column: parts[column] for column in columns if column in parts.columns}
    return pl.DataFrame({"inner": inner, "timestamp": time, **columns})


def _are_envelopes(raw: pl.Series) -> pl.Series:
    """By the text alone. Patterns look only at objects that are not written as Fluent Bit writes them."""
    outer = raw.str.contains(_OUTER_MEMBERS[0], literal=True)
    for member in _OUTER_MEMBERS[1:]:
        if outer.all():
            break
        outer |= raw.str.contains(member, literal=True)
    found = (
        outer
        & raw.str.starts_with("{")
        & raw.str.ends_with("}")
        & raw.str.contains(_LOG_MEMBER, literal=True)
    )
    rows = (~found).arg_true()
    if not rows.len():
        return found
    others = raw.gather(rows)
    return found.scatter(rows, others.str.contains(_ENVELOPE_LINE) & others.str.contains(_ENVELOPE_MARK))


def _unwrap_envelopes(raw: pl.Series, *, arrived: datetime, zone: str, with_times: bool) -> pl.DataFrame:
    """The header columns of a collector's objects, and the program's line as `inner`; null in other rows."""
    rows = _are_envelopes(raw).fill_null(value=False).arg_true()
    contents = _Contents(with_times=with_times)
    contents.read_all(raw if rows.len() == raw.len() else raw.gather(rows))
    found = contents.columns(arrived=arrived, zone=zone)
    if rows.len() == raw.len():
        return found
    blank = (
        pl.Series(name, [None], dtype=kind).new_from_index(0, raw.len())
        for name, kind in found.schema.items()
    )
    return pl.DataFrame([column.scatter(rows, found[column.name]) for column in blank])


class _Layout(NamedTuple):
    """How objects with the same members are decoded in one call. A decoder refuses other objects."""

    decoder: msgspec.json.Decoder[Any]
    line: Callable[[Any], str] | None  # reads the line, None without one
    times: tuple[tuple[int, Callable[[Any], str]], ...]  # by their places
    keys: tuple[str, ...]  # of the other telling members
    others: Callable[[Any], Any]  # reads them: one alone, or a tuple of them


def _nothing(_: object) -> tuple[()]:
    return ()


def _layout_of(members: dict[str, msgspec.Raw]) -> _Layout | None:
    """Of objects like this one. None where a line or a time is no text, and for unusual keys."""
    if len(members) > _MOST_MEMBERS:
        return None
    for key, raw in members.items():
        if (key in _INNER or key in pairs.TIME_PLACES) and bytes(raw)[:1] != b'"':
            return None
        if not key.isprintable() or '"' in key or "\\" in key:
            return None
    return _layout(tuple(members))


@lru_cache(maxsize=_LAYOUTS)
def _layout(keys: tuple[str, ...]) -> _Layout:
    names = {key: f"member_{number}" for number, key in enumerate(keys)}
    texts = {key for key in keys if key in _INNER or key in pairs.TIME_PLACES}
    fields = [
        (name, str if key in texts else msgspec.Raw, msgspec.field(name=key)) for key, name in names.items()
    ]
    decoder = msgspec.json.Decoder(
        msgspec.defstruct("Envelope", fields, forbid_unknown_fields=True, gc=False)
    )
    line = min(texts.intersection(_INNER), default=None)
    times = sorted((pairs.TIME_PLACES[key], names[key]) for key in texts.difference(_INNER))
    telling = tuple(key for key in keys if key not in texts and pairs.is_telling(key))
    return _Layout(
        decoder,
        None if line is None else attrgetter(names[line]),
        tuple((place, attrgetter(name)) for place, name in times),
        telling,
        attrgetter(*(names[key] for key in telling)) if telling else _nothing,
    )


class _Beside(NamedTuple):
    """The header of an object without its line and its time, where both are texts."""

    header: pairs.Header
    key: str  # of a line that is no text, "" without one
    line: str | None


def _beside(found: Sequence[tuple[str, str]]) -> _Beside:
    """Of the pairs of an object, in the order of their keys."""
    key, line = next((pair for pair in found if pair[0] in _INNER), ("", None))
    return _Beside(pairs.header_of(found), key, line)


class _Contents:
    """Columns of a collector's objects. Most differ in line and time alone. The remainder is read once."""

    def __init__(self, *, with_times: bool) -> None:
        self._with_times = with_times  # whether times are read
        self._lines: list[str | None] = []
        self._which: list[int] = []  # of the distinct ones
        self._distinct: list[_Beside] = []
        self._known: dict[tuple[tuple[str, bytes], ...], int] = {}
        self._times: list[str] = []  # of each object in turn, the likeliest first
        self._of: list[int] = []  # the object of each time

    def read_all(self, texts: pl.Series) -> None:
        """Adds objects, which are envelopes each."""
        layout: _Layout | None = None
        for at in range(0, texts.len(), _ALIKE):
            some = texts.slice(at, _ALIKE)
            if layout is None:
                layout = _layout_of(pairs.members_of(some[0]) or {})
            if layout is not None and self._read_alike(some, layout):
                continue
            layout = None
            for text in some.to_list():
                self._read(text)

    def _read_alike(self, texts: pl.Series, layout: _Layout) -> bool:
        """Adds objects of one layout. False, without any of them, where one has another.

        Each text begins with a brace and ends with one. So no value goes on in the next text, and as many
        values as texts are one of each."""
        if texts.str.contains(pairs.HALF).any():
            return False
        try:
            rows = layout.decoder.decode_lines(texts.str.join("\n").item())
        except (ValueError, RecursionError):
            return False
        if len(rows) != texts.len():
            return False
        which: list[int] = []
        for others, run in groupby(map(layout.others, rows)):
            values = others if isinstance(others, tuple) else (others,)
            known = zip(layout.keys, map(bytes, values), strict=True)
            which += [self._number(known)] * len(list(run))
        lines = [None] * len(rows) if layout.line is None else list(map(layout.line, rows))
        if not self._with_times:
            self._which += which
            self._lines += lines
            return True
        for row, line, number in zip(rows, lines, which, strict=True):
            self._add(number, "", line, [(place, read(row)) for place, read in layout.times])
        return True

    def _read(self, text: str) -> None:
        """Adds an object."""
        members = pairs.members_of(text)
        if members is None:
            self._distinct.append(_beside(pairs.pairs_in(text)))
            self._add(len(self._distinct) - 1, "", None, [])
            return
        name, line = "", b""
        times: list[tuple[int, str]] = []
        others: list[tuple[str, bytes]] = []
        for key, raw in members.items():
            value = bytes(raw)
            is_text = value[:1] == b'"'
            if is_text and key in _INNER:
                if not name or key < name:
                    name, line = key, value
            elif is_text and key in pairs.TIME_PLACES:
                times.append((pairs.TIME_PLACES[key], pairs.member_text(value)))
            elif key in _INNER or pairs.is_telling(key):
                others.append((key, value))
        self._add(self._number(others), name, pairs.member_text(line) if name else None, times)

    def _number(self, others: Iterable[tuple[str, bytes]]) -> int:
        """The number of the object without line and time that has these members."""
        known = tuple(others)
        which = self._known.get(known)
        if which is None:
            which = self._known[known] = len(self._distinct)
            self._distinct.append(_beside(pairs.pairs_in(pairs.object_of(known))))
        return which

    def _add(self, which: int, key: str, line: str | None, times: list[tuple[int, str]]) -> None:
        beside = self._distinct[which]
        if beside.key and (not key or beside.key < key):
            line = beside.line
        self._lines.append(line)
        self._which.append(which)
        if not self._with_times:
            return
        times += beside.header.times
        if len(times) > 1:
            times.sort(key=itemgetter(0))
        for _, text in times:
            self._times.append(text)
            self._of.append(len(self._lines) - 1)

    def columns(self, *, arrived: datetime, zone: str) -> pl.DataFrame:
        which = pl.Series(self._which, dtype=pl.UInt32)
        headers = [beside.header for beside in self._distinct]
        columns = [
            pl.Series(name, [getattr(header, name) for header in headers], dtype=pl.String)[which]
            for name in pairs.HEADER
        ]
        lines = pl.Series("inner", self._lines, dtype=pl.String).str.strip_suffix("\n")
        return pl.DataFrame([self._timestamps(arrived=arrived, zone=zone), *columns, lines])

    def _timestamps(self, *, arrived: datetime, zone: str) -> pl.Series:
        """The first readable time of each object; none where times are not read."""
        if not self._with_times:
            return pl.Series("timestamp", [None], dtype=UTC_US).new_from_index(0, len(self._lines))
        texts = pairs.plain_times(pl.Series("timestamp", self._times, dtype=pl.String))
        read = read_times(texts, arrived=arrived, zone=zone)
        of = np.array(self._of, dtype=np.uint32)
        if np.array_equal(of, np.arange(len(self._lines))):
            return read
        readable = read.is_not_null()
        objects, first = np.unique(of[readable.to_numpy()], return_index=True)
        blank = pl.Series("timestamp", [None], dtype=UTC_US).new_from_index(0, len(self._lines))
        return blank.scatter(pl.Series(objects), read.filter(readable)[first])
