"""What is kept of sessions that fell silent and were judged: normal ones may go on for hours after a silence, and what
comes then is judged together with what came before. Forgotten after KEEP_S; a key that comes again then is another
session's. Pure.
"""

from dataclasses import dataclass
from typing import Final

import msgpack

from pipeline.errors import BadPayload
from pipeline.watching.sessions.sampling import KEEP_S

PAST_VERSION: Final = 1
KEEP_MS: Final = round(KEEP_S * 1000)
MOST_TOLD: Final = 20  # causes that were told of one session


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What came of a session until it fell silent, and what was told of it."""

    source: str  # where it began: source, line and time of its first event
    line: int
    began_ms: int
    until_ms: int  # time of its last event
    left_out: int  # events of which no template is kept
    templates: tuple[int, ...]  # in order
    told: tuple[str, ...] = ()  # causes, the newest last
    partial: bool = (
        False  # something came before it, or in between, that is not here or stands in another order
    )

    def pack(self) -> bytes:
        """msgpack of version and fields."""
        return bytes(
            msgpack.packb(
                [
                    PAST_VERSION, self.source, self.line, self.began_ms, self.until_ms, self.left_out,
                    self.templates, self.told[-MOST_TOLD:], self.partial,
                ]
            )
        )  # fmt: skip

    @classmethod
    def unpack(cls, blob: bytes) -> "Past":
        """Raises BadPayload."""
        try:
            version, *rest = msgpack.unpackb(blob)
            if version > PAST_VERSION:
                raise BadPayload(
                    f"what is kept of a session has wire version {version}; this build reads up to {PAST_VERSION}"
                )
            source, line, began_ms, until_ms, left_out, templates, told, partial = rest
            if not (templates and all(isinstance(text, str) for text in (source, *told))):
                raise TypeError("its fields do not fit")
            return cls(
                source=source,
                line=int(line),
                began_ms=int(began_ms),
                until_ms=int(until_ms),
                left_out=int(left_out),
                templates=tuple(int(x) for x in templates),
                told=tuple(told),
                partial=bool(partial),
            )
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as exc:
            raise BadPayload(f"what is kept of a session ({len(blob)} bytes) is not readable: {exc}") from exc
