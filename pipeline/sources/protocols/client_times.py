"""Times as clients write them, in microseconds since 1970.

A time that is unreadable, or outside the years that records can hold, is None and never an error.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from pipeline.records.pushed import EARLIEST, LATEST
from pipeline.records.remembered import remembered

SECOND: Final = 1_000_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
# Below each bound a number counts seconds, milliseconds, microseconds; above all of them nanoseconds.
_SECONDS, _MILLISECONDS, _MICROSECONDS = 1e11, 1e14, 1e17
_MOST_DIGITS: Final = 30
_SCALES: Final = {3: 1000, 6: 1}  # microseconds of a fraction of so many digits
_SECONDS_KEPT: Final = 1_024
_SECOND_CHARS: Final = 19  # of `2026-11-20T10:00:00`
_FRACTION: Final = re.compile(r":[0-9]{2}[.,]([0-9]+)")


def of_nanoseconds(value: int | str | None) -> int | None:
    """A count of nanoseconds, which JSON may hold as text; 0 stands for no time."""
    if isinstance(value, str):
        try:
            value = int(value) if len(value) <= _MOST_DIGITS else 0
        except ValueError:
            return None
    micros = value // 1000 if value else 0
    return micros if micros and EARLIEST <= micros <= LATEST else None


def of_iso(text: str) -> int | None:
    """ISO 8601 with an offset; stage ingest reads a local time, because it knows the zone."""
    # Records that follow each other share their second, and to read a whole time takes twice as long.
    digits = text[20:-1]
    scale = _SCALES.get(len(digits))
    # A week date (`2026-W48`) is two characters shorter, so that its fraction might begin at text[17].
    if (
        scale
        and text[19] == "."
        and text[10] in "Tt "
        and text[-1] == "Z"
        and digits.isdigit()
        and text.isascii()
    ):
        second = _of_second(text[:_SECOND_CHARS])
        return None if second is None else second + int(digits) * scale
    return _of_any_iso(text)


@remembered(_SECONDS_KEPT, _SECOND_CHARS)
def _of_second(text: str) -> int | None:
    return _of_any_iso(f"{text}Z")


def _of_any_iso(text: str) -> int | None:
    try:
        moment = datetime.fromisoformat(text)
        if moment.utcoffset() is None:
            return None
        micros = (moment - _EPOCH) // _MICROSECOND
    except (ValueError, OverflowError):
        return None
    return micros if EARLIEST <= micros <= LATEST else None


def of_number(value: float) -> int | None:
    """Seconds, milliseconds, microseconds or nanoseconds since 1970, told apart by their size."""
    size = abs(value)
    if not 0 < size < 1e20:
        return None
    if size < _SECONDS:
        micros = round(value * SECOND)
    elif size < _MILLISECONDS:
        micros = round(value * 1000)
    else:
        micros = int(value) if size < _MICROSECONDS else int(value) // 1000
    return micros if EARLIEST <= micros <= LATEST else None


def of_value(value: object) -> int | None:
    """A time of a JSON document: a number, a text of digits, or ISO 8601."""
    if isinstance(value, str):
        if value[4:5] == "-":
            return of_iso(value)
        try:
            return of_number(float(value)) if len(value) <= _MOST_DIGITS else None
        except ValueError:
            return of_iso(value)
    return of_number(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def has_fraction(value: object) -> bool:
    """Whether the notation of a time that `of_value` reads can say less than a second."""
    if isinstance(value, str):
        return "." in value or "," in value or value.isdecimal()
    return isinstance(value, int | float)


def are_microseconds(fractions: Iterable[str]) -> bool:
    """Whether times with these digits behind the second tell each record from every other.

    A sender that repeats single records cuts a burst anywhere, so several moments are not enough here."""
    digits = list(fractions)
    return all(len(text) >= 6 for text in digits) and any(int(text[:6]) % 1000 for text in digits)


def fraction_of(value: object) -> str:
    """The digits behind the second of a time in ISO 8601, "" for none."""
    found = _FRACTION.search(value) if isinstance(value, str) else None
    return found[1] if found else ""


def are_fine(times: Sequence[int | None]) -> bool:
    """Whether the times of all records of a request tell it from every other request.

    They are several moments, or one in microseconds: a program writes the same line twice in a millisecond,
    and may send each in its own request. Whole seconds throughout were cut to seconds and tell nothing."""
    known = [time for time in times if time is not None]
    if len(known) < len(times) or not any(time % SECOND for time in known):
        return False
    first = known[0]
    return first % 1000 != 0 or any(time != first for time in known)


def of_fraction(digits: str | None) -> int | None:
    """The microseconds of the digits behind a second; None without any."""
    return int(f"{digits:0<6}"[:6]) if digits else None


def of_microseconds(text: str | bytes) -> int | None:
    """A text of digits."""
    if not text.isdigit() or len(text) > _MOST_DIGITS or not text.isascii():
        return None
    micros = int(text)
    return micros if 0 < micros <= LATEST else None
