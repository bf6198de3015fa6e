"""Session histories: the events of sessions before a gap.

A normal session may go on hours after a gap. Its later events are then judged together with its history. A
history expires after KEEP_S; a later event of the same key starts another session. Pure.
"""

from typing import Annotated, Final

import msgspec

from pipeline.errors import BadPayload
from pipeline.records.wire import Codec
from pipeline.watching.sessions.sampling import KEEP_S

KEEP_MS: Final = round(KEEP_S * 1000)
MAX_REPORTED: Final = 20  # causes of one session


class SessionHistory(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A session until its last gap, and the causes that were reported of it."""

    source: str  # source, line and time of its first event
    line: int
    began_ms: int
    until_ms: int  # time of its last event
    dropped: int  # events past the limit
    templates: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)]  # in order
    reported: tuple[str, ...] = ()  # causes, the newest last
    partial: bool = False  # earlier events are missing or out of order

    @property
    def events(self) -> int:
        return len(self.templates) + self.dropped

    def pack(self) -> bytes:
        """The newest MAX_REPORTED causes alone."""
        return _HISTORIES.pack(msgspec.structs.replace(self, reported=self.reported[-MAX_REPORTED:]))

    @classmethod
    def unpack(cls, blob: bytes) -> "SessionHistory":
        """Raises BadPayload."""
        return _HISTORIES.unpack(blob)


_HISTORIES: Final = Codec(SessionHistory, version=1, what="a session history", newer=BadPayload)
