"""Lines that came as a record each, joined as those of a file: per stream, within one batch.

A stream is named by the way in. A record that holds more than its line, such as the fields beside it, keeps
those of its first line. Nothing depends on the other batches of a pass, so a batch that is read again has the
same records."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import polars as pl

from pipeline.records.columns import Parts, numbers_of
from pipeline.records.pushed import JOINED, PushedRecords
from pipeline.records.traces import pattern_of
from pipeline.sources.formats import TIMED, VAGUE, head_mask
from pipeline.sources.formats_delimited import belong_before, is_layout, read_layout
from pipeline.sources.joining.joiner import Flags, Joiner, Places
from pipeline.sources.wrappers import inner_lines

MOST_BYTES: Final = 65_536  # of a joined record, as of one of a file (sources/framing.py)
_LINE_END: Final = "\r\n"
# rsyslog leaves the blank behind a tag to the message: there, one blank says nothing.
_ONE_BLANK: Final = r"^ [^ \t]"
_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])
_ENCODER: Final = msgspec.json.Encoder()
Formats = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Record:
    rows: list[int]  # the first one, and those that continue it
    level: str | None  # of a crash


def joined_streams(
    parts: Parts[pl.DataFrame], records: PushedRecords, formats: Sequence[Formats]
) -> Parts[pl.DataFrame]:
    """The records of each part, RAW_SCHEMA, with the lines of its streams joined. `records`: those of all
    parts, row by row. `formats`: of each part."""
    if records.streams is None:
        return parts
    streams = pl.Series(records.streams, dtype=pl.Int64)
    lines = _lines_of(parts.whole, records)
    found: list[_Record] = []
    for names, places in _doubtful(parts, lines, streams, formats).items():
        # A table tells its rows from the beginning.
        for group in [[place] for place in places] if any(map(is_layout, names)) else [places]:
            found += _records_of(parts, lines, streams, names, group)
    return _with_records(parts, lines, found) if found else parts


def _lines_of(whole: pl.DataFrame, records: PushedRecords) -> pl.Series:
    """The line of each record, without its end."""
    lines = whole["raw"] if whole["message"].null_count() else whole["message"]
    if 0 < whole["message"].null_count() < whole.height:
        lines = whole["message"].zip_with(whole["message"].is_not_null(), whole["raw"])
    if records.lines_inside is not None:
        inside = pl.Series(records.lines_inside, dtype=pl.String)
        lines = inside.zip_with(inside.is_not_null(), lines)
    return lines.str.strip_chars_end(_LINE_END).alias("line")


def _doubtful(
    parts: Parts[pl.DataFrame], lines: pl.Series, streams: pl.Series, formats: Sequence[Formats]
) -> Mapping[Formats, Sequence[int]]:
    """The parts in which a line may continue another one, or begin a record without a header, by the formats
    of their lines."""
    places = {names: place for place, names in enumerate(dict.fromkeys(formats))}
    part_of = numbers_of(parts.heights)
    of_rows = np.array([places[names] for names in formats], dtype=np.intp)[part_of]
    heads = np.zeros(lines.len(), dtype=np.bool)
    for names, place in places.items():
        rows = np.flatnonzero(of_rows == place)
        some = lines if rows.size == lines.len() else lines.gather(rows)
        heads[rows] = head_mask(inner_lines(some, names), names).to_numpy()
    is_line = streams.is_not_null().to_numpy()
    others = np.flatnonzero(is_line & ~heads)
    found: dict[Formats, list[int]] = {}
    if not others.size:
        return found
    kinds = pattern_of("continues", "next", "crash", "signal", "error")
    count = len(parts)
    told = np.bincount(part_of[others[lines.gather(others).str.contains(kinds).to_numpy()]], minlength=count)
    headed = np.bincount(part_of[is_line & heads], minlength=count)
    headless = np.bincount(part_of[others], minlength=count)
    for place in range(count):
        if not headed[place] and told[place]:
            # The formats, if any, are those of what stands around the lines.
            found.setdefault(TIMED, []).append(place)
        elif told[place] or (headless[place] and not set(formats[place]) <= VAGUE and headed[place]):
            found.setdefault(formats[place], []).append(place)
    return found


def _records_of(
    parts: Parts[pl.DataFrame],
    lines: pl.Series,
    streams: pl.Series,
    formats: Formats,
    places: Sequence[int],
) -> Iterator[_Record]:
    """The records of parts with the same formats, ordered by parts and streams."""
    starts = np.array(parts.starts)[places]
    heights = np.array(parts.heights)[places]
    part = np.repeat(np.arange(len(places)), heights)
    rows = np.arange(part.size) + np.repeat(starts - (np.cumsum(heights) - heights), heights)
    numbers = streams.gather(rows).fill_null(-1).to_numpy()
    order = np.lexsort((rows, numbers, part))
    order = order[numbers[order] >= 0]
    rows, part, numbers = rows[order], part[order], numbers[order]
    first = (np.diff(numbers, prepend=-1) != 0) | (np.diff(part, prepend=-1) != 0)
    texts = lines.gather(rows)
    record: _Record | None = None
    total = 0
    for row, size, begins, level in zip(
        rows.tolist(), texts.str.len_bytes(), *_begins(texts, first, part, formats), strict=True
    ):
        if record is None or begins or total + 1 + size > MOST_BYTES:
            if record is not None:
                yield record
            record, total = _Record([row], level if begins else None), size
        else:
            record.rows.append(row)
            total += 1 + size
    if record is not None:
        yield record


def _begins(
    lines: pl.Series, first: Flags, parts: Places, formats: Formats
) -> tuple[list[bool], list[str | None]]:
    """Whether each text begins a record, and the level of one that begins so. `first`: of its stream. A text
    may have several lines."""
    counts = lines.str.count_matches("\n", literal=True).to_numpy().astype(np.int64) + 1
    places = np.cumsum(counts) - counts
    starts = np.zeros(int(counts.sum()), dtype=np.bool)
    starts[places[first]] = True
    physical = lines.str.split("\n").explode() if counts.max() > 1 else lines
    blank = physical.str.contains(_ONE_BLANK).to_numpy()[starts]
    if blank.any():
        shifted = pl.Series(blank[np.cumsum(starts) - 1])
        physical = physical.str.strip_prefix(" ").zip_with(shifted, physical)
    inner = inner_lines(physical, formats)
    if table := next(filter(is_layout, formats), ""):
        joins, _ = belong_before(inner, read_layout(table), state=0)
        begins, levels = ~joins | pl.Series(starts), None
    else:
        joiner = Joiner()
        joiner.decide(inner, formats, np.repeat(parts, counts))
        found = joiner.joins(inner, formats, pl.Series(starts))
        begins, levels = found.begins, found.levels
    none: list[str | None] = [None] * len(places)
    return begins.gather(places).to_list(), none if levels is None else levels.gather(places).to_list()


def _with_records(
    parts: Parts[pl.DataFrame], lines: pl.Series, found: Sequence[_Record]
) -> Parts[pl.DataFrame]:
    whole = parts.whole
    levels = whole["level"]
    told = {one.rows[0]: one.level for one in found if one.level and levels[one.rows[0]] is None}
    if told:
        whole = whole.with_columns(levels.clone().scatter(list(told), list(told.values())))
    joined = [one.rows for one in found if len(one.rows) > 1]
    if not joined:
        return Parts(whole, parts.heights)
    heads = [rows[0] for rows in joined]
    texts = ["\n".join(lines.gather(rows)) for rows in joined]
    raws = [
        _whole_text(
            whole["raw"].gather(rows).to_list(), lines.gather(rows).to_list(), text, whole["message"][rows[0]]
        )
        for rows, text in zip(joined, texts, strict=True)
    ]
    counts = pl.Series([whole["lines"].gather(rows).sum() for rows in joined], dtype=pl.UInt32)
    known = [n for n, head in enumerate(heads) if whole["message"][head] is not None]
    whole = whole.with_columns(
        whole["raw"].clone().scatter(heads, raws),
        whole["lines"].clone().scatter(heads, counts),
        whole["message"].clone().scatter([heads[n] for n in known], [texts[n] for n in known]),
    )
    stays = np.ones(whole.height, dtype=np.bool)
    stays[[row for rows in joined for row in rows[1:]]] = False
    heights = np.add.reduceat(stays.astype(np.int64), parts.starts).tolist()
    return Parts(whole.filter(pl.Series(stays)), heights)


def _whole_text(raws: Sequence[str], lines: Sequence[str], text: str, message: str | None) -> str:
    """The raw text of a joined record: that of its first line, with the whole text in place of the line."""
    raw, line = raws[0], lines[0]
    if raw.rstrip(_LINE_END) == line:
        return text
    document = _document(raw)
    for key, value in document.items():
        if isinstance(value, str) and value.rstrip(_LINE_END) in (line, message):
            whole = document | {key: text}
            if "_id" in document:  # each of these is answered (sinks/nats.py)
                ids = (_document(other).get("_id", "") for other in raws[1:])
                whole[JOINED] = list(zip(ids, lines[1:], strict=True))
            return _ENCODER.encode(whole).decode()
    return raw.rstrip(_LINE_END) + text[len(line) :]


def _document(raw: str) -> dict[str, Any]:
    try:
        return _OBJECT.decode(raw) if raw.startswith("{") else {}
    except (msgspec.DecodeError, RecursionError):
        return {}
