"""Log files: paths of patterns, and records from a cursor on."""

import glob
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final

from pipeline.errors import BadInput
from pipeline.records.batch import digest
from pipeline.records.declared import DETECTED, FormatChoice
from pipeline.sources.bytestreams import REWRITTEN_MARKS, ByteStream
from pipeline.sources.chunks import MAX_BYTES, MAX_RECORDS, Assembly, Chunk, Cursor
from pipeline.sources.elements import Kind, kind_of
from pipeline.sources.framing import Framer
from pipeline.sources.lines import LineCutter

BLOCK_BYTES: Final = 1024 * 1024
IDENTITY_BYTES: Final = 256
STREAM: Final = "stream"  # the identity of pipes, which cannot be read twice
_GLOB_MARKS: Final = frozenset("*?[")


def expand(patterns: Sequence[str]) -> list[Path]:
    """The files of paths and globs, in order, each once.

    Raises BadInput for an unreadable file and for a pattern without a match.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        for path in _matches(pattern):
            found.setdefault(path)
    same: dict[tuple[int, int], Path] = {}
    for path in found:
        _refuse_unreadable(path)
        info = path.stat()
        same.setdefault((info.st_dev, info.st_ino), path)
    return list(same.values())


def _matches(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    # a file may really be called `a[1].log`
    if path.exists() or not _GLOB_MARKS & set(pattern):
        return [path]
    names = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - Path.glob takes no absolute pattern
    files = [p for p in map(Path, names) if not p.is_dir()]
    if not files:
        matched = "only directories" if names else "no file"
        raise BadInput(f"{pattern!r} matches {matched}; check the pattern, ** descends into directories")
    return files


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

    Raises BadInput for a file that is missing, unreadable, binary or compressed in an unknown way.
    """
    _refuse_unreadable(path)
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        return ""
    if not info.st_size:
        return f"{path} is empty"
    with open_file(path) as file:
        stream = ByteStream(file, path)
        if stream.encoding != "UTF-8":
            return f"{path} is {stream.encoding}, read as UTF-8"
    return ""


def total_bytes(path: Path) -> int:
    """Size on disk, the end of `Chunk.position`; 0 for a pipe."""
    info = path.stat()
    return info.st_size if stat.S_ISREG(info.st_mode) else 0


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
    once for what is not a text log, and, after everything readable was handed over, for a cut-off archive.
    """
    _refuse_unreadable(path)
    with open_file(path) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            place = Cursor(path=str(path), identity=STREAM)
        else:
            place = resume_at(path, file, start)
        stream = ByteStream(file, path, offset=place.offset)
        kind = _kind_at_beginning(path) if place.offset else None
        assembly = Assembly(
            place, max_records=max_records, max_bytes=max_bytes, documents=True, kind=kind, choice=choice
        )
        if place.offset:
            look_at_beginning(path, assembly.framer, final=True)
        failure: BadInput | None = None
        while failure is None:
            try:
                block = stream.read(BLOCK_BYTES)
            except BadInput as exc:
                failure = exc
                break
            except OSError as exc:
                failure = BadInput(f"{path} cannot be read further: {exc.strerror}")
                break
            if not block:
                break
            yield from assembly.push(block, stream.consumed())
        yield from assembly.finish(stream.consumed())
        if failure is not None:
            raise failure


def open_file(path: Path) -> BinaryIO:
    """An unbuffered file. Raises BadInput."""
    try:
        return path.open("rb", buffering=0)
    except OSError as exc:
        raise BadInput(f"{path} cannot be opened: {exc.strerror}; check its name and permissions") from exc


def _kind_at_beginning(path: Path) -> Kind | None:
    """The kind of document that the file is, None for lines."""
    with open_file(path) as file:
        try:
            return kind_of(ByteStream(file, path).read(BLOCK_BYTES))
        except BadInput:  # the reader reports the same damage
            return None


def look_at_beginning(path: Path, framer: Framer, *, final: bool) -> None:
    """Gives the framer the first lines of the file as its sample."""
    with open_file(path) as file:
        stream, cutter = ByteStream(file, path), LineCutter()
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
    head = os.pread(file.fileno(), 4, 0)
    plain = not head.startswith(REWRITTEN_MARKS)
    if plain and os.fstat(file.fileno()).st_size < start.offset:
        return Cursor(path=str(path), identity=identity)
    return replace(start, path=str(path), identity=identity)
