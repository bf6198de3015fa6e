"""A verdict on a session together with the follow-ups that did not come in time.

The reason is `session-missing:17 after 9 2000 1623/1630`: template 17 comes within 2,000 ms after template 9
in 1,623 of 1,630 normal parts. With ` late 9000` behind it, it came after 9,000 ms. Pure.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pipeline.records.verdict import Reason, reason
from pipeline.watching.sessions.follow_ups import Missing
from pipeline.watching.sessions.model import LEVEL, SessionVerdict

MAX_MISSING: Final = 3  # follow-ups among the reasons of a session


def with_missing(
    verdict: SessionVerdict, missing: Sequence[Missing], *, first: bool = False
) -> SessionVerdict:
    """The verdict with reasons for what did not come in time, behind its own or alone.

    `first`: before its own, because the event that was expected next tells best where a trace broke."""
    p_value = min((one.p_value for one in missing), default=1.0)
    if not (verdict.anomalous or p_value <= LEVEL):
        return verdict
    ordered = missing if verdict.anomalous else sorted(missing, key=lambda one: one.p_value)
    if not ordered:
        return verdict
    reasons = tuple(_missing_reason(one) for one in ordered[:MAX_MISSING])
    earliest = ordered[0].follow_up
    cause = reason(Reason.SESSION_MISSING, f"{earliest.event}-after-{earliest.after}")
    if verdict.anomalous:
        if first:
            return replace(verdict, reasons=reasons + verdict.reasons, cause=cause)
        return replace(verdict, reasons=verdict.reasons + reasons)
    score = 1.0 / (1.0 + p_value / LEVEL)
    return SessionVerdict(anomalous=True, score=score, p_value=p_value, reasons=reasons, cause=cause)


def _missing_reason(missing: Missing) -> str:
    one = missing.follow_up
    late = "" if missing.late_ms is None else f" late {missing.late_ms}"
    return reason(
        Reason.SESSION_MISSING, f"{one.event} after {one.after} {one.usual_ms} {one.within}/{one.parts}{late}"
    )
