"""Error words: words in a message that name a failure, whatever its level column says.

A closed list, matched word by word. Counters, negations, handled faults and names of fault handlers do not
count.
"""

import re
from collections.abc import Sequence
from itertools import groupby, islice
from typing import Final

# fmt: off
_SEVERE: Final = frozenset((
    "error", "errors", "err", "failure", "failures", "fail", "fails", "failed", "failing", "fatal", "panic",
    "panicked", "exception", "exceptions", "refused", "denied", "timeout", "timeouts", "killed", "corrupt",
    "corrupted", "corruption", "abort", "aborted", "aborting", "crash", "crashed", "crashes", "unreachable",
    "unavailable", "rejected", "deadlock", "deadlocked", "segfault", "traceback", "critical", "emergency",
    "violation", "overflow", "unauthorized", "forbidden", "oom", "unable", "invalid", "broken",
    "uncorrectable", "unrecoverable", "lost",
    # as log15 and go-logging spell it, and in other languages
    "erro", "eror", "fehler", "fehlgeschlagen", "erreur", "errore",
))
# Failures of a whole process or of data, not of one request.
GRAVE_WORDS: Final = frozenset((
    "panic", "panicked", "fatal", "corrupt", "corrupted", "corruption", "crash", "crashed", "killed",
    "segfault", "oom", "out of memory",
))
_PHRASES: Final = (
    ("timed", "out"),
    ("not", "found"),
    ("out", "of", "memory"),
    # A lock or a device that holds a process up: PostgreSQL, Linux.
    ("still", "waiting"),
    ("blocked", "for", "more"),
)
_BEGINS: Final = _SEVERE | {phrase[0] for phrase in _PHRASES}
# `no error`, `without any errors`, `non-fatal`, `0 failures`
_NEGATORS: Final = frozenset(("no", "without", "zero", "non", "0"))
_NOT: Final = frozenset(("not", "never"))
# The fault was handled: `parity error corrected`.
_HANDLED: Final = frozenset((
    "corrected", "recovered", "resolved", "cleared", "ignored", "handled", "suppressed",
))
# The word is part of a name: `ErrorHandler`, `error log`, `exception resolver`.
_NAMES: Final = frozenset((
    "handler", "handlers", "handling", "resolver", "reporter", "listener", "log", "logs", "logger", "page",
    "pages", "rate", "threshold", "detector", "detection", "correction", "recovery", "tolerance", "free",
    "policy", "filter", "mapper", "channel",
))
_EMPTY: Final = frozenset(("none", "null", "nil", "false", "ok", "success"))
# Counters give a number and report no failure: `<NUM> errors`, `failed=<NUM>`, `errors: 0`.
_COUNTED: Final = frozenset((
    "errors", "failures", "exceptions", "timeouts", "crashes", "failed", "rejected", "aborted", "lost",
    "denied", "refused",
))
# Weaker signs: one may stand in a calm line, several rarely do. Five to eight letters match as the beginning
# of a word. Nouns (core, dump, parity, null) are no sign: they do not name a state.
_TROUBLE: Final = frozenset((
    "warn", "warning", "cannot", "can't", "couldn", "missing", "mismatch", "unexpec", "illegal", "bad",
    "wrong", "malfo", "expired", "retry", "retrie", "interru", "terminat", "halt", "halted", "dead", "hung",
    "hang", "stuck", "stall", "disconn", "drop", "dropped", "discar", "reset", "shutdown", "degrad",
    "unknown", "undefin", "unresol", "unsuppor", "incorrec", "inconsis", "insuff", "exhaus", "exceed",
    "excess", "leak", "conflict", "stale", "suspec", "suspic", "attack", "breakin", "intrus", "alarm",
    "alert", "backtra", "fault", "assert", "bug", "oops", "problem", "trouble", "violat", "damag", "evict",
    "kill", "revoke", "rollba", "unclean", "uncaug", "unhandl", "deny", "denies", "refuse", "reject", "ignor",
    "incompl", "abnorm", "checks", "crc", "overlo", "overru", "underru", "throttl", "slow", "severe",
    "nonexis",
))
# Signs of success.
_CALM: Final = frozenset((
    "success", "complet", "finish", "start", "started", "starti", "ready", "ok", "listen", "accept",
    "created", "creati", "opened", "loaded", "loadin", "initia", "regist", "enable", "connected", "establ",
    "receiv", "sent", "saved", "updated", "healthy", "done", "granted", "info",
))
# fmt: on
_WEAK_SIGNS: Final = _TROUBLE | _CALM
# A number that opens the line or a clause counts what follows: `<NUM> double-hummer alignment exceptions`.
_NUMBER_BEFORE: Final = re.compile(r"(?:<NUM>|\b\d+)\s+$|(?:^|[,;:(]\s*)(?:<NUM>|\d+)\s+(?:[\w-]+\s+){1,2}$")
_NUMBER_AFTER: Final = re.compile(r"(?:_?counts?)?\"?\s*(?:=|:)\s*(?:<NUM>|0\b|\[\]|\"\")")
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
# `/srv/app-error/x`, `crash-report.txt`, `app-error.log.1`
_FILE: Final = re.compile(r"[~.]{0,2}/.*|.*\.[a-z][a-z0-9]{0,4}(?:\.(?:\d+|gz|zst|xz|bz2))*")
_PIECE: Final = re.compile(r"<[A-Z0-9_]+>|[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_SCAN_CHARS: Final = 2048  # a longer line names its failure before that


def _begins_with(word: str, signs: frozenset[str]) -> bool:
    # Signs of five to eight letters are beginnings, others whole words. Slices cost a fifth of an expression.
    return word in signs or word[:5] in signs or word[:6] in signs or word[:7] in signs or word[:8] in signs


# Each line with an error word holds one of these: of a phrase, the longest word. `errors` contains `err`.
FAILURE_WORDS: Final = _SEVERE | {max(p, key=len) for p in _PHRASES}
_SHORTEST: Final = sorted(w for w in FAILURE_WORDS if not any(o in w for o in FAILURE_WORDS - {w}))
# Grouped by their first letter, so that few alternatives are tried at a place.
_SIGNS: Final = re.compile(
    "|".join(
        f"{first}(?:{'|'.join(w[1:] for w in words)})" for first, words in groupby(_SHORTEST, lambda w: w[0])
    )
)


def may_be_severe(word: str) -> bool:
    """A cheap filter: `severity_words` of a line without any such word is None."""
    return _SIGNS.search(word.lower()) is not None


def names_failure(word: str) -> bool:
    """As `may_be_severe` for a word without white space, but `forerunner` does not count as `err` in it."""
    return any(piece.lower() in FAILURE_WORDS for piece in _PIECE.findall(word))


def severity_words(masked: str) -> str | None:
    """The first error word or phrase of a masked line, lower case, or None.

    Compound names are split: `SocketTimeoutException` says `timeout`.
    """
    text = masked[:_SCAN_CHARS]
    words: list[str] = [piece.lower() for piece in _PIECE.findall(text)]
    begins = [i for i, word in enumerate(words) if word in _BEGINS]
    if not begins:
        return None
    pieces, read = _PIECE.finditer(text), 0  # only up to the last asked one
    leader = max((m.start() for m in _LEADER.finditer(text)), default=-1) if "..." in text else -1
    dealt_with = -1
    if not _HANDLED.isdisjoint(words):
        dealt_with = max(
            (j for j, w in enumerate(words) if w in _HANDLED and words[j - 1] not in _NOT), default=-1
        )
    for i in begins:
        word = words[i]
        for phrase in _PHRASES:
            if word == phrase[0] and tuple(words[i : i + len(phrase)]) == phrase:
                return " ".join(phrase)
        if word not in _SEVERE or i < dealt_with:
            continue
        start, end = next(islice(pieces, i - read, None)).span()
        read = i + 1
        if end <= leader:
            continue
        if (
            not _named_or_negated(words, i)
            and not _counter(text, word, start, end)
            and not _inside_a_name(text, start, end)
        ):
            return word
    return None


def is_sign(word: str) -> bool:
    """Whether `trouble` or `all_well` holds of a lower-case word."""
    return _begins_with(word, _WEAK_SIGNS)


def trouble(word: str) -> bool:
    """Whether a lower-case word is a weak sign of failure."""
    return _begins_with(word, _TROUBLE)


def all_well(word: str) -> bool:
    """Whether a lower-case word is a weak sign of success."""
    return _begins_with(word, _CALM)


def _named_or_negated(words: Sequence[str], i: int) -> bool:
    follower = words[i + 1] if i + 1 < len(words) else ""
    if follower in _NAMES or follower in _EMPTY:
        return True
    before = words[max(0, i - 2) : i]
    return any(w in _NEGATORS for w in before) or (bool(before) and before[-1] in _NOT)


def _inside_a_name(text: str, start: int, end: int) -> bool:
    """Whether a word is in the name of a package or file: `libgpg-error-dev`, not `connection-refused`."""
    if "-" not in (text[start - 1 : start], text[end : end + 1]) and not re.match(
        r"\d+-", text[end : end + 8]
    ):
        return False
    before = _NAME_END.split(text[max(0, start - _NAME_CHARS) : start])[-1]
    after = _NAME_END.split(text[end : end + _NAME_CHARS], maxsplit=1)[0]
    # Punctuation at the end belongs to the sentence; a masked part stood for a number or the like.
    name = _MASK.sub("0", before + text[start:end] + after).rstrip(".:-/")
    return name == name.lower() and bool(_PACKAGE.fullmatch(name) or _FILE.fullmatch(name))


def _counter(text: str, word: str, start: int, end: int) -> bool:
    if word in _COUNTED and _NUMBER_BEFORE.search(text[max(0, start - 64) : start]):
        return True
    after = _NUMBER_AFTER.match(text, end)
    # `error: <NUM>` is a code; a counter is a plural, or is written with `=` or `count`.
    return bool(after and (word in _COUNTED or "=" in after.group() or "count" in after.group()))
