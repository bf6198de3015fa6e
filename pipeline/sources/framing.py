"""Physical lines to records: a stack trace is one record of many lines.

Invariants for any division of the lines into feeds: `lines` counts every physical line once, no text is
dropped, no record exceeds the cap, and none has lines of two services. A record that would pass the cap is
closed, and its next line begins a new record. A line longer than the cap becomes consecutive records of one
`line` number, the first with lines = 1, the others with lines = 0. Records joined by newlines (pieces with
lines = 0: by nothing) are the input.
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import polars as pl

from pipeline.records.declared import DETECTED, FormatChoice
from pipeline.records.schema import RAW_SCHEMA, nulls
from pipeline.records.traces import KINDS, pattern_of
from pipeline.sources.formats import BLOCKS, VAGUE, detect, head_mask
from pipeline.sources.formats_delimited import belong_before, is_layout, read_layout
from pipeline.sources.joining.joiner import Joiner
from pipeline.sources.joining.two_streams import DOCKER_BEGIN, TWO_STREAMS, Weave
from pipeline.sources.wrappers import OWNED, behind_prefixes, inner_lines, owners, uncoloured

MAX_RECORD_BYTES: Final = 65536
# Enough to tell the format of a file that opens with a banner.
SAMPLE_LINES: Final = 200
# A source of blank lines must not wait for ever while the sample fills.
MAX_LOOKED_AT: Final = 20_000

# Values of `part`: a whole line, or the first or a later piece of a line longer than the cap.
WHOLE_LINE: Final = 0
FIRST_PIECE: Final = 1
NEXT_PIECE: Final = 2

DOCUMENTS: Final = ("envelope",)  # the formats of a collector's objects, without those of their lines
# What lines without a time, and lines without any format, do not have.
_MAY_BE_TIMED: Final = r"[0-9]{1,2}[:.][0-9]{2}|[0-9]{8}|[0-9][-/][0-9]"
_MAY_HAVE_A_FORMAT: Final = rf"{_MAY_BE_TIMED}|[A-Za-z_]=|^\W*(?:[A-Z]{{3,}}\b|[IWEFD][0-9])|^\s*[{{\[<(\"']"
_JOINED: Final = "end"
# The other columns are null until `formats.parse` reads the header. The level is that of a crash without one.
_LEVEL: Final = "level"
_FRAMED: Final = ("raw", "line", "lines", _LEVEL)
_OF_ROWS: Final = ("raw", "part", _JOINED, "size", "line", "lines")


class Framer:
    """Joins lines to records; detects the formats in the first lines unless given.

    `sample` holds the first lines of the source, for readers that start in its middle.
    """

    def __init__(
        self,
        *,
        max_record_bytes: int = MAX_RECORD_BYTES,
        formats: tuple[str, ...] | None = None,
        choice: FormatChoice = DETECTED,
        sample: Sequence[str] = (),
        first_line: int = 1,
    ) -> None:
        self._cap = max_record_bytes
        if formats is None and choice.forced:
            formats = (choice.forced,)
        self._given = formats
        self._declared = choice.declared
        self.formats: tuple[str, ...] = formats or ()
        self._sample: list[str] = []
        self._looked_at = 0
        self._settled = False
        self._waiting: list[pl.DataFrame] = []  # lines before the formats were detected
        self._open: pl.DataFrame | None = None  # the lines of the open record
        self._next_line = first_line
        self._joiner = Joiner()
        self._weave: Weave | None = None
        self._in_table = 0  # what the row before leaves open
        self._owner = ""  # prefix of the line before, where services share the stream
        if sample:
            self.look(pl.Series("raw", sample, dtype=pl.String))

    def feed(self, lines: Sequence[str] | pl.Series) -> pl.DataFrame:
        """RAW_SCHEMA frame of the records that these lines finish."""
        return self.feed_frame(pl.DataFrame({"raw": pl.Series("raw", lines, dtype=pl.String)})).drop(_JOINED)

    def flush(self) -> pl.DataFrame:
        """The last open record; the next line begins a new one."""
        return self.flush_frame().drop(_JOINED)

    def feed_frame(self, lines: pl.DataFrame) -> pl.DataFrame:
        """As `feed`, for a frame with column `raw` and optionally `part` (see WHOLE_LINE) and `end`.

        `end` is an Int64 of a line, such as the offset behind the line; a record has the `end` of its last
        line."""
        frame = self._numbered(self._split_long(lines))
        if frame.is_empty():
            return _no_records()
        if self._settled:
            return self._frame(frame)
        self.look(frame["raw"])
        self._waiting.append(frame)
        return self._frame(self._released()) if self.settled else _no_records()

    def flush_frame(self) -> pl.DataFrame:
        """As `flush`, with the column `end`."""
        records = self._frame(self._released()) if self._waiting else _no_records()
        if self._weave is not None and (held := self._weave.flush()) is not None:
            records = pl.concat([records, self._frame_in_turn(held)])
        if self._open is not None:
            records = pl.concat([records, _join(self._open)])
            self._open = None
        self._joiner.reset()
        if self._weave is not None:
            self._weave.reset()
        self._in_table = 0
        self._owner = ""
        return records

    def frame_texts(self, lines: pl.DataFrame, starts: pl.Series) -> pl.DataFrame:
        """The records of whole texts that stand one behind another, as `feed_frame`; `line` counts through.

        `starts`: true for the first line of each. No line is longer than the cap. The formats are settled."""
        records = self._frame(self._numbered(self._split_long(lines)).with_columns(starts.alias("starts")))
        return pl.concat([records, self.flush_frame()])

    # Which formats

    @property
    def settled(self) -> bool:
        """True once the formats are final. Before, only a flush gives records."""
        return self._settled

    def look(self, lines: pl.Series, *, final: bool = False) -> None:
        """Adds lines to the sample without framing. A full sample, or `final`, settles the formats."""
        if self._settled:
            return
        missing = SAMPLE_LINES - len(self._sample)
        lines = lines.head(MAX_LOOKED_AT - self._looked_at)
        self._looked_at += lines.len()
        filled = lines.filter(lines.str.contains(r"\S"))
        self._sample.extend(filled.head(missing).to_list())
        if len(self._sample) >= SAMPLE_LINES or self._looked_at >= MAX_LOOKED_AT or final:
            self._decide()
            self._settled = True
            self._sample = []

    def _decide(self) -> None:
        """Formats and strictness from the sample so far."""
        self.formats = detect(self._sample, self._declared) if self._given is None else self._given
        sample_lines = pl.Series("raw", self._sample, dtype=pl.String)
        self._joiner.decide(inner_lines(sample_lines, self.formats), self.formats)
        self._weave = None if TWO_STREAMS.isdisjoint(self.formats) else Weave(self.formats)

    def _released(self) -> pl.DataFrame:
        if not self._settled:
            self._decide()
        frame = pl.concat(self._waiting)
        self._waiting = []
        return frame

    # Rows

    def _split_long(self, lines: pl.DataFrame) -> pl.DataFrame:
        """Rows of at most the cap: a longer line becomes pieces, cut between characters."""
        n = lines.height
        columns = [lines["raw"]]
        for name, kind in (("part", np.uint8), (_JOINED, np.int64)):
            columns.append(lines[name] if name in lines.columns else pl.Series(name, np.zeros(n, dtype=kind)))
        size = lines["raw"].str.len_bytes().alias("size")
        lines = pl.DataFrame([*columns, size])
        if not n or int(size.max()) <= self._cap:  # type: ignore[arg-type] # of numbers
            return lines
        raws: list[str] = []
        parts: list[int] = []
        ends: list[int] = []
        for raw, part, end, size in lines.iter_rows():
            if size <= self._cap:
                pieces: Iterator[str] = iter((raw,))
            else:
                pieces = split_text(raw, self._cap)
                part = FIRST_PIECE if part == WHOLE_LINE else part  # noqa: PLW2901
            for number, piece in enumerate(pieces):
                raws.append(piece)
                parts.append(NEXT_PIECE if number else part)
                ends.append(end)
        frame = pl.DataFrame(
            {
                "raw": pl.Series(raws, dtype=pl.String),
                "part": pl.Series(parts, dtype=pl.UInt8),
                _JOINED: pl.Series(ends, dtype=pl.Int64),
            }
        )
        return frame.with_columns(pl.col("raw").str.len_bytes().alias("size"))

    def _numbered(self, frame: pl.DataFrame) -> pl.DataFrame:
        if frame.is_empty() or frame["part"].max() == WHOLE_LINE:
            first, n = self._next_line, frame.height
            self._next_line += n
            number = pl.Series("line", np.arange(first, first + n, dtype=np.uint64))
            return frame.with_columns(number, pl.Series("lines", np.ones(n, dtype=np.uint32)))
        fresh = (frame["part"] != NEXT_PIECE).cast(pl.UInt32)
        count = fresh.cast(pl.UInt64).cum_sum()
        numbered = frame.with_columns(
            # a later piece of a line from an earlier feed has the previous number
            (count + self._next_line - 1).cast(pl.UInt64).alias("line"),
            fresh.alias("lines"),
        )
        self._next_line += int(fresh.sum())
        return numbered

    def _frame(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Records that end within these rows; the last record stays open. `starts`: rows that begin one."""
        return self._frame_in_turn(frame if self._weave is None else self._weave.in_turn(frame))

    def _frame_in_turn(self, frame: pl.DataFrame) -> pl.DataFrame:
        if frame.is_empty():
            return _no_records()
        begins, levels = self._begins(frame)
        if "starts" in frame.columns:
            begins = begins | frame["starts"]
        frame = frame.select(_OF_ROWS).with_columns(begins.alias("begins"), levels.alias(_LEVEL))
        if begins.all() and frame["part"].max() == WHOLE_LINE:
            before, self._open = self._open, frame[-1:]
            records = _completed(frame[:-1])
            return records if before is None else pl.concat([_join(before), records])
        if self._open is not None:
            frame = pl.concat([self._open, frame])
        is_line = frame["part"] == WHOLE_LINE
        # pieces of a long line are records of their own, and the next line begins a record
        begins = frame["begins"] | ~is_line | ~is_line.shift(1, fill_value=True)
        begins[0] = True
        group = begins.cast(pl.UInt32).cum_sum()
        frame = frame.with_columns(begins.alias("begins"), group.alias("group"))
        if frame.height > group[-1]:
            frame = self._capped(frame)
        start = int(np.flatnonzero(frame["begins"].to_numpy())[-1])
        self._open = frame[start:].drop("group")
        return _join(frame[:start])

    def _begins(self, frame: pl.DataFrame) -> tuple[pl.Series, pl.Series]:
        """True for rows that begin a record, by their text, their service and the row before, and the levels
        of such records."""
        raw = frame["raw"]
        inner = inner_lines(raw, self.formats)
        levels: pl.Series | None = None
        if table := next(filter(is_layout, self.formats), ""):
            joined, self._in_table = belong_before(inner, read_layout(table), state=self._in_table)
            begins = ~joined
        else:
            found = self._joiner.joins(inner, self.formats)
            begins, levels = found.begins, found.levels
        if self._weave is not None:
            begins = self._weave.parted(frame, begins)
        if wrapper := next(filter(OWNED.__contains__, self.formats), ""):
            # Services write at the same time: the rest of a stack trace may come after lines of another one.
            owner = owners(raw, wrapper).fill_null(strategy="forward").fill_null(self._owner)
            begins = begins | (owner != owner.shift(1, fill_value=self._owner))
            self._owner = str(owner[-1])
        if levels is None:
            levels = nulls(_LEVEL, raw.len())
        return begins, levels

    def _capped(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Closes records at the cap: a row that would pass the cap begins a new record."""
        sizes = frame.group_by("group", maintain_order=True).agg((pl.col("size") + 1).sum().alias("total"))
        over = sizes.filter(pl.col("total") - 1 > self._cap)["group"]
        if over.is_empty():
            return frame
        begins = frame["begins"].to_numpy().copy()
        rows = frame.with_row_index("i").filter(pl.col("group").is_in(over.implode()))
        total = 0
        for i, size, begin in rows.select("i", "size", "begins").iter_rows():
            total = size if begin or total + 1 + size > self._cap else total + 1 + size
            begins[i] = begin or total == size
        marks = pl.Series("begins", begins)
        return frame.with_columns(marks, marks.cast(pl.UInt32).cum_sum().alias("group"))


def are_records(lines: pl.Series, formats: tuple[str, ...]) -> "np.ndarray[tuple[int], np.dtype[np.bool]]":
    """True for lines that are a record each, by the formats of earlier lines of their source.

    False also where it takes a closer look: a line may have a format that the earlier ones had not."""
    return are_records_each(lines, [formats], np.zeros(lines.len(), dtype=np.intp))


def are_records_each(
    lines: pl.Series, formats: Sequence[tuple[str, ...]], which: "np.ndarray[tuple[int], np.dtype[np.intp]]"
) -> "np.ndarray[tuple[int], np.dtype[np.bool]]":
    """`are_records` of lines of several sources: `which` tells the place of the formats of each."""
    found = np.zeros(lines.len(), dtype=np.bool)
    is_short = lines.str.len_bytes() <= MAX_RECORD_BYTES
    likely = (is_short & ~lines.str.starts_with(DOCKER_BEGIN)).to_numpy()
    plain = uncoloured(lines)
    for number, names in enumerate(formats):
        rows = np.flatnonzero(likely & (which == number))
        if not rows.size or _takes_a_look(names):
            continue
        some, inner = (lines, plain) if rows.size == lines.len() else (lines.gather(rows), plain.gather(rows))
        found[rows] = _have_heads(some, behind_prefixes(inner, names), names).to_numpy()
    return found


def _have_heads(lines: pl.Series, inner: pl.Series, formats: tuple[str, ...]) -> pl.Series:
    """True for lines that begin with a header of one of these formats, and may have no other one."""
    if not formats:
        return ~lines.str.contains(f"{_MAY_HAVE_A_FORMAT}|{pattern_of(*KINDS)}")
    heads = head_mask(inner, formats)
    return heads & ~lines.str.contains(_MAY_BE_TIMED) if set(formats) <= VAGUE else heads


def are_read_as_documents(formats: tuple[str, ...]) -> bool:
    """Whether a line that is a record by DOCUMENTS is one by these formats as well."""
    return DOCUMENTS[0] in formats and not _takes_a_look(formats) and set(OWNED).isdisjoint(formats)


def _takes_a_look(formats: tuple[str, ...]) -> bool:
    """Whether the lines around a line tell what it belongs to."""
    return any(map(is_layout, formats)) or not (BLOCKS | TWO_STREAMS).isdisjoint(formats)


def split_text(text: str, cap: int = MAX_RECORD_BYTES) -> Iterator[str]:
    """Pieces of at most `cap` bytes of UTF-8, cut between characters."""
    data, at = text.encode(), 0
    while len(data) - at > cap:
        cut = cut_between_characters(data, at, cap)
        yield data[at:cut].decode()
        at = cut
    yield data[at:].decode()


def cut_between_characters(data: bytes | bytearray, at: int, cap: int) -> int:
    """The last offset up to at + cap that does not split a UTF-8 character."""
    cut = at + cap
    if cut >= len(data):
        return len(data)
    for back in range(4):
        if data[cut - back] & 0xC0 != 0x80:  # not a continuation byte
            return cut - back
    return cut


def _join(rows: pl.DataFrame) -> pl.DataFrame:
    """One record per group of rows; without `group`, all rows are one record."""
    if rows.is_empty():
        return _no_records()
    if rows.height == 1:
        return _completed(rows)
    if "group" not in rows.columns:
        rows = rows.with_columns(pl.lit(0).alias("group"))
    single = rows["group"].is_unique()
    if single.all():
        joined = rows.select(*_FRAMED, _JOINED)
    else:
        many = (
            rows.filter(~single)
            .group_by("group", maintain_order=True)
            .agg(
                pl.col("raw").str.join("\n"),
                pl.col("line").first(),
                pl.col("lines").sum(),
                pl.col(_LEVEL).first(),
                pl.col(_JOINED).last(),
            )
        )
        columns = ["group", *_FRAMED, _JOINED]
        both = pl.concat([rows.filter(single).select(columns), many.select(columns)])
        joined = both.sort("group").drop("group")
    return _completed(joined)


def _completed(joined: pl.DataFrame) -> pl.DataFrame:
    """All columns of records. A query that adds the nulls takes 0.3 ms, also for a few records."""
    columns = [
        joined.get_column(name).cast(kind) if name in _FRAMED else nulls(name, joined.height)
        for name, kind in RAW_SCHEMA.items()
    ]
    return pl.DataFrame([*columns, joined.get_column(_JOINED)])


def _no_records() -> pl.DataFrame:
    return pl.DataFrame(schema={**RAW_SCHEMA, _JOINED: pl.Int64})
