"""Sessions as they are before anything is known of them: cleaned, counted, alike or not.

A session is a tuple of template ids in order. Equal sessions are one, with a count.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

MAX_EVENTS: Final = 2_000  # of a session; as many as are kept of an open one. HDFS's longest has 298
MAX_DISTINCT: Final = 20_000  # different sessions learnt from, most frequent first
_UNKNOWN: Final = 0  # every id that is no template's: unclassified lines, ids of a sample alone
_ENDS_SEEN: Final = 20  # sessions that have to end with an event before it is believed to end them
_ENDS_SHARE: Final = 0.99  # of the sessions that have it


def joined(sessions: Sequence[Sequence[int]]) -> Ints:
    """The events of all, one behind the other."""
    return np.fromiter(chain.from_iterable(sessions), dtype=np.int64)


def cleaned(session: Sequence[int]) -> tuple[int, ...]:
    """No longer than is looked at, and with one id for everything that is no template's."""
    kept = tuple(session[:MAX_EVENTS])
    return tuple(max(event, _UNKNOWN) for event in kept) if kept and min(kept) < 0 else kept


def most_frequent(times: Mapping[tuple[int, ...], int]) -> list[tuple[tuple[int, ...], int]]:
    """At most MAX_DISTINCT sessions that are not empty, most frequent first, equally frequent ones by their ids."""
    ordered = sorted(((s, n) for s, n in times.items() if s), key=lambda item: (-item[1], item[0]))
    return ordered[:MAX_DISTINCT]


def first_of_each(keys: Sequence[bytes]) -> tuple[list[int], Ints]:
    """Where each different key stands first, and which of them each key is."""
    known: dict[bytes, int] = {}
    at = np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)
    return np.unique(at, return_index=True)[1].tolist(), at


def ending(seen: Sequence[tuple[tuple[int, ...], int]]) -> Iterator[int]:
    """Events that come last, and nowhere else, in nearly every session that has them."""
    having: Counter[int] = Counter()
    ending: Counter[int] = Counter()
    for session, times in seen:
        for event in set(session):
            having[event] += times
        if session.count(session[-1]) == 1:
            ending[session[-1]] += times
    for event, times in ending.items():
        if event != _UNKNOWN and times >= _ENDS_SEEN and times >= _ENDS_SHARE * having[event]:
            yield event
