"""Marks: people's labels of patterns, templates and findings, which overrule every model."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import redis

from pipeline.controller.watchlist import covers
from pipeline.errors import BadInput, NotFound
from pipeline.ledger.ledger import Ledger
from pipeline.marks.marks import Kind, Mark, State, Target
from pipeline.marks.store import Marks
from pipeline.records.batch import utc_now
from pipeline.service.access.audit import record_change
from pipeline.service.mark_target import Named
from pipeline.service.values import MarksView, MarkView
from pipeline.settings import Settings
from pipeline.units import span


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMark:
    """A mark that was put, the one that it replaces, and what it is about."""

    mark: Mark
    replaced: Mark | None
    named: Named
    remarks: tuple[str, ...]


def read_marks(client: "redis.Redis", settings: Settings) -> MarksView:
    """All marks, the oldest first. Raises RedisUnavailable."""
    marked = Marks(client, settings).look()
    return MarksView(
        version=marked.version,
        marks=[mark_view(mark, now=marked.now) for mark in marked.marks],
        unreadable=list(marked.unreadable),
    )


def check_marks_of(only: Sequence[str], workload: str, *, by: str) -> None:
    """Who sees some workloads marks patterns of these alone, each in one workload. Raises NotFound.

    `only`: patterns of the workloads; empty: all. `workload`: of the mark, "" for every one."""
    if only and not (workload and covers(only, workload)):
        asked = repr(workload[:80]) if workload else "every workload"
        raise NotFound(
            f"the key {by!r} marks patterns of {', '.join(only)} alone, and not of {asked}; name a workload of "
            "these"
        )


def put_mark(
    client: "redis.Redis",
    settings: Settings,
    named: Named,
    state: str,
    *,
    workload: str = "",
    lasts: str | None = None,
    by: str,
    why: str = "",
) -> NewMark:
    """Marks what a PATTERN names. `lasts`: 15m, 1h, 7d; None for ever. Raises BadInput, RedisUnavailable."""
    length = _length(lasts)
    remarks = list(named.remarks)
    if workload and workload not in Ledger(client, settings).backlog.totals():
        remarks.append(f"no line of {workload!r} was seen yet; `logweir watch list` shows the names")
    mark, replaced = Marks(client, settings).put(
        named.target, State(state), text=named.text, workload=workload, lasts=length, by=by, why=why
    )
    record_change(
        client, settings, by=by, action=f"mark.{mark.state}", target=str(mark.target),
        workload=workload, until=mark.until, why=why,
    )  # fmt: skip
    return NewMark(mark=mark, replaced=replaced, named=named, remarks=tuple(remarks))


def revoke_marks(
    client: "redis.Redis",
    settings: Settings,
    named: tuple[list[Target], str],
    workload: str | None,
    *,
    by: str,
) -> list[tuple[Target, str, Mark | None]]:
    """Takes back the marks of these targets, and those of this text: (target, workload, the mark).

    Raises BadInput where there is none, RedisUnavailable."""
    targets, text = named
    marks = Marks(client, settings)
    before = {(mark.target, mark.workload): mark for mark in marks.look().marks}
    words = " ".join(text.split())
    # A template has gained wildcards since, or the masks are others now: its text as `--list` shows it still
    # names it.
    wanted = [
        *targets,
        *(target for (target, _), mark in before.items() if words and " ".join(mark.text.split()) == words),
    ]
    revoked = marks.revoke(wanted, workload)
    for target, whose in revoked:
        record_change(client, settings, by=by, action="mark.revoke", target=str(target), workload=whose)
    return [(target, whose, before.get((target, whose))) for target, whose in revoked]


def restore_mark(client: "redis.Redis", settings: Settings, mark: MarkView, *, by: str) -> Mark:
    """Puts a mark again that was revoked, with what is left of its time.

    Raises BadInput where its time has run out meanwhile, RedisUnavailable."""
    if mark.template_id is None and mark.pattern_id is None:
        raise BadInput("a mark is of a pattern or a template; name one")
    target = (
        Target.pattern(mark.pattern_id or 0)
        if mark.template_id is None
        else Target.template(mark.template_id)
    )
    lasts = None if mark.until is None else mark.until - utc_now()
    again, _ = Marks(client, settings).put(
        target, State(mark.state), text=mark.text, workload=mark.workload or "", lasts=lasts, by=by, why=mark.why
    )  # fmt: skip
    record_change(
        client, settings, by=by, action=f"mark.{again.state}", target=str(target),
        workload=again.workload, until=again.until, why=again.why,
    )  # fmt: skip
    return again


def mark_view(mark: Mark, *, now: datetime | None = None) -> MarkView:
    """A mark for programs."""
    return MarkView(
        **bare_target(mark.target, mark.workload),  # type: ignore[arg-type] # of one kind each
        state=mark.state.value,
        text=mark.text,
        at=mark.at,
        until=mark.until,
        by=mark.by,
        why=mark.why,
        expired=now is not None and not mark.holds(now),
    )


def bare_target(target: Target, workload: str) -> dict[str, int | str | None]:
    """The target of a mark, for programs."""
    number = {kind: target.number if target.kind is kind else None for kind in Kind}
    return {
        "pattern_id": number[Kind.PATTERN],
        "template_id": number[Kind.TEMPLATE],
        "workload": workload or None,
    }


def _length(text: str | None) -> timedelta | None:
    if text is None:
        return None
    try:
        length = span(text)
    except OverflowError:
        length = None
    if not length:
        raise BadInput(
            f"--for {text!r} is no length of time; write 90s, 15m, 1h or 7d, or leave it out for ever"
        )
    return length
