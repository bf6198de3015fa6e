"""Devices by free compute, then by free memory: a best fit is one bisection per percentage (at most 101)."""

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice

_Key = tuple[int, int]  # free MiB, rank of the device


class DeviceIndex:
    """A set of devices, by the ranks that stand for them."""

    def __init__(self, devices: Iterable[tuple[int, int, int]]) -> None:
        """`devices`: (percent, MiB, rank) of each."""
        self._buckets: dict[int, list[_Key]] = defaultdict(list)
        for percent, mib, rank in devices:
            self._buckets[percent].append((mib, rank))
        for bucket in self._buckets.values():
            bucket.sort()

    def add(self, percent: int, mib: int, rank: int) -> None:
        insort(self._buckets[percent], (mib, rank))

    def remove(self, percent: int, mib: int, rank: int) -> None:
        bucket = self._buckets[percent]
        del bucket[bisect_left(bucket, (mib, rank))]

    def best(self, memory_mib: int, compute_percent: int) -> _Key | None:
        """The best fit: its free memory and its rank."""
        best: _Key | None = None
        for amount, bucket in self._buckets.items():
            if amount >= compute_percent and bucket and bucket[-1][0] >= memory_mib:
                candidate = bucket[bisect_left(bucket, (memory_mib, -1))]
                if best is None or candidate < best:
                    best = candidate
        return best

    def all(self, memory_mib: int, compute_percent: int) -> Iterator[_Key]:
        """All that fit, the best first."""
        runs = [
            islice(bucket, bisect_left(bucket, (memory_mib, -1)), None)
            for amount, bucket in self._buckets.items()
            if amount >= compute_percent
        ]
        return heapq.merge(*runs)
