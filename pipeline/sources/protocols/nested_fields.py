"""Counts the records of a body of protobuf before it is parsed.

An empty message takes two bytes of a body and up to 150 in memory, so 20 MiB of empty records would take more
than a gigabyte. The count ends at the limit of a request, so it takes a few hundredths of a second.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from pipeline.sources.protocols.json_text import check_count

_WORTH_COUNTING: Final = 1 << 20  # bytes; what fewer bytes can take in memory does no harm
_FIELDS_A_RECORD: Final = 4  # more than the messages around records have beside them
_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5  # wire types


def check_nested(body: bytes, path: Sequence[int]) -> None:
    """Raises Undecodable for too many fields at any level of `path`, the numbers from the outside inwards.

    Damaged bytes end the count: the parser says what is wrong with them."""
    if len(body) <= _WORTH_COUNTING:
        return
    spans = [(0, len(body))]
    for number in path:
        fields = 0
        inner: list[tuple[int, int]] = []
        for start, end in spans:
            for found, span in _fields(body, start, end):
                fields += 1
                if found == number:
                    inner.append(span)
                check_count(max(len(inner), fields // _FIELDS_A_RECORD))
        spans = inner


def _fields(body: bytes, at: int, end: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """The number of each field, 0 for one without a length, and where its value lies."""
    while at < end:
        tag, at = _varint(body, at, end)
        kind = tag & 7
        if kind == _LENGTH:
            size, at = _varint(body, at, end)
            yield tag >> 3, (at, min(at + size, end))
            at += size
        elif kind == _VARINT:
            _, at = _varint(body, at, end)
            yield 0, (at, at)
        elif kind in (_FIXED_64, _FIXED_32):
            at += 8 if kind == _FIXED_64 else 4
            yield 0, (at, at)
        else:
            return


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """The number and the offset behind it; an offset behind the end where there is none."""
    value = 0
    for place in range(10):
        if at + place >= end:
            break
        byte = body[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    return 0, end + 1
