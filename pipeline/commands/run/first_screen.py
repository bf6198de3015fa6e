"""The first screen of `logweir run`: facts about the input that need no model, before anything is started.

A bounded part of the input is read, parsed and masked as the pipeline does it. Levels, error words, stack
traces and frequent patterns are known then. Imports neither redis, celery nor torch: it is out in a second.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import polars as pl

from pipeline.drain.masking.mask_set import MaskSet
from pipeline.errors import BadInput
from pipeline.models.severity import severity_words
from pipeline.records.batch import utc_now
from pipeline.records.declared import DETECTED, FormatChoice
from pipeline.records.levels import ERROR_LEVELS, LEVELS
from pipeline.report.excerpt import shortened
from pipeline.settings import Settings
from pipeline.sources import files, formats
from pipeline.units import clipped, line_count, plural, visible
from pipeline.watching.incidents.leading import grade_of

# Of all files together: masked in half a second.
MOST_RECORDS: Final = 20_000
MOST_BYTES: Final = 8 << 20
MOST_FILES: Final = 100  # of a folder; opening one and telling its formats costs milliseconds
_PATTERNS: Final = 5  # shown, of all and of the error-like ones
_WORDS: Final = 6
_CHUNK_RECORDS: Final = 5_000
_SEVERE: Final = 3  # error-like, as `findings.finding_severity`
# A frame of a stack as Java, .NET, Node, Python, Go, Ruby and native debuggers print it.
_FRAME: Final = (
    r'(?m)^(?:\s+at \S+|\s*File ".+", line \d+|\s+\S+\.(?:go|rs|s):\d+|\s*from \S+:\d+:in |\s*#\d+:? )'
)


@dataclass(slots=True, kw_only=True)
class Pattern:
    """Records of one masked line."""

    masked: str
    records: int
    place: str  # file name and line of the first one, of the first error-like one where there is one
    word: str | None  # the error word in it
    severe: int  # error-like records: by the word or their level
    grade: int  # `leading.Grade`, the highest of the error-like records


@dataclass(slots=True)
class FirstLook:
    """The facts of the part that was read."""

    lines: int = 0
    records: int = 0
    whole: bool = True  # everything was read
    levels: Counter[str] = field(default_factory=Counter)  # records; "" for none
    words: Counter[str] = field(default_factory=Counter)  # records by error word
    traces: int = 0  # records with a stack trace
    patterns: dict[int, Pattern] = field(default_factory=dict)

    @property
    def error_like(self) -> list[Pattern]:
        """The error-like patterns, the gravest first, and of those the rarest."""
        severe = [p for p in self.patterns.values() if p.severe]
        return sorted(severe, key=lambda p: (-p.grade, p.severe, p.masked))


def look(
    paths: Sequence[Path],
    settings: Settings,
    *,
    records: int = MOST_RECORDS,
    size: int = MOST_BYTES,
    choice: FormatChoice = DETECTED,
) -> FirstLook:
    """Reads the beginning of each file: together at most about so many records and bytes.

    Pipes and devices are left to the run, because they cannot be read twice. So are faults of a file.
    """
    masks, found = MaskSet.load(extra=settings.intake.masks), FirstLook(whole=len(paths) <= MOST_FILES)
    paths = paths[:MOST_FILES]
    for path in paths:
        if not path.is_file():
            found.whole = False
            continue
        try:
            share = {"records": records // len(paths), "size": size // len(paths)}
            _look_at(path, found, masks, settings, **share, choice=choice)
        except BadInput:  # the run says it
            found.whole = False
    return found


def _look_at(
    path: Path,
    found: FirstLook,
    masks: MaskSet,
    settings: Settings,
    *,
    records: int,
    size: int,
    choice: FormatChoice,
) -> None:
    remaining, at = records, 0
    step = max(1, min(_CHUNK_RECORDS, records))
    for reading in files.read_texts(
        path, note=_unsaid, max_records=step, max_bytes=max(1, size), choice=choice
    ):
        start = at
        for chunk in reading.chunks:
            if remaining <= 0 or at >= size:
                found.whole = False
                return
            remaining, at = remaining - chunk.records.height, start + chunk.cursor.offset
            parsed = formats.parse(
                chunk.records, chunk.formats, arrived=utc_now(), zone=settings.intake.time_zone
            )
            masked = masks.mask(parsed["message"])
            masked_lines = parsed.with_columns(masked["masked"], masked["pattern_id"])
            _count(found, masked_lines, reading.source.named.name)


def _unsaid(_note: str) -> None:
    """The run reads the same and says it."""


def _count(found: FirstLook, parsed: pl.DataFrame, name: str) -> None:
    found.records += parsed.height
    found.lines += int(parsed["lines"].sum())
    several = parsed.filter(pl.col("lines") > 1)
    found.traces += int(several["raw"].str.contains(_FRAME).sum())
    grouped = parsed.group_by("pattern_id", "level", maintain_order=True).agg(
        pl.len(), pl.col("masked", "line", "message", "raw").first()
    )
    for pattern_id, level, count, masked, line, message, raw in grouped.iter_rows():
        found.levels[level or ""] += count
        pattern = found.patterns.get(pattern_id)
        if pattern is None:
            word = severity_words(masked)
            pattern = Pattern(masked=masked, records=0, place=f"{name}:{line}", word=word, severe=0, grade=0)
            found.patterns[pattern_id] = pattern
        if pattern.word is not None:
            found.words[pattern.word] += count
        if pattern.word is not None or level in ERROR_LEVELS:
            pattern.place = pattern.place if pattern.severe else f"{name}:{line}"
            pattern.severe += count
            pattern.grade = max(pattern.grade, grade_of(level, _SEVERE, message, raw))
        pattern.records += count


def rows(found: FirstLook, *, width: int) -> list[str]:
    """The screen as lines of at most `width` characters; none of them can steer a terminal."""
    if not found.records:
        return []
    part = "" if found.whole else " (the beginning; the run reads all)"
    lines = [f"{line_count(found.lines, found.records)} at first sight{part}: {_levels(found)}"]
    severe = found.error_like
    facts = [f"{plural(sum(p.severe for p in severe), 'error-like record')}"] if severe else []
    if found.traces:
        facts.append(plural(found.traces, "stack trace"))
    if found.words:
        facts.append("words: " + ", ".join(f"{w} {n:,}" for w, n in found.words.most_common(_WORDS)))
    if facts:
        lines.append("  " + " · ".join(facts))
    lines += [_severe_row(pattern, width) for pattern in severe[:_PATTERNS]]
    frequent = sorted(found.patterns.values(), key=lambda p: (-p.records, p.masked))
    lines.append(f"  {plural(len(frequent), 'pattern')}, the most frequent:")
    lines += [f"  {p.records:>7,} {p.masked}" for p in frequent[:_PATTERNS]]
    return [clipped(line.replace("\n", " ").replace("\t", " "), width) for line in lines]


def _severe_row(pattern: Pattern, width: int) -> str:
    """Its line is cut around the error word."""
    begin = f"  {pattern.severe:>7,} {clipped(pattern.place, width // 2)}: "
    text = visible(pattern.masked)
    return begin + shortened(text, [pattern.word] if pattern.word else [], max(40, width - len(begin)))


def _levels(found: FirstLook) -> str:
    order = {level: place for place, level in enumerate(reversed(LEVELS))}
    shown = sorted(found.levels.items(), key=lambda item: order.get(item[0], len(order)))
    return ", ".join(f"{count:,} {level or 'without level'}" for level, count in shown)
