"""Stack traces that a shipper split into records become one record again, per stream of a request.

A record continues the record before it in its stream if its text begins with a blank or with words that only
follow (`Caused by:`, `... 7 more`). So does a text within a traceback of Python. rsyslog leaves the blank
behind a tag to the message, so behind a record that begins with one blank, one blank says nothing.

A joined record has at most MAX_LINES lines and MAX_BYTES bytes; the line behind it begins another record. A
continuation without a record before it stays a record: the part before it came in an earlier request.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

MAX_LINES: Final = 1_000
MAX_BYTES: Final = 65_536  # the cap of a record of a file (sources/framing.py)
_TRACEBACK: Final = "Traceback (most recent call last):"
_ONE_BLANK: Final = re.compile(r" [^ \t]")
_CHAIN: Final = (
    "During handling of the above exception",
    "The above exception was the direct cause",
)
_FIRSTS: Final = frozenset(" \tC.TD")  # of the texts that may continue a record
_CONTINUES: Final = re.compile(
    rf"[ \t]|Caused by: |\.\.\. [0-9]+ (?:more|common frames omitted)|{re.escape(_TRACEBACK)}"
    rf"|{'|'.join(_CHAIN)}"
)


@dataclass(slots=True)
class _Stream:
    """The open record of a stream."""

    head: int
    lines: int = 0
    size: int = 0
    blank: bool = False  # it begins with one blank, as all texts of its stream may do
    traced: bool = False  # it has a traceback of Python
    inside: bool = False  # its last line stands within one

    def takes(self, text: str) -> bool:
        """Whether the text continues the open record."""
        if self.lines >= MAX_LINES or self.size + _size(text) > MAX_BYTES:
            return False
        text = self._without_blank(text)
        if not text.strip():
            return self.traced  # an empty line separates the tracebacks of a chain
        return self.inside or _CONTINUES.match(text) is not None

    def _without_blank(self, text: str) -> str:
        return text[1:] if self.blank and text[:1] == " " else text

    def add(self, text: str) -> None:
        last = self._without_blank(text)
        last = last[last.rfind("\n") + 1 :]
        traced = self.traced or _TRACEBACK in text
        if last.strip():
            self.inside = last.startswith((_TRACEBACK, *_CHAIN)) or (traced and last[0] in " \t")
        self.traced = traced
        self.lines += text.count("\n") + 1
        self.size += _size(text)


def _size(text: str) -> int:
    """Bytes, with the end of the line."""
    return len(text.encode("utf-8", "replace")) + 1


def continuations(
    texts: Sequence[str | None], stream_of: Callable[[int], Hashable]
) -> Mapping[int, Sequence[int]]:
    """The records that continue each record, by its index; empty where no record continues another.

    A record whose text is None has no part in this. `stream_of` names the stream of a record. It is called
    only if some text looks like a continuation."""
    if not any(text and text[0] in _FIRSTS and _CONTINUES.match(text) for text in texts):
        return {}
    streams: dict[Hashable, _Stream] = {}
    found: dict[int, list[int]] = {}
    for i, text in enumerate(texts):
        if text is None:
            continue
        key = stream_of(i)
        stream = streams.get(key)
        if stream is not None and stream.takes(text):
            found.setdefault(stream.head, []).append(i)
        else:
            stream = streams[key] = _Stream(head=i, blank=_ONE_BLANK.match(text) is not None)
        stream.add(text)
    return found


def heads(records: int, found: Mapping[int, Sequence[int]]) -> Sequence[int]:
    """The records that continue none, in their order."""
    if not found:
        return range(records)
    joined = {i for others in found.values() for i in others}
    return [i for i in range(records) if i not in joined]


def joined_text(texts: Sequence[str | None], head: int, others: Iterable[int]) -> str:
    """The whole text of a record that others continue."""
    return "\n".join((texts[i] or "").rstrip("\r\n") for i in (head, *others))
