"""Archives: log objects below a folder or in a bucket, listed with their identity and read in ranges.

An object must not change while it is read. Its identity tells that: ETag and size in a bucket; inode, size
and time of change in a folder. A read of an object with another identity raises ObjectChanged."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from pipeline.errors import BadInput, ObjectChanged, StoreUnavailable
from pipeline.sources.folders import Filter, Skipped, is_hidden, walk

# Of one request to a bucket. A request takes some ten milliseconds, and the reader of a piece waits for it.
BLOCK_BYTES: Final = 4 * 2**20
S3: Final = "s3://"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveObject:
    """A log object. `name` is its path in the archive, `changed` the time of its change in seconds."""

    name: str
    size: int
    changed: float
    identity: str


class Archive(Protocol):
    """A folder or bucket of log objects. Methods raise StoreUnavailable where it cannot be read now."""

    url: str

    def objects(self, wanted: Filter, skipped: Skipped) -> Iterator[ArchiveObject]:
        """Wanted objects, neither empty nor hidden. Raises BadInput for an archive that does not exist."""

    def read(self, one: ArchiveObject, offset: int, size: int) -> bytes:
        """Up to `size` bytes, b"" at the end. Raises ObjectChanged."""

    def shown(self, name: str) -> str:
        """The object as users know it."""

    def check(self, root: str = "") -> None:
        """Raises StoreUnavailable, or BadInput, where this machine cannot reach the archive now, or another
        one than that of `root`."""

    def root(self) -> str:
        """Tells the archive from another one at its address; "" where an address is enough."""


def archive_of(place: str) -> Archive:
    """The archive at an address: `s3://bucket/prefix`, or a folder. Raises BadInput."""
    if "://" not in place:
        return FolderArchive(Path(place))
    parts = urlsplit(place)
    if "@" in parts.netloc:
        raise BadInput(
            "the address holds credentials; give them as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead"
        )
    if not place.startswith(S3) or not parts.netloc:
        raise BadInput(f"{place!r} is no archive; give a folder, or s3://bucket/prefix")
    # A key may have a question mark or a number sign.
    return BucketArchive(parts.netloc, place.removeprefix(S3).partition("/")[2])


class FolderArchive:
    """The files below a folder, which every reader's machine has at this path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser().absolute()
        self.url = str(self.folder)

    def objects(self, wanted: Filter, skipped: Skipped) -> Iterator[ArchiveObject]:
        if self.folder.is_file():
            raise BadInput(f"{self.url} is a file; give its folder and --include {self.folder.name!r}")
        self._refuse_missing()
        real = self.folder.resolve()
        for path, info in walk(self.folder, wanted, skipped):
            if not info.st_size:
                continue
            name = str(path.relative_to(self.folder))
            # Who fills an archive may not choose what a reader, with rights of its own, reads elsewhere.
            leads_out = path.is_symlink() and not path.resolve().is_relative_to(real)
            # An odd name would have to come back from JSON as it was.
            if leads_out or not name.isprintable():
                skipped.add(name)
                continue
            yield ArchiveObject(
                name=name, size=info.st_size, changed=info.st_mtime, identity=_file_identity(info)
            )

    def read(self, one: ArchiveObject, offset: int, size: int) -> bytes:
        path = self.folder / one.name
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError as exc:
            raise missing_object(self.shown(one.name)) from exc
        except OSError as exc:
            raise StoreUnavailable(
                f"{path} cannot be opened ({exc.strerror}); look at its permissions"
            ) from exc
        try:
            data = os.pread(file, size, offset)
            if _file_identity(os.fstat(file)) != one.identity:
                raise changed(self.shown(one.name))
        except OSError as exc:
            raise StoreUnavailable(f"{path} cannot be read ({exc.strerror}); look at its disk") from exc
        finally:
            os.close(file)
        return data

    def shown(self, name: str) -> str:
        return str(self.folder / name)

    def check(self, root: str = "") -> None:
        self._refuse_missing()
        # Where a folder is not mounted, its empty mount point is there.
        if root and root != self.root():
            raise BadInput(
                f"{self.url} is another folder here than where the backfill was planned; mount the same one "
                "on this machine, or give the same command again"
            )

    def root(self) -> str:
        return f"{self.folder.stat().st_ino:x}"

    def _refuse_missing(self) -> None:
        if not self.folder.exists():
            raise BadInput(f"{self.url} does not exist; check the name, or mount the folder on this machine")
        if not self.folder.is_dir():
            raise BadInput(f"{self.url} is no folder; give a folder, or s3://bucket/prefix")
        if not os.access(self.folder, os.R_OK | os.X_OK):
            raise BadInput(f"{self.url} may not be read by this user; change its permissions or the user")


class BucketArchive:
    """The objects of a bucket below a prefix, or the one object of this key."""

    def __init__(self, bucket: str, prefix: str) -> None:
        from pipeline.store.bucket import ForeignBucket  # obstore is of an extra

        self.prefix = prefix.strip("/")
        self.bucket = ForeignBucket(bucket)
        self.url = f"{self.bucket.url}/{self.prefix}".rstrip("/")

    def objects(self, wanted: Filter, skipped: Skipped) -> Iterator[ArchiveObject]:
        found = False
        for one in self.bucket.listed(self.prefix):
            found = True
            relative = one.key.removeprefix(self.prefix).lstrip("/")
            parts = relative.split("/")
            if not one.size or any(map(is_hidden, parts)) or _dropped(parts, wanted):
                continue
            if not one.key.isprintable():
                skipped.add(one.key)
            elif wanted.takes(relative):
                yield _of_bucket(one, relative)
        if not found and self.prefix and (one_object := self.bucket.look(self.prefix)) is not None:
            yield _of_bucket(one_object, "")

    def read(self, one: ArchiveObject, offset: int, size: int) -> bytes:
        size = min(size, one.size - offset)
        if size <= 0:
            return b""
        answer = self.bucket.part(self._key(one.name), offset, offset + size)
        if answer is None:
            raise missing_object(self.shown(one.name))
        data, tag = answer
        if _tag_identity(tag, one.size) != one.identity or len(data) != size:
            raise changed(self.shown(one.name))
        return data

    def shown(self, name: str) -> str:
        return f"{self.bucket.url}/{self._key(name)}"

    def check(self, root: str = "") -> None:  # noqa: ARG002 - a bucket is the same everywhere
        next(iter(self.bucket.listed(self.prefix)), None)

    def root(self) -> str:
        return ""

    def _key(self, name: str) -> str:
        return "/".join(part for part in (self.prefix, name) if part)


class ObjectFile(RawIOBase):
    """An object as a file that can seek, for unpackers."""

    def __init__(self, archive: Archive, one: ArchiveObject) -> None:
        self._archive, self._one, self._at = archive, one, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._archive.read(self._one, self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._one.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at


def opened(archive: Archive, one: ArchiveObject) -> BufferedReader:
    """The object as a file that is read in blocks."""
    return BufferedReader(ObjectFile(archive, one), min(BLOCK_BYTES, max(1, one.size)))


def missing_object(shown: str) -> ObjectChanged:
    return ObjectChanged(f"{shown} does not exist any more; put it back and give the same command again")


def changed(shown: str) -> ObjectChanged:
    return ObjectChanged(
        f"{shown} has changed since it was planned; archives must not change, send what grows with "
        "`logweir send`"
    )


def _dropped(parts: list[str], wanted: Filter) -> bool:
    """True below a folder that is excluded."""
    return any(wanted.drops("/".join(parts[:n])) for n in range(1, len(parts)))


def _of_bucket(one: Any, name: str) -> ArchiveObject:
    identity = _tag_identity(one.tag, one.size)
    return ArchiveObject(name=name, size=one.size, changed=one.changed, identity=identity)


def _tag_identity(tag: str, size: int) -> str:
    mark = tag.strip('"')
    return f"{mark}:{size:x}"


def _file_identity(info: os.stat_result) -> str:
    # Without the device: its number differs between the machines that mount one folder.
    return f"{info.st_ino:x}:{info.st_size:x}:{info.st_mtime_ns:x}" if stat.S_ISREG(info.st_mode) else ""
