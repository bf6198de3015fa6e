"""The members of tar and zip archives as streams, one after another. Nothing is written to a disk.

A member's name is text for people: it is never used as a path. Bytes that the reader of a
member leaves are skipped.
"""

import io
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

from pipeline.errors import BadInput
from pipeline.sources.folders import Skipped, is_hidden, oldest_first
from pipeline.sources.packed.bytestreams import ByteStream, Layers
from pipeline.sources.packed.unpacking import Readable, damaged, ends_early
from pipeline.units import plural

MAX_MEMBERS: Final = 100_000
_BLOCK: Final = 512
_MAX_HEADER: Final = 1024 * 1024  # of a long name, or of the attributes of one member
_MAX_DIRECTORY: Final = 128 * 1024 * 1024  # of a zip, which is held in memory
_MAX_NESTED_ZIP: Final = (
    64 * 1024 * 1024
)  # a zip is read from its end, so one within an archive is held whole
_ENCRYPTED: Final = 1  # a flag of a zip's member
_SKIP_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A file, or a member of an archive: `bundle.tar.gz:app/web.log`."""

    path: Path
    member: str = ""

    @property
    def name(self) -> str:
        """For people, and for results."""
        return f"{self.path}:{self.member}" if self.member else str(self.path)

    @property
    def named(self) -> Path:
        """The path that names its workload. It is never opened."""
        return Path(PurePosixPath(self.member.rpartition(":")[2]).name) if self.member else self.path

    def within(self, member: str) -> "Source":
        """A member of this archive."""
        return Source(path=self.path, member=f"{self.member}:{member}" if self.member else member)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A file in an archive. `mark` tells it from another one of this name."""

    name: str
    mark: str
    stream: Readable


class _Part:
    """The bytes of one member of a tar."""

    def __init__(self, source: Readable, size: int) -> None:
        self._source, self.left = source, size

    def read(self, size: int, /) -> bytes:
        """Shorter than the member where the archive is cut off."""
        data = self._source.read(min(size, self.left)) if self.left else b""
        self.left -= len(data)
        return data


def members(layers: Layers, file: BinaryIO | None) -> Iterator[Member]:
    """The regular files of an archive that are not hidden: a tar's in its order, a zip's as of a folder.

    `file`: the archive itself where it can seek. Raises BadInput where the rest cannot be read.
    """
    found = _of_tar(layers) if layers.kind == "tar" else _of_zip(layers, file)
    times: dict[str, int] = {}
    for number, member in enumerate(found):
        if number >= MAX_MEMBERS:
            raise BadInput(f"{layers.name} has more than {MAX_MEMBERS:,} members, the rest is left out")
        name = member.name.removeprefix("./")
        if any(is_hidden(part) for part in PurePosixPath(name).parts if part != ".."):
            continue
        times[name] = times.get(name, 0) + 1
        if times[name] > 1:  # a tar may hold a name again
            name = f"{name}#{times[name]}"
        yield Member(name=name, mark=member.mark, stream=member.stream)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text to read, before the next one is asked for."""

    source: Source
    mark: str
    stream: ByteStream


def texts(layers: Layers, file: BinaryIO | None, source: Source, skipped: Skipped) -> Iterator[Text]:
    """The text of a file, or those of an archive and of the archives in it, one after another.

    `skipped` gets members that are no text. Raises BadInput where the rest of the file cannot be read.
    """
    if layers.kind == "text":
        yield Text(source=source, mark="", stream=ByteStream(layers))
        return
    late: Callable[[], None] | None = None
    for member in members(layers, file):
        # Only now is it known that the archive itself did not end there.
        if late is not None:
            late()
        inside, late = source.within(member.name), None
        try:
            inner = Layers(member.stream, inside.name, outer=layers)
            # Documents and programs are zips, too.
            if inner.kind == "zip" and not member.name.lower().endswith(".zip"):
                late = partial(skipped.add, inside.name)
            elif inner.kind == "text" and inner.first:
                yield Text(source=inside, mark=member.mark, stream=ByteStream(inner))
        except BadInput:
            late = partial(skipped.add, inside.name)
            continue
        if inner.kind == "tar" or (inner.kind == "zip" and late is None):
            try:
                for text in texts(inner, None, inside, skipped):
                    yield Text(source=text.source, mark=f"{member.mark} {text.mark}", stream=text.stream)
            except BadInput as exc:
                late = partial(layers.note, str(exc))
    if late is not None:
        late()


def _of_tar(layers: Layers) -> Iterator[Member]:
    """Members in their order. Headers are read here, because `tarfile` holds long ones in memory whole."""
    source, name = layers.source, layers.name
    longer, attributes = "", dict[str, str]()
    while (header := _exactly(source, _BLOCK, name)) and header.count(0) < _BLOCK:
        info = _header(header, name)
        size = info.size
        if info.type in (
            tarfile.GNUTYPE_LONGNAME,
            tarfile.GNUTYPE_LONGLINK,
            tarfile.XHDTYPE,
            tarfile.SOLARIS_XHDTYPE,
        ):
            if size > _MAX_HEADER:
                raise damaged(name, ValueError(f"a header of {size:,} bytes"))
            data = _exactly(source, -(-size // _BLOCK) * _BLOCK, name)[:size]
            if info.type == tarfile.GNUTYPE_LONGNAME:
                longer = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
            elif info.type != tarfile.GNUTYPE_LONGLINK:
                attributes = _attributes(data)
            continue
        if attributes.get("size", "").isdigit():
            size = int(attributes["size"][:20])
        part = _Part(source, size if _has_data(info) else 0)
        padding = -part.left % _BLOCK
        if _is_sparse(info, attributes):
            _skip_sparse_maps(source, header, name)
        elif info.isreg():
            yield Member(
                name=attributes.get("path") or longer or info.name,
                mark=f"{size:x}:{int(info.mtime):x}",
                stream=part,
            )
        longer, attributes = "", {}
        _skip(part, source, padding, name)


def _header(header: bytes, name: str) -> tarfile.TarInfo:
    try:
        info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError) as exc:
        raise damaged(name, exc) from exc
    if info.size < 0:
        raise damaged(name, ValueError("a member of negative size"))
    return info


def _has_data(info: tarfile.TarInfo) -> bool:
    """Links, devices and folders have none, whatever size their header names."""
    return info.isreg() or info.type not in tarfile.SUPPORTED_TYPES or info.type == tarfile.XGLTYPE


def _is_sparse(info: tarfile.TarInfo, attributes: dict[str, str]) -> bool:
    return info.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse.") for key in attributes)


def _skip_sparse_maps(source: Readable, header: bytes, name: str) -> None:
    """A sparse file is no log; the blocks behind its header say where its holes are."""
    more = header[156:157] == tarfile.GNUTYPE_SPARSE and header[482]
    while more:
        more = _exactly(source, _BLOCK, name).ljust(_BLOCK, b"\0")[504]


def _attributes(data: bytes) -> dict[str, str]:
    """Attributes of POSIX headers: `LENGTH KEY=VALUE\n`."""
    found: dict[str, str] = {}
    while data:
        digits, _, _ = data.partition(b" ")
        if not digits.isdigit() or len(digits) > 7 or not len(digits) < int(digits) <= len(data):
            break
        key, _, value = data[len(digits) + 1 : int(digits)].removesuffix(b"\n").partition(b"=")
        found[key.decode("utf-8", "replace")] = value.decode("utf-8", "surrogateescape")
        data = data[int(digits) :]
    return found


def _exactly(source: Readable, size: int, name: str) -> bytes:
    """`size` bytes; b"" at the end. Raises BadInput in between."""
    data = b""
    while len(data) < size:
        more = source.read(size - len(data))
        if not more:
            if data:
                raise ends_early(name)
            break
        data += more
    return data


def _skip(part: _Part, source: Readable, padding: int, name: str) -> None:
    while part.left:
        if not part.read(_SKIP_BYTES):
            raise ends_early(name)
    if padding and not _exactly(source, padding, name):
        raise ends_early(name)


def _of_zip(layers: Layers, file: BinaryIO | None) -> Iterator[Member]:
    name = layers.name
    if file is None or layers.packing:
        file = _in_memory(layers)
    _refuse_directory(file, name)
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, OSError, ValueError, EOFError, struct.error, NotImplementedError) as exc:
        raise damaged(name, exc) from exc
    infos: dict[PurePosixPath, list[zipfile.ZipInfo]] = {}
    locked = Skipped()
    for info in archive.infolist():
        if info.flag_bits & _ENCRYPTED:
            locked.add(info.filename)
        elif not info.is_dir():
            infos.setdefault(PurePosixPath(info.filename), []).append(info)
    if locked.count:
        names = f"{plural(locked.count, 'encrypted member')}: {locked.names()}"
        layers.note(f"{name} is read without {names}")
    for path in oldest_first((path, _moment(same[0])) for path, same in infos.items()):
        for info in infos[path]:
            layers.plain.read_bytes += info.compress_size
            yield Member(
                name=info.filename,
                mark=f"{info.file_size:x}:{info.CRC:08x}",
                stream=_ZipPart(archive, info, layers),
            )


def _moment(info: zipfile.ZipInfo) -> float:
    year, month, day, hour, minute, second = info.date_time
    return ((((year * 12 + month) * 31 + day) * 24 + hour) * 60 + minute) * 60 + second


class _ZipPart:
    """The text of one member of a zip, opened at its first byte."""

    def __init__(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo, layers: Layers) -> None:
        self._archive, self._info, self._layers = archive, info, layers
        self._open: Readable | None = None

    def read(self, size: int, /) -> bytes:
        info, name = self._info, f"{self._layers.name}:{self._info.filename}"
        try:
            if self._open is None:
                # The other methods have no bound on what one read unpacks.
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise BadInput(f"{name} is packed in a way that is not read")
                self._open = self._archive.open(info)
            data = self._open.read(size)
        except (
            zipfile.BadZipFile,
            zlib.error,
            OSError,
            EOFError,
            ValueError,
            NotImplementedError,
            struct.error,
        ) as exc:
            raise damaged(name, exc) from exc
        self._layers.budget.spend(len(data), self._layers.name)
        return data


def _in_memory(layers: Layers) -> BinaryIO:
    data = b""
    while more := layers.source.read(_SKIP_BYTES):
        data += more
        if len(data) > _MAX_NESTED_ZIP:
            raise BadInput(
                f"{layers.name} is a zip of more than {_MAX_NESTED_ZIP >> 20} MiB within an archive, which "
                "is not read; take it out first"
            )
    return io.BytesIO(data)


def _refuse_directory(file: BinaryIO, name: str) -> None:
    """A zip's list of members is held in memory, so its size is bounded."""
    end = file.seek(0, io.SEEK_END)
    start = max(0, end - 65_557)
    file.seek(start)
    tail = file.read(end - start)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) < at + 20:
        raise ends_early(name)
    size = struct.unpack_from("<L", tail, at + 12)[0]
    if size == 0xFFFFFFFF and tail[at - 20 : at - 16] == b"PK\x06\x07" and at >= 20:
        (place,) = struct.unpack_from("<Q", tail, at - 12)
        file.seek(min(place, end))
        wide = file.read(56)
        size = struct.unpack_from("<Q", wide, 40)[0] if len(wide) == 56 else 0
    if size > _MAX_DIRECTORY:
        raise BadInput(
            f"{name} has a list of members of {size >> 20:,} MiB, which is not read; unpack it first"
        )
