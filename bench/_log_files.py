"""The records of a file, one chunk after another."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import BadInput
from pipeline.sources.chunks import Chunk, Cursor
from pipeline.sources.files import read_texts


def read_file(path: Path, *, start: Cursor | None = None, **choices: Any) -> Iterator[Chunk]:
    """The chunks of a file from `start` on. What would be a note about it is an error behind them."""
    notes: list[str] = []
    for text in read_texts(path, note=notes.append, begin=lambda _source: start, **choices):
        yield from text.chunks
    if notes:
        raise BadInput("; ".join(notes))
