"""Records that a reader has fetched and the ledger does not have yet."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class HeldRecords(Generic[T]):
    """A queue, oldest record first. An offer to the ledger is always derived from its head, and accepting it
    removes exactly the records that were offered, even if others were added since.

    An offer is repeated with the same records until it is accepted, so that its batches keep their ids: they
    may be in already where Redis did not answer. Not thread-safe."""

    def __init__(self, size_of: Callable[[T], int]) -> None:
        self.records: list[T] = []
        self.size = 0
        self.since = 0.0  # monotonic: when the oldest record came, or the ones before it were accepted
        self._size_of = size_of
        self._offered = 0

    def __len__(self) -> int:
        return len(self.records)

    def add(self, record: T) -> None:
        if not self.records:
            self.since = time.monotonic()
        self.records.append(record)
        self.size += self._size_of(record)

    def offer(self, count: int | None = None) -> list[T]:
        """The records of the open offer, else the first `count` of the queue, by default all."""
        self._offered = self._offered or (len(self.records) if count is None else count)
        return self.records[: self._offered]

    def accepted(self) -> None:
        """The offered records are in the ledger."""
        self.size -= sum(map(self._size_of, self.records[: self._offered]))
        del self.records[: self._offered]
        self._offered, self.since = 0, time.monotonic()

    def clear(self) -> None:
        """Forgets all records: they are fetched again from the ledger's cursor."""
        self.records, self.size, self._offered = [], 0, 0
