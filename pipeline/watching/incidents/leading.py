"""The order of the causes of one incident: the first one is its headline.

A report, the terminal and `logweir incidents` order with `lead_order`, so all of them name the same line.

* What the log itself calls graver comes first (`Grade`): its level weighs more than the words of a line.
* Of those, causes that no training has seen stand before known ones. Known ones that last longer than an
  incident (`onsets.SPAN`) stand last.
* A bare record of a request, as in an access log, comes after lines that say something in words.
* Rarer causes come first, in steps of eight times as many: a fault happens once, its consequences repeat.
* Within a step the earlier cause comes first.
* A known cause below the error level leads with its stack trace only if another cause quotes what was thrown:
  the program went on, and nothing followed. Else the first error leads, or the first quoted trace.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Any, Final

from pipeline.models.severity import severity_words
from pipeline.records.levels import ERROR_LEVELS
from pipeline.records.remembered import remembered
from pipeline.watching.incidents.onsets import SPAN

TEXT_CHARS: Final = 200  # of a cause that are looked at: live causes keep little more
WORDS: Final = 2  # outside quotes; a bare record of a request has its method at most
RAW_CHARS: Final = 8_000  # of a record with its stack trace that are looked at

_METHOD: Final = re.compile(r"\b(?:GET|HEAD|POST|PUT|DELETE|CONNECT|OPTIONS|TRACE|PATCH)\b")
_QUOTED: Final = re.compile(r"\"(?:[^\"\\]|\\.)*(?:\"|\Z)")
_WORD: Final = re.compile(r"(?:^|(?<=[\s(\[{=:,]))[A-Za-z]{2,}(?=[\s.,;:!?)\]}]|\Z)")
_ENDED: Final = frozenset({"killed", "segfault", "oom", "out of memory"})  # of a process
_SECOND: Final = timedelta(microseconds=999_999)
# A line of a stack trace, or the line that names what was thrown, behind the first line of a record. White
# space is that of one line: a record of thousands of blank lines would take seconds.
_TRACE: Final = re.compile(
    r"\n(?:[^\S\n]+at |[^\S\n]+File \"|Caused by: |goroutine \d|Traceback "
    r"|[^\S\n]*(?:[\w$]+\.)*[\w$]*(?:Error|Exception)\b)"
)
_THROWN: Final = re.compile(
    r"^[^\S\n]*(?:Caused by: )?(?:[\w$]+\.)*[\w$]*(?:Error|Exception)\b:?[^\S\n]*(.*)", re.MULTILINE
)
THROWN_CHARS: Final = 120  # of what was thrown that another cause may quote
LEAST_THROWN: Final = 12  # "null" and "closed" are quoted by chance
# The program was told to stop, or goes on as it can: an error that nobody has to fix.
_STOPPED: Final = re.compile(
    r"interrupt|Interrupted\w*Exception|ClosedByInterrupt|\bSIG(?:TERM|INT|HUP)\b|shut(?:ting )?down"
    r"|ShutdownHandler|\bstopp(?:ed|ing)\b",
    re.IGNORECASE,
)
_DEFAULT: Final = re.compile(
    r"\b(?:assum\w+|us\w+|a reasonable)\b (?:\w+ )?default|falling back"
    r"|\busing\b(?:(?!\busing\b).)*\b(?:instead|applicable)\b",
    re.IGNORECASE,
)


class Grade(IntEnum):
    """How grave a record is, by its level before its words."""

    CALM = 1
    WORDED = 2  # an error word in a record whose level is calm, or whatever a program says as it starts
    WARNING = 3  # also an error of a part that was stopped, and one after which a default was taken
    FAILING = 4  # a warning with an error word
    UNLEVELLED = 5  # an error word in a record without a level
    TRACED = 6  # a stack trace at a level that is not an error
    # Fatal too, as databases say of a connection; a stack trace without a level; the end of a process at any.
    ERROR = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """The facts of one cause that its place depends on."""

    grade: int
    workload: str
    new: bool  # no training has seen its template
    first: datetime
    last: datetime
    count: int
    text: str  # of its first line
    thrown: tuple[str, ...] = ()  # as `thrown_in`
    tie: tuple[Any, ...]  # where its first line stands; different for every cause


def grade_of(level: str | None, severity: int, text: str, raw: str) -> Grade:
    """`severity`: 3 error-like by level or words, 2 warning or marked, 1 neither. `text`: the message of a
    record, `raw`: all of it."""
    raw = raw[:RAW_CHARS]
    traced = severity > 1 and "\n" in raw and _TRACE.search(raw) is not None
    if traced or level in ERROR_LEVELS:
        if _is_passed_over(raw):
            return Grade.WARNING
        return Grade.ERROR if level is None or level in ERROR_LEVELS else Grade.TRACED
    if severity == 2:
        return Grade.WARNING
    if severity == 3:
        word = severity_words(text.partition("\n")[0])
        if word in _ENDED:
            return Grade.ERROR
        failing = Grade.WARNING if _is_passed_over(raw) else Grade.FAILING
        return {None: Grade.UNLEVELLED, "warning": failing}.get(level, Grade.WORDED)
    return Grade.CALM


def lead_order(signs: Sequence[Sign]) -> list[int]:
    """The indices of the causes of one incident, the headline first. Does not depend on their order."""
    worst: dict[str, int] = {}
    for sign in signs:
        worst[sign.workload] = max(sign.grade, worst.get(sign.workload, 0))

    def place(at: int) -> tuple[Any, ...]:
        sign = signs[at]
        # Some programs write no level above a warning.
        failing = sign.grade == worst[sign.workload] == Grade.FAILING
        return -(Grade.ERROR if failing or sign.grade == Grade.TRACED else sign.grade), *_place(sign)

    order = sorted(range(len(signs)), key=place)
    if order and signs[order[0]].grade == Grade.TRACED and not signs[order[0]].new:
        grave = [at for at in order if signs[at].grade >= Grade.TRACED]
        led = (at for at in grave if signs[at].grade == Grade.ERROR or _is_quoted(at, signs))
        headline = next(led, order[0])
        order.remove(headline)
        order.insert(0, headline)
    return order


def thrown_in(raw: str) -> tuple[str, ...]:
    """What the first and the last line of a stack trace say that name what was thrown; `raw`: of a record."""
    said = [found[1].strip()[:THROWN_CHARS] for found in _THROWN.finditer(raw[:RAW_CHARS].partition("\n")[2])]
    telling = [text for text in said if len(text) >= LEAST_THROWN and " " in text]
    return tuple(dict.fromkeys([*telling[:1], *telling[-1:]]))


def _is_quoted(at: int, signs: Sequence[Sign]) -> bool:
    others = [text for place, sign in enumerate(signs) if place != at for text in (sign.text, *sign.thrown)]
    return any(thrown in text for thrown in signs[at].thrown for text in others)


@remembered(4_096, TEXT_CHARS)
def is_request(text: str) -> bool:
    """Whether a line is a bare record of a request: it names an HTTP method and has no words of its own."""
    text = text[:TEXT_CHARS]
    return _METHOD.search(text) is not None and len(_WORD.findall(_QUOTED.sub(" ", text))) < WORDS


def count_step(count: int) -> int:
    """0 for up to 7 records, 1 for up to 63, and so on."""
    return (max(1, count).bit_length() - 1) // 3


def _place(sign: Sign) -> tuple[Any, ...]:
    familiarity = 0 if sign.new else 1 + (sign.last - sign.first > SPAN)
    request = is_request(sign.text[:TEXT_CHARS])
    return familiarity, request, count_step(sign.count), _latest(sign.first), sign.tie


def _is_passed_over(raw: str) -> bool:
    first, _, rest = raw.partition("\n")
    thrown = _THROWN.search(rest)
    said = f"{first}\n{thrown.group()}" if thrown else first
    return _STOPPED.search(said) is not None or _DEFAULT.search(said) is not None


def _latest(first: datetime) -> datetime:
    """The end of the second where a log writes whole seconds: its line may have come at any time in it."""
    return first if first.microsecond else first + _SECOND
