"""Sessions before anything is learnt from them: normalised, counted, cut into prefixes.

A session is a tuple of template ids in order. A session gap is a silence longer than the session timeout. A
*prefix* is the beginning of a session up to a gap, or the whole session: the parts of a session that the
watcher judges.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Final, Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

MAX_EVENTS: Final = 2_000  # of a session, as of an open one. HDFS's longest has 298
MAX_DISTINCT: Final = 20_000  # distinct prefixes, of the most frequent sessions first
# Events in these: 2,000 gaps in a session of 2,000 events make prefixes of 2,000,000 events. At least as many
# as training reads (sampling.MAX_SAMPLED), so that sessions without gaps are all learnt.
MAX_PREFIX_EVENTS: Final = 3_000_000
# Events in the prefixes of one session; without it 2,000 gaps cost as much as 1,000 sessions of that length.
# A session with a gap after each of its 200 events keeps all prefixes.
MAX_SESSION_PREFIX_EVENTS: Final = 20_000
_MAX_MISSES: Final = 1_000  # Sessions without room, after which no further session is tried.
_UNKNOWN: Final = 0  # Stands for every id that is no template's: unclassified lines, ids of one sample alone.
_END_SESSIONS: Final = 20  # Sessions that end with an event before the event is believed to end sessions.
_END_SHARE: Final = 0.99  # Of the sessions that have the event.

SessionWithGaps = tuple[
    tuple[int, ...], tuple[int, ...]
]  # events, and the lengths of its prefixes, ascending


def concatenate(sessions: Sequence[Sequence[int]]) -> Ints:
    """The events of all sessions in one array."""
    return np.fromiter(chain.from_iterable(sessions), dtype=np.int64)


def normalise(session: Sequence[int]) -> tuple[int, ...]:
    """The first MAX_EVENTS events, with one id for everything that is no template."""
    events = tuple(session[:MAX_EVENTS])
    return tuple(max(event, _UNKNOWN) for event in events) if events and min(events) < 0 else events


def thin_out(lengths: Sequence[int]) -> Sequence[int]:
    """Of ascending prefix lengths as many, spaced evenly, as fit MAX_SESSION_PREFIX_EVENTS; also the last."""
    if sum(lengths) <= MAX_SESSION_PREFIX_EVENTS:
        return lengths
    count = max(1, MAX_SESSION_PREFIX_EVENTS // lengths[-1])
    return [lengths[i * len(lengths) // count - 1] for i in range(1, count + 1)]


def with_gaps(segments: Iterable[Sequence[int]]) -> SessionWithGaps:
    """A session from its segments between gaps, normalised."""
    parts = list(map(tuple, segments))
    ends = accumulate(map(len, parts))
    lengths = dict.fromkeys(min(end, MAX_EVENTS) for end in ends if end)
    return normalise(tuple(chain.from_iterable(parts))), tuple(lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Distinct sessions, their distinct prefixes, and which session has which prefix."""

    sessions: list[tuple[int, ...]]
    times: Ints  # number of each session
    prefixes: list[tuple[int, ...]]
    session: Ints  # pairs, sorted by session and by length: session[i] has prefix[i]
    prefix: Ints

    @classmethod
    def of(cls, counted: Iterable[tuple[SessionWithGaps, int]]) -> Self:
        """From distinct sessions with their numbers."""
        numbers: dict[tuple[int, ...], int] = {}
        sessions, times, row, prefix = [], [], [], []
        for at, ((events, lengths), count) in enumerate(counted):
            sessions.append(events)
            times.append(count)
            for length in lengths:
                row.append(at)
                prefix.append(numbers.setdefault(events[:length], len(numbers)))
        return cls(
            sessions=sessions,
            times=np.array(times, dtype=np.int64),
            prefixes=list(numbers),
            session=np.array(row, dtype=np.int64),
            prefix=np.array(prefix, dtype=np.int64),
        )

    def lengths(self) -> Ints:
        """Of each prefix."""
        return np.array([len(prefix) for prefix in self.prefixes], dtype=np.int64)

    def session_max(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The greatest value of each session's prefixes, from the values of all prefixes."""
        found = np.full(len(self.sessions), -np.inf)
        np.maximum.at(found, self.session, values[self.prefix])
        return found


def reset_at_gaps(counted: Mapping[SessionWithGaps, int]) -> bool:
    """Whether most segments after a gap have the counts of a first segment: a new session reuses the key."""
    if all(len(lengths) == 1 for _, lengths in counted):
        return False
    first: set[frozenset[tuple[int, int]]] = set()
    later: Counter[frozenset[tuple[int, int]]] = Counter()
    for (events, lengths), count in counted.items():
        for begin, end in pairwise((0, *lengths)):
            segment = frozenset(Counter(events[begin:end]).items())
            if begin:
                later[segment] += count
            else:
                first.add(segment)
    return 2 * sum(count for segment, count in later.items() if segment in first) > later.total()


def separate(counted: Mapping[SessionWithGaps, int]) -> Counter[SessionWithGaps]:
    """Each segment as a session of its own."""
    found: Counter[SessionWithGaps] = Counter()
    for (events, lengths), count in counted.items():
        for begin, end in pairwise((0, *lengths)):
            found[events[begin:end], (end - begin,)] += count
    return found


def most_frequent(counted: Mapping[SessionWithGaps, int]) -> list[tuple[SessionWithGaps, int]]:
    """Non-empty sessions by frequency, then by ids, within MAX_DISTINCT and MAX_PREFIX_EVENTS; at least one.

    A session without room does not keep out a smaller one after it.
    """
    ordered = sorted(((s, n) for s, n in counted.items() if s[0]), key=lambda item: (-item[1], item[0]))
    prefixes: set[tuple[int, ...]] = set()
    found: list[tuple[SessionWithGaps, int]] = []
    total = misses = 0
    for (events, all_lengths), count in ordered:
        lengths = tuple(thin_out(all_lengths))
        new = {events[:length] for length in lengths} - prefixes
        size = sum(map(len, new))
        if not found or (len(prefixes) + len(new) <= MAX_DISTINCT and total + size <= MAX_PREFIX_EVENTS):
            found.append(((events, lengths), count))
            prefixes |= new
            total += size
        elif (misses := misses + 1) >= _MAX_MISSES or len(prefixes) >= MAX_DISTINCT:
            break
    return found


def unique_pairs(a: Ints, b: Ints) -> tuple[Ints, Ints]:
    """Each pair once, sorted."""
    pairs = np.unique(np.stack([a, b], axis=1), axis=0)
    return pairs[:, 0], pairs[:, 1]


def factorize(keys: Sequence[bytes]) -> tuple[list[int], Ints]:
    """(index of the first occurrence of each distinct key, number of the distinct key of each key)."""
    numbers: dict[bytes, int] = {}
    codes = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
    return np.unique(codes, return_index=True)[1].tolist(), codes


def end_events(counted: Iterable[tuple[tuple[int, ...], int]]) -> Iterator[int]:
    """Events that come last, and only last, in nearly every session that has them."""
    having: Counter[int] = Counter()
    ending: Counter[int] = Counter()
    for session, times in counted:
        for event in set(session):
            having[event] += times
        if session.count(session[-1]) == 1:
            ending[session[-1]] += times
    for event, times in ending.items():
        if event != _UNKNOWN and times >= _END_SESSIONS and times >= _END_SHARE * having[event]:
            yield event
