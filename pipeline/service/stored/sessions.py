"""The records of a session or trace, in order of time across workloads, and what was found in sessions.

A session is known by its key: the id of a block, a trace or a request that its records name. No index of keys
is stored. The records are those whose text or structured fields hold the key, in a bounded span.
"""

import re
from datetime import UTC, datetime
from typing import Any, Final

import polars as pl
import redis

from pipeline.errors import BadInput
from pipeline.ledger.ledger import Ledger
from pipeline.records.result_query import ResultQuery
from pipeline.service.lines import chosen_names, lines_of_rows
from pipeline.service.questions import LinesAsked
from pipeline.service.stored.nearest import nearest_sessions
from pipeline.service.stored.values import SESSION_RECORDS, SessionFinding, SessionInHand, SessionRecords
from pipeline.settings import Settings
from pipeline.sinks.answers.answers import Answers
from pipeline.watching.rows import SESSIONS
from pipeline.watching.sessions.keys import KINDS as KINDS_OF_KEYS
from pipeline.watching.sessions.keys import SEPARATOR, find_keys, kind_and_key, user_patterns
from pipeline.watching.sessions.open_sessions import session_name
from pipeline.watching.state import WatcherState

MIN_KEY, MAX_KEY = 4, 200  # characters
KINDS: Final = (
    "block ids of HDFS", "trace ids (W3C, trace_id, SkyWalking, Sleuth)", "request ids of OpenStack",
    "request, correlation, transaction and job ids", "instance ids", "ids of user sessions", "span ids", "UUIDs",
)  # fmt: skip
_MESSAGE: Final = re.compile(r"(.*): session (\S.*?), ([0-9,]+) events?\b", re.DOTALL)
_SCANNED: Final = 2_000  # findings, of which those in sessions are taken


def stored_session(
    answers: Answers,
    client: "redis.Redis",
    settings: Settings,
    key: str,
    *,
    span: tuple[datetime, datetime],
    limit: int = SESSION_RECORDS,
    only: tuple[str, ...] = (),
) -> SessionRecords:
    """All about one key. Raises BadInput, RedisUnavailable, and as `Answers` does."""
    if not MIN_KEY <= len(key) <= MAX_KEY:
        raise BadInput(f"key {key[:60]!r} has {len(key)} characters; a key has {MIN_KEY} to {MAX_KEY}")
    LinesAsked(since=span[0], until=span[1])  # checks them
    names = chosen_names(answers, None, only)
    query = ResultQuery(limit=limit + 1, since=span[0], until=span[1], workloads=names, key=key)
    found = answers.lines(query)  # the oldest first
    judged = pl.col("source").eq_missing(SESSIONS)
    records = found.filter(~judged)
    lines, kind = lines_of_rows(records), _kind(records, key, settings)
    return SessionRecords(
        key=key,
        since=span[0],
        until=span[1],
        lines=lines[-limit:],
        more=found.height > limit,
        workloads=sorted({line.workload for line in lines}),
        findings=_findings(found.filter(judged)),
        in_hand=_in_hand(client, settings, key, names),
        nearest=nearest_sessions(client, settings, lines, kind) if found.height <= limit else [],
    )


def session_findings(
    answers: Answers, *, since: datetime, until: datetime, limit: int, only: tuple[str, ...] = ()
) -> list[SessionFinding]:
    """Sessions that left the course of the others, the newest first. Raises BadInput, else as `Answers`."""
    LinesAsked(since=since, until=until)  # checks them
    query = ResultQuery(
        limit=_SCANNED,
        since=since,
        until=until,
        workloads=chosen_names(answers, None, only),
        anomalous=True,
        text="session",
        level="warning",
    )
    return _findings(answers.lines(query).filter(pl.col("source") == SESSIONS))[::-1][:limit]


def key_of_finding(message: pl.Expr) -> pl.Expr:
    """The key of the session that a finding is about, null for none."""
    return message.str.extract(r"(?s)^.*: session (\S.*?), [0-9,]+ events?\b", 1)


def _findings(rows: pl.DataFrame) -> list[SessionFinding]:
    return [_finding(row) for row in rows.iter_rows(named=True)]


def _finding(row: dict[str, Any]) -> SessionFinding:
    message, raw = row["message"] or "", row["raw"]
    parts = _MESSAGE.match(message)
    return SessionFinding(
        key=parts[2] if parts else "",
        workload=row["workload"],
        at=row["timestamp"],
        why=parts[1] if parts else message,
        events=raw.splitlines() if raw and raw != message else [],
        score=row["score"],
        template_id=row["template_id"],
    )


def _kind(records: pl.DataFrame, key: str, settings: Settings) -> str:
    """The kind of a key by the records that name it, "" where none does."""
    entries = find_keys(records, user_patterns(settings.watch.session_keys)).explode().drop_nulls()
    kinds = {kind for kind, of in map(kind_and_key, entries.unique().to_list()) if of == key}
    return next((kind for kind in KINDS_OF_KEYS if kind in kinds), "")


def _in_hand(
    client: "redis.Redis", settings: Settings, key: str, names: tuple[str, ...] | None
) -> list[SessionInHand]:
    known = Ledger(client, settings).backlog.totals()
    wanted = {name for name in known if names is None or name in names}
    entries = [kind + SEPARATOR + key for kind in KINDS_OF_KEYS]
    stored = {session_name(name, entry) for name in wanted for entry in entries}
    found = WatcherState(client, settings).sessions(sorted(stored))
    parts = [part for session in found.values() for part in session.parts().values()]
    return [
        SessionInHand(
            workload=one.workload,
            events=len(one.at_ms) + one.dropped,
            began=datetime.fromtimestamp(min(one.at_ms) / 1000, UTC) if one.at_ms else None,
        )
        for one in {part.workload: part for part in parts if part.workload in wanted}.values()
    ]
