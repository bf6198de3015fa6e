"""Open sessions: the events of one session key of one workload, until no more are expected.

Batches arrive out of order and event times jump, so an open session collects events in any order
(growing.py). When it closes, its events are sorted and cut at gaps. So the verdict does not depend on how
lines were cut into batches, nor on the order in which batches were stored.

Closing follows the clock of batch acceptance: a session closes a session timeout (or longer:
`session_open_s`) and a grace after the newest of its batches. Every batch of its lane that was accepted
before then has to be stored. A stream's event times follow this clock; a file that is read at a thousand
times its speed keeps its sessions open a little longer.

A trace is collected over all workloads, under the name of none (`JOINT`). Once closed it has a part in each
workload, and it is a session of events of all of them (`joint.py`).

A closed session may go on after a gap. Under a stateful session model its events become its history
(`history.py`), and later events within a day are judged together with the history. A session with very many
gaps is judged at some of them, and always at the last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Final

import msgspec

from pipeline.errors import BadPayload
from pipeline.watching.observation import Lane
from pipeline.watching.sessions.growing import (
    MAX_SESSION_EVENTS,
    AddedEvents,
    GrowingSession,
    due_ms,
    wire_of,
)
from pipeline.watching.sessions.history import KEEP_MS, SessionHistory
from pipeline.watching.sessions.joint import Places, joint_event
from pipeline.watching.sessions.keys import JOINED, JOINT, SEPARATOR, kind_and_key
from pipeline.watching.sessions.prefixes import MAX_SESSION_PREFIX_EVENTS, thin_out


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The events of a closed session between two gaps, and its history before them."""

    workload: str
    key: str
    source: str  # of its newest batch; "" for a trace as a whole
    at_ms: tuple[int, ...]  # event times, ascending
    lines: tuple[int, ...]
    templates: tuple[int, ...]
    dropped: int  # events past MAX_SESSION_EVENTS
    history: SessionHistory | None = None
    partial: bool = False  # earlier events are missing or out of order
    places: Places = field(default_factory=dict)  # of the events of a trace as a whole
    timed: bool = True  # false: times are those of arrival

    @property
    def prefix(self) -> tuple[int, ...]:
        """Template ids of the session until the end of this segment, at most MAX_SESSION_EVENTS."""
        return ((self.history.templates if self.history else ()) + self.templates)[:MAX_SESSION_EVENTS]

    def next_history(self, reported: tuple[str, ...] = ()) -> SessionHistory:
        """The session's history after this segment; these causes were reported."""
        history, prefix = self.history, self.prefix
        events = len(self.templates) + self.dropped + (history.events if history else 0)
        return SessionHistory(
            source=history.source if history else self.source,
            line=history.line if history else self.lines[0],
            began_ms=history.began_ms if history else self.at_ms[0],
            until_ms=max(self.at_ms[-1], history.until_ms if history else self.at_ms[-1]),
            dropped=events - len(prefix),
            templates=prefix,
            reported=reported,
            partial=self.partial,
        )


_PIECES: Final = msgspec.msgpack.Decoder(AddedEvents)


@dataclass(slots=True, kw_only=True)
class OpenSession:
    """One open session; its lists are parallel, in the order in which events arrived."""

    workload: str  # JOINT for a trace, until it is parted
    key: str
    kind: str = ""  # of the key
    source: str = ""  # of its newest batch, as the next two
    lane: Lane = Lane.FRESH
    accepted_ms: int = 0
    ended: bool = False  # its last event is an end event
    dropped: int = 0  # events past MAX_SESSION_EVENTS
    timed: bool = True  # false: times are those of arrival
    at_ms: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    templates: list[int] = field(default_factory=list)
    # Of a trace: the workloads with the sources of their newest batches, and which of them each event has.
    origins: list[tuple[str, str]] = field(default_factory=list)
    origin_of: list[int] = field(default_factory=list)
    places: Places = field(default_factory=dict)  # of `whole`
    was: Lane | None = None  # as of a growing session

    @property
    def entry(self) -> str:
        """Kind and key, as `find_keys` writes them."""
        return self.kind + SEPARATOR + self.key if self.kind else self.key

    def parts(self) -> dict[str, "OpenSession"]:
        """Its sessions in single workloads, by name."""
        if self.workload != JOINT:
            return {session_name(self.workload, self.entry): self}
        found = {}
        for place, (workload, source) in enumerate(self.origins):
            rows = [row for row, origin in enumerate(self.origin_of) if origin == place]
            found[session_name(workload, self.entry, joined=False)] = replace(
                self,
                workload=workload,
                source=source,
                at_ms=[self.at_ms[row] for row in rows],
                lines=[self.lines[row] for row in rows],
                templates=[self.templates[row] for row in rows],
                origins=[],
                origin_of=[],
            )
        return found

    def whole(self) -> "OpenSession":
        """A trace as one session of events of all of its workloads. Lines of several files have no order, so
        events of one moment stand in the order of their numbers, as in training."""
        pairs = [
            (self.origins[origin][0], template)
            for origin, template in zip(self.origin_of, self.templates, strict=True)
        ]
        events = [joint_event(*pair) for pair in pairs]
        places = dict(zip(events, pairs, strict=True))
        return replace(self, source="", lines=[0] * len(events), templates=events, places=places)

    def due_ms(self, open_ms: int) -> int:
        """When it closes, on the clock of batch acceptance."""
        return due_ms(self.accepted_ms, open_ms, ended=self.ended)

    def segments(
        self,
        timeout_ms: int,
        *,
        stateful: bool = False,
        history: SessionHistory | None = None,
        lost: bool = False,
    ) -> Iterator[Segment]:
        """Its events in order of time, cut at gaps longer than the timeout.

        `stateful`: each segment has the history of all before it, starting with `history`, until a gap of a
        day; very many segments are thinned out. `lost`: if there is no history, one may have been dropped.
        """
        # In order of lines at equal times: a second is a long time.
        events = sorted(zip(self.at_ms, self.lines, self.templates, strict=True))
        # An older log may have the same keys, so events a day before a history belong to it as little as
        # later ones.
        if history and events and abs(events[0][0] - history.until_ms) > KEEP_MS:
            history, lost = None, False
        at_ms = [at for at, _, _ in events]
        ends = _gaps(at_ms, timeout_ms)
        if stateful:
            ends = _thinned_out(at_ms, ends, before=len(history.templates) if history else 0)
        begin = 0
        for end in ends:
            times, lines, templates = zip(*events[begin:end], strict=True)
            gap_ms = times[0] - history.until_ms if history else 0
            earlier = history if stateful and abs(gap_ms) <= KEEP_MS else None
            segment = Segment(
                workload=self.workload,
                key=self.key,
                source=self.source,
                at_ms=times,
                lines=lines,
                templates=templates,
                dropped=self.dropped if end == len(events) else 0,
                history=earlier,
                partial=earlier.partial or gap_ms < 0 if earlier else lost and not begin,
                places=self.places,
                timed=self.timed,
            )
            yield segment
            begin, history = end, segment.next_history() if stateful else None

    def weight(self, timeout_ms: int, before: int) -> int:
        """A lower estimate of the events that judging it takes, with so many events in its history."""
        gaps = _gaps(sorted(self.at_ms), timeout_ms)
        return min(MAX_SESSION_PREFIX_EVENTS, len(gaps) * (before + len(self.at_ms)))

    def pack(self) -> bytes:
        return wire_of(
            list(zip(self.at_ms, self.lines, self.templates, strict=True)),
            self.origin_of,
            self.origins,
            source=self.source,
            lane=self.lane,
            accepted_ms=self.accepted_ms,
            ended=self.ended,
            dropped=self.dropped,
            timed=self.timed,
        ).pack()

    @classmethod
    def unpack(cls, workload: str, entry: str, blob: bytes) -> "OpenSession":
        """`entry`: kind and key. Raises BadPayload."""
        return cls.of(GrowingSession.unpack(workload, entry, blob))

    @classmethod
    def of(cls, growing: GrowingSession) -> "OpenSession":
        """With all events of a session that grew. Raises BadPayload."""
        wire = growing.wire
        session = cls(
            workload=growing.workload,
            key=growing.key,
            kind=growing.kind,
            source=wire.source,
            lane=wire.lane,
            accepted_ms=wire.accepted_ms,
            ended=wire.ended,
            dropped=wire.dropped,
            timed=wire.timed,
            origins=list(wire.origins),
        )
        for blob in wire.pieces:
            session._add(_piece(blob))
        if len(session.at_ms) != wire.events:
            raise BadPayload("an open session is not readable: it has lost events")
        return session

    def _add(self, piece: AddedEvents) -> None:
        if not len(piece.at_steps) == len(piece.line_steps) == len(piece.templates):
            raise BadPayload("an open session is not readable: its lists have different lengths")
        self.at_ms += accumulate(piece.at_steps)
        self.lines += accumulate(piece.line_steps)
        self.templates += piece.templates
        if self.workload == JOINT:
            if piece.origin >= len(self.origins):
                raise BadPayload("an open trace is not readable: an event has no workload")
            self.origin_of += [piece.origin] * len(piece.templates)


def _piece(blob: bytes) -> AddedEvents:
    try:
        return _PIECES.decode(blob)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise BadPayload(f"an open session is not readable: {exc}") from exc


def _gaps(times: Sequence[int], longer_than_ms: int) -> list[int]:
    """The number of events, of these ascending times, before each gap and at the end."""
    gaps = [end for end, (a, b) in enumerate(pairwise(times), 1) if b - a > longer_than_ms]
    return [*gaps, len(times)] if times else []


def _thinned_out(times: Sequence[int], ends: Sequence[int], *, before: int) -> list[int]:
    """The gaps at which a session is judged with all before them, `before` events of a history included.

    After a gap of a day another session begins.
    """
    found: list[int] = []
    begin = 0
    for day in _gaps(times, KEEP_MS):
        lengths = thin_out([end + before - begin for end in ends if begin < end <= day])
        found += [length - before + begin for length in lengths]
        begin, before = day, 0
    return found


def session_name(workload: str, entry: str, *, joined: bool = True) -> str:
    """The field name of a session in Redis; the workload has no NUL. `joined`: a trace is of no workload."""
    return f"{JOINT if joined and kind_and_key(entry)[0] in JOINED else workload}{SEPARATOR}{entry}"


def split_name(name: str) -> tuple[str, str]:
    """(workload, kind and key) of a `session_name`."""
    workload, _, entry = name.partition(SEPARATOR)
    return workload, entry
