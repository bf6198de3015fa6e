"""The cursor of a poll: a low watermark per shard, and a dedup window of documents above the watermarks.

A shard numbers its writes. Every document up to the shard's place (the watermark) was accepted. The place
trails behind the read position, because a number can become visible after a higher one. Accepted documents
above the place stand in the window under a 64-bit digest of index and `_id`.

Invariant between two pages: a document was accepted if and only if its number is at most its shard's place,
or the window holds the document. Within a page only the window grows."""

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

# A late write becomes visible with the next refresh: 1 s as shipped, 30 s in indices tuned for writing. After
# this long the write is visible, or its bulk was refused.
OVERLAP_S: Final = 60
# About 12 bytes each in a cursor, which every batch writes. The window also recognises a shipper's repeated
# writes.
REMEMBERED: Final = 10_000
# Entries that each shard keeps. A shard has as many writes in flight as writing threads.
ALWAYS: Final = 200
MANY_PLACES: Final = 2_000  # about 30 bytes each in a cursor
_ROW: Final = np.dtype([("id", "<u8"), ("shard", "<u4"), ("seq", "<i8"), ("at", "<u4")])


class AcceptedDocument(NamedTuple):
    """`seq` is the number in the shard, `at` the time of the view that showed the document (seconds since
    1970)."""

    shard: str
    seq: int
    at: int


@dataclass(slots=True)
class DedupWindow:
    """`places`: "<index uuid>/<shard>" -> number. `entries`: digest -> document, in order of acceptance."""

    places: dict[str, int] = field(default_factory=dict)
    entries: dict[int, AcceptedDocument] = field(default_factory=dict)

    def place(self, shard: str) -> int:
        """All documents of the shard up to this number were accepted; -1 for an unknown shard."""
        return self.places.get(shard, -1)

    def add(self, documents: Mapping[int, AcceptedDocument]) -> None:
        """Adds the documents of the batch that carries the cursor packed next."""
        for document, entry in documents.items():
            earlier = self.entries.pop(document, None)
            if earlier is not None:  # of an index that was deleted and created anew
                self.places[earlier.shard] = max(self.place(earlier.shard), earlier.seq)
            self.entries[document] = entry

    def recognises(self, document: int, entry: AcceptedDocument) -> bool:
        """True for a document in the window. A rewritten document takes its new number."""
        earlier = self.entries.get(document)
        if earlier is None or earlier.shard != entry.shard:
            return False
        if entry.seq > earlier.seq:
            self.entries[document] = earlier._replace(seq=entry.seq)
        return True

    def settle(self, shard: str, upto: int, view: int) -> None:
        """Moves places over entries that are old or in excess, and drops those entries.

        `shard` was read up to the number `upto` at the time `view`, and all its documents were added. An
        entry is old OVERLAP_S after the view that showed it: this reading has met every lower number that was
        late."""
        for document, entry in list(self.entries.items()):
            if entry.shard == shard and entry.seq <= upto and entry.at <= view - OVERLAP_S:
                self._forget(document)
        excess = len(self.entries) - REMEMBERED
        if excess <= 0:
            return
        counts = Counter(entry.shard for entry in self.entries.values())
        for document, entry in list(self.entries.items()):  # in the order of acceptance
            if excess <= 0:
                break
            if counts[entry.shard] > ALWAYS:
                self._forget(document)
                counts[entry.shard] -= 1
                excess -= 1

    def _forget(self, document: int) -> None:
        entry = self.entries.pop(document)
        self.places[entry.shard] = max(self.place(entry.shard), entry.seq)

    def keep(self, shards: Collection[str]) -> None:
        """Drops places of missing indices above MANY_PLACES. Until then a closed index may be opened
        again."""
        if len(self.places) > MANY_PLACES:
            self.places = {shard: n for shard, n in self.places.items() if shard in shards}
            self.entries = {d: e for d, e in self.entries.items() if e.shard in shards}

    def pack(self) -> str:
        """Text for the ledger."""
        names = sorted({entry.shard for entry in self.entries.values()})
        number = {name: n for n, name in enumerate(names)}
        rows = np.array([(d, number[e.shard], e.seq, e.at) for d, e in self.entries.items()], dtype=_ROW)
        # Column by column: three of four compress to nearly nothing.
        columns = b"".join(np.ascontiguousarray(rows[name]).tobytes() for name in _ROW.names or ())
        packed = base64.b85encode(zlib.compress(columns, 1)).decode()
        return _CODEC.to_json(_Packed(places=self.places, shards=names, known=packed))

    @classmethod
    def unpack(cls, text: str | None) -> Self:
        """None is the beginning. Raises BadPayload."""
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
