"""Objects that every machine of a pipeline reaches: in a folder (`file:///...`) or in a bucket (`s3://...`).

A key is a relative path with `/`. An object is whole or absent, never half. `create` writes only where
nothing is: of several creators exactly one wins, by a hard link in a folder and by `If-None-Match: *` in a
bucket. `swap` is a compare-and-set on the tag of an object. Of several writers that read the same object one
wins, by a lock in a folder and by `If-Match` in a bucket. Both kinds pass the same contract suite
(tests/store/test_objects.py).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, Protocol
from uuid import uuid4

from pipeline.errors import BadInput

# No part begins with a dot: those are temporary files of a folder.
KEY: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]*(/[A-Za-z0-9_][A-Za-z0-9_.=-]*)*")
PROBES: Final = "probes/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One object of a listing: key, size in bytes, time of its last change in seconds since 1970."""

    key: str
    size: int
    changed: float


class Objects(Protocol):
    """Objects by key. Every method raises StoreUnavailable when the store does not answer or refuses."""

    url: str

    def get(self, key: str) -> bytes | None:
        """The object, None where there is none."""

    def fetch(self, key: str, to: Path, *, max_bytes: int) -> bool:
        """Writes the object to a file; False where there is none. No more than `max_bytes` + 1 are read."""

    def create(self, key: str, content: bytes | Path) -> bool:
        """Writes a new object and keeps an existing one; False if there was one.

        A creation whose answer was lost and that was repeated answers False too: compare the content.
        """

    def put(self, key: str, content: bytes | Path) -> None:
        """Writes an object, also over an existing one."""

    def tagged(self, key: str) -> tuple[bytes, str] | None:
        """The object and the tag of this content, None where there is none."""

    def swap(self, key: str, content: bytes, tag: str | None) -> str | None:
        """Writes an object whose tag is still `tag` (None: that does not exist); its new tag, or None if it
        changed.

        A swap whose answer was lost and that was repeated answers None too: read the object again.
        """

    def look(self, key: str) -> Found | None:
        """Size and time of the object, None where there is none."""

    def found(self, prefix: str) -> Iterator[Found]:
        """The objects whose key begins with `prefix`, a folder with its `/`; in no order."""

    def delete(self, key: str) -> None:
        """Removes an object; nothing happens where there is none."""

    def sweep(self, prefix: str) -> int:
        """Removes what killed writers left below a prefix; returns the number of files."""


def probe(objects: Objects) -> None:
    """Checks that the store takes objects and honours conditions.

    Raises BadInput for a store that overwrites what exists, StoreUnavailable for one that cannot be written.
    """
    key = f"{PROBES}{uuid4().hex}"
    try:
        first = objects.create(key, b"first")
        second = objects.create(key, b"second")
        probe = objects.tagged(key)
        tag = probe[1] if probe is not None else ""
        third = objects.swap(key, b"third", tag)
        fourth = objects.swap(key, b"fourth", tag)
        last = objects.get(key)
    finally:
        objects.delete(key)
    if not first or second or probe is None or probe[0] != b"first":
        _refuse(objects, "If-None-Match")
    if third is None or fourth is not None or last != b"third":
        _refuse(objects, "If-Match")


def _refuse(objects: Objects, condition: str) -> NoReturn:
    raise BadInput(
        f"the store {objects.url} ignores conditions ({condition}), so two machines could overwrite each "
        "other's objects; choose a store that honours them, or a folder that all machines mount"
    )


def checked(key: str) -> str:
    """The key itself. Raises ValueError for one that could lead out of the store."""
    if not KEY.fullmatch(key):
        raise ValueError(f"{key!r} is no key of a store")
    return key
