"""The files of a folder, and the order of rotated files.

Only names and directory entries are looked at; no file is opened. Needs the standard library alone, because
the producer names workloads by it.
"""

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Final, NamedTuple, TypeVar

from pipeline.units import plural

PACKED_ENDINGS: Final = (".gz", ".zst", ".xz", ".bz2", ".lzma")
# Folders of version control that do not begin with a dot.
_VERSIONS: Final = frozenset({"CVS", "RCS", "SCCS", "_darcs"})
# Entries of a folder that `logweir run` wrote, and of a data directory. Results are no logs; one has a key.
_LOGWEIR_MARKS: Final = (frozenset({".logweir"}), frozenset({"lock", "store.json"}))
NAMED: Final = 2  # names in a sentence about skipped files

_DATE: Final = r"(?:19|20)\d\d(?:-?)(?:0[1-9]|1[0-2])(?:-?)(?:0[1-9]|[12]\d|3[01])"
_TIME: Final = r"(?:[-_T.]?[0-2]\d(?:[-_:]?[0-5]\d){0,2})?"
# app.log.1, app.log-20261120, app.log.2026-11-20_10-30, spring.log.2026-11-20.0
_AT_END: Final = re.compile(
    rf"(?<=.)[.-](?:(?P<date>{_DATE}{_TIME})(?:[.-](?P<part>\d{{1,4}}))?|(?P<n>\d{{1,3}}))$"
)
# app-20261119.log, app.2026-11-19.0.log. A bare number here tells two programs apart: worker-1.log.
_BEFORE_ENDING: Final = re.compile(
    rf"(?<=.)[.-](?P<date>{_DATE}{_TIME})(?:[.-](?P<part>\d{{1,4}}))?(?=\.(?:log|txt|jsonl|json)$)"
)


class Rotation(NamedTuple):
    """The name of the live file, and the age of a rotated copy, as its own name tells them."""

    live: str
    date: str  # digits; "" without a date
    number: int  # the counter of app.log.2, or the part within a date; 0 without one
    packed: bool


def rotation(name: str) -> Rotation:
    """`app.log.2.gz` is the second copy of `app.log`."""
    plain = next((name.removesuffix(e) for e in PACKED_ENDINGS if name.endswith(e) and name != e), name)
    found = _AT_END.search(plain) or _BEFORE_ENDING.search(plain)
    if found is None:
        return Rotation(plain, "", 0, plain != name)
    groups = found.groupdict()
    date = re.sub(r"\D", "", groups["date"] or "")
    number = int(groups.get("n") or groups["part"] or 0)
    return Rotation(plain[: found.start()] + plain[found.end() :], date, number, plain != name)


P = TypeVar("P", bound=PurePath)


def oldest_first(files: Iterable[tuple[P, float]]) -> list[P]:
    """Paths with their times of change: rotated copies stand oldest first, where the first of them stood.

    The order follows the names. Where some copies have dates and others numbers, it follows the times.
    """
    groups: dict[tuple[PurePath, str], list[tuple[Rotation, float, P]]] = {}
    for path, changed in files:
        named = rotation(path.name)
        groups.setdefault((path.parent, named.live), []).append((named, changed, path))
    ordered: list[P] = []
    for group in groups.values():
        if len(group) > 1:
            copies = [named for named, _, _ in group if named.date or named.number]
            by_name = len({bool(named.date) for named in copies}) < 2
            group.sort(key=lambda one: (*_age(one[0], by_name=by_name), one[1], str(one[2])))
        ordered += [path for _, _, path in group]
    return ordered


def _age(named: Rotation, *, by_name: bool) -> tuple[bool, str, int, bool]:
    """Sorts the oldest first; the live file is the last one."""
    live = not (named.date or named.number)
    if not by_name:
        return live, "", 0, False
    # A counter grows with age. A part of a day grows with time.
    number = named.number if named.date else -named.number
    return live, named.date.ljust(14, "0") if named.date else "", number, live and not named.packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Globs for what folders and globs bring. One without `/` is compared with the name alone."""

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()

    def takes(self, relative: str) -> bool:
        """True for a file that is wanted."""
        return not self.drops(relative) and (
            not self.include or any(_matches(relative, p) for p in self.include)
        )

    def drops(self, relative: str) -> bool:
        """True for a file or folder that is excluded."""
        return any(_matches(relative, p) for p in self.exclude)


def _matches(relative: str, pattern: str) -> bool:
    subject = relative if "/" in pattern.rstrip("/") else relative.rpartition("/")[2]
    return fnmatchcase(subject, pattern.rstrip("/"))


@dataclass(slots=True)
class Skipped:
    """Names that were left out: the first few, and how many."""

    first: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, name: str) -> None:
        self.count += 1
        if len(self.first) < NAMED + 1:
            self.first.append(name)

    def join(self, other: "Skipped") -> None:
        self.count += other.count
        self.first = (self.first + other.first)[: NAMED + 1]

    def names(self) -> str:
        """`a, b and 1 more`."""
        shown = self.first if self.count <= len(self.first) else self.first[:NAMED]
        more = self.count - len(shown)
        return ", ".join(shown) + (f" and {more:,} more" if more else "")

    def sentence(self, noun: str = "file") -> str:
        """`skipped 3 files that are no text logs: a, b and 1 more`; "" without any."""
        if not self.count:
            return ""
        logs = "that is no text log" if self.count == 1 else "that are no text logs"
        return f"skipped {plural(self.count, noun)} {logs}: {self.names()}"


@dataclass(slots=True)
class FilesLeftOut:
    """What folders and globs brought, and a run reads otherwise than as it is, or not at all."""

    skipped: Skipped = field(default_factory=Skipped)  # no text
    others: Skipped = field(default_factory=Skipped)  # texts that are not logs
    kinds: Counter[str] = field(default_factory=Counter)  # of those texts
    recoded: Skipped = field(default_factory=Skipped)

    @property
    def count(self) -> int:
        return self.skipped.count + self.others.count

    def add_other(self, kind: str, name: str) -> None:
        """A text that is not a log; `kind` is a noun."""
        self.kinds[kind] += 1
        self.others.add(name)

    def notes(self) -> list[str]:
        """A sentence for each sort of file that there is."""
        found = [self.skipped.sentence()] if self.skipped.count else []
        if self.others.count:
            kinds = ", ".join(plural(count, kind) for kind, count in sorted(self.kinds.items()))
            found.append(
                f"left out {plural(self.others.count, 'file')} whose content is not a log ({kinds}): "
                f"{self.others.names()}; a file that is named itself is read"
            )
        if self.recoded.count:
            verb = "is" if self.recoded.count == 1 else "are"
            count = plural(self.recoded.count, "file")
            found.append(f"{count} {verb} UTF-16, read as UTF-8: {self.recoded.names()}")
        return found


def walk(folder: Path, wanted: Filter, skipped: Skipped) -> Iterator[tuple[Path, os.stat_result]]:
    """The regular files below a folder, sorted, files before folders.

    Hidden entries, folders of version control, those that Logweir wrote, and what the filter drops are passed
    over in silence. Links to folders are not entered, so no walk runs in a circle. Unreadable entries
    and those that are neither file nor folder count as skipped.
    """
    todo = [(folder, "")]
    while todo:
        here, prefix = todo.pop()
        try:
            with os.scandir(here) as listing:
                entries = sorted(listing, key=lambda e: e.name)
        except OSError:
            skipped.add(str(here))
            continue
        names = {entry.name for entry in entries}
        if prefix and any(marks <= names for marks in _LOGWEIR_MARKS):
            continue
        below: list[tuple[Path, str]] = []
        for entry in entries:
            relative = prefix + entry.name
            if is_hidden(entry.name):
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    if not wanted.drops(relative):
                        below.append((here / entry.name, f"{relative}/"))
                    continue
                if not wanted.takes(relative):
                    continue
                info = entry.stat()
            except OSError:  # a link to nothing, or to itself
                skipped.add(entry.path)
                continue
            if stat.S_ISREG(info.st_mode):
                yield here / entry.name, info
            else:
                skipped.add(entry.path)
        todo += reversed(below)


def is_hidden(name: str) -> bool:
    """True for the name of a hidden entry or a folder of version control."""
    return name.startswith(".") or name in _VERSIONS
