"""The files that had a followed name: rotated copies by their names, and what each of them holds.

A copy is known again by its inode, and after it was copied or packed by its text: how it begins, and what
stands before the place that was read to.
"""

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.errors import BadInput
from pipeline.records.batch import digest
from pipeline.sources.chunks import TextPlace
from pipeline.sources.files import (
    BLOCK_BYTES,
    HEAD_BYTES,
    IDENTITY_BYTES,
    FromStart,
    identify,
    is_same,
    look_at_beginning,
    open_file,
)
from pipeline.sources.folders import oldest_first, rotation
from pipeline.sources.framing import Framer
from pipeline.sources.packed.bytestreams import ByteStream, Layers, is_rewritten

TAIL_BYTES: Final = 256
_NUMBER: Final = re.compile(r"\d+")

Inode = tuple[int, int]  # device and number


class OpenText:
    """An open file that is read as text, from a place on. Plain files may grow, packed ones do not.

    Raises BadInput for a file that cannot be opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = open_file(path)
        info = os.fstat(self.file.fileno())
        self.inode: Inode = (info.st_dev, info.st_ino)
        self.packed = is_rewritten(os.pread(self.file.fileno(), HEAD_BYTES, 0))
        self._stream: ByteStream | None = None  # of a packed file
        self._first = b""

    def close(self) -> None:
        self.file.close()

    @property
    def identity(self) -> str:
        """Of the file as it is now."""
        return identify(self.file)

    @property
    def changed(self) -> int:
        """When it was last written to, in ns since 1970."""
        return os.fstat(self.file.fileno()).st_mtime_ns

    def sample(self, framer: Framer) -> None:
        """Gives the framer the first lines."""
        look_at_beginning(self.file, str(self.path), framer, final=self.packed)

    def tail(self, offset: int) -> bytes | None:
        """Up to TAIL_BYTES of text before the offset; None for a text that is shorter. Raises BadInput for
        damage."""
        if self.packed:
            return self._unpack_to(offset)
        if os.fstat(self.file.fileno()).st_size < offset:
            return None
        size = min(TAIL_BYTES, offset)
        return os.pread(self.file.fileno(), size, offset - size)

    def _unpack_to(self, offset: int) -> bytes | None:
        """Unpacks from the beginning up to the offset, where `read` goes on."""
        self._stream = ByteStream(Layers(FromStart(self.file), str(self.path)))
        tail = b""
        while self._stream.offset < offset:
            data = self._stream.read(min(BLOCK_BYTES, offset - self._stream.offset))
            if not data:
                return None
            tail = (tail + data)[-TAIL_BYTES:]
        return tail

    def seek(self, offset: int) -> None:
        """The next `read` begins there."""
        if not self.packed:
            self.file.seek(offset)
        elif self._stream is None or self._stream.offset != offset:
            self._unpack_to(offset)

    def read(self) -> bytes:
        """A block of text; b"" at the end. Raises BadInput for damage."""
        return self.file.read(BLOCK_BYTES) if self._stream is None else self._stream.read(BLOCK_BYTES)

    def is_file_of(self, place: TextPlace) -> bool:
        """True for the very file of this place, with what it had there."""
        return is_same(place.identity, self.file) and self._has_before(place.offset, place.tail)

    def is_copy_of(self, place: TextPlace) -> bool:
        """True for a text that begins as the file of this place did, and has what it had there."""
        return self.begins_as(place.identity) and self._has_before(place.offset, place.tail)

    def _has_before(self, offset: int, tail: str) -> bool:
        try:
            before = self.tail(offset)
        except BadInput:
            return False
        return before is not None and (not tail or digest(before) == tail)

    def begins_as(self, identity: str) -> bool:
        """True for a text that begins as the plain file of this identity did."""
        try:
            _, _, size, first = identity.split(":")
            wanted, head = int(size), self.head
        except (ValueError, BadInput):
            return False
        return 0 < wanted <= len(head) and digest(head[:wanted]) == first

    @property
    def size(self) -> int:
        """Bytes of text; of a damaged file up to the damage."""
        if not self.packed:
            return os.fstat(self.file.fileno()).st_size
        stream = ByteStream(Layers(FromStart(self.file), str(self.path)))
        with contextlib.suppress(BadInput):
            while stream.read(BLOCK_BYTES):
                pass
        return stream.offset

    @property
    def head(self) -> bytes:
        """The first IDENTITY_BYTES of text. Raises BadInput for damage."""
        if len(self._first) < IDENTITY_BYTES:
            stream, self._first = ByteStream(Layers(FromStart(self.file), str(self.path))), b""
            while data := stream.read(IDENTITY_BYTES - len(self._first)):
                self._first += data
        return self._first


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """An entry of a folder that had the name, or will be taken for one that had."""

    path: Path
    inode: Inode
    size: int
    changed: int  # ns since 1970


def file_at(path: Path) -> list[Copy]:
    """The regular file that has the name now; [] without one."""
    try:
        info = path.stat()
    except OSError:
        return []
    return [_copy(path, info)] if stat.S_ISREG(info.st_mode) else []


def rotated_copies(path: Path) -> list[Copy]:
    """The rotated copies of a name, oldest first. One that is being packed counts once, as plain."""
    found = {copy.path: copy for copy in entries(path.parent) if _is_copy(copy.path.name, path.name)}
    plain = [
        copy
        for copy in found.values()
        if not (rotation(copy.path.name).packed and copy.path.with_suffix("") in found)
    ]
    return [found[one] for one in oldest_first((copy.path, copy.changed / 1e9) for copy in plain)]


def _is_copy(name: str, live: str) -> bool:
    return name != live and rotation(name).live == live


def targets_between(old: Path, new: Path) -> list[Copy]:
    """What a link may have named in between: `1.log` where it named `0.log` and now names `2.log`."""
    shapes = [_NUMBER.split(path.name) for path in (old, new)]
    if old.parent != new.parent or shapes[0] != shapes[1]:
        return []
    first, last = _numbers(old.name), _numbers(new.name)
    between = [
        copy
        for copy in entries(new.parent)
        if _NUMBER.split(copy.path.name) == shapes[0] and first < _numbers(copy.path.name) < last
    ]
    return sorted(between, key=lambda copy: _numbers(copy.path.name))


def _numbers(name: str) -> list[int]:
    return [int(digits) for digits in _NUMBER.findall(name)]


def entries(folder: Path) -> Iterator[Copy]:
    """The regular files of a folder; none of one that cannot be read."""
    try:
        with os.scandir(folder) as listing:
            for entry in listing:
                try:
                    info = entry.stat()
                except OSError:  # it has just gone, or is a link to nothing
                    continue
                if stat.S_ISREG(info.st_mode):
                    yield _copy(folder / entry.name, info)
    except OSError:
        return


def _copy(path: Path, info: os.stat_result) -> Copy:
    return Copy(path=path, inode=(info.st_dev, info.st_ino), size=info.st_size, changed=info.st_mtime_ns)


def linked_names(path: Path) -> tuple[Path, ...]:
    """The path, and where its links lead."""
    real = Path(os.path.realpath(path))
    return (path,) if real == path.absolute() else (path, real)
