"""The objects that only one of two sequences has, where most are the same objects in the same order."""

from collections.abc import Sequence
from operator import is_
from typing import Final, TypeVar

T = TypeVar("T")
EDITS: Final = 6  # beyond so many the rest is compared as sets


def difference(before: Sequence[T], now: Sequence[T]) -> tuple[list[T], list[T]]:
    """(those that are gone, those that are new), by identity."""
    gone: list[T] = []
    new: list[T] = []
    a = b = 0
    for _ in range(EDITS):
        rest_a, rest_b = before[a:], now[b:]
        same = list(map(is_, rest_a, rest_b))
        step = same.index(False) if False in same else len(same)
        a, b = a + step, b + step
        if a == len(before) or b == len(now):
            gone, new = gone + list(before[a:]), new + list(now[b:])
            return _without(gone, new), _without(new, gone)
        if a + 1 < len(before) and before[a + 1] is now[b]:
            gone.append(before[a])
            a += 1
        elif b + 1 < len(now) and now[b + 1] is before[a]:
            new.append(now[b])
            b += 1
        else:
            gone.append(before[a])
            new.append(now[b])
            a, b = a + 1, b + 1
    ids_a, ids_b = set(map(id, before[a:])), set(map(id, now[b:]))
    gone += [one for one in before[a:] if id(one) not in ids_b]
    new += [one for one in now[b:] if id(one) not in ids_a]
    return _without(gone, new), _without(new, gone)


def _without(some: Sequence[T], others: Sequence[T]) -> list[T]:
    """An object that has moved is in both."""
    ids = set(map(id, others))
    return [one for one in some if id(one) not in ids]
