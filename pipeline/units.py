"""Numbers, names and foreign text in sentences."""

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Final

from pipeline.errors import BadInput, BadSetting

# C0 controls and DEL have pictures of their own (U+2400...); newline and tab keep their meaning. C1
# controls, line separators, zero-width and direction marks are named by their number. Lone
# surrogates cannot be encoded at all.
_VISIBLE: Final = {
    **{c: chr(0x2400 + c) for c in range(0x20) if chr(c) not in "\n\t"},
    0x7F: "\u2421",
    **{
        c: f"<U+{c:04X}>"
        for c in (
            *range(0x80, 0xA0),
            *(0x00AD, 0x061C, 0x180E, 0xFEFF),
            *range(0x200B, 0x2010),
            *range(0x2028, 0x202F),
            *range(0x2060, 0x2070),
            *range(0xFFF9, 0xFFFC),
            *range(0xD800, 0xE000),
            *(0xFFFE, 0xFFFF),
            *range(0xE0000, 0xE0080),
        )
    },
}


def visible(text: str) -> str:
    """The text with every control character, direction mark and separator shown instead of obeyed."""
    return text.replace("\r\n", "\n").translate(_VISIBLE)


def clipped(text: str, chars: int) -> str:
    """The visible text, at most `chars` characters of it, an ellipsis for the rest."""
    # Two characters can become one (CR LF), never fewer; the rest of a long text need not be looked at.
    text = visible(text[: 2 * chars + 2])
    return text if len(text) <= chars else text[: chars - 1] + "…"


def one_line(text: object) -> str:
    """The visible text of a sentence: a newline, as in a file's name, is shown too."""
    return visible(str(text)).replace("\n", "\u240a")


def plural(count: int, noun: str) -> str:
    """`1 line`, `2,000 lines`, `2 batches`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def line_count(lines: int, records: int) -> str:
    """`2,000 lines`; `1 line (2,000 records)` where a line holds many records, as a JSON array does."""
    return plural(lines, "line") + (f" ({plural(records, 'record')})" if records > lines else "")


def chance(p_value: float | None) -> str:
    """`0.002`, `<0.0001`; nothing where there is none."""
    if p_value is None:
        return ""
    return "<0.0001" if p_value < 0.0001 else f"{p_value:.2g}"


def listed(names: Iterable[str], limit: int = 3) -> str:
    """`a, b, c and 4 more`."""
    all_names = list(names)
    more = len(all_names) - limit
    return ", ".join(all_names[:limit]) + (f" and {more:,} more" if more > 0 else "")


def size(mib: int) -> str:
    """`4.0 GiB`, `512 MiB`: rounded, for people. Exact amounts: gpu/policy/admission.py."""
    return f"{mib} MiB" if abs(mib) < 1024 else f"{mib / 1024:.1f} GiB"


def seconds(length: float) -> str:
    """`12 s`, `3 min`, `2.5 h`, `4 d`."""
    if length < 100:
        return f"{max(0.0, length):.0f} s"
    if length < 6000:
        return f"{length / 60:.0f} min"
    return f"{length / 3600:.1f} h" if length < 48 * 3600 else f"{length / 86400:.0f} d"


LOG_YEARS: Final = range(1678, 2262)  # whole ones that 64 bits of nanoseconds hold
_SPAN: Final = re.compile(r"(\d{1,6})([smhd])")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def span(text: str) -> timedelta | None:
    """`90s`, `15m`, `1h`, `7d` as a length of time, None for anything else. Raises OverflowError."""
    match = _SPAN.fullmatch(text)
    return None if match is None else timedelta(**{_UNITS[match[2]]: int(match[1])})


def epoch_us(at: datetime) -> int:
    """Microseconds since 1970, exact."""
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def time_of(text: str, now: datetime, *, flag: str = "--since") -> datetime:
    """The moment that `--since TEXT` means: a span before `now`, or a time in ISO 8601. Raises BadInput.

    A time without offset is UTC."""
    moment = _moment_of(text, now, flag)
    if moment.year not in LOG_YEARS:
        raise BadInput(
            f"{flag} {text!r} lies in the year {moment.year}; give a time from {LOG_YEARS[0]} to {LOG_YEARS[-1]}"
        )
    return moment


def _moment_of(text: str, now: datetime, flag: str) -> datetime:
    try:
        length = span(text)
        if length is not None:
            return now - length
    except OverflowError as exc:
        raise BadInput(f"{flag} {text!r} reaches back before the year 1; leave it out for all times") from exc
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as exc:
        raise BadInput(
            f"{flag} {text!r} is neither a span nor a time; write 90s, 15m, 1h, 7d or 2026-11-20T10:00"
        ) from exc
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def mib(text: str) -> int:
    """`4GiB`, `512MiB`, `512m`, `4096` (MiB) as whole MiB. Raises BadSetting, also for fractions of a MiB."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*(?:(k|m|g|t)(?:i?b)?)?\s*", text, re.IGNORECASE)
    unit = (found.group(2) or "m").lower() if found else ""
    if found is None or unit == "k":
        raise BadSetting(f"{text!r} is not a size of memory; write it like 4GiB or 512MiB")
    return int(found.group(1)) << {"m": 0, "g": 10, "t": 20}[unit]
