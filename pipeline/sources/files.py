"""Log files: which are meant by paths, folders and globs, and their records from a cursor on."""

import glob
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from pipeline.errors import BadInput
from pipeline.records.batch import digest
from pipeline.records.declared import DETECTED, FormatChoice
from pipeline.sources.archives import Source, Text, texts
from pipeline.sources.bytestreams import LOOK_BYTES, ByteStream, Layers, is_plain, is_rewritten
from pipeline.sources.chunks import MAX_BYTES, MAX_RECORDS, Assembly, Chunk, Cursor
from pipeline.sources.elements import element_kind
from pipeline.sources.folders import Filter, Skipped, oldest_first, walk
from pipeline.sources.framing import Framer
from pipeline.sources.lines import LineCutter
from pipeline.sources.unpacking import Note, Readable
from pipeline.units import plural

BLOCK_BYTES: Final = 1024 * 1024
IDENTITY_BYTES: Final = 256
HEAD_BYTES: Final = 4096  # They tell whether offsets in the text are those of the file.
STREAM: Final = "stream"  # The identity of pipes, which cannot be read twice.
MOST_COPIED: Final = 2 << 30  # Bytes of a zip on standard input, which is read from its end.
_GLOB_MARKS: Final = frozenset("*?[")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The files to read, in order, each once, and notes about what is odd or left out."""

    paths: tuple[Path, ...]
    notes: tuple[str, ...] = ()


def choose(patterns: Sequence[str], wanted: Filter | None = None) -> Chosen:
    """The logs that paths, folders and globs mean; rotated copies stand oldest first.

    A folder or glob may bring other files, which are left out with one note. Raises BadInput for a file named
    itself that is no text log, and for a folder or glob without any.
    """
    wanted = wanted or Filter()
    found: dict[tuple[int, int], tuple[Path, float]] = {}
    notes: list[str] = []
    skipped, recoded = Skipped(), Skipped()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        # a file may really be called `a[1].log`
        if path.is_dir():
            logs = _logs_of(pattern, walk(path, wanted, skipped), skipped, recoded)
        elif _GLOB_MARKS & set(pattern) and not path.exists():
            logs = _logs_of(pattern, _matches(pattern, wanted, skipped), skipped, recoded)
        else:
            if note := check_file(path):
                notes.append(note)
            logs = [(path, path.stat())]
        for one, info in logs:
            found.setdefault((info.st_dev, info.st_ino), (one, info.st_mtime))
    if skipped.count:
        notes.append(skipped.sentence())
    if recoded.count:
        verb = "is" if recoded.count == 1 else "are"
        notes.append(f"{plural(recoded.count, 'file')} {verb} UTF-16, read as UTF-8: {recoded.names()}")
    return Chosen(paths=tuple(oldest_first(found.values())), notes=tuple(notes))


def _logs_of(
    pattern: str, brought: Iterable[tuple[Path, os.stat_result]], skipped: Skipped, recoded: Skipped
) -> list[tuple[Path, os.stat_result]]:
    """The text logs among the files of a folder or glob, and in `recoded` those in UTF-16. Raises BadInput
    without any."""
    before, logs = skipped.count, []
    for path, info in brought:
        try:
            log = bool(info.st_size) and _is_log(path, recoded)
        except BadInput:
            log = False
        if log:
            logs.append((path, info))
        else:
            skipped.add(str(path))
    if not logs:
        count = skipped.count - before
        why = f"of {plural(count, 'file')} none is one" if count else "no file there is wanted"
        raise BadInput(f"{pattern} has no text log; {why}, name a log file or another folder")
    return logs


def _matches(pattern: str, wanted: Filter, skipped: Skipped) -> Iterator[tuple[Path, os.stat_result]]:
    """The files that a glob brings. Raises BadInput when it matches none."""
    name = str(Path(pattern).expanduser())
    names = sorted(glob.iglob(name, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
    matched = "only directories" if names else "no file"
    for path in map(Path, names):
        if path.is_dir():
            continue
        matched = ""
        if not wanted.takes(str(path)):
            continue
        try:
            info = path.stat()
        except OSError:  # a link to nothing, or to itself
            skipped.add(str(path))
            continue
        if stat.S_ISREG(info.st_mode):
            yield path, info
        else:
            skipped.add(str(path))
    if matched:
        raise BadInput(f"{pattern!r} matches {matched}; check the pattern, ** descends into directories")


def _refuse_unreadable(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as exc:
        hint = "it is a link to a missing file" if path.is_symlink() else "check the name"
        raise BadInput(f"{path} does not exist; {hint}") from exc
    except OSError as exc:
        raise BadInput(
            f"{path} cannot be looked at ({exc.strerror}); check its directories' permissions"
        ) from exc
    if stat.S_ISDIR(mode):
        raise BadInput(f"{path} is a directory; give its files, for example '{path}/*.log'")
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)):
        raise BadInput(f"{path} is neither a file nor a pipe; give a log file")
    if not os.access(path, os.R_OK):
        raise BadInput(f"{path} may not be read by this user; run `chmod +r` on it or change the user")


def check_file(path: Path) -> str:
    """A note for the user about an empty or UTF-16 file, else "".

    Raises BadInput for a file that is missing, unreadable, binary or compressed in an unknown way, and for an
    archive without a text log.
    """
    _refuse_unreadable(path)
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        return ""
    if not info.st_size:
        return f"{path} is empty"
    with open_file(path) as file:
        layers = Layers(file, str(path))
        text = next(texts(layers, file, Source(path=path), Skipped()), None)
        if text is None:
            raise BadInput(f"{path} is a {layers.kind} archive without a text log; give a log")
        if layers.kind == "text" and text.stream.encoding != "UTF-8":
            guess = ", as the places of its NULs tell," if text.stream.guessed else ","
            return f"{path} is {text.stream.encoding}{guess} read as UTF-8"
    return ""


def _is_log(path: Path, recoded: Skipped) -> bool:
    """Whether a file that nobody named is a text log. Raises BadInput for most that are none."""
    with open_file(path) as file:
        if is_plain(file.read(LOOK_BYTES)):
            return True
        file.seek(0)
        layers = Layers(file, str(path))
        # Documents and programs are zips, too.
        if layers.kind == "zip" and path.suffix.lower() != ".zip":
            return False
        if (
            not layers.first
            or (text := next(texts(layers, file, Source(path=path), Skipped()), None)) is None
        ):
            return False
        if layers.kind == "text" and text.stream.encoding != "UTF-8":
            recoded.add(str(path))
        return True


def total_bytes(path: Path) -> int:
    """Size on disk, the end of `Chunk.position`; 0 for a pipe, and for a file that is gone."""
    try:
        info = path.stat()
    except OSError:
        return 0
    return info.st_size if stat.S_ISREG(info.st_mode) else 0


class _Reader:
    """Reads one text to its end, or as far as it can be read."""

    def __init__(self, stream: ByteStream, assembly: Assembly, ahead: Sequence[bytes] = ()) -> None:
        """`ahead`: what was read of the text already."""
        self._stream, self._assembly, self._ahead = stream, assembly, ahead
        self.failure = ""  # why the text ends before its end

    @property
    def lines(self) -> int:
        return self._assembly.cursor.line

    def chunks(self) -> Iterator[Chunk]:
        for block in self._blocks():
            yield from self._assembly.push(block, self._stream.consumed())
        yield from self._assembly.finish(self._stream.consumed())

    def _blocks(self) -> Iterator[bytes]:
        yield from self._ahead
        try:
            while block := self._stream.read(BLOCK_BYTES):
                yield block
        except BadInput as exc:
            self.failure = str(exc)
        except OSError as exc:
            self.failure = f"{self._stream.name} cannot be read further ({exc.strerror})"


def read_file(
    path: Path,
    *,
    start: Cursor | None = None,
    max_records: int = MAX_RECORDS,
    max_bytes: int = MAX_BYTES,
    choice: FormatChoice = DETECTED,
) -> Iterator[Chunk]:
    """All records of a file from `start` on, in chunks whose bounds depend on the content alone.

    A cursor of another file (rotated, truncated, replaced) starts at the beginning. Raises BadInput at
    once for what is not a text log, and, after everything readable was handed over, for a cut-off file.
    """
    _refuse_unreadable(path)
    assemble = _Assembling(max_records=max_records, max_bytes=max_bytes, choice=choice)
    with open_file(path) as file:
        regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        place = resume_at(path, file, start) if regular else Cursor(path=str(path), identity=STREAM)
        stream = ByteStream(Layers(file, str(path)))
        assembly = assemble(stream, place)
        reader = _Reader(stream, assembly, _moved(stream, path, place.offset, assembly.framer))
        yield from reader.chunks()
    if reader.failure:
        raise BadInput(f"{_how_far(reader.failure, reader.lines)}; copy the file again")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Assembling:
    """How records are made of a text."""

    max_records: int
    max_bytes: int
    choice: FormatChoice

    def __call__(self, stream: ByteStream, place: Cursor) -> Assembly:
        """For a text that stands at its beginning yet. A place within a document needs its kind."""
        kind = element_kind(stream.peek()) if place.offset else None
        return Assembly(
            place,
            max_records=self.max_records,
            max_bytes=self.max_bytes,
            documents=True,
            kind=kind,
            choice=self.choice,
        )


def _how_far(failure: str, lines: int) -> str:
    return f"{failure}: {plural(lines, 'line')} {'was' if lines == 1 else 'were'} read"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReading:
    """A text and its chunks from `place` on; to be read before the next text is asked for."""

    source: Source
    place: Cursor
    chunks: Iterator[Chunk]


def read_texts(
    path: Path,
    *,
    note: Note,
    begin: Callable[[Source], Cursor | None] = lambda _source: None,
    max_records: int = MAX_RECORDS,
    max_bytes: int = MAX_BYTES,
    choice: FormatChoice = DETECTED,
) -> Iterator[TextReading]:
    """The text of a file, or those of an archive one after another, each from its cursor on.

    Damage, a cut-off end and bounds that were reached become notes behind all that could be read. Raises
    BadInput for a file that cannot be opened or is no text log.
    """
    _refuse_unreadable(path)
    assemble = _Assembling(max_records=max_records, max_bytes=max_bytes, choice=choice)
    with open_file(path) as file:
        regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        layers = Layers(file, str(path), note=note)
        if layers.kind == "zip" and not regular:
            raise BadInput(f"{path} is a zip archive, which a pipe cannot give; save it to a file first")
        yield from _readings(layers, file if regular else None, path, assemble, begin)


def read_packed(
    stream: Readable,
    name: str,
    *,
    note: Note,
    max_records: int = MAX_RECORDS,
    max_bytes: int = MAX_BYTES,
    choice: FormatChoice = DETECTED,
) -> Iterator[TextReading]:
    """As `read_texts`, for packed standard input. A zip is copied to a temporary file first."""
    assemble = _Assembling(max_records=max_records, max_bytes=max_bytes, choice=choice)
    with tempfile.TemporaryFile() as copy:
        layers, file = Layers(stream, name, note=note), None
        if layers.kind == "zip":
            _copy(layers.source, copy, name)
            layers, file = Layers(copy, name, note=note), copy
        yield from _readings(layers, file, Path(name), assemble, lambda _source: None)


def read_object(
    file: BinaryIO,
    name: str,
    *,
    identity: str,
    note: Note,
    begin: Callable[[Source], Cursor | None],
    max_records: int = MAX_RECORDS,
    max_bytes: int = MAX_BYTES,
    choice: FormatChoice = DETECTED,
) -> Iterator[TextReading]:
    """As `read_texts`, for an object that an archive opened; its identity stands in the cursors."""
    assemble = _Assembling(max_records=max_records, max_bytes=max_bytes, choice=choice)
    yield from _readings(Layers(file, name, note=note), file, Path(name), assemble, begin, identity=identity)


def _copy(source: Readable, copy: BinaryIO, name: str) -> None:
    """Raises BadInput above MOST_COPIED bytes."""
    while data := source.read(BLOCK_BYTES):
        copy.write(data)
        if copy.tell() > MOST_COPIED:
            raise BadInput(
                f"{name} is a zip archive of more than {MOST_COPIED >> 30} GiB; save it to a file and "
                "send that"
            )
    copy.seek(0)


def _readings(
    layers: Layers,
    file: BinaryIO | None,
    path: Path,
    assemble: _Assembling,
    begin: Callable[[Source], Cursor | None],
    *,
    identity: str = "",
) -> Iterator[TextReading]:
    """`file`: None for a pipe, which cannot seek. `identity`: of an object that is no file here."""
    note, lines, late, skipped, empty = layers.note, 0, "", Skipped(), True
    found = texts(layers, file, Source(path=path), skipped)
    while True:
        try:
            text = next(found, None)
        except BadInput as exc:
            if layers.kind == "text":
                raise
            note(_how_far(str(exc), lines))
            break
        if late:  # said only now, because the end of the archive explains that of its last member
            note(late)
        if text is None:
            break
        empty = False
        place, continued = _start_of(text, path, file, begin, identity)
        assembly = assemble(text.stream, place)
        reader = _Reader(text.stream, assembly, continued(assembly.framer))
        yield TextReading(source=text.source, place=place, chunks=reader.chunks())
        lines += reader.lines
        late = _how_far(reader.failure, reader.lines) if reader.failure else ""
    if skipped.count:
        note(skipped.sentence("member"))
    if empty and layers.kind != "text":
        note(f"{path} has no text log")


def _start_of(
    text: Text,
    path: Path,
    file: BinaryIO | None,
    begin: Callable[[Source], Cursor | None],
    identity: str,
) -> tuple[Cursor, Callable[[Framer], Sequence[bytes]]]:
    """Where an earlier reader of a text stopped, and the step that moves the text there.

    `file`: None for a pipe, which begins at its beginning. `identity`: as for `_readings`.
    """
    name = text.source.name
    if file is None:
        return Cursor(path=name, identity=STREAM), lambda _framer: ()
    start = begin(text.source)
    if not text.source.member and not identity:
        place = resume_at(path, file, start)
        return place, partial(_moved, text.stream, path, place.offset)
    identity = f"{identity or identify(file)} {text.mark}"
    same = start is not None and start.identity == identity
    place = replace(start, path=name) if start is not None and same else Cursor(path=name, identity=identity)
    return place, partial(_behind, text.stream, place.offset)


def _moved(stream: ByteStream, path: Path, offset: int, framer: Framer) -> Sequence[bytes]:
    """Moves the text of a file to the offset; the framer gets the beginning as its sample."""
    if offset:
        stream.skip(offset)
        look_at_beginning(path, framer, final=True)
    return ()


def _behind(stream: ByteStream, offset: int, framer: Framer) -> list[bytes]:
    """Reads a member to `offset`, and on until the framer has its sample: the text read behind `offset`.

    The damage of a cut-off member is met again by its reader.
    """
    at, ahead, cutter = 0, list[bytes](), LineCutter()
    while offset and (at < offset or not framer.settled):
        try:
            block = stream.read(BLOCK_BYTES)
        except BadInput:
            block = b""
        if not block:
            framer.look(cutter.finish()["raw"], final=True)
            break
        if not framer.settled:
            framer.look(cutter.push(block)["raw"])
        if at + len(block) > offset:
            ahead.append(block[max(0, offset - at) :])
        at += len(block)
    return ahead


def open_file(path: Path) -> BinaryIO:
    """An unbuffered file. Raises BadInput."""
    try:
        return path.open("rb", buffering=0)
    except OSError as exc:
        raise BadInput(f"{path} cannot be opened: {exc.strerror}; check its name and permissions") from exc


def look_at_beginning(path: Path, framer: Framer, *, final: bool) -> None:
    """Gives the framer the first lines of the file as its sample."""
    with open_file(path) as file:
        stream, cutter = ByteStream(Layers(file, str(path))), LineCutter()
        while not framer.settled:
            try:
                block = stream.read(BLOCK_BYTES)
            except BadInput:  # the reader reports the same damage
                block = b""
            if not block:
                framer.look(cutter.finish()["raw"], final=final)
                return
            framer.look(cutter.push(block)["raw"])


def identify(file: BinaryIO) -> str:
    """Device, inode, and size and hash of the first bytes."""
    info = os.fstat(file.fileno())
    first = os.pread(file.fileno(), IDENTITY_BYTES, 0)
    return f"{info.st_dev:x}:{info.st_ino:x}:{len(first)}:{digest(first)}"


def is_same(identity: str, file: BinaryIO) -> bool:
    """True for the file of this identity, also after it grew."""
    try:
        device, inode, size, first = identity.split(":")
        info = os.fstat(file.fileno())
        if (int(device, 16), int(inode, 16)) != (info.st_dev, info.st_ino):
            return False
        now = os.pread(file.fileno(), int(size), 0)
        return len(now) == int(size) and digest(now) == first
    except ValueError:
        return False


def resume_at(path: Path, file: BinaryIO, start: Cursor | None) -> Cursor:
    """The cursor for the file that it belongs to, else the beginning."""
    identity = identify(file)
    if start is None or not is_same(start.identity, file):
        return Cursor(path=str(path), identity=identity)
    plain = not is_rewritten(os.pread(file.fileno(), HEAD_BYTES, 0))
    if plain and os.fstat(file.fileno()).st_size < start.offset:
        return Cursor(path=str(path), identity=identity)
    return replace(start, path=str(path), identity=identity)
