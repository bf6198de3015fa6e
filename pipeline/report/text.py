"""Log text and reasons made fit to show to a person.

Log lines are hostile input: everything that a terminal or a browser would obey instead of showing is
turned into something visible (`units.visible`), before any other code sees it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from pipeline.records.levels import ERROR_LEVELS, LEVELS
from pipeline.records.verdict import OURS, Reason
from pipeline.report.findings import Finding, FindingSample
from pipeline.units import listed, plural, visible

UNTIMED: Final = "Without a time"  # heads the findings whose records have none


def clipped(text: str, chars: int) -> str:
    """The visible text, at most `chars` characters of it, an ellipsis for the rest."""
    # Two characters can become one (CR LF), never fewer; the rest of a long text need not be looked at.
    text = visible(text[: 2 * chars + 2])
    return text if len(text) <= chars else text[: chars - 1] + "…"


def word_spans(text: str, words: Iterable[str]) -> list[tuple[int, int]]:
    """Where the words stand in the text: (start, end) of each, in order, never overlapping.

    Whole words only, case-sensitive; a word of the masked line that the text does not hold is skipped.
    """
    # No word of a log is this long, nor does anyone look at that many.
    wanted = sorted({visible(w) for w in list(words)[:50] if 0 < len(w) <= 200}, key=lambda w: (-len(w), w))
    if not wanted:
        return []
    # Only where a word ends in a letter or digit can more of them follow and make it another word.
    edged = [
        (r"(?<!\w)" if re.match(r"\w", w) else "")
        + re.escape(w)
        + (r"(?!\w)" if re.search(r"\w$", w) else "")
        for w in wanted
    ]
    return [m.span() for m in re.finditer("|".join(edged), text)]


def sample_text(sample: FindingSample, chars: int) -> tuple[str, list[tuple[int, int]]]:
    """The raw record as it may be shown, and where its surprising words stand in the message part."""
    text = clipped(sample.raw, chars)
    # The header before the message has words of its own that surprised nobody.
    message = visible(sample.message[:100])
    begin = max(text.find(message), 0) if message else 0
    return text, [(start, end) for start, end in word_spans(text, sample.words) if start >= begin]


def sample_place(sample: FindingSample, chars: int) -> str:
    """Where the record stands; what was found in no single line names its lines itself."""
    if sample.source.startswith(OURS):
        return f"found in {sample.source.removeprefix(OURS)}"
    return f"{clipped(sample.source, chars)}:{sample.line}"


def explain(reasons: Iterable[str], level: str | None = "") -> list[str]:
    """The reasons in plain words: one sentence part for each kind, in the order given.

    `level` is the most severe one of the records, None when they have none. A word such as `error` is taken
    for a level only where it can be one; "", for a level that is not known here, leaves open which it is.
    """
    kinds: dict[str, list[str]] = {}
    for text in reasons:
        name, _, data = text.partition(":")
        kinds.setdefault(name, []).append(data)
    return [_sentence(name, [d for d in data if d], level) for name, data in kinds.items()]


def _sentence(name: str, data: list[str], level: str | None) -> str:
    match name:
        case Reason.NEW_TEMPLATE:
            return "no line of this shape in the training data"
        case Reason.UNLIKELY_TOKENS:
            words = list(dict.fromkeys(w for d in data for w in d.split()))
            return "unexpected here: " + _listed(words) if words else "words that do not belong together"
        case Reason.RARE:
            # The most frequent data stands first; a range of counts helps nobody.
            count, _, total = data[0].partition("/") if data else ("", "", "")
            counted = count.isdigit() and total.isdigit()
            return (
                f"rare: {int(count):,} of {int(total):,} training lines"
                if counted
                else "rare in the training data"
            )
        case Reason.ERROR_SEVERITY:
            return _error_sign(data, level)
        case Reason.MARKED:
            # The data says as what, and who said so.
            return "marked " + (", ".join(clipped(d, 120) for d in data[:3]) or "by somebody")
        case Reason.UNCLASSIFIED:
            return "unclassified: its workload is past its template limit"
        case Reason.WARMING:
            return "no model yet"
        case Reason.SESSION_EVENT:
            return "an event that no normal session has"
        case Reason.SESSION_COUNTS:
            return "events in numbers that no normal session has"
        case Reason.SESSION_LENGTH:
            return "another length than normal sessions"
        case Reason.SESSION_ORDER:
            return "an order that no normal session has"
        case Reason.RATE_BURST:
            return "more lines than its past explains"
        case Reason.RATE_SILENCE:
            return "lines that stopped"
        case Reason.RATE_MIX:
            return "another mix of templates than before"
        case _:
            return clipped(": ".join([name, *data[:1]]), 120)


def _error_sign(data: list[str], level: str | None) -> str:
    # The data is the record's level where that is error-like, else the word in its text; both may read
    # `error`.
    words = [d for d in data if d not in LEVELS or d in ERROR_LEVELS]
    if level == "":
        return "error sign " + _listed(words) if words else "says that something failed"
    highest = LEVELS.index(level) if level in ERROR_LEVELS else -1
    levels = [d for d in words if d in ERROR_LEVELS and LEVELS.index(d) <= highest]
    says = [d for d in words if d not in levels]
    parts = ["logged as " + " and ".join(levels)] if levels else []
    parts += ["says " + _listed(says)] if says else []
    return ", ".join(parts) or "says that something failed"


def _listed(words: list[str], limit: int = 5) -> str:
    first = ", ".join(f"“{clipped(w, 60)}”" for w in words[:limit])
    return f"{first} and {len(words) - limit:,} more" if len(words) > limit else first


def headline(findings: Sequence[Finding], summary: Mapping[str, Any]) -> str:
    """The result in one sentence."""
    records, not_judged, lines = summary["records"], summary["not_judged"], plural(summary["lines"], "line")
    if not records:
        return "No lines were read"
    if findings:
        incidents = len({f.incident for f in findings if f.timed})
        parts = [plural(incidents, "incident")] if incidents else []
        return f"{', '.join([*parts, plural(len(findings), 'finding')])} in {lines}; read these first"
    if not_judged == records:
        return f"Nothing in {lines} says that something failed; they were not judged by the model"
    if not_judged:
        return (
            f"Nothing unusual in the lines judged; {not_judged:,} of {records:,} records "
            "were not judged by the model"
        )
    return f"Nothing unusual in {lines}"


def incident_header(findings: Sequence[Finding]) -> list[str]:
    """Name, begin, workloads and number of findings of an incident; `findings`: all of them.

    Findings without a time have a name alone.
    """
    first, *_ = hit = sorted(findings, key=lambda f: (f.first_seen, f.workload))
    names = dict.fromkeys(clipped(f.workload, 80) for f in hit)
    return [
        *([f"Incident {first.incident}", f"{clock(first.first_seen)} UTC"] if first.timed else [UNTIMED]),
        listed(names),
        plural(len(findings), "finding"),
    ]


def followers(findings: Sequence[Finding], shown: int) -> str:
    """The findings of an incident behind the first `shown` ones, in words: how many, and where."""
    others = findings[shown:]
    followed = all(f.first_seen >= findings[0].first_seen for f in others)
    names = dict.fromkeys(clipped(f.workload, 80) for f in others)
    return f"and {len(others):,} more{' that followed' if followed else ''} in {listed(names)}"


def clock(moment: datetime) -> str:
    """`2026-11-20 10:32:11`, UTC."""
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def time_range(first: datetime, last: datetime) -> str:
    """First and last seen; the date of the last only where it differs."""
    if last.replace(microsecond=0) == first.replace(microsecond=0):
        return clock(first)
    end = last.strftime("%H:%M:%S") if first.date() == last.date() else clock(last)
    return f"{clock(first)} – {end}"
