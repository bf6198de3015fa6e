"""Which physical lines continue the record before them, whichever way they came.

A line with a header begins a record. Without one, the table of traces says what it is (records/traces.py). A
line that is nothing there belongs to the record before it where that is how the source writes: nearly every
line that may have a header has one (STRICT_SHARE), or it is told by the header whether lines follow."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import numpy as np
import polars as pl

from pipeline.records.schema import raw_frame
from pipeline.records.traces import pattern_of
from pipeline.sources.formats import BLOCKS, TIMED, VAGUE, head_mask, parse

# With this share of heads among the lines that may be heads, a line without one belongs to the line before.
STRICT_SHARE: Final = 0.8
# So many headers, with this share of the lines that may be heads, tell by themselves whether lines follow.
# Where headers are seldom, lines follow each of them by chance: then about as many must follow each.
_FEW_HEADS, _FEW_SHARE, _SELDOM_SHARE, _AGREE = 3, 0.1, 1 / 3, 0.9
_MORE_LINES: Final = 2

# A grave line without its own header does not continue the line before.
_ALARM: Final = (
    r"^\[? ?(?:WARN|WARNING|ERROR|ERRO|ERR|SEVERE|CRITICAL|CRIT|ALERT|EMERG|FATAL|PANIC) ?(?:[:|\[\]]|[ -]|$)"
)
# A line that a traceback may explain.
_GRAVE: Final = (
    r"(?i:error|exception|fail|fatal|critical|severe|panic|warn|traceback|unhandled|uncaught|abort|crash|emerg"
    r"|\bcrit\b|\balert\b|\berr\b)|(?:^|[\[|<(\s])[EFWC](?:[0-9]{4}|[\]|)>,/:]|\s)"
)
# The header of a slow query of MySQL: the second line may stand alone.
_SLOW_TIME, _SLOW_USER = "# Time: ", "# User@Host: "
_CRASH_LEVEL, _ERROR_LEVEL = "critical", "error"
_NUMBERS: Final = re.compile(r"[0-9]+|\"[^\"]*\"")
_HEAD_CHARS: Final = 60
_SOME_DAY: Final = datetime(2000, 1, 1, tzinfo=UTC)  # the times of a sample are not looked at
Places = np.ndarray[tuple[int], np.dtype[np.intp]]
Flags = np.ndarray[tuple[int], np.dtype[np.bool]]
Shares = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Joins:
    """Of some lines, in their order: whether each begins a record, and the level of one that begins so, null
    where its header is to tell it."""

    begins: pl.Series
    levels: pl.Series | None


class _Told:
    """Lines that the table of traces may describe; few are, and one pass finds them."""

    def __init__(self, lines: pl.Series) -> None:
        self.lines = lines
        self._places = lines.str.contains(
            pattern_of("continues", "next", "crash", "signal", "error")
        ).arg_true()
        self._few = lines.gather(self._places)

    def mask(self, *kinds: str) -> pl.Series:
        """True for lines of these kinds."""
        found = pl.repeat(False, self.lines.len(), dtype=pl.Boolean, eager=True)
        if not self._few.len():
            return found
        return found.scatter(self._places, self._few.str.contains(pattern_of(*kinds)))


class Joiner:
    """Tells where records begin, line by line, and remembers the lines before."""

    def __init__(self) -> None:
        self.strict: bool | pl.Series = False  # of all lines, or of each
        self._block = False  # records are several lines below a header
        self.reset()

    def reset(self) -> None:
        """The next line has none before it."""
        self._after_time = False  # the line before is the first one of a header of two
        self._awaits = False  # the next line that is not indented belongs to the record
        self._last, self._is_own = "", False  # the last line with a text, and whether it may be a record
        self._crashed = False  # the record began with a crash

    def decide(self, lines: pl.Series, formats: tuple[str, ...], parts: Places | None = None) -> None:
        """Whether lines without a header belong to the one before, by a sample of lines without wrappers.
        `parts`: the number of its source for each line, from 0 on, if there are several."""
        self._block = bool(BLOCKS & set(formats))
        if parts is None:
            strict = _are_strict(lines, formats, np.zeros(lines.len(), dtype=np.intp))
            self.strict = self._block or bool(strict.any())
        else:
            strict = _are_strict(lines, formats, parts)
            self.strict = pl.Series((strict | self._block)[parts])

    def joins(self, lines: pl.Series, formats: tuple[str, ...], starts: pl.Series | None = None) -> Joins:
        """Of lines without colours and wrappers. `starts`: lines that have none before them."""
        heads = head_mask(lines, formats)
        if self._block:
            after = lines.str.starts_with(_SLOW_TIME).shift(1, fill_value=self._after_time)
            self._after_time = bool(lines.str.starts_with(_SLOW_TIME)[-1])
            heads = heads & ~(after & lines.str.starts_with(_SLOW_USER))
        if heads.all():
            self._awaits = self._crashed = False
            self._last, self._is_own = lines[-1], True
            return Joins(heads, None)
        rows = (~heads).arg_true()
        others = lines.gather(rows)
        told = _Told(others)
        shaped = told.mask("continues")
        strict = self.strict.gather(rows) if isinstance(self.strict, pl.Series) else self.strict
        joins = shaped if strict is False else self._with_headless(others, shaped, strict)
        begins, levels = heads.clone().scatter(rows, ~joins), None
        if starts is not None:
            begins, heads = begins | starts, heads | starts
        if not self._block:
            if isinstance(self.strict, pl.Series):
                own = heads | (begins & ~self.strict)
            else:
                own = heads if self.strict else heads | begins
            begins, levels = self._with_starts(lines, begins, own, rows, told)
            begins = begins if starts is None else begins | starts
        return Joins(self._without_awaited(lines, begins, heads, rows, told), levels)

    def _with_headless(self, others: pl.Series, shaped: pl.Series, strict: pl.Series | bool) -> pl.Series:
        """Of lines without a header of these formats, those that continue a record. A timed header of another
        format still begins one, and so does a line that begins with a grave level."""
        rows = (~shaped & strict).arg_true()
        free = others.gather(rows)
        foreign = head_mask(free, TIMED)
        if not self._block:
            foreign = foreign | free.str.contains(_ALARM)
        return shaped.clone().scatter(rows, ~foreign)

    def _without_awaited(
        self, lines: pl.Series, begins: pl.Series, heads: pl.Series, rows: pl.Series, told: "_Told"
    ) -> pl.Series:
        """Without the first line that is not indented behind one that awaits it: it names the exception."""
        awaits = told.mask("next")
        if not awaits.any() and not self._awaits:
            return begins
        awaits = pl.repeat(False, lines.len(), dtype=pl.Boolean, eager=True).scatter(rows, awaits)
        flush_left = (heads | lines.str.contains(r"^\S")).arg_true()
        if not flush_left.len():
            return begins
        behind = awaits.gather(flush_left).shift(1, fill_value=self._awaits)
        self._awaits = bool(awaits[int(flush_left[-1])])
        return begins & (
            heads | ~pl.repeat(False, lines.len(), dtype=pl.Boolean, eager=True).scatter(flush_left, behind)
        )

    def _with_starts(
        self, lines: pl.Series, begins: pl.Series, own: pl.Series, rows: pl.Series, told: "_Told"
    ) -> tuple[pl.Series, pl.Series | None]:
        """And the lines that begin a record by what they say, with the level of such records.

        `own`: lines that are whole records. `rows`: the places of the lines of `told`, which have no
        header."""
        hits = told.mask("crash", "signal", "error").arg_true()
        own_places = own.arg_true().to_numpy()
        levels = None
        if hits.len():
            starts, places = told.lines.gather(hits), rows.gather(hits).to_numpy()
            kinds = zip(
                places.tolist(),
                starts.str.contains(pattern_of("crash")),
                starts.str.contains(pattern_of("signal")),
                self._are_parts(lines, own, places),
                strict=True,
            )
            found: dict[int, bool] = {}
            words: dict[int, str] = {}
            seen = 0  # own lines up to the last of these
            for place, is_crash, is_signal, is_part in kinds:
                between = int(np.searchsorted(own_places, place)) - seen
                self._crashed = self._crashed and between <= 0
                seen = int(np.searchsorted(own_places, place, side="right"))
                words[place] = _CRASH_LEVEL if is_crash or is_signal else _ERROR_LEVEL
                if is_crash:
                    found[place] = self._crashed = True
                elif self._crashed:
                    found[place] = False
                elif is_signal:
                    found[place] = self._crashed = True
                elif not is_part:
                    found[place] = True
            begins = begins.clone().scatter(list(found), list(found.values()))
            levels = pl.Series("level", [None], dtype=pl.String).new_from_index(0, lines.len())
            levels = levels.scatter(list(words), list(words.values()))
            own_places = own_places[seen:]
        self._crashed = self._crashed and not own_places.size
        for place in range(lines.len() - 1, -1, -1):
            if (text := lines[place]) and not text.isspace():
                self._last, self._is_own = text, bool(own[place])
                break
        return begins, levels

    def _are_parts(self, lines: pl.Series, own: pl.Series, places: Places) -> list[bool]:
        """Whether the last line with a text before each is a part of a record, or says what is wrong."""
        filled = lines.str.contains(r"\S").arg_true().to_numpy()
        at = np.searchsorted(filled, places) - 1
        before = [lines[int(filled[n])] if n >= 0 else self._last for n in at]
        is_own = [bool(own[int(filled[n])]) if n >= 0 else self._is_own for n in at]
        grave = pl.Series(before, dtype=pl.String).str.contains(_GRAVE)
        return [wrong or not alone for wrong, alone in zip(grave, is_own, strict=True)]


def _are_strict(lines: pl.Series, formats: tuple[str, ...], parts: Places) -> Flags:
    """Whether the lines without a header belong to headers, by the first lines of each source: of the sources
    0 to the last one in `parts`, the source of each line."""
    heads = head_mask(lines, formats).to_numpy()
    count = int(parts.max(initial=-1)) + 1
    if not heads.any():
        return np.zeros(count, dtype=np.bool)
    free = (
        ~heads & ~lines.str.contains(pattern_of("continues", "below", "crash", "signal", "error")).to_numpy()
    )
    n_heads = np.bincount(parts[heads], minlength=count)
    share = n_heads / np.maximum(1, n_heads + np.bincount(parts[free], minlength=count))
    strict: Flags = share >= STRICT_SHARE
    if set(formats) <= VAGUE:
        return strict
    doubtful = ~strict & (n_heads >= _FEW_HEADS) & (share >= _FEW_SHARE)
    if doubtful.any():
        rows = np.flatnonzero(doubtful[parts])
        strict |= _tell_of_lines(
            lines.gather(rows), formats, heads=heads[rows], free=free[rows], parts=parts[rows], share=share
        )
    return strict


def _tell_of_lines(
    lines: pl.Series, formats: tuple[str, ...], *, heads: Flags, free: Flags, parts: Places, share: Shares
) -> Flags:
    """Whether the headers of each source tell by themselves whether lines follow."""
    places = np.flatnonzero(heads)
    before = np.cumsum(heads) - 1  # the header before each line
    free = free & (before >= 0)
    free[free] = parts[places[before[free]]] == parts[free]
    counts = np.bincount(before[free], minlength=places.size)
    texts = lines.gather(places)
    names = parse(raw_frame(texts), formats, arrived=_SOME_DAY, headers={"level", "service"})
    levels, both = names["level"].to_list(), names.select("level", "service").rows()
    kinds = [_kind_of(text) for text in texts]
    found = np.zeros(share.size, dtype=np.bool)
    for part in np.unique(parts).tolist():
        some = np.flatnonzero(parts[places] == part)
        if some.size > _FEW_HEADS:  # the lines of the last one may not be complete
            some = some[:-1]
        below = counts[some]
        if not below.any() or (
            share[part] < _SELDOM_SHARE and below.max() > 2 * below[below > 0].min() + _MORE_LINES
        ):
            continue
        followed = (below > 0).tolist()
        found[part] = any(
            _agreement([each[n] for n in some], followed) >= _AGREE for each in (levels, both, kinds)
        )
    return found


def _kind_of(text: str) -> str:
    return _NUMBERS.sub("#", text)[:_HEAD_CHARS]


def _agreement(kinds: Iterable[object], followed: Iterable[bool]) -> float:
    """The share of headers that have lines below them, or none, as most of their kind. 0 for too few."""
    groups: dict[object, list[bool]] = defaultdict(list)
    for kind, is_followed in zip(kinds, followed, strict=True):
        groups[kind].append(is_followed)
    told = [group for group in groups.values() if len(group) > 1]
    total = sum(map(len, told))
    if total < _FEW_HEADS:
        return 0.0
    return sum(max(sum(group), len(group) - sum(group)) for group in told) / total
