"""The reasons of a finding in one plain sentence."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from pipeline.records.levels import ERROR_LEVELS, LEVELS
from pipeline.records.verdict import Reason
from pipeline.report.findings import Finding, is_new
from pipeline.report.text import EDGES, meaningful
from pipeline.units import clipped, visible

# In this order in a sentence; other kinds follow as they are given.
_ORDER: Final = (
    Reason.MARKED,
    Reason.NEW_TEMPLATE,
    Reason.NEVER_SAID,
    Reason.RARE,
    Reason.ERROR_SEVERITY,
    Reason.UNLIKELY_TOKENS,
)


# What no single line shows.
_WATCHED: Final[Mapping[str, str]] = {
    Reason.SESSION_EVENT: "an event that no normal session has",
    Reason.SESSION_COUNTS: "events in numbers that no normal session has",
    Reason.SESSION_ORDER: "an order that no normal session has",
    Reason.SESSION_MISSING: "an event that did not come in its usual time",
    Reason.RATE_BURST: "more lines than its past explains",
    Reason.RATE_SILENCE: "lines that stopped",
    Reason.RATE_MIX: "another mix of templates than before",
    Reason.NUMBER_SHIFT: "other values than before",
    Reason.NUMBER_OUTLIER: "a value far above all others",
}


def why(finding: Finding) -> str:
    """Why it is a finding, in one sentence without a full stop."""
    sample = max(finding.samples, key=lambda s: len(s.words), default=None)
    text = reasons_in_words(finding.reasons, finding.level, sample.message if sample else "")
    text = text or "the model finds it unlikely"
    return text[0].upper() + text[1:]


def briefly(finding: Finding, *, new_is_said: bool) -> str:
    """As `why`, without what stands beside it: its level, and where `new_is_said` that it is new.

    "" where nothing is left."""
    reasons = [reason for reason in finding.reasons if not _is_level(reason, finding.level)]
    if is_new(finding):
        explained = {Reason.UNLIKELY_TOKENS, *([Reason.NEW_TEMPLATE] if new_is_said else [])}
        reasons = [reason for reason in reasons if reason.partition(":")[0] not in explained]
    return why(replace(finding, reasons=tuple(reasons))) if reasons else ""


def _is_level(reason: str, level: str | None) -> bool:
    """Whether a reason says no more than the level."""
    name, _, data = reason.partition(":")
    return name == Reason.ERROR_SEVERITY and level in ERROR_LEVELS and data == level


def reasons_in_words(reasons: Iterable[str], level: str | None, text: str) -> str:
    """The parts of `explain` as one sentence without a capital and a full stop, "" for no reasons."""
    parts = explain(reasons, level, text)
    return ", and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))


def explain(reasons: Iterable[str], level: str | None = "", text: str = "") -> list[str]:
    """The reasons in plain words: one part of a sentence for each kind.

    `level` is the most severe one of the records, None when they have none. A word such as `error` is taken
    for a level only where it can be one; "", for a level that is not known here, leaves open which it is.
    `text` is a message in which the unexpected words are looked up.
    """
    kinds: dict[str, list[str]] = {}
    for reason in reasons:
        name, _, data = reason.partition(":")
        kinds.setdefault(name, []).append(data)
    # A line that was never seen is no stranger for a word, and a stop word explains nothing.
    if Reason.NEVER_SAID in kinds:
        kinds.pop(Reason.NEW_TEMPLATE, None)
        kinds.pop(Reason.UNLIKELY_TOKENS, None)
    if Reason.NEW_TEMPLATE in kinds or (
        len(kinds) > 1 and not _unlikely(kinds.get(Reason.UNLIKELY_TOKENS, ()))
    ):
        kinds.pop(Reason.UNLIKELY_TOKENS, None)
    names = sorted(kinds, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    return [_part(name, [d for d in kinds[name] if d], level, text) for name in names]


def _part(name: str, data: list[str], level: str | None, text: str) -> str:
    match name:
        case Reason.NEW_TEMPLATE:
            return "never seen before"
        case Reason.UNLIKELY_TOKENS:
            return _unexpected(_unlikely(data), text)
        case Reason.NEVER_SAID:
            return _never_said(data)
        case Reason.RARE:
            return _rare(data)
        case Reason.ERROR_SEVERITY:
            return _error_sign(data, level)
        case Reason.MARKED:
            # The data says as what, and who said so.
            return "marked " + (", ".join(clipped(d, 120) for d in data[:3]) or "by somebody")
        case Reason.UNCLASSIFIED:
            return "unclassified: its workload is past its template limit"
        case Reason.WARMING:
            return "no model yet"
        case _:
            return _WATCHED.get(name) or clipped(": ".join([name, *data[:1]]), 120)


def _never_said(data: Sequence[str]) -> str:
    total, _, usual = data[0].partition(" ") if data else ("", "", "")
    said = f"never seen in {int(total):,} lines" if total.isdigit() else "never seen before"
    return f"{said}; usually “{clipped(visible(usual), 60)}”" if usual else said


def _rare(data: Sequence[str]) -> str:
    # The most frequent data stands first; a range of counts helps nobody.
    count, _, total = data[0].partition("/") if data else ("", "", "")
    if not (count.isdigit() and total.isdigit()):
        return "seldom seen before"
    if int(count) == 0:
        return f"never seen in {int(total):,} lines"
    return f"seen {'once' if int(count) == 1 else f'{int(count):,} times'} in {int(total):,} lines"


def _unlikely(data: Iterable[str]) -> list[str]:
    return meaningful(word for d in data for word in d.split())


def _unexpected(words: Sequence[str], text: str) -> str:
    """The first word with the one before it, or all of them where the text does not hold it."""
    if not words:
        return "its words do not belong together"
    text = visible(text[:4_000])
    found = re.search(r"(\S+)\s+(?:(?!\w)\S)*" + re.escape(visible(words[0])) + r"(?!\w)", text)
    before = found[1].strip(EDGES) if found else ""
    if before:
        return f"{_listed(words[:1])} was unexpected after {_listed([before])}"
    return f"{_listed(words)} {'was' if len(words) == 1 else 'were'} unexpected"


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


def _listed(words: Sequence[str], limit: int = 5) -> str:
    first = ", ".join(f"“{clipped(w, 60)}”" for w in words[:limit])
    return f"{first} and {len(words) - limit:,} more" if len(words) > limit else first
