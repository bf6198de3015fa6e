"""Log files: which are meant by paths, folders and globs, and their records from a cursor on."""

import glob
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Final, Unpack

from pipeline.errors import BadInput
from pipeline.records.batch import digest
from pipeline.sources.chunks import Assembly, Chunk, Cursor, Limits
from pipeline.sources.elements import element_kind
from pipeline.sources.folders import FilesLeftOut, Filter, Skipped, oldest_first, walk
from pipeline.sources.framing import Framer
from pipeline.sources.lines import sample
from pipeline.sources.other_texts import other_archive, other_text
from pipeline.sources.packed.archives import Source, Text, texts
from pipeline.sources.packed.bytestreams import LOOK_BYTES, ByteStream, Layers, is_plain, is_rewritten
from pipeline.sources.packed.unpacking import Note, Readable
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


def choose(patterns: Sequence[str], wanted: Filter | None = None, *, copy: "Copied | None" = None) -> Chosen:
    """The logs that paths, folders and globs mean; rotated copies stand oldest first.

    `copy` may be among them, and is called by its own name.
    A folder or glob may bring other files, which are left out with a note: one about those that are no text,
    and one about texts that are not logs. Raises BadInput for a file named itself that is no text, and for a
    folder or glob without any log.
    """
    wanted = wanted or Filter()
    found: dict[tuple[int, int], tuple[Path, float]] = {}
    notes: list[str] = []
    left_out = FilesLeftOut()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        # a file may really be called `a[1].log`
        if path.is_dir():
            logs = _logs_of(pattern, walk(path, wanted, left_out.skipped), left_out)
        elif _GLOB_MARKS & set(pattern) and not path.exists():
            logs = _logs_of(pattern, _matches(pattern, wanted, left_out.skipped), left_out)
        else:
            if note := check_file(path, name=shown_name(path, copy)):
                notes.append(note)
            logs = [(path, path.stat())]
        for one, info in logs:
            found.setdefault((info.st_dev, info.st_ino), (one, info.st_mtime))
    return Chosen(paths=tuple(oldest_first(found.values())), notes=(*notes, *left_out.notes()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A file that holds a copy of something else, for example of standard input; people know it by `name`."""

    path: Path
    name: str


def shown_name(path: Path, copy: Copied | None) -> str:
    """What people know a file by."""
    return copy.name if copy is not None and path == copy.path else str(path)


def _logs_of(
    pattern: str, brought: Iterable[tuple[Path, os.stat_result]], left_out: FilesLeftOut
) -> list[tuple[Path, os.stat_result]]:
    """The text logs among the files of a folder or glob. Raises BadInput without any."""
    before, logs = left_out.count, []
    for path, info in brought:
        try:
            other = _other_than_a_log(path, left_out.recoded) if info.st_size else None
        except BadInput:
            other = None
        if other is None:
            left_out.skipped.add(str(path))
        elif other:
            left_out.add_other(other, str(path))
        else:
            logs.append((path, info))
    if not logs:
        count = left_out.count - before
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


def check_file(path: Path, *, name: str = "") -> str:
    """A note for the user about an empty or UTF-16 file, else "".

    `name`: what it is called if not by its path. Raises BadInput for a file that is missing, unreadable,
    binary or compressed in an unknown way, and for an archive without a text log.
    """
    _refuse_unreadable(path)
    info, name = path.stat(), name or str(path)
    if not stat.S_ISREG(info.st_mode):
        return ""
    if not info.st_size:
        return f"{name} is empty"
    with open_file(path) as file:
        layers = Layers(file, name)
        text = next(texts(layers, file, Source(path=path), Skipped()), None)
        if text is None:
            raise BadInput(f"{name} is a {layers.kind} archive without a text log; give a log")
        if layers.kind == "text" and text.stream.encoding != "UTF-8":
            guess = ", as the places of its NULs tell," if text.stream.guessed else ","
            return f"{name} is {text.stream.encoding}{guess} read as UTF-8"
    return ""


def _other_than_a_log(path: Path, recoded: Skipped) -> str | None:
    """What a file that nobody named is if it has text, but is clearly not a log; "" for a log, and None for a
    file without text. Raises BadInput for most of those."""
    with open_file(path) as file:
        first = file.read(LOOK_BYTES)
        if is_plain(first):
            return other_text(first)
        file.seek(0)
        layers = Layers(file, str(path))
        # Documents and programs are zips, too.
        if not layers.first or (layers.kind == "zip" and path.suffix.lower() != ".zip"):
            return None
        found = texts(layers, file, Source(path=path), Skipped())
        text = next(found, None)
        if text is None:
            return None
        if layers.kind != "text":
            return other_archive(one.stream.peek() for one in chain((text,), found))
        if (other := other_text(text.stream.peek())) == "" and text.stream.encoding != "UTF-8":
            recoded.add(str(path))
        return other


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
    name: str = "",
    **limits: Unpack[Limits],
) -> Iterator[TextReading]:
    """The text of a file, or those of an archive one after another, each from its cursor on.

    `name`: what the file is called if not by its path, which then appears in no result. Damage, a cut-off end
    and bounds that were reached become notes behind all that could be read. Raises BadInput for a file that
    cannot be opened or is no text log.
    """
    _refuse_unreadable(path)
    with open_file(path) as file:
        regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        layers = Layers(file, name or str(path), note=note)
        if layers.kind == "zip" and not regular:
            raise BadInput(f"{path} is a zip archive, which a pipe cannot give; save it to a file first")
        known_as = Path(name) if name else path
        yield from _readings(layers, file if regular else None, known_as, limits, begin, identity=name)


def read_packed(
    stream: Readable,
    name: str,
    *,
    note: Note,
    **limits: Unpack[Limits],
) -> Iterator[TextReading]:
    """As `read_texts`, for packed standard input. A zip is copied to a temporary file first."""
    with tempfile.TemporaryFile() as copy:
        layers, file = Layers(stream, name, note=note), None
        if layers.kind == "zip":
            _copy(layers.source, copy, name)
            layers, file = Layers(copy, name, note=note), copy
        yield from _readings(layers, file, Path(name), limits, lambda _source: None)


def read_object(
    file: BinaryIO,
    name: str,
    *,
    identity: str,
    note: Note,
    begin: Callable[[Source], Cursor | None],
    **limits: Unpack[Limits],
) -> Iterator[TextReading]:
    """As `read_texts`, for an object that an archive opened; its identity stands in the cursors."""
    yield from _readings(Layers(file, name, note=note), file, Path(name), limits, begin, identity=identity)


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
    limits: Limits,
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
        # A place within a document needs its kind.
        kind = element_kind(text.stream.peek()) if place.offset else None
        assembly = Assembly(place, documents=True, kind=kind, **limits)
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
        return place, partial(_moved, text.stream, file, place.offset)
    identity = f"{identity or identify(file)} {text.mark}"
    same = start is not None and start.identity == identity
    place = replace(start, path=name) if start is not None and same else Cursor(path=name, identity=identity)
    return place, partial(_behind, text.stream, place.offset)


def _moved(stream: ByteStream, file: BinaryIO, offset: int, framer: Framer) -> Sequence[bytes]:
    """Moves the text of a file to the offset; the framer gets the beginning as its sample."""
    if offset:
        stream.skip(offset)
        look_at_beginning(file, stream.name, framer)
    return ()


def _behind(stream: ByteStream, offset: int, framer: Framer) -> list[bytes]:
    """Reads a member to `offset`, and on until the framer has its sample: the text read behind `offset`.

    The damage of a cut-off member is met again by its reader.
    """
    ahead: list[bytes] = []

    def read() -> Iterator[bytes]:
        for block in _blocks(stream):
            ahead.append(block[max(0, offset - stream.offset + len(block)) :])
            yield block

    if offset:
        blocks = read()
        sample(blocks, framer)
        while stream.offset < offset and next(blocks, None):
            pass
    return list(filter(None, ahead))


def _blocks(stream: ByteStream) -> Iterator[bytes]:
    """The blocks of a text, up to its damage."""
    with suppress(BadInput):
        while block := stream.read(BLOCK_BYTES):
            yield block


def open_file(path: Path) -> BinaryIO:
    """An unbuffered file. Raises BadInput."""
    try:
        return path.open("rb", buffering=0)
    except OSError as exc:
        raise BadInput(f"{path} cannot be opened: {exc.strerror}; check its name and permissions") from exc


class FromStart:
    """Reads an open file from its beginning and leaves the file's own position where it is."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file.fileno()
        self._at = 0

    def fileno(self) -> int:
        return self._file

    def read(self, size: int, /) -> bytes:
        data = os.pread(self._file, size, self._at)
        self._at += len(data)
        return data


def look_at_beginning(file: BinaryIO, name: str, framer: Framer, *, final: bool = True) -> None:
    """Gives the framer the first lines of the file as its sample. The reader reports its damage."""
    sample(_blocks(ByteStream(Layers(FromStart(file), name))), framer, final=final)


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
    """The cursor for the file that it belongs to, else the beginning.

    Of a cursor over several files of one name, the place of this one; the others stay in it."""
    identity = identify(file)
    places = start.places if start is not None else ()
    known = next((n for n, place in enumerate(places) if is_same(place.identity, file)), None)
    if start is None or known is None:
        return Cursor(path=str(path), identity=identity)
    start = start.centred(known)
    plain = not is_rewritten(os.pread(file.fileno(), HEAD_BYTES, 0))
    if plain and os.fstat(file.fileno()).st_size < start.offset:
        return Cursor(path=str(path), identity=identity)
    return replace(start, path=str(path), identity=identity)
