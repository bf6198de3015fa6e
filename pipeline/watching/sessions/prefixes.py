"""Sessions as they are before anything is known of them: cleaned, counted, alike or not.

A session is a tuple of template ids in order. Equal sessions are one, with a count. A *state* of a session is what had
come of it when it fell silent: its beginning up to there. The last of its states is the session itself, and one that
never fell silent before its end has no other.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Final, Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

MAX_EVENTS: Final = 2_000  # of a session; as many as are kept of an open one. HDFS's longest has 298
MAX_DISTINCT: Final = 20_000  # different states of the sessions learnt from, most frequent sessions first
# Events in these; one that falls silent after each of 2,000 events has 2,000 states, and 2,000,000 events in them. No
# fewer than training reads (session_sampling.MAX_HELD): where nothing falls silent this leaves nothing out.
MAX_STATE_EVENTS: Final = 3_000_000
# Events in the states of one session that are looked at: one of 2,000 events that is silent after each would be 1,000
# sessions as long. The longest that stays whole has 200 events with a silence after each.
MAX_OWN_EVENTS: Final = 20_000
_MISSES: Final = 1_000  # sessions for which there was no room: what follows is looked at no more
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


def chosen(ends: Sequence[int]) -> Sequence[int]:
    """Of the lengths of the states of a session, ascending: all, or where these have more than MAX_OWN_EVENTS events in all
    as many as may have, evenly chosen, and always the last."""
    if sum(ends) <= MAX_OWN_EVENTS:
        return ends
    count = max(1, MAX_OWN_EVENTS // ends[-1])
    return [ends[i * len(ends) // count - 1] for i in range(1, count + 1)]


# A session and the lengths of its states, ascending.
Silent = tuple[tuple[int, ...], tuple[int, ...]]


def silent(parts: Iterable[Sequence[int]]) -> Silent:
    """Of what came between the silences of a session, each part in order; cleaned."""
    several = list(map(tuple, parts))
    ends = accumulate(map(len, several))
    return cleaned(tuple(chain.from_iterable(several))), tuple(
        dict.fromkeys(min(end, MAX_EVENTS) for end in ends if end)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Different sessions, the different states that they were in, and which session was in which."""

    sessions: list[tuple[int, ...]]
    times: Ints  # how often each of the sessions came
    states: list[tuple[int, ...]]
    session: Ints  # pairs, sorted by session and in the order of its states: session[i] was in state[i]
    state: Ints

    @classmethod
    def of(cls, seen: Iterable[tuple[Silent, int]]) -> Self:
        """Of different sessions and how often each came."""
        known: dict[tuple[int, ...], int] = {}
        sessions, times, row, state = [], [], [], []
        for at, ((events, ends), count) in enumerate(seen):
            sessions.append(events)
            times.append(count)
            for end in ends:
                row.append(at)
                state.append(known.setdefault(events[:end], len(known)))
        return cls(
            sessions=sessions,
            times=np.array(times, dtype=np.int64),
            states=list(known),
            session=np.array(row, dtype=np.int64),
            state=np.array(state, dtype=np.int64),
        )

    def most(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Of each session: the greatest of the values of its states."""
        found = np.full(len(self.sessions), -np.inf)
        np.maximum.at(found, self.session, values[self.state])
        return found


def begin_anew(times: Mapping[Silent, int]) -> bool:
    """Whether most of what comes after a silence is what sessions begin with, count for count: their key is used again,
    and they do not go on."""
    if all(len(ends) == 1 for _, ends in times):
        return False
    begins: set[frozenset[tuple[int, int]]] = set()
    later: Counter[frozenset[tuple[int, int]]] = Counter()
    for (events, ends), count in times.items():
        for begin, end in pairwise((0, *ends)):
            part = frozenset(Counter(events[begin:end]).items())
            if begin:
                later[part] += count
            else:
                begins.add(part)
    return 2 * sum(count for part, count in later.items() if part in begins) > later.total()


def apart(times: Mapping[Silent, int]) -> Counter[Silent]:
    """Each part as a session of its own."""
    found: Counter[Silent] = Counter()
    for (events, ends), count in times.items():
        for begin, end in pairwise((0, *ends)):
            found[events[begin:end], (end - begin,)] += count
    return found


def pairs_once(a: Ints, b: Ints) -> tuple[Ints, Ints]:
    """Each pair once, sorted."""
    pairs = np.unique(np.stack([a, b], axis=1), axis=0)
    return pairs[:, 0], pairs[:, 1]


def most_frequent(times: Mapping[Silent, int]) -> list[tuple[Silent, int]]:
    """Sessions that are not empty, most frequent first, equally frequent ones by their ids; no more than have MAX_DISTINCT
    different states and MAX_STATE_EVENTS events in them, but one at least. One for which there is no room keeps out no
    other."""
    ordered = sorted(((s, n) for s, n in times.items() if s[0]), key=lambda item: (-item[1], item[0]))
    states: set[tuple[int, ...]] = set()
    found: list[tuple[Silent, int]] = []
    held = misses = 0
    for (events, ends), count in ordered:
        some = tuple(chosen(ends))
        new = {events[:end] for end in some} - states
        more = sum(map(len, new))
        if not found or (len(states) + len(new) <= MAX_DISTINCT and held + more <= MAX_STATE_EVENTS):
            found.append(((events, some), count))
            states |= new
            held += more
        elif (misses := misses + 1) >= _MISSES or len(states) >= MAX_DISTINCT:
            break
    return found


def first_of_each(keys: Sequence[bytes]) -> tuple[list[int], Ints]:
    """Where each different key stands first, and which of them each key is."""
    known: dict[bytes, int] = {}
    at = np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)
    return np.unique(at, return_index=True)[1].tolist(), at


def ending(seen: Iterable[tuple[tuple[int, ...], int]]) -> Iterator[int]:
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
