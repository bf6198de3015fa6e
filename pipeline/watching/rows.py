"""The watcher's findings as rows of RESULT_SCHEMA: stores, findings and reports treat them as lines.

A row belongs to no line: `lines` is 0, so line counts stay true, and `source` begins with records.OURS. Its
template id is negative and derives from workload and cause, so equal faults are one finding. Its record id
derives from the finding, so a second write of it is harmless.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import polars as pl

from pipeline.records.batch import digest
from pipeline.records.schema import RESULT_SCHEMA
from pipeline.records.verdict import OURS, pattern_ids
from pipeline.watching.alarm_budget import ChanceRate

SESSIONS: Final = f"{OURS}sessions"
RATES: Final = f"{OURS}rates"
NUMBERS: Final = f"{OURS}numbers"
LEVEL: Final = "warning"  # below lines at an error level
# Of one cause in one round. A rollout that changes every session is one thing to read.
MAX_ROWS: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class WatcherFinding:
    """A finding about a session, a rate or numbers."""

    source: str  # SESSIONS, RATES or NUMBERS
    workload: str
    cause: str  # short, and equal for equal faults
    subject: str  # distinguishes findings of one cause: the session and its begin, or the minute
    at: datetime
    message: str  # one sentence, the cause first
    detail: str  # further lines, "" for none
    reasons: tuple[str, ...]
    score: float
    p_value: float
    chance: ChanceRate
    version: str  # model version of the verdict, "" for none
    line: int = 0  # of its begin in the source, 0 for none
    timed: bool = True  # false: `at` is a time of arrival

    @property
    def kind(self) -> str:
        """The name of its first reason."""
        return self.reasons[0].partition(":")[0] if self.reasons else self.source.removeprefix(OURS)


# (batch id, workload, RESULT_SCHEMA rows)
FoundRows = tuple[str, str, pl.DataFrame]


def finding_rows(found: Sequence[WatcherFinding]) -> list[FoundRows]:
    """Rows per workload and source; batch ids derive from rows."""
    groups: dict[tuple[str, str], list[WatcherFinding]] = {}
    for item in capped(found):
        groups.setdefault((item.workload, item.source), []).append(item)
    batches = []
    for (workload, source), items in groups.items():
        rows = pl.DataFrame([_row(item) for item in items], schema=RESULT_SCHEMA)
        name = source.removeprefix(OURS)
        batches.append((f"logweir-{name}-{digest(*rows['record_id'], size=12)}", workload, rows))
    return batches


def capped(found: Iterable[WatcherFinding]) -> list[WatcherFinding]:
    """At most MAX_ROWS of each workload and cause; the last of them tells the number of the others."""
    rows: list[WatcherFinding] = []
    numbers: Counter[tuple[str, str, str]] = Counter()
    last: dict[tuple[str, str, str], int] = {}
    for item in found:
        key = (item.workload, item.source, item.cause)
        numbers[key] += 1
        if numbers[key] <= MAX_ROWS:
            last[key] = len(rows)
            rows.append(item)
    for key, place in last.items():
        more = numbers[key] - MAX_ROWS
        if more > 0:
            rows[place] = replace(rows[place], message=f"{rows[place].message}; and {more:,} more like it")
    return rows


def template_of(workload: str, source: str, cause: str) -> int:
    """Negative, as no line has it; of 62 bits, so that equal ids are equal causes."""
    return -2 - (int(digest(workload, source, cause), 16) >> 2)


def marked_as(workload: str, cause: str) -> int | None:
    """The template id of an incident's cause for `logweir mark`; None if the cause has none."""
    kind, _, number = cause.partition(":")
    if kind == "template":
        return int(number) if number.isdecimal() and number != "0" else None
    for source in (SESSIONS, RATES, NUMBERS):
        if kind.startswith(source.removeprefix(OURS).removesuffix("s") + "-"):
            return template_of(workload, source, cause)
    return None


def _row(item: WatcherFinding) -> dict[str, Any]:
    blank: dict[str, Any] = dict.fromkeys(RESULT_SCHEMA)
    pattern = f"{item.source} {item.cause}"
    return blank | {
        "record_id": f"{item.source}-{digest(item.workload, item.source, item.cause, item.subject)}",
        "source": item.source,
        "line": item.line,
        "lines": 0,
        "timestamp": item.at,
        "timed": item.timed,
        "workload": item.workload,
        "level": LEVEL,
        "message": item.message,
        "pattern_id": pattern_ids([pattern])[0],
        "template_id": template_of(item.workload, item.source, item.cause),
        "score": min(1.0, max(0.0, item.score)),
        "anomalous": True,
        "p_value": item.p_value,
        "reasons": list(item.reasons),
        "model_version": item.version or None,
        "raw": item.detail or item.message,
    }
