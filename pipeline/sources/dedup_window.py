"""Where the poll of a store goes on: a place per shard, and the documents around it that are known.

A shard numbers its writes, so a place is a number: every document up to it was accepted. It trails behind what was
read, because a number can become visible after a higher one; documents past it that were accepted are remembered by a
64-bit digest of index and `_id`. Always true between two pages: a document was accepted if and only if its number is
at most its shard's place, or it is remembered. Inside a page only the remembered ones grow.
"""

import base64
import zlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

import msgspec
import numpy as np

from pipeline.errors import BadPayload
from pipeline.records.wire import Codec

# A write of which a later one is visible already becomes visible with the next refresh: 1 s as shipped, 30 s in
# indices that were tuned for writing. After this long it is there, or its bulk was refused.
OVERLAP_S: Final = 60
# About 12 bytes each in a cursor, which is written with every batch. Also what recognises a shipper's repeated write.
REMEMBERED: Final = 10_000
# Of each shard at least, however much is read elsewhere: numbers that are in flight at one moment are as many as the
# shard has writing threads.
ALWAYS: Final = 200
MANY_PLACES: Final = 2_000  # about 30 bytes each in a cursor
_ROW: Final = np.dtype([("id", "<u8"), ("shard", "<u4"), ("seq", "<i8"), ("at", "<u4")])


class AcceptedDocument(NamedTuple):
    """An accepted document: its shard, its number there, the time of the view that showed it (seconds since 1970)."""

    shard: str
    seq: int
    at: int


@dataclass(slots=True)
class DedupWindow:
    """`places`: "<index uuid>/<shard>" -> number. `entries`: digest -> the document, in the order of acceptance."""

    places: dict[str, int] = field(default_factory=dict)
    entries: dict[int, AcceptedDocument] = field(default_factory=dict)

    def place(self, shard: str) -> int:
        """Everything of the shard up to this number was accepted; -1: nothing is known of it."""
        return self.places.get(shard, -1)

    def add(self, documents: Mapping[int, AcceptedDocument]) -> None:
        """These documents go with the batch that carries the cursor packed next."""
        for document, entry in documents.items():
            known = self.entries.pop(document, None)
            if known is not None:  # of an index that was deleted and made anew
                self.places[known.shard] = max(self.place(known.shard), known.seq)
            self.entries[document] = entry

    def again(self, document: int, entry: AcceptedDocument) -> bool:
        """True for a document that is remembered. Written anew, it is remembered under its new number."""
        known = self.entries.get(document)
        if known is None or known.shard != entry.shard:
            return False
        if entry.seq > known.seq:
            self.entries[document] = known._replace(seq=entry.seq)
        return True

    def settle(self, shard: str, upto: int, view: int) -> None:
        """Forget what is old or too much, and move the places over it.

        `shard` was read up to the number `upto` as it was at `view`; all that was read must be in. Old is what an
        earlier view showed, OVERLAP_S before: had a lower number been late, this reading would have met it.
        """
        for document, entry in list(self.entries.items()):
            if entry.shard == shard and entry.seq <= upto and entry.at <= view - OVERLAP_S:
                self._forget(document)
        excess = len(self.entries) - REMEMBERED
        if excess <= 0:
            return
        held = Counter(entry.shard for entry in self.entries.values())
        for document, entry in list(self.entries.items()):  # in the order of acceptance
            if excess <= 0:
                break
            if held[entry.shard] > ALWAYS:
                self._forget(document)
                held[entry.shard] -= 1
                excess -= 1

    def _forget(self, document: int) -> None:
        entry = self.entries.pop(document)
        self.places[entry.shard] = max(self.place(entry.shard), entry.seq)

    def keep(self, shards: Collection[str]) -> None:
        """Drop the places of indices that are gone, once there are many: a closed index may be opened again."""
        if len(self.places) > MANY_PLACES:
            self.places = {shard: n for shard, n in self.places.items() if shard in shards}
            self.entries = {d: e for d, e in self.entries.items() if e.shard in shards}

    def pack(self) -> str:
        """As text for the ledger."""
        names = sorted({entry.shard for entry in self.entries.values()})
        number = {name: n for n, name in enumerate(names)}
        rows = np.array([(d, number[e.shard], e.seq, e.at) for d, e in self.entries.items()], dtype=_ROW)
        # Column by column: three of four compress to nearly nothing.
        columns = b"".join(np.ascontiguousarray(rows[name]).tobytes() for name in _ROW.names or ())
        packed = base64.b85encode(zlib.compress(columns, 1)).decode()
        return _CODEC.to_json(_Packed(places=self.places, shards=names, known=packed))

    @classmethod
    def unpack(cls, text: str | None) -> Self:
        """None: from the beginning. Raises BadPayload."""
        if text is None:
            return cls()
        packed = _CODEC.from_json(text)
        try:
            blob = zlib.decompress(base64.b85decode(packed.known))
            size, offset, columns = len(blob) // _ROW.itemsize, 0, []
            for name in _ROW.names or ():
                kind = _ROW[name]
                columns.append(np.frombuffer(blob, dtype=kind, count=size, offset=offset).tolist())
                offset += kind.itemsize * size
            ids, shards, seqs, ats = columns
            names = packed.shards
            entries = {
                d: AcceptedDocument(names[s], q, a) for d, s, q, a in zip(ids, shards, seqs, ats, strict=True)
            }
            return cls(packed.places, entries)
        except (ValueError, IndexError, zlib.error) as exc:
            raise BadPayload(f"the cursor of a polled source is not readable: {exc!r}") from exc


class _Packed(msgspec.Struct, frozen=True, kw_only=True):
    """The wire form of a window. `known` holds the entries: `_ROW` by column, zlib, base 85."""

    places: dict[str, int]
    shards: list[str]
    known: str


_CODEC: Final = Codec(_Packed, version=1, what="the cursor of a polled source", newer=BadPayload)
