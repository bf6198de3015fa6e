"""Where the reading of a stream stands, as the ledger holds it."""

from typing import NamedTuple, Self

from pipeline.errors import BadPayload


class StreamCursor(NamedTuple):
    """The sequence of the next message to take in. `stream_id` tells the stream from a later one."""

    stream_id: str
    sequence: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises BadPayload."""
        stream_id, mark, sequence = text.rpartition(" ")
        if not mark or not (sequence.isascii() and sequence.isdigit()):
            raise BadPayload(f"the cursor {text[:80]!r} is not of a stream of NATS")
        return cls(stream_id, int(sequence))

    def __str__(self) -> str:
        return f"{self.stream_id} {self.sequence}"
