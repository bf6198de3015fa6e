"""The journal of templates: the store's own record of which id has which words.

Stored results name their templates by id for as long as they are kept, and Redis may be lost much earlier. So
the learner writes every new or widened template here before it writes it to Redis, and results can
name an id only after that. An entry is an object `templates/NUMBER`. The numbers follow each other and
`create` never overwrites, so of two learners that write the same number one learns that it was overtaken.
Every MERGED_AFTER entries the learner writes one that holds all templates and removes those before it."""

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from pipeline.errors import BadPayload, LeaseRefused, StoreUnavailable
from pipeline.records.wire import Codec
from pipeline.store.objects import Objects

FOLDER: Final = "templates/"
# Reading an object takes some 20 ms in a bucket, so a learner that starts reads for at most about a second.
MERGED_AFTER: Final = 64
READ_TRIES: Final = 5  # a merge that removes entries while they are read is rare; five in a row are a fault


class Kept(NamedTuple):
    """A template as Redis stores it (drain/templates.py), and the workload that created it."""

    packed: bytes
    workload: str


class JournalEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One object. `whole`: it holds all templates, so earlier entries are not needed."""

    whole: bool
    templates: list[tuple[int, bytes, str]]


_WIRE: Final = Codec(JournalEntry, version=1, what="an entry of the journal of templates")


class Journal:
    """The entries of one pipeline. Every method raises StoreUnavailable."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.position = 0  # the newest entry that was read or written; 0 before the first one
        self._whole = 0  # the newest entry that holds all templates

    def read(self) -> dict[int, Kept]:
        """All templates by id, each as it was written last. Raises TooNew."""
        for _ in range(READ_TRIES):
            entries = self._entries()
            if entries is not None:
                break
        else:
            raise StoreUnavailable(
                f"entries of {self.objects.url}/{FOLDER} vanish while they are read; it is tried again"
            )
        return {i: Kept(packed, name) for entry in entries for i, packed, name in entry.templates}

    def append(self, templates: Mapping[int, Kept]) -> None:
        """Writes templates behind the newest entry.

        Raises LeaseRefused when another learner has written there; read the journal before the next try.
        """
        self._write(templates, whole=False)
        if self.position - self._whole >= MERGED_AFTER:
            self._write(self.read(), whole=True)
            for number in self._numbers():
                if number < self.position:
                    self.objects.delete(self._key(number))

    def _write(self, templates: Mapping[int, Kept], *, whole: bool) -> None:
        number = self.position + 1
        entry = JournalEntry(whole=whole, templates=[(i, *kept) for i, kept in templates.items()])
        if not self.objects.create(self._key(number), _WIRE.pack(entry)):
            raise LeaseRefused(
                f"another learner has written entry {number} of {FOLDER}; this batch is tried again"
            )
        self.position = number
        if whole:
            self._whole = number

    def _entries(self) -> list[JournalEntry] | None:
        """The entries from the newest whole one on, oldest first; None if one vanished during this."""
        numbers = self._numbers()
        entries: list[JournalEntry] = []
        whole = 0
        for number in reversed(numbers):
            raw = self.objects.get(self._key(number))
            if raw is None:
                return None
            entries.append(self._unpacked(raw, number))
            if entries[-1].whole:
                whole = number
                break
        self.position, self._whole = max(numbers, default=0), whole
        return entries[::-1]

    def _unpacked(self, raw: bytes, number: int) -> JournalEntry:
        name = f"{self._key(number)} of the store {self.objects.url}"
        try:
            return _WIRE.unpack(raw, what=name)
        except BadPayload as exc:  # a fault of the store, which no batch may be blamed for
            raise StoreUnavailable(f"{exc}; restore it from a backup, or remove it if there is none") from exc

    def _numbers(self) -> list[int]:
        names = (one.key.removeprefix(FOLDER) for one in self.objects.found(FOLDER))
        return sorted(int(name) for name in names if name.isdecimal())

    def _key(self, number: int) -> str:
        return f"{FOLDER}{number:012d}"
