"""Files that are one document of many records: JSON arrays, pretty-printed JSON, Windows events as XML, and
requests of OTLP as the Collector's file exporter writes them.

`Elements` cuts a byte stream into elements: JSON objects at the top, within an array, or within `{"Records":
[...]}`; `<Event>...</Event>`. An element is a record, whatever its lines; a request of OTLP is those that the
intake makes of it, and a chunk ends behind the last one. Separators between elements
(brackets, commas, blanks) are stored nowhere, but their lines count for the record before them, or for the
first one.

Invariants for any division into blocks: every physical line counts once, and text other than separators is in
some record. A record's `line` is that of its first character; further records of one line have lines = 0. An
element is taken by its braces and quotes alone. Text outside of elements and an element without end become
records of a line each; after `_MAX_DAMAGE` of those the remainder is plain lines. An element above the cap
becomes pieces, like a long line."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import polars as pl

from pipeline.records.schema import RAW_SCHEMA, with_missing_columns
from pipeline.sources.framing import MAX_RECORD_BYTES, cut_between_characters
from pipeline.sources.lines import NEWLINE, decode
from pipeline.sources.protocols.contract import Hints, Undecodable
from pipeline.sources.protocols.otlp_json import decode_json
from pipeline.sources.pushed import framed

MAX_ELEMENT_BYTES: Final = 1 << 20  # above, an element counts as one without end
MAX_REQUEST_BYTES: Final = 16 << 20  # of OTLP: a batch of the Collector has 8,192 records
_MAX_DAMAGE: Final = 100  # each may cost a look at MAX_ELEMENT_BYTES
_MARK: Final = rb"(?:\xef\xbb\xbf)?"

_WRAPPER: Final = rb'\{\s{0,40}"(?:[Rr]ecords|events|logEvents|entries)"\s{0,40}:\s{0,40}\[\s{0,40}(?=\{)'
_JSON_OPENS: Final = re.compile(
    _MARK + rb'\s*(?:\[\s*\{\s*["}]|\{[ \t]*\r?\n\s*["}]|' + _WRAPPER + rb'\{\s*["}])'
)
_OTLP_OPENS: Final = re.compile(_MARK + rb'\s*\{\s*"resourceLogs"\s*:\s*\[')
_XML_OPENS: Final = re.compile(_MARK + rb"\s*(?:<\?xml[^>]{0,200}\?>\s*)?<Events?[\s>]")
# A beginning that may still become one of both.
_MAY_OPEN: Final = re.compile(
    rb"(?:\xef\xbb?)?|" + _MARK + rb"\s*(?:\[\s*(?:\{\s*)?|\{[^\n]{0,255}|\{[ \t]*\r?\n\s*|<[^\n]{0,255})?"
)
_MAY_OPEN_BYTES: Final = 4096

# Up to the next brace outside of strings. Possessive, so a failure costs one pass.
_BRACE: Final = re.compile(rb'(?:[^"{}]++|"(?:[^"\\\n]++|\\[^\n])*+")*+([{}])')
_NO_BRACE: Final = re.compile(rb'(?:[^"{}]++|"(?:[^"\\\n]++|\\[^\n])*+")*+')
_XML_START: Final = re.compile(rb"<Event[\s>]")
_XML_END: Final = b"</Event>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementKind:
    """A kind of document. `separators` stand between elements; `resync` is where a damaged one may end. An
    element of more bytes than `most` counts as one without end."""

    name: str
    starts: re.Pattern[bytes]
    separators: re.Pattern[bytes]
    resync: re.Pattern[bytes]
    most: int = MAX_ELEMENT_BYTES


JSON: Final = ElementKind(
    name="json",
    starts=re.compile(rb"\{"),
    separators=re.compile(_MARK + rb"(?:[\s,\[\]}]|" + _WRAPPER + rb")*"),
    resync=re.compile(rb"\n|\}[ \t]*(?=,[ \t]*\{)"),
)
OTLP: Final = replace(JSON, name="otlp", most=MAX_REQUEST_BYTES)
XML: Final = ElementKind(
    name="xml",
    starts=_XML_START,
    separators=re.compile(_MARK + rb"(?:\s|<\?xml[^>]{0,200}\?>|</?Events(?:\s[^>]{0,200})?>)*"),
    resync=re.compile(rb"\n|(?<=.)(?=<Event[\s>])"),
)


def element_kind(beginning: bytes) -> ElementKind | None:
    """The kind of document that begins so; None for lines."""
    if _OTLP_OPENS.match(beginning):
        return OTLP
    if _JSON_OPENS.match(beginning):
        return JSON
    return XML if _XML_OPENS.match(beginning) else None


class Elements:
    """Blocks of bytes to records. `rest` is not None once the remainder is lines: it begins at `offset`.

    `line`: physical lines begun before `offset`; `inside`: the offset is within a line. Without `kind` the
    first bytes tell the kind."""

    def __init__(
        self,
        *,
        offset: int = 0,
        line: int = 0,
        inside: bool = False,
        kind: ElementKind | None = None,
        cap: int = MAX_RECORD_BYTES,
    ) -> None:
        self.offset, self.inside = offset, inside
        self.rest: bytes | None = None
        self._kind, self._cap = kind, cap
        self._data = b""
        self._at = 0  # place of `offset` in `_data`
        self._newlines = line - inside  # before `offset`
        self._begun = line  # lines that records have counted
        self._open = (0, 0)  # of an unfinished element: bytes looked at, depth
        self._held: list[_Row] = []  # pieces of the last record, until the separators behind are known
        self._rows: list[_Row] = []
        self._damage = 0

    @property
    def line(self) -> int:
        """Physical lines begun before `offset`."""
        return self._newlines + self.inside

    def push(self, block: bytes, *, final: bool = False) -> pl.DataFrame:
        """The records that end with this block: RAW_SCHEMA and `end` (negative within a line)."""
        self._data = self._data[self._at :] + block
        self._at = 0
        if self._kind is None:
            self._kind = element_kind(self._data)
            if self._kind is None:
                if final or len(self._data) > _MAY_OPEN_BYTES or not _MAY_OPEN.fullmatch(self._data):
                    self._give_up()
                return _frame([])
        self._cut(self._kind, final=final)
        if final and self.rest is None:
            self._close()
        return self._take_ready()

    def flush(self) -> pl.DataFrame:
        """The last whole element; the separators behind it then count for the next one."""
        self._release()
        return self._take_ready()

    # Cutting

    def _cut(self, kind: ElementKind, *, final: bool) -> None:
        while True:
            found = kind.separators.match(self._data, self._at)
            start = found.end() if found else self._at
            if start == len(self._data):
                if start - self._at > self._cap:  # blanks without end
                    self._pass(start)
                return
            is_element = kind.starts.match(self._data, start) is not None
            end = self._end_of(kind, start, final=final) if is_element else -1
            if end < 0:
                end = self._end_of_damage(kind, start, final=final, unknown=not is_element)
                self._damage += end > 0
            if end == 0:  # the separators wait as well: they may grow
                return
            self._pass(start)
            if self._damage > _MAX_DAMAGE:
                self._give_up()
                return
            self._take(end)

    def _end_of(self, kind: ElementKind, start: int, *, final: bool) -> int:
        """The end of the element at `start`; 0 if more bytes are needed, -1 for one without end."""
        end = self._end_of_event(start) if kind is XML else self._end_of_object(start, kind.most)
        if end == 0 and final:
            return -1
        if end == 0 and len(self._data) - start > kind.most:
            return -1
        return -1 if end - start > kind.most else end

    def _end_of_object(self, start: int, most: int) -> int:
        data = self._data
        seen, depth = self._open
        self._open = (0, 0)
        at = start + seen
        while found := _BRACE.match(data, at):
            at = found.end()
            depth += 1 if found[1] == b"{" else -1
            if depth == 0:
                return at
            if at - start > most:
                return -1
        stuck = _NO_BRACE.match(data, at)
        # a string never holds a line end, so its quote is missing
        if stuck and data.find(b"\n", stuck.end()) >= 0:
            return -1
        self._open = (at - start, depth)
        return 0

    def _end_of_event(self, start: int) -> int:
        end = self._data.find(_XML_END, start)
        limit = len(self._data) if end < 0 else end
        if _XML_START.search(self._data, start + 1, limit):
            return -1
        return 0 if end < 0 else end + len(_XML_END)

    def _end_of_damage(self, kind: ElementKind, start: int, *, final: bool, unknown: bool) -> int:
        """The end of a piece of text that is no element; 0 if more bytes are needed."""
        self._open = (0, 0)
        stop = min(len(self._data), start + self._cap)
        found = kind.resync.search(self._data, start + 1, stop)
        if unknown and (
            element := kind.starts.search(self._data, start + 1, found.start() if found else stop)
        ):
            return element.start()
        if found:
            return found.start() + (found[0] != b"\n" and len(found[0]))
        if stop == start + self._cap:
            return cut_between_characters(self._data, start, self._cap)
        return stop if final or not unknown else 0

    # Rows

    def _pass(self, start: int) -> None:
        """Moves on over separators: their whole lines count for the record before."""
        if self._held:
            last = self._data.rfind(b"\n", self._at, start) + 1
            self._advance(last or start)
            self._release()
        self._advance(start)

    def _advance(self, to: int) -> None:
        if to > self._at:
            self.offset += to - self._at
            self._newlines += self._data.count(b"\n", self._at, to)
            self.inside = self._data[to - 1] != NEWLINE
            self._at = to

    def _take(self, end: int) -> None:
        """The bytes up to `end` as a record, held until the separators behind it are known."""
        self._release()
        line, at = self._newlines + 1, self._at
        data = self._data[at:end]
        if self._kind is OTLP and (records := _records_of(data)) is not None:
            self._advance(end)
            self._held = [
                _Row(raw=raw, line=line, end=0, header=header) for raw, *header in records.iter_rows()
            ]
            return
        text = decode(data)
        room = len(data)
        if room > self._cap // 4 and len(text.encode()) > self._cap:
            # an escape is four characters for one byte
            room = self._cap if len(text.encode()) == room else self._cap // 4
        while at < end:
            cut = end if end - at <= room else cut_between_characters(self._data, at, room)
            piece = text if room == len(data) else decode(self._data[at:cut])
            self._advance(cut)
            self._held.append(_Row(raw=_text(piece), line=line, end=self.offset))
            at = cut

    def _release(self) -> None:
        """The held record with its count of lines."""
        if not self._held:
            return
        for number, row in enumerate(self._held):
            row.lines = self.line - self._begun if number == 0 else 0
            row.end = -row.end
        last = self._held[-1]
        last.end = -self.offset if self.inside else self.offset
        self._begun = self.line
        self._rows += self._held
        self._held = []

    def _close(self) -> None:
        """At the end: the last separators count for the last record; without one they are a record."""
        if not self._held and self._at < len(self._data):
            self._take(len(self._data))
        self._advance(len(self._data))
        self._release()

    def _give_up(self) -> None:
        self._release()
        self.rest, self._data, self._at = self._data[self._at :], b"", 0

    def _take_ready(self) -> pl.DataFrame:
        rows, self._rows = self._rows, []
        return _frame(rows)


_HEADER: Final = ("timestamp", "timed", "level", "host", "process", "service", "message")
_UNREAD: Final = (None,) * len(_HEADER)


def _records_of(request: bytes) -> pl.DataFrame | None:
    """The columns `raw` and _HEADER of a request's records; None for another object and an empty request."""
    try:
        records = decode_json(request, Hints()).records
    except Undecodable:
        return None
    return framed(records)[0].select("raw", *_HEADER) if records.height else None


@dataclass(slots=True, kw_only=True)
class _Row:
    raw: str
    line: int
    end: int
    lines: int = 0
    header: Sequence[Any] = _UNREAD  # the values of _HEADER


def _text(text: str) -> str:
    return text.replace("\r\n", "\n").removesuffix("\r") if "\r" in text else text


def _frame(rows: "list[_Row]") -> pl.DataFrame:
    frame = pl.DataFrame(
        {
            "raw": pl.Series([row.raw for row in rows], dtype=pl.String),
            "line": pl.Series([row.line for row in rows], dtype=pl.UInt64),
            "lines": pl.Series([row.lines for row in rows], dtype=pl.UInt32),
        }
    )
    if any(row.header is not _UNREAD for row in rows):
        headers = pl.DataFrame(
            [row.header for row in rows], schema={name: RAW_SCHEMA[name] for name in _HEADER}, orient="row"
        )
        frame = frame.hstack(headers)
    ends = pl.Series("end", [row.end for row in rows], dtype=pl.Int64)
    return with_missing_columns(frame).with_columns(ends)
