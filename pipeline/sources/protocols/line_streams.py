"""The streams of the lines in a request, in which stage ingest joins stack traces.

A line of a program, and where it came from, stand in one record each. To name the streams takes a tenth of
the work on a request, so none is named where each line begins as a header does."""

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final

from pipeline.records.pushed import stream_numbers

# The first or second character of a time, of a level and date (`E1124`), of a bracket before one; an object.
_AS_A_HEADER: Final = re.compile(r'.?[0-9]|\{"')


def streams_of(
    texts: Sequence[str | None], keys: Callable[[], Iterable[Hashable]]
) -> list[int | None] | None:
    """The number of the stream of each text, None for a record without one. `keys`: where each comes from."""
    if all(text is None or _AS_A_HEADER.match(text) for text in texts):
        return None
    try:
        numbers = stream_numbers(keys())
    except TypeError:  # a key holds a list or an object
        numbers = stream_numbers(map(repr, keys()))
    return [None if text is None else number for number, text in zip(numbers, texts, strict=True)]
