"""Pieces of an archive: an object, or a range of a large text object. One reader reads a piece.

Ranges of an object meet at *borders* (borders.py), which depend on its bytes alone. So every line lies in
exactly one piece, whoever reads it."""

from collections.abc import Iterator
from typing import Final

import msgspec

from pipeline.records.batch import digest
from pipeline.records.declared import FormatChoice
from pipeline.records.wire import Codec
from pipeline.sources.backfill.archive import ArchiveObject
from pipeline.sources.backfill.window import time_of_object

# A killed reader loses no lines, so the size only bounds how unevenly readers end. 160,000 pieces are 10 TB.
PIECE_BYTES: Final = 64 * 2**20
_ORDERS: Final = 1_000_000  # pieces of one object that keep their order


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of an object between the borders at `begin` and `end`. `whole`: the object is one piece."""

    name: str
    identity: str
    size: int
    changed: float
    begin: int = 0
    end: int = 0
    whole: bool = True

    @property
    def object(self) -> ArchiveObject:
        return ArchiveObject(name=self.name, size=self.size, changed=self.changed, identity=self.identity)

    @property
    def piece_id(self) -> str:
        return digest("piece", self.name, self.identity, f"{self.begin:x}-{self.end:x}")

    @property
    def bytes(self) -> int:
        return self.end - self.begin


PIECE: Final = Codec(Piece, version=1, what="a piece of an archive")


class BackfillPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The request of one `logweir backfill`. The same command gives the same name."""

    name: str
    place: str
    since: str = ""
    until: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    workload: str = ""  # "": each object's name
    zone: str = "UTC"
    declared: tuple[str, ...] = ()
    forced: str = ""
    # The moments that `since` and `until` meant when the plan was made, in milliseconds.
    since_ms: int | None = None
    until_ms: int | None = None
    piece_bytes: int = PIECE_BYTES
    root: str = ""  # of the archive, as Archive.root answered

    @property
    def choice(self) -> FormatChoice:
        return FormatChoice(declared=self.declared, forced=self.forced)


PLAN: Final = Codec(BackfillPlan, version=1, what="a backfill")


def plan_name(place: str, *parts: str) -> str:
    """A short name that people can type: the last part of the place, and a digest of the whole command."""
    last = next((part for part in reversed(place.split("/")) if part), "archive")
    plain = "".join(c if c.isascii() and c.isalnum() else "-" for c in last).strip("-").lower()[:24]
    return f"{plain or 'archive'}-{digest('backfill', place, *parts)[:8]}"


def cut(one: ArchiveObject, *, ranges: bool, piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """The pieces of an object, the last one first. `ranges`: the object may be cut."""
    facts = {"name": one.name, "identity": one.identity, "size": one.size, "changed": one.changed}
    count = -(-one.size // piece_bytes) if ranges else 1
    if count < 2:
        yield Piece(**facts, end=one.size)  # type: ignore[arg-type]
        return
    for n in reversed(range(count)):
        begin, end = n * piece_bytes, min(one.size, (n + 1) * piece_bytes)
        yield Piece(**facts, begin=begin, end=end, whole=False)  # type: ignore[arg-type]


def turn_of(piece: Piece) -> float:
    """The turn of a piece, smallest first: newest objects, and the end of an object before its beginning."""
    begin, _ = time_of_object(piece.name, piece.changed)
    order = min(_ORDERS - 1, piece.begin // max(1, PIECE_BYTES))
    return -(int(begin.timestamp()) * _ORDERS + order)
