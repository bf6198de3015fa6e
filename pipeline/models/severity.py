"""Error words: words in a message that name a failure, whatever its level column says.

A closed list (`config/words.toml`), matched word by word. Counters, limits, negations, handled faults and
words within the names of files, methods and fault handlers do not count.
"""

import re
from collections.abc import Sequence
from functools import cache
from itertools import groupby, islice
from typing import Final

import msgspec

from pipeline.settings.toml import shipped_value

_FILE_NAME: Final = "words.toml"
_NOT: Final = frozenset(("not", "never"))
_LIMITS: Final = frozenset(("timeout", "timeouts"))
# A number that opens the line or a clause counts what follows: `<NUM> double-hummer alignment exceptions`.
_NUMBER_BEFORE: Final = re.compile(
    r"(?:<NUM>|\b\d+)\s+$|(?:^|[,;:(\[]\s*)(?:<NUM>|\d+)\s+(?:[\w-]+\s+){1,2}$"
)
_NUMBER_AFTER: Final = re.compile(r"(?:_?counts?)?\"?\s*(?:=|:)\s*(?:<NUM>|0\b|\[\]|\"\")")
# `number of failed storages = 0`, `corrupt replicas: 0`, but not `failed after attempts=<NUM>`
_NUMBER_OF: Final = re.compile(
    r"(?:\s+(?!(?:after|at|by|due|for|from|in|on|to|while|with)\b)[A-Za-z]+){1,2}\s*[=:]\s*(?:0|<NUM>)(?![\w.])"
)
# `session timeout of <NUM> ms`, but not `timeout of <NUM> ms exceeded`
_LIMIT: Final = re.compile(
    r"\s*(?:value\s+)?(?:=|:|is|of|set to)\s*(?:<[A-Z]+>|-?\d+)\s*+\w*+(?!\s*(?:exceeded|expired|elapsed|passed|reached))"
)
# A row of a table names a field: `parity error.......<NUM>`.
_LEADER: Final = re.compile(r"\.{3,}\s*(?:<[A-Z0-9_]+>|\d)")
# Marks that end the name of a package or a file.
_NAME_END: Final = re.compile(r"[^\w.+~/<>:%@-]")
_MASK: Final = re.compile(r"<[A-Z0-9_]+>")
_NAME_CHARS: Final = 256  # no longer name is looked at
# `libgpg-error-dev`, `ruby-error-highlight`, `gpg-error:amd64`, `gpg-error_<NUM>`, but not `auth-failure`.
_PACKAGE: Final = re.compile(
    r"(?:lib(?!rar)|python\d?-|ruby-|node-|golang-|php\d?-|r-cran-)[^/]*"
    r"|[^/]*-(?:dev|devel|doc|docs|dbg|dbgsym|debuginfo|common|utils|tools|libs|bin|perl|java|ruby)"
    r"(?:[_:.-][^/]*)?"
    r"|[^/]*[_:.](?:amd64|arm64|i386|i686|all|x86_64|aarch64|noarch)"
    r"|[^/]*_\d[^/]*"
)
# What a package manager does to a package of any name: `Setting up crash (<NUM>-<NUM>) ...`.
_DONE_TO: Final = re.compile(
    r"(?:Setting up|Unpacking|Removing|Purging configuration files for|Processing triggers for) $"
)
_VERSION_DOTS: Final = re.compile(r" \([^()\s]+\)(?: over \([^()\s]+\))? \.\.\.")
_SELECTED: Final = "Selecting previously unselected package "
# `crash:amd64 <NUM>`, `crash:all (<NUM>, automatic)`
_BUILT_FOR: Final = re.compile(
    r"[a-z\d][a-z\d+.-]*:(?:amd64|arm64|armhf|armel|i386|ppc64el|riscv64|s390x|all)"
)
_VERSION: Final = re.compile(r" \(?(?:\d|<NUM>|<none>)")
# `/srv/app-error/x`, `crash-report.txt`, `app-error.log.1`
_FILE: Final = re.compile(r"[~.]{0,2}/.*|.*\.[a-z][a-z0-9]{0,4}(?:\.(?:\d+|gz|zst|xz|bz2))*")
# `/hbase/corrupt/<HEX>`, `hdfs://host/failed/x`, `TestFailedRegion.java:<NUM>`
_PATH: Final = re.compile(
    r"[~.]{0,2}/[^/].*/.*|[a-z]+:/+.*/.*"
    r"|.*\.(?:c|cc|cpp|conf|db|err|go|gz|h|html|java|js|json|jsp|log|out|php|properties|py|rb|rs|scala|sh|ts|txt|xml"
    r"|ya?ml|zst)(?::\d+)*",
    re.IGNORECASE,
)
_PIECE: Final = re.compile(r"<[A-Z0-9_]+>|[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_SCAN_CHARS: Final = 2048  # a longer line names its failure before that


def _begins_with(word: str, signs: frozenset[str]) -> bool:
    # Signs of five to eight letters are beginnings, others whole words. Slices cost a fifth of an expression.
    return word in signs or word[:5] in signs or word[:6] in signs or word[:7] in signs or word[:8] in signs


class Words(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The lists of `config/words.toml`."""

    failure: frozenset[str]
    phrases: tuple[str, ...]
    grave: frozenset[str]
    negators: frozenset[str]
    handled: frozenset[str]
    names: frozenset[str]
    thrown: frozenset[str]
    empty: frozenset[str]
    counted: frozenset[str]
    trouble: frozenset[str]
    well: frozenset[str]
    faults: tuple[str, ...]


@cache
def words() -> Words:
    """Raises BadInput for a damaged file."""
    return shipped_value(_FILE_NAME, Words)


@cache
def _phrases() -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(phrase.split()) for phrase in words().phrases)


@cache
def _begins() -> frozenset[str]:
    return words().failure | {phrase[0] for phrase in _phrases()}


@cache
def _signs() -> re.Pattern[str]:
    """Each line with an error word holds one of these: of a phrase, the longest word. `errors` contains
    `err`."""
    every = words().failure | {max(phrase, key=len) for phrase in _phrases()}
    shortest = sorted(w for w in every if not any(other in w for other in every - {w}))
    # Grouped by their first letter, so that few alternatives are tried at a place.
    groups = groupby(shortest, lambda w: w[0])
    return re.compile("|".join(f"{first}(?:{'|'.join(w[1:] for w in group)})" for first, group in groups))


def may_be_severe(word: str) -> bool:
    """A cheap filter: `severity_words` of a line without any such word is None."""
    return _signs().search(word.lower()) is not None


def severity_words(masked: str) -> str | None:
    """The first error word or phrase of a masked line, lower case, or None.

    Compound names are split: `SocketTimeoutException` says `timeout`.
    """
    text, lists, first = masked[:_SCAN_CHARS], words(), _begins()
    pieces: list[str] = [piece.lower() for piece in _PIECE.findall(text)]
    begins = [i for i, word in enumerate(pieces) if word in first]
    if not begins:
        return None
    matches, read = _PIECE.finditer(text), 0  # only up to the last asked one
    leader = max((m.start() for m in _LEADER.finditer(text)), default=-1) if "..." in text else -1
    dealt_with = -1
    if not lists.handled.isdisjoint(pieces):
        dealt_with = max(
            (j for j, w in enumerate(pieces) if w in lists.handled and pieces[j - 1] not in _NOT), default=-1
        )
    for i in begins:
        word = pieces[i]
        for phrase in _phrases():
            if word == phrase[0] and tuple(pieces[i : i + len(phrase)]) == phrase:
                return " ".join(phrase)
        if word not in lists.failure or i < dealt_with:
            continue
        start, end = next(islice(matches, i - read, None)).span()
        read = i + 1
        if end <= leader:
            continue
        if (
            not _named_or_negated(pieces, i)
            and not _counter(text, word, start, end)
            and not _inside_an_identifier(text, start, end)
            and not _inside_a_name(text, start, end)
        ):
            return word
    return None


def trouble(word: str) -> bool:
    """Whether a lower-case word is a weak sign of failure."""
    return _begins_with(word, words().trouble)


def all_well(word: str) -> bool:
    """Whether a lower-case word is a weak sign of success."""
    return _begins_with(word, words().well)


def _named_or_negated(pieces: Sequence[str], i: int) -> bool:
    follower = pieces[i + 1] if i + 1 < len(pieces) else ""
    if follower in words().names or follower in words().empty:
        return True
    before = pieces[max(0, i - 2) : i]
    return any(w in words().negators for w in before) or (bool(before) and before[-1] in _NOT)


def _inside_an_identifier(text: str, start: int, end: int) -> bool:
    """Whether a word is a part of what a method, a property or a class is called: `minSessionTimeout`.

    A class that is thrown, and a reason that begins or ends with its error word, say it: `FailedMount`."""
    begin = next((at + 1 for at in range(start - 1, -1, -1) if not _is_letter(text[at])), 0)
    stop = next((at for at in range(end, len(text)) if not _is_letter(text[at])), len(text))
    if (begin, stop) == (start, end):
        return text[start - 1 : start] == text[end : end + 1] == "." and text[end + 1 : end + 2].isalnum()
    pieces = [piece.lower() for piece in _PIECE.findall(text[begin:stop])]
    if text[begin].islower() or pieces[-1] in words().names:
        return True
    return start > begin and end < stop and pieces[-1] not in words().thrown


def _is_letter(char: str) -> bool:
    return char.isalpha() and char.isascii()


def _inside_a_name(text: str, start: int, end: int) -> bool:
    """Whether a word is in the name of a package or file: `libgpg-error-dev`, not `connection-refused`."""
    before = _NAME_END.split(text[max(0, start - _NAME_CHARS) : start])[-1]
    after = _NAME_END.split(text[end : end + _NAME_CHARS], maxsplit=1)[0]
    if _is_package(text, start - len(before), before + text[start:end] + after):
        return True
    if not before and not after:
        return False
    # Punctuation at the end belongs to the sentence; a masked part stood for a number or the like.
    name = _MASK.sub("0", before + text[start:end] + after).rstrip(".:-/")
    if _PATH.fullmatch(name):
        return True
    hyphenated = before.endswith("-") or after.startswith("-") or re.match(r"\d+-", after)
    return bool(hyphenated and name == name.lower() and (_PACKAGE.fullmatch(name) or _FILE.fullmatch(name)))


def _is_package(text: str, begin: int, name: str) -> bool:
    """Whether the name that begins there is what a package manager installs or removes."""
    end = begin + len(name)
    if _BUILT_FOR.fullmatch(name) and _VERSION.match(text, end):
        return True
    before = text[max(0, begin - _NAME_CHARS) : begin]
    return before.endswith(_SELECTED) or bool(_DONE_TO.search(before) and _VERSION_DOTS.match(text, end))


def _counter(text: str, word: str, start: int, end: int) -> bool:
    if word in words().counted and _NUMBER_BEFORE.search(text[max(0, start - 64) : start]):
        return True
    if (word in _LIMITS and _LIMIT.match(text, end)) or _NUMBER_OF.match(text, end):
        return True
    after = _NUMBER_AFTER.match(text, end)
    # `error: <NUM>` is a code; a counter is a plural, or is written with `=` or `count`.
    return bool(after and (word in words().counted or "=" in after.group() or "count" in after.group()))
