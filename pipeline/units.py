"""Numbers and names in sentences."""

import re
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

from pipeline.errors import BadInput, BadSetting


def plural(count: int, noun: str) -> str:
    """`1 line`, `2,000 lines`, `2 batches`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def chance(p_value: float | None) -> str:
    """`0.002`, `<0.0001`; nothing where there is none."""
    if p_value is None:
        return ""
    return "<0.0001" if p_value < 0.0001 else f"{p_value:.2g}"


def listed(names: Iterable[str], most: int = 3) -> str:
    """`a, b, c and 4 more`."""
    all_names = list(names)
    more = len(all_names) - most
    return ", ".join(all_names[:most]) + (f" and {more:,} more" if more > 0 else "")


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


_SPAN: Final = re.compile(r"(\d{1,6})([smhd])")
_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def span(text: str) -> timedelta | None:
    """`90s`, `15m`, `1h`, `7d` as a length of time, None for anything else. Raises OverflowError."""
    match = _SPAN.fullmatch(text)
    return None if match is None else timedelta(**{_UNITS[match[2]]: int(match[1])})


def ago(text: str, now: datetime) -> datetime:
    """The moment that `--since TEXT` means. Raises BadInput."""
    length = span(text)
    if length is None:
        raise BadInput(f"--since {text!r} is not a span; write 90s, 15m, 1h or 7d")
    try:
        return now - length
    except OverflowError as exc:
        raise BadInput(
            f"--since {text!r} reaches back before the year 1; leave it out for all times"
        ) from exc


def mib(text: str) -> int:
    """`4GiB`, `512MiB`, `512m`, `4096` (MiB) as whole MiB. Raises BadSetting, also for fractions of a MiB."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*(?:(k|m|g|t)(?:i?b)?)?\s*", text, re.IGNORECASE)
    unit = (found.group(2) or "m").lower() if found else ""
    if found is None or unit == "k":
        raise BadSetting(f"{text!r} is not a size of memory; write it like 4GiB or 512MiB")
    return int(found.group(1)) << {"m": 0, "g": 10, "t": 20}[unit]
