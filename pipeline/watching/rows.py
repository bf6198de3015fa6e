"""What watching found, as rows of RESULT_SCHEMA: the same store, the same findings, the same report as for lines.

Such a row is of no line: `lines` is 0, so line counts stay true, and `source` begins with records.OURS. Its template id is
negative and stable for a workload and a cause, so that equal faults are one finding; its record id derives from what was
found, so that finding it again is harmless.
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

SESSIONS: Final = f"{OURS}sessions"
RATES: Final = f"{OURS}rates"
LEVEL: Final = "warning"  # worth a look, and below what a line itself says at an error level
# Of one cause in one round. A rollout that changes every session is one thing to read, however many sessions it meets.
MOST_ROWS: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One thing that is wrong with no single line."""

    source: str  # SESSIONS or RATES
    workload: str
    cause: str  # short and stable: equal faults have equal ones
    subject: str  # what tells it from others of its cause: the session and when it began, the minute
    at: datetime
    message: str  # one sentence, the cause first
    detail: str  # further lines for whoever reads on, "" for none
    reasons: tuple[str, ...]
    score: float
    p_value: float
    version: str  # model version that said so, "" for none
    line: int = 0  # where it begins in its source, 0 where that says nothing

    @property
    def kind(self) -> str:
        """The name of its first reason."""
        return self.reasons[0].partition(":")[0] if self.reasons else self.source.removeprefix(OURS)


def result_rows(found: Sequence[Found]) -> list[tuple[str, str, pl.DataFrame]]:
    """(batch id, workload, RESULT_SCHEMA rows) per workload and source; ids derive from what is in them."""
    groups: dict[tuple[str, str], list[Found]] = {}
    for item in capped(found):
        groups.setdefault((item.workload, item.source), []).append(item)
    batches = []
    for (workload, source), items in groups.items():
        rows = pl.DataFrame([_row(item) for item in items], schema=RESULT_SCHEMA)
        name = source.removeprefix(OURS)
        batches.append((f"logweir-{name}-{digest(*rows['record_id'], size=12)}", workload, rows))
    return batches


def capped(found: Iterable[Found]) -> list[Found]:
    """At most MOST_ROWS of each workload and cause; the last of them says how many more there were."""
    kept: list[Found] = []
    numbers: Counter[tuple[str, str, str]] = Counter()
    last: dict[tuple[str, str, str], int] = {}
    for item in found:
        key = (item.workload, item.source, item.cause)
        numbers[key] += 1
        if numbers[key] <= MOST_ROWS:
            last[key] = len(kept)
            kept.append(item)
    for key, place in last.items():
        more = numbers[key] - MOST_ROWS
        if more > 0:
            kept[place] = replace(kept[place], message=f"{kept[place].message}; and {more:,} more like it")
    return kept


def template_of(workload: str, source: str, cause: str) -> int:
    """Negative, and never what a line can have; 62 bits, so that equal ids are equal causes."""
    return -2 - (int(digest(workload, source, cause), 16) >> 2)


def marked_as(workload: str, cause: str) -> int | None:
    """The template id by which `logweir mark` knows a cause of an incident; None where it is about no template."""
    kind, _, number = cause.partition(":")
    if kind == "template":
        return int(number) if number.isdecimal() and number != "0" else None
    for source in (SESSIONS, RATES):
        if kind.startswith(source.removeprefix(OURS).removesuffix("s") + "-"):
            return template_of(workload, source, cause)
    return None


def _row(item: Found) -> dict[str, Any]:
    blank: dict[str, Any] = dict.fromkeys(RESULT_SCHEMA)
    pattern = f"{item.source} {item.cause}"
    return blank | {
        "record_id": f"{item.source}-{digest(item.workload, item.source, item.cause, item.subject)}",
        "source": item.source,
        "line": item.line,
        "lines": 0,
        "timestamp": item.at,
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
