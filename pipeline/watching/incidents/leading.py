"""The order of the causes of one incident: the first one is its headline.

A report, the terminal and `logweir incidents` order with `lead_order`, so all of them name the same line.

* Error-like causes come first.
* Of those, causes that no training has seen stand before known ones. Known ones that last longer than an
  incident (`onsets.SPAN`) stand last.
* A bare record of a request, as in an access log, comes after lines that say something in words.
* Earlier causes come first, in steps of a second that double, because clocks of services differ.
* Within a step the rarer cause comes first, in steps that double: a fault happens once, its consequences
  repeat.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Final

from pipeline.watching.incidents.onsets import SPAN

TEXT_CHARS: Final = 200  # of a cause that are looked at: live causes keep little more
WORDS: Final = 2  # outside quotes; a bare record of a request has its method at most

_METHOD: Final = re.compile(r"\b(?:GET|HEAD|POST|PUT|DELETE|CONNECT|OPTIONS|TRACE|PATCH)\b")
_QUOTED: Final = re.compile(r"\"(?:[^\"\\]|\\.)*(?:\"|\Z)")
_WORD: Final = re.compile(r"(?:^|(?<=[\s(\[{=:,]))[A-Za-z]{2,}(?=[\s.,;:!?)\]}]|\Z)")
_SECOND: Final = timedelta(microseconds=999_999)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """The facts of one cause that its place depends on."""

    severity: int  # 3 error-like, 2 warning, 1 neither
    new: bool  # no training has seen its template
    first: datetime
    last: datetime
    count: int
    text: str  # of its first line
    tie: tuple[Any, ...]  # where its first line stands; different for every cause


def lead_order(signs: Sequence[Sign]) -> list[int]:
    """The indices of the causes of one incident, the headline first. Does not depend on their order."""
    # A pass each, because the steps begin at the earliest cause of its class.
    began: dict[tuple[Any, ...], datetime] = {}
    for sign in signs:
        group, moment = _class(sign), _latest(sign.first)
        began[group] = min(began.get(group, moment), moment)

    def place(at: int) -> tuple[Any, ...]:
        sign = signs[at]
        group, moment = _class(sign), _latest(sign.first)
        late = int((moment - began[group]).total_seconds())
        return *group, (late + 1).bit_length(), sign.count.bit_length(), moment, sign.tie

    return sorted(range(len(signs)), key=place)


@lru_cache(maxsize=4096)
def is_request(text: str) -> bool:
    """Whether a line is a bare record of a request: it names an HTTP method and has no words of its own."""
    text = text[:TEXT_CHARS]
    return _METHOD.search(text) is not None and len(_WORD.findall(_QUOTED.sub(" ", text))) < WORDS


def _class(sign: Sign) -> tuple[int, int, bool]:
    familiarity = 0 if sign.new else 1 + (sign.last - sign.first > SPAN)
    return -sign.severity, familiarity, is_request(sign.text[:TEXT_CHARS])


def _latest(first: datetime) -> datetime:
    """The end of the second where a log writes whole seconds: its line may have come at any time in it."""
    return first if first.microsecond else first + _SECOND
