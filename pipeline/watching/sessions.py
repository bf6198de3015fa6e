"""Open sessions: what happened so far under one session key of one workload, until nothing more is to be expected.

Batches come out of order and event times jump, so a session only collects while it is open, in whatever order; it is
sorted, and cut where it was silent for longer than the timeout, when it closes. So what is judged does not depend on
how its lines were cut into batches or which batch was stored first.

When it closes is decided on the clock by which batches are accepted: a timeout and a grace after the newest of its
batches, and only once every batch of its lane that was accepted before that is stored. For a stream that is followed
that is its own clock; a file that is read at a thousand times its speed keeps its sessions open a little longer.

One that is closed may only have fallen silent. Where normal sessions go on after a silence (the rules of the model say
so), what came of it stays as its past (`pasts.py`), and what comes within a day is judged together with that.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack

from pipeline.errors import BadPayload
from pipeline.watching.observation import Lane, Observation
from pipeline.watching.pasts import KEEP_MS, Past

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
            until_ms=self.at_ms[-1],
            left_out=events - len(whole),
            templates=whole,
            told=told,
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

    def due_ms(self, timeout_ms: int) -> int:
        """When it closes, on the clock by which batches are accepted."""
        return self.accepted_ms + round(GRACE_S * 1000) + (0 if self.ended else timeout_ms)

    def parts(self, timeout_ms: int, *, carried: bool = False, past: Past | None = None) -> Iterator[Part]:
        """In order of time, cut where nothing happened for longer than the timeout; `carried`: each with all before it,
        this past included, as far as no silence was longer than a day."""
        # By line where times are equal: a second is a long time.
        events = sorted(zip(self.at_ms, self.lines, self.templates, strict=True))
        begin = 0
        for end in range(1, len(events) + 1):
            if end < len(events) and events[end][0] - events[end - 1][0] <= timeout_ms:
                continue
            times, lines, templates = zip(*events[begin:end], strict=True)
            goes_on = carried and past and times[0] - past.until_ms <= KEEP_MS
            part = Part(
                workload=self.workload,
                key=self.key,
                source=self.source,
                at_ms=times,
                lines=lines,
                templates=templates,
                left_out=self.left_out if end == len(events) else 0,
                past=past if goes_on else None,
            )
            yield part
            begin, past = end, part.then() if carried else None

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
        except (ValueError, TypeError, msgpack.UnpackException) as exc:
            raise BadPayload(f"an open session of {len(blob)} bytes is not readable: {exc}") from exc


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
