"""Open sessions: what happened so far under one session key of one workload, until nothing more is to be expected.

Batches come out of order and event times jump, so a session only collects while it is open, in whatever order; it is
sorted, and cut where it was silent for longer than the timeout, when it closes. So what is judged does not depend on
how its lines were cut into batches or which batch was stored first.

When it closes is decided on the clock by which batches are accepted: a timeout (or longer: `session_open_s`) and
a grace after the newest of its batches, and only once every batch of its lane that was accepted before that is stored.
For a stream that is followed that is its own clock; a file that is read at a thousand times its speed keeps its sessions
open a little longer.

One that is closed may only have fallen silent. Where normal sessions go on after a silence (the rules of the model say
so), what came of it stays as its past (`pasts.py`), and what comes within a day is judged together with that. One that
was silent so often that it would be judged at great length is judged at some of its silences, and at the last.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack

from pipeline.errors import BadPayload
from pipeline.watching.observation import Lane, Observation
from pipeline.watching.sessions.history import KEEP_MS, Past
from pipeline.watching.sessions.prefixes import MAX_OWN_EVENTS, chosen

SESSION_VERSION: Final = 1
MAX_SESSION_EVENTS: Final = 2_000  # the longest that is kept of one; HDFS's longest block has 298
GRACE_S: Final = 5.0  # batches on their way: a producer gathers lines for 1 s, a step takes up to seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A session that is over, or what stands between two long silences of one, and what came before it."""

    workload: str
    key: str
    source: str  # of its newest batch
    at_ms: tuple[int, ...]  # event times, ascending
    lines: tuple[int, ...]
    templates: tuple[int, ...]
    left_out: int  # events past MAX_SESSION_EVENTS
    past: Past | None = None
    partial: bool = False  # what came before it is not known, or not in order

    @property
    def whole(self) -> tuple[int, ...]:
        """Template ids of the session until now, the first MAX_SESSION_EVENTS."""
        return ((self.past.templates if self.past else ()) + self.templates)[:MAX_SESSION_EVENTS]

    def then(self, told: tuple[str, ...] = ()) -> Past:
        """What the session's past is from now on; these causes were told of it."""
        past, whole = self.past, self.whole
        events = len(self.templates) + self.left_out
        if past:
            events += len(past.templates) + past.left_out
        return Past(
            source=past.source if past else self.source,
            line=past.line if past else self.lines[0],
            began_ms=past.began_ms if past else self.at_ms[0],
            until_ms=max(self.at_ms[-1], past.until_ms if past else self.at_ms[-1]),
            left_out=events - len(whole),
            templates=whole,
            told=told,
            partial=self.partial,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one batch has of one session, in its order."""

    seen: Observation
    at_ms: list[int]
    lines: list[int]
    templates: list[int]


def gathered(observed: Iterable[Observation]) -> dict[str, list[Piece]]:
    """The pieces of every session, by its name."""
    found: dict[str, list[Piece]] = {}
    for seen in observed:
        if seen.events.is_empty():
            continue
        grouped = seen.events.group_by("session", maintain_order=True).agg("at", "line", "template_id")
        for key, at_ms, lines, templates in grouped.iter_rows():
            piece = Piece(seen=seen, at_ms=at_ms, lines=lines, templates=templates)
            found.setdefault(name_of(seen.workload, key), []).append(piece)
    return found


@dataclass(slots=True, kw_only=True)
class Session:
    """One open session; the lists are parallel and in the order events came."""

    workload: str
    key: str
    source: str = ""  # of its newest batch, as the two that follow
    lane: Lane = Lane.FRESH
    accepted_ms: int = 0
    ended: bool = False  # an end event was seen
    left_out: int = 0
    at_ms: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    templates: list[int] = field(default_factory=list)

    def add(self, piece: "Piece") -> int:
        """Take these events in; returns how many there was room for."""
        taken = piece.at_ms[: MAX_SESSION_EVENTS - len(self.at_ms)]
        self.at_ms += taken
        self.lines += piece.lines[: len(taken)]
        self.templates += piece.templates[: len(taken)]
        self.left_out += len(piece.at_ms) - len(taken)
        self.source, self.lane = piece.seen.source, piece.seen.lane
        self.accepted_ms = max(self.accepted_ms, piece.seen.accepted_ms)
        return len(taken)

    def ends_with(self, ends: frozenset[int]) -> bool:
        """Whether its last event is one with which a session ends."""
        if ends.isdisjoint(self.templates):
            return False
        return max(zip(self.at_ms, self.lines, self.templates, strict=True))[2] in ends

    def due_ms(self, open_ms: int) -> int:
        """When it closes, on the clock by which batches are accepted."""
        return self.accepted_ms + round(GRACE_S * 1000) + (0 if self.ended else open_ms)

    def parts(
        self, timeout_ms: int, *, carried: bool = False, past: Past | None = None, lost: bool = False
    ) -> Iterator[Part]:
        """In order of time, cut where nothing happened for longer than the timeout; `carried`: each with all before it,
        this past included, as far as no silence was longer than a day, and no more of them than `chosen` says. `lost`:
        without a past, there may have been one."""
        # By line where times are equal: a second is a long time.
        events = sorted(zip(self.at_ms, self.lines, self.templates, strict=True))
        # An older log may have the same keys: what is a day before a past is as little of it as what is a day after.
        if past and events and abs(events[0][0] - past.until_ms) > KEEP_MS:
            past, lost = None, False
        at_ms = [at for at, _, _ in events]
        ends = _silences(at_ms, timeout_ms)
        if carried:
            ends = _judged_at(at_ms, ends, before=len(past.templates) if past else 0)
        begin = 0
        for end in ends:
            times, lines, templates = zip(*events[begin:end], strict=True)
            silence = times[0] - past.until_ms if past else 0
            goes_on = past if carried and abs(silence) <= KEEP_MS else None
            part = Part(
                workload=self.workload,
                key=self.key,
                source=self.source,
                at_ms=times,
                lines=lines,
                templates=templates,
                left_out=self.left_out if end == len(events) else 0,
                past=goes_on,
                partial=goes_on.partial or silence < 0 if goes_on else carried and lost and not begin,
            )
            yield part
            begin, past = end, part.then() if carried else None

    def weight(self, timeout_ms: int, before: int) -> int:
        """About as many events are looked at when it is judged after so many of a past, rather fewer."""
        silences = _silences(sorted(self.at_ms), timeout_ms)
        return min(MAX_OWN_EVENTS, len(silences) * (before + len(self.at_ms)))

    def pack(self) -> bytes:
        """msgpack of version and fields."""
        return bytes(
            msgpack.packb(
                [
                    SESSION_VERSION, self.source, self.lane.value, self.accepted_ms, self.ended, self.left_out,
                    _steps(self.at_ms), _steps(self.lines), self.templates,
                ]
            )
        )  # fmt: skip

    @classmethod
    def unpack(cls, workload: str, key: str, blob: bytes) -> "Session":
        """Raises BadPayload."""
        try:
            version, *rest = msgpack.unpackb(blob)
            if version > SESSION_VERSION:
                raise BadPayload(f"an open session has wire version {version}; this build reads up to 1")
            source, lane, accepted_ms, ended, left_out, at_ms, lines, templates = rest
            if not len(at_ms) == len(lines) == len(templates) or not isinstance(source, str):
                raise TypeError("its fields do not fit")
            return cls(
                workload=workload,
                key=key,
                source=source,
                lane=Lane(lane),
                accepted_ms=int(accepted_ms),
                ended=bool(ended),
                left_out=int(left_out),
                at_ms=_sums(at_ms),
                lines=_sums(lines),
                templates=[int(x) for x in templates],
            )
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as exc:
            raise BadPayload(f"an open session of {len(blob)} bytes is not readable: {exc}") from exc


def _silences(times: Sequence[int], longer_than_ms: int) -> list[int]:
    """How many events of these ascending times there were at each silence, and at the end."""
    return [
        end
        for end in range(1, len(times) + 1)
        if end == len(times) or times[end] - times[end - 1] > longer_than_ms
    ]


def _judged_at(times: Sequence[int], ends: Sequence[int], *, before: int) -> list[int]:
    """Those of its silences at which a session is judged with all that came before, `before` events of a past included;
    after a day another session begins."""
    found: list[int] = []
    begin = 0
    for day in _silences(times, KEEP_MS):
        some = [end for end in ends if begin < end <= day]
        found += [end - before + begin for end in chosen([end + before - begin for end in some])]
        begin, before = day, 0
    return found


def _steps(values: Sequence[int]) -> list[int]:
    """Each as the difference to the one before: msgpack then needs one or two bytes instead of nine."""
    return [b - a for a, b in zip([0, *values], values, strict=False)]


def _sums(steps: Sequence[Any]) -> list[int]:
    total, found = 0, []
    for step in steps:
        total += int(step)
        found.append(total)
    return found


def name_of(workload: str, key: str) -> str:
    """What an open session is called in Redis; neither part has a NUL."""
    return f"{workload}\0{key}"


def names_of(name: str) -> tuple[str, str]:
    """(workload, key)."""
    workload, _, key = name.partition("\0")
    return workload, key
