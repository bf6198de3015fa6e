"""Numbers and names as they stand in sentences."""

from collections.abc import Iterable


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
