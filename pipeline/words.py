"""Numbers as they stand in sentences."""


def plural(count: int, noun: str) -> str:
    """`1 line`, `2,000 lines`, `2 batches`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{'es' if noun.endswith('ch') else 's'}"
