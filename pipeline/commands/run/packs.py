"""Many small files read at once: what costs milliseconds a file costs them once for hundreds of files.

A pack holds whole text files that share their formats. Its records are those that the files would give when
read alone; each names its file. Files that need a closer look (packed, UTF-16, documents of elements, tables,
a first line that no format of the others reads) are left to the reader of single files.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl

from pipeline.records.declared import DETECTED, FormatChoice
from pipeline.sources.chunks import MAX_BYTES, MAX_RECORDS
from pipeline.sources.elements import element_kind
from pipeline.sources.formats import detect, head_mask
from pipeline.sources.formats_delimited import is_layout
from pipeline.sources.framing import MAX_RECORD_BYTES, Framer
from pipeline.sources.lines import LineCutter
from pipeline.sources.packed.bytestreams import is_plain
from pipeline.sources.wrappers import inner_lines

SMALL_BYTES: Final = MAX_RECORD_BYTES  # No line of a small file is too long for a record.
FEW: Final = 8  # Fewer files than these are not worth a pack.
_SAMPLED: Final = 400  # Lines of a group of files that tell their formats.
_ROUNDS: Final = 4  # Kinds of files that are looked for in one group.
_TIME_LIKE: Final = r"[0-9]:[0-9]{2}|[0-9]{10}"
_BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """The records of several files: RAW_SCHEMA with `source`, in the order of `paths`."""

    paths: tuple[Path, ...]
    records: pl.DataFrame
    formats: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Small:
    """A small text file. Each of its lines ends with a newline."""

    path: Path
    text: bytes
    lines: int


def packs(
    paths: Sequence[Path],
    *,
    group: Callable[[Path], str],
    max_records: int = MAX_RECORDS,
    max_bytes: int = MAX_BYTES,
    choice: FormatChoice = DETECTED,
) -> Iterator[Pack | Path]:
    """The files as packs, and those that are to be read alone. A pack has files of one `group` only.

    A file that is read alone ends the pack before it: rotated copies keep their order."""
    for files in _groups(paths, group, max_records, max_bytes):
        if isinstance(files, Path):
            yield files
        else:
            yield from _packed(files, choice)


def _groups(
    paths: Sequence[Path], group: Callable[[Path], str], max_records: int, max_bytes: int
) -> Iterator[list[_Small] | Path]:
    pending, lines, size, name = list[_Small](), 0, 0, ""
    for path in paths:
        small, earlier = _small(path), name
        name = group(path)
        full = small is not None and (lines + small.lines > max_records or size + len(small.text) > max_bytes)
        if pending and (full or name != earlier or small is None):
            yield pending
            pending, lines, size = [], 0, 0
        if small is None:
            yield path
            continue
        pending.append(small)
        lines, size = lines + small.lines, size + len(small.text)
    if pending:
        yield pending


def _small(path: Path) -> _Small | None:
    """None for a file that is to be read alone."""
    try:
        if not path.is_file():  # to open a pipe would wait for its writer
            return None
        with path.open("rb", buffering=0) as file:
            text = file.read(SMALL_BYTES + 1)
    except OSError:
        return None
    if not 0 < len(text) <= SMALL_BYTES or not is_plain(text) or text.startswith(_BOM):
        return None
    if (b"\r" in text and b"\n" not in text) or element_kind(text) is not None:
        return None
    try:
        text.decode()
    except UnicodeDecodeError:
        return None
    text = text if text.endswith(b"\n") else text + b"\n"
    return _Small(path, text, text.count(b"\n"))


def _packed(files: list[_Small], choice: FormatChoice) -> Iterator[Pack | Path]:
    """Packs of the files that share formats; a group seldom has more than one kind of files."""
    for _ in range(_ROUNDS):
        if len(files) < FEW:
            break
        lines = LineCutter().push(b"".join(small.text for small in files))
        counts = np.array([small.lines for small in files])
        begins = np.cumsum(counts) - counts
        framer = _framer(lines["raw"], begins, choice)
        if any(map(is_layout, framer.formats)):  # each of these files may begin with the names of columns
            break
        fits = _fits(lines["raw"].gather(begins), framer.formats)
        members = [small for small, takes in zip(files, fits, strict=True) if takes]
        if len(members) < FEW:
            break
        if len(members) < len(files):
            lines = lines.filter(pl.Series(np.repeat(fits, counts)))
            begins = np.cumsum(counts[fits]) - counts[fits]
        yield _pack(members, lines, begins, framer)
        files = [small for small, takes in zip(files, fits, strict=True) if not takes]
    yield from (small.path for small in files)


def _framer(
    raw: pl.Series, begins: "np.ndarray[tuple[int], np.dtype[np.int64]]", choice: FormatChoice
) -> Framer:
    """A framer with the formats of these files, told by some lines of each."""
    each = max(1, _SAMPLED // len(begins))
    ends = np.append(begins[1:], raw.len())
    places = np.unique(np.minimum(begins[:, None] + np.arange(each)[None, :], ends[:, None] - 1))
    sample = raw.gather(places)
    formats = (choice.forced,) if choice.forced else detect(sample.to_list(), choice.declared)
    framer = Framer(formats=formats)
    framer.look(sample, final=True)
    return framer


def _fits(firsts: pl.Series, formats: tuple[str, ...]) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """True for the files whose first line has one of these formats; without formats, for those that seem to
    have none."""
    if not formats:
        return ~firsts.str.contains(_TIME_LIKE).to_numpy()
    return head_mask(inner_lines(firsts, formats), formats).to_numpy()


def _pack(
    files: list[_Small],
    lines: pl.DataFrame,
    begins: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    framer: Framer,
) -> Pack:
    starts = np.zeros(lines.height, dtype=np.bool_)
    starts[begins] = True
    records = framer.frame_texts(lines, pl.Series(starts)).drop("end")
    first = records["line"].to_numpy().astype(np.int64) - 1
    file = np.searchsorted(begins, first, side="right") - 1
    names = pl.Series("source", [str(small.path) for small in files], dtype=pl.String)
    line = pl.Series("line", first - begins[file] + 1, dtype=pl.UInt64)
    return Pack(
        paths=tuple(small.path for small in files),
        records=records.with_columns(line, names.gather(file)).rechunk(),
        formats=framer.formats,
    )
