"""The part of a long text that is shown: around what is unusual, and of a stack trace what was thrown."""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from pipeline.models.severity import severity_words

LEAD: Final = 60  # Characters shown before the unusual word.
_AFTER: Final = 40  # Characters shown behind it, at least.
_BREAK: Final = 20  # A cut moves on to a blank within so many characters.
# The line of a stack trace that names what was thrown, in Python, Java, .NET, Node, Go and Rust.
_THROWN: Final = re.compile(
    r"^\s*(?:Caused by: )?(?:[A-Za-z_$<][\w$<>]*(?:\.|::))*[A-Za-z_$]\w*"
    r"(?:Error|Exception|Throwable|Panic|Exit|Timeout)"
    r"\w*(?::|\s*$)|^panic: |^thread '.*' panicked"
)
# What stands before the name of a class: `org.apache.hadoop.hbase.`
_PACKAGE: Final = re.compile(r"\b(?:[a-z][\w$]*\.)+(?=[A-Z])")
_GAP: Final = "…"


def telling(message: str, words: Iterable[str] = ()) -> list[str]:
    """The words that a cut of the message should keep: its error word, then the surprising words."""
    word = severity_words(message)
    return [*([word] if word else []), *words]


def shortened(text: str, words: Sequence[str], chars: int) -> str:
    """At most `chars` characters of a visible text, with the first of `words` that it holds.

    A stack trace keeps its first line, and the first and the last line that name what was thrown, without
    the packages of its classes."""
    if len(text) <= chars:
        return text
    first, *others = text.split("\n")
    thrown = [number for number, line in enumerate(others) if _THROWN.search(line)]
    if not thrown:
        return _around(text, words, chars)
    kept = sorted({thrown[0], thrown[-1]})
    head = _around(first, words, chars // 2)
    shown, before = head, -1
    for left, number in zip(range(len(kept), 0, -1), kept, strict=True):
        gap = "\n" if number == before + 1 else f"\n{_GAP}\n"
        line = _PACKAGE.sub("", others[number].strip())
        shown += gap + _around(line, words, (chars - len(shown) - len(gap)) // left)
        before = number
    return shown


def _around(text: str, words: Sequence[str], chars: int) -> str:
    if len(text) <= chars:
        return text
    begin, end = 0, chars - 1
    place = _place(text, words)
    if place is not None and place[1] + _AFTER > end:
        begin = max(0, min(place[0] - LEAD, len(text) - chars + 1))
        blank = text.find(" ", begin, begin + _BREAK)
        begin = blank + 1 if 0 <= blank < place[0] else begin
        end = begin + chars - 2
    return f"{_GAP if begin else ''}{text[begin:end]}{_GAP if end < len(text) else ''}"


def _place(text: str, words: Sequence[str]) -> tuple[int, int] | None:
    """Where the first of these words that occurs stands, as a whole word in any case."""
    for word in words:
        # A compound such as SocketTimeoutException holds its error word.
        found = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) or re.search(
            re.escape(word), text, re.IGNORECASE
        )
        if found:
            return found.span()
    return None
