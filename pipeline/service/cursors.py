"""Cursors of pages: opaque texts that name the last item of a page, and the question that it belongs to.

A page continues behind that item, whatever has come or gone meanwhile: no item comes twice, and none that
stays is left out.
"""

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from pipeline.errors import BadInput
from pipeline.records.batch import digest

VERSION: Final = 1
MAX_CHARS: Final = 2_000

T = TypeVar("T")


def cursor_text(position: Any, *question: object) -> str:
    """The cursor behind an item at this position (JSON types) of the answer to a question."""
    packed = msgspec.json.encode([VERSION, _digest(question), position])
    return urlsafe_b64encode(packed).rstrip(b"=").decode()


def cursor_position(text: str, kind: type[T], *question: object) -> T:
    """The inverse. Raises BadInput for a text that is no cursor, or one of another question."""
    wrong = f"cursor {text[:40]!r} is none of ours; take `next` of the page before, or leave it out"
    try:
        if len(text) > MAX_CHARS:
            raise ValueError(text)
        packed = urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
        version, whose, position = msgspec.json.decode(packed, type=tuple[int, str, Any])
        found = msgspec.convert(position, kind)
    except (ValueError, binascii.Error, msgspec.MsgspecError, RecursionError) as exc:
        raise BadInput(wrong) from exc
    if version != VERSION or whose != _digest(question):
        raise BadInput(
            f"cursor {text[:40]!r} belongs to another question; repeat the filters of its page, or leave it out"
        )
    return found


def page_of(
    rows: Sequence[tuple[Sequence[Any], T]], limit: int, cursor: str | None, *question: object
) -> tuple[list[T], str | None]:
    """A page of rows with their sort keys (JSON types, all different, ascending), and the next cursor."""
    behind = None if cursor is None else cursor_position(cursor, list[Any], *question)
    try:
        left = [(key, row) for key, row in rows if behind is None or list(key) > behind]
    except TypeError as exc:  # keys of other types
        raise BadInput("the cursor belongs to another question; leave it out") from exc
    more = len(left) > limit
    return [row for _, row in left[:limit]], (
        cursor_text(list(left[limit - 1][0]), *question) if more else None
    )


def _digest(question: Sequence[object]) -> str:
    return digest(*map(str, question))[:12]
