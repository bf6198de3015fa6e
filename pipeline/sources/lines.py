"""Bytes to physical lines: cut at newlines, decoded without loss.

Text is UTF-8. An invalid byte becomes `\\xNN`, a NUL `\\x00`. Only a newline ends a line; a carriage return
before the newline is dropped. A line longer than the cap becomes pieces, cut at places that depend on the
line alone."""

from collections.abc import Iterable

import numpy as np
import polars as pl

from pipeline.sources.framing import (
    FIRST_PIECE,
    MAX_RECORD_BYTES,
    NEXT_PIECE,
    WHOLE_LINE,
    Framer,
    cut_between_characters,
)

NEWLINE = 0x0A


def decode(data: bytes) -> str:
    """Text of whole lines, invalid bytes and NULs escaped."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("utf-8", "backslashreplace")
    return text.replace("\0", "\\x00") if "\0" in text else text


def _lines(data: bytes) -> pl.Series | None:
    """The lines of a text that ends with a newline; None for text with bytes to escape.

    Polars decodes the bytes directly, without a Python string in between.
    """
    if b"\0" in data:
        return None
    try:
        # Polars unpacks a text that begins as packed data do, such as `x^`. None begin with a newline.
        return pl.read_lines(b"\n" + data, name="raw").to_series()[1:]
    except pl.exceptions.ComputeError:  # not UTF-8
        return None


class _Rows:
    """Rows collected one by one, for long lines."""

    def __init__(self) -> None:
        self._raws: list[str] = []
        self._parts: list[int] = []
        self._ends: list[int] = []

    def add(self, raw: str, part: int, end: int) -> None:
        self._raws.append(raw)
        self._parts.append(part)
        self._ends.append(end)

    def frame(self) -> pl.DataFrame:
        return _frame(
            pl.Series("raw", self._raws, dtype=pl.String),
            pl.Series("part", self._parts, dtype=pl.UInt8),
            np.array(self._ends, dtype=np.int64),
        )


class LineCutter:
    """Cuts a byte stream, given in blocks of any size, into rows for `Framer.feed_frame`.

    Rows: `raw` (at most the cap, also after escaping), `part` (see framing.WHOLE_LINE), `end` (offset in the
    stream behind the row, negative within a line). The cutter buffers at most one cap between blocks."""

    def __init__(self, *, offset: int = 0, inside: bool = False, cap: int = MAX_RECORD_BYTES) -> None:
        """`offset`: the begin of the stream; `inside`: the stream begins within a long line."""
        self._cap = cap
        self._tail = b""
        self._at = offset  # of the tail's first byte
        self._inside = inside
        self._mark = offset == 0  # a byte order mark may come

    @property
    def pending(self) -> int:
        """Bytes of the last, unfinished line."""
        return len(self._tail)

    def push(self, block: bytes) -> pl.DataFrame:
        """Rows of the lines and pieces that are complete with this block."""
        data = self._tail + block
        last = data.rfind(b"\n") + 1
        frames = [self._whole_lines(data[:last])] if last else []
        self._tail, self._at = data[last:], self._at + last
        if len(self._tail) > self._cap:
            frames.append(self._pieces_of_tail())
        return self._unmarked(pl.concat(frames)) if frames else _Rows().frame()

    def finish(self) -> pl.DataFrame:
        """The last line when the stream ends without a newline."""
        if not self._tail:
            self._inside = False
            return _Rows().frame()
        return self._unmarked(self._last_line())

    def _unmarked(self, rows: pl.DataFrame) -> pl.DataFrame:
        if self._mark and rows.height:
            self._mark = False
            if rows["raw"][0].startswith("\ufeff"):
                raw = rows["raw"].clone()
                raw[0] = raw[0].removeprefix("\ufeff")
                return rows.with_columns(raw)
        return rows

    def _last_line(self) -> pl.DataFrame:
        stop = len(self._tail)
        rows = self._line_by_line(self._tail, np.array([stop], dtype=np.int64))
        # without a newline the end is at the last byte
        rows = rows.with_columns(pl.col("end").clip(upper_bound=self._at + stop))
        self._tail, self._at = b"", self._at + stop
        return rows

    def _whole_lines(self, data: bytes) -> pl.DataFrame:
        """`data` ends with a newline."""
        stops = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == NEWLINE).astype(np.int64)
        if not self._inside and int(np.diff(stops, prepend=-1).max()) - 1 <= self._cap:
            raw = _lines(data)
            if raw is not None and raw.len() == len(stops):
                part = pl.Series(np.full(len(stops), WHOLE_LINE, dtype=np.uint8))
                return _frame(raw, part, stops + (self._at + 1))
        return self._line_by_line(data, stops)

    def _line_by_line(self, data: bytes, stops: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> pl.DataFrame:
        rows = _Rows()
        start = 0
        for stop in stops.tolist():
            start = self._cut_long(data, start, stop, rows, ended=True)
            part = NEXT_PIECE if self._inside else WHOLE_LINE
            rows.add(decode(data[start:stop]).removesuffix("\r"), part, self._at + stop + 1)
            self._inside = False
            start = stop + 1
        return rows.frame()

    def _pieces_of_tail(self) -> pl.DataFrame:
        rows = _Rows()
        start = self._cut_long(self._tail, 0, len(self._tail), rows, ended=False)
        self._tail, self._at = self._tail[start:], self._at + start
        return rows.frame()

    def _cut_long(
        self,
        data: bytes,
        start: int,
        stop: int,
        rows: "_Rows",
        *,
        ended: bool,
    ) -> int:
        """Appends the pieces of data[start:stop] except the last; returns the begin of the last piece.

        `ended`: the line ends at `stop`. A growing line is cut only above the cap, so cuts do not depend on
        the blocks."""
        while stop - start > self._cap or (ended and self._too_long(data[start:stop])):
            cut = cut_between_characters(data, start, min(self._cap, stop - start))
            if self._too_long(data[start:cut]):
                # an escape is four characters for one byte, so a quarter of the cap always fits
                cut = cut_between_characters(data, start, self._cap // 4)
            part = NEXT_PIECE if self._inside else FIRST_PIECE
            rows.add(decode(data[start:cut]), part, -(self._at + cut))
            self._inside = True
            start = cut
        return start

    def _too_long(self, data: bytes) -> bool:
        return len(data) * 4 > self._cap and len(decode(data).encode()) > self._cap


def _frame(
    raw: pl.Series, part: pl.Series, end: "np.ndarray[tuple[int], np.dtype[np.int64]]"
) -> pl.DataFrame:
    return pl.DataFrame({"raw": raw, "part": part, "end": pl.Series(end, dtype=pl.Int64)})


def sample(blocks: Iterable[bytes], framer: Framer, *, final: bool = True) -> None:
    """Gives the framer the beginning of a text as its sample. `final`: the text does not grow."""
    cutter = LineCutter()
    for block in blocks:
        framer.look(cutter.push(block)["raw"])
        if framer.settled:
            return
    framer.look(cutter.finish()["raw"], final=final)
