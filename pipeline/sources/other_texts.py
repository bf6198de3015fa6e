"""Texts that are not logs, recognised by how they are built: manual pages, package lists and prose.

The name of a file does not matter. A text whose lines or stanzas have times or levels is a log, whatever else
it looks like, and so is every text that is not clearly one of these kinds. An archive is taken for logs where
one of its first members has a time or a level.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice, pairwise
from typing import Final

from pipeline.records.written_levels import levels_by_word

MANUAL: Final = "manual page"
PACKAGES: Final = "package list"
PROSE: Final = "explanatory text"
ARCHIVE: Final = "package or source archive"
_LOOK_BYTES: Final = 16_384  # thirty stanzas of a solver dump
_FEWEST_LINES: Final = 6
_GLANCE_LINES: Final = 5  # in most logs they all have a time
_MEMBERS: Final = 30  # of an archive

# A clock time, or a date before one.
_TIME: Final = re.compile(r"(?<!\d)\d{1,2}:\d{2}:\d{2}(?!\d)|\b\d{4}-\d{2}-\d{2}[T ]+\d|(?<!\d)1\d{9}(?!\d)")
_LEVEL: Final = re.compile(r"^\W{0,2}(?:DEBUG|INFO|NOTICE|WARN|WARNING|ERROR|CRITICAL|FATAL)\b")

# groff_man(7) and mdoc(7): requests begin a line, and every page has a title or a section.
_REQUEST: Final = re.compile(r"[.'](?:\\\"|[A-Za-z]{2})")
_TITLE: Final = re.compile(r"\.(?:TH|SH|Dd|Dt|Sh|so)(?: |$)")
_REQUESTS: Final = 0.05  # share of a page that is mostly text

# deb822(5), and what other package managers print: `Key: value`, with blank rows between the packages.
_FIELD: Final = re.compile(r"([A-Z][\w-]*(?: [\w-]+){0,2}) *:(?:\s|$|(?=\S))")
_STANZAS: Final = 3
_FIELDS: Final = 2.5  # of a stanza, on average
_ALIKE: Final = 0.8  # share of the stanzas that begin with the same field

# Wrapped text: a row ends where the next word would not fit.
_WORD: Final = re.compile(r"[(\"']?[A-Za-z][a-z'-]*[)\"',.;:!?]*")
_WIDEST: Final = 120
_BREAKS: Final = 4
_WORDS: Final = 6.0  # of a row, on average
_OPENINGS: Final = 0.6  # share of the rows that begin with a word of their own; those of a log do not
_PLAIN: Final = 0.8  # share of the words that are of letters, and of the rows that are wrapped


def other_text(first: bytes) -> str:
    """MANUAL, PACKAGES or PROSE for the first bytes of a text that is clearly not a log, else ""."""
    rows = first[:_LOOK_BYTES].decode("utf-8", "replace").splitlines()
    if len(first) > _LOOK_BYTES:  # the last row may be cut off
        rows = rows[:-1]
    if _is_manual(rows):
        return MANUAL
    if all(map(_TIME.search, rows[:_GLANCE_LINES])) or any(map(_LEVEL.match, rows)):
        return ""
    if sum(bool(row.strip()) for row in rows) < _FEWEST_LINES:
        return ""
    if _are_packages(rows):
        return PACKAGES
    return PROSE if _is_prose(rows) else ""


def other_archive(members: Iterable[bytes]) -> str:
    """ARCHIVE if none of the first members has a time or a level, else "". `members`: their first bytes."""
    looked_at = islice(members, _MEMBERS)
    return "" if any(not other_text(first) and _is_dated(first) for first in looked_at) else ARCHIVE


def _is_dated(first: bytes) -> bool:
    rows = first[:_LOOK_BYTES].decode("utf-8", "replace").splitlines()
    return any(_TIME.search(row) or _LEVEL.match(row) for row in rows)


def _is_manual(rows: Sequence[str]) -> bool:
    filled = [row for row in rows if row.strip()]
    requests = sum(map(bool, map(_REQUEST.match, filled)))
    return requests >= max(1.0, len(filled) * _REQUESTS) and any(map(_TITLE.match, filled))


def _paragraphs(rows: Sequence[str]) -> Iterator[list[str]]:
    for filled, group in groupby(rows, key=lambda row: bool(row.strip())):
        if filled:
            yield list(group)


def _are_packages(rows: Sequence[str]) -> bool:
    stanzas = list(_paragraphs(rows))
    if len(stanzas) < _STANZAS:
        return False
    begins: list[str] = []
    fields = timed = 0
    for stanza in stanzas:
        found = [_FIELD.match(row) for row in stanza if not row[0].isspace()]
        keys = [field[1] for field in found if field is not None]
        if not keys or len(keys) < len(found) or len(set(keys)) < len(keys):
            return False
        begins.append(keys[0])
        fields += len(keys)
        timed += any(_TIME.search(row) or _says_level(row) for row in stanza)
    alike = max(map(begins.count, set(begins)))
    # Events in this form have a time or a level each.
    return fields >= _FIELDS * len(stanzas) and alike >= _ALIKE * len(stanzas) and timed < len(stanzas) / 2


def _says_level(row: str) -> bool:
    return row.partition(":")[2].strip().lower() in levels_by_word()


def _is_prose(rows: Sequence[str]) -> bool:
    if any(map(_TIME.search, rows)):
        return False
    paragraphs = [[row for row in group if not row[0].isspace()] for group in _paragraphs(rows)]
    wrapped = [group for group in paragraphs if len(group) > 1]
    filled = [row.split() for group in wrapped for row in group]
    width = max((len(row.rstrip()) for group in wrapped for row in group), default=0)
    words = [word for row in filled for word in row]
    if len({row[0] for row in filled}) < _OPENINGS * len(filled):
        return False
    if width > _WIDEST or len(words) < _WORDS * max(1, len(filled)):
        return False
    breaks = [(row.rstrip(), after.split()[0]) for group in wrapped for row, after in pairwise(group)]
    full = sum(len(row) + 1 + len(word) > width - 1 for row, word in breaks)
    in_sentences = sum(word[0].islower() for _, word in breaks)
    return (
        len(breaks) >= _BREAKS
        and full >= _PLAIN * len(breaks)
        and in_sentences >= len(breaks) / 2
        and sum(map(bool, map(_WORD.fullmatch, words))) >= _PLAIN * len(words)
    )
