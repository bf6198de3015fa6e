"""The marks of a deployment: one Redis hash, which every process reads again only after a change.

    marks = Marks(client, settings)
    marks.put(Target.pattern(pattern_id), State.NORMAL, text="cache refreshed with <NUM> entries", by="alice")

Invariants: marks expire by Redis' clock. A mark replaces the earlier mark of its target and workload. A mark
of a newer build is skipped and can still be revoked."""

import re
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Final

import msgspec
import polars as pl
import redis

from pipeline.errors import BadInput, BadPayload
from pipeline.logs import logger
from pipeline.marks.marks import Kind, Mark, Marked, Overlay, State, Target, moment
from pipeline.records.batch import MAX_NAME
from pipeline.redis.arguments import named_arguments_with_bytes
from pipeline.redis.connection import answering, byte_map
from pipeline.redis.keys import Keys
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings

MAX_MARKS: Final = 10_000  # who needs more has a wrong model, or wants a template instead of its patterns
MAX_TEXT: Final = 1024  # characters of the marked line that are kept for readers
MAX_WHY: Final = 500
MAX_BY: Final = 100
# How long a mark that ran out is still listed; fewer days where the room is needed.
SHOWN_AFTER: Final = timedelta(days=30)
_NUMBER: Final = re.compile(r"-?[0-9]{1,20}")


class PutArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of marks/mark.lua for a new mark, by name."""

    most: int
    field: bytes
    value: bytes
    stale: list[bytes]  # fields and values in turn: forgotten where they are still so


class RevokeArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of marks/mark.lua for marks to be revoked, by name."""

    fields: list[bytes]


class Marks:
    """Put, revoke, look, lay over. Every method raises RedisUnavailable."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.keys = Keys(settings.redis.key_prefix)
        self.scripts = Scripts(client)
        self._near: tuple[bytes, Overlay] = (b"", Overlay())

    def put(
        self,
        target: Target,
        state: State,
        *,
        text: str,
        workload: str = "",
        lasts: timedelta | None = None,
        by: str = "",
        why: str = "",
    ) -> tuple[Mark, Mark | None]:
        """The new mark, and the one of the same target and workload that it replaces.

        Raises BadInput for a target that cannot be marked, and when there are too many marks.
        """
        _check(target, state, workload, lasts, why)
        before = self.look()
        try:
            until = None if lasts is None else before.now + lasts
        except OverflowError as exc:
            raise BadInput("a mark cannot last beyond the year 9999; leave the time out for ever") from exc
        mark = Mark(
            target=target, state=state, text=_printable(text)[:MAX_TEXT], workload=workload, at=before.now,
            until=until, by=_printable(by)[:MAX_BY], why=_printable(why),
        )  # fmt: skip
        # Only as they were seen: somebody may renew one of them at this moment.
        stale = [part for old in _stale(before) for part in (_field(old), old.pack())]
        args = PutArgs(most=MAX_MARKS, field=_field(mark), value=mark.pack(), stale=stale)
        answer = self.scripts.run("marks/mark", [self.keys.marks], [named_arguments_with_bytes(args)])
        if answer[0] == b"full":
            raise BadInput(
                f"there are {MAX_MARKS:,} marks, the limit; mark templates instead of single patterns, or "
                "revoke some: "
                "`logweir mark --list` shows them"
            )
        replaced = {_field(old): old for old in before.marks if old.holds(before.now)}
        return mark, replaced.get(_field(mark)) if answer[1] else None

    def revoke(self, targets: Iterable[Target], workload: str | None = None) -> list[tuple[Target, str]]:
        """Revokes the marks of these targets in `workload`, or in all workloads for None.

        Returns (target, workload) of the revoked marks, unreadable ones included.
        """
        wanted = set(targets)
        with answering():
            names = [name for name in byte_map(self.client.hgetall(self.keys.marks)) if name]
        named = [(name, found) for name in names if (found := _named(name)) is not None]
        fields = [n for n, (t, w) in named if t in wanted and workload in (None, w)]
        if not fields:
            return []
        args = named_arguments_with_bytes(RevokeArgs(fields=list(fields)))
        revoked = set(self.scripts.run("marks/mark", [self.keys.marks], [args]))
        return [found for name, found in named if name in revoked]

    def look(self) -> Marked:
        """All marks as they are now."""
        pipe = self.client.pipeline(transaction=True)
        pipe.hgetall(self.keys.marks)
        pipe.time()
        with answering():
            raw, (seconds, micros) = pipe.execute()
        version = raw.pop(b"", b"").decode("utf-8", "replace")
        marks, unreadable = [], []
        for name, blob in raw.items():
            try:
                named = _named(name)
                if named is None:
                    raise BadPayload(f"the mark {name!r} is about nothing that this build knows")
                marks.append(Mark.unpack(*named, blob))
            except BadPayload as exc:
                unreadable.append(str(exc))
        now = moment(seconds * 1000 + micros // 1000)
        marks.sort(key=lambda mark: (mark.at, str(mark.target), mark.workload))
        return Marked(version=version, now=now, marks=tuple(marks), unreadable=tuple(unreadable))

    def overlay(self) -> Callable[[pl.DataFrame, str], pl.DataFrame]:
        """The marks of this moment, to be laid over the answered rows (WORK_SCHEMA) of a workload's batch.

        They give `work` itself where none is about it. One small round trip; the marks are read again only
        when somebody has changed them.
        """
        overlay, now = self._overlay()
        return lambda work, workload: overlay.over(work, workload, now)

    def overlay_if_any(self) -> Callable[[pl.DataFrame, str], pl.DataFrame] | None:
        """`overlay`, None where there is no mark at all."""
        overlay, now = self._overlay()
        return (lambda work, workload: overlay.over(work, workload, now)) if overlay else None

    def normal(self, template_ids: Iterable[int], workload: str) -> frozenset[int]:
        """The templates among these that are marked as normal now."""
        overlay, now = self._overlay()
        return overlay.normal(template_ids, workload, now)

    def _overlay(self) -> tuple[Overlay, datetime]:
        """All marks and Redis' time."""
        pipe = self.client.pipeline(transaction=False)
        pipe.hget(self.keys.marks, "")
        pipe.time()
        with answering():
            raw, (seconds, micros) = pipe.execute()
        # A change between the two reads gives another version, so the next call reads again.
        if (version := raw or b"") != self._near[0]:
            marked = self.look()
            if marked.unreadable:
                logger().warning("marks.unreadable", count=len(marked.unreadable), why=marked.unreadable[0])
            self._near = (version, Overlay(marked.marks))
        return self._near[1], moment(seconds * 1000 + micros // 1000)


def _check(target: Target, state: State, workload: str, lasts: timedelta | None, why: str) -> None:
    if not _possible(target):
        raise BadInput(f"{target} is the id of no {target.kind}; `logweir results --json` shows them")
    if not target.of_lines and state is State.ANOMALOUS:
        raise BadInput(
            f"{target} was found in sessions or rates, which finds it by itself; it can be marked normal, or "
            "some of its "
            "lines anomalous"
        )
    if not target.of_lines and workload:
        raise BadInput(f"{target} is of one workload already; leave --workload out")
    if len(workload) > MAX_NAME or not workload.isprintable():
        raise BadInput(f"{workload[:40]!r} is no workload; write its whole name, such as prod/shop/cart")
    if lasts is not None and lasts <= timedelta(0):
        raise BadInput("a mark has to last some time; write 15m, 1h or 7d")
    if len(why) > MAX_WHY:
        raise BadInput(f"the reason of a mark has at most {MAX_WHY} characters, not {len(why):,}; shorten it")


def _possible(target: Target) -> bool:
    if target.kind is Kind.PATTERN:
        return 0 <= target.number < 2**64
    return 0 < target.number < 2**63 or -(2**63) <= target.number < -1


def _stale(marked: Marked) -> list[Mark]:
    """Marks that ran out and need not be listed any more: all of them when the room is needed."""
    over = [mark for mark in marked.marks if not mark.holds(marked.now)]
    if len(marked.marks) + len(marked.unreadable) >= MAX_MARKS:
        return over
    return [mark for mark in over if mark.until is not None and mark.until + SHOWN_AFTER < marked.now]


def _field(mark: Mark) -> bytes:
    return f"{mark.target.kind}:{mark.target.number}:{mark.workload}".encode()


def _named(name: bytes) -> tuple[Target, str] | None:
    """(target, workload) of a field; None when a newer build marks other things."""
    kind, _, tail = name.decode("utf-8", "replace").partition(":")
    number, _, workload = tail.partition(":")
    if kind not in set(Kind) or not _NUMBER.fullmatch(number):
        return None
    target = Target(kind=Kind(kind), number=int(number))
    return (target, workload) if _possible(target) else None


def _printable(text: str) -> str:
    """Text without control characters, safe for reasons, logs and terminals."""
    return "".join(c if c.isprintable() else " " for c in text)
