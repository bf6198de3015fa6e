"""Where the reading of a partition stands, as the ledger holds it."""

from typing import NamedTuple, Self

from pipeline.errors import BadPayload


class PartitionCursor(NamedTuple):
    """The offset of the next record to take in. `topic_id` tells the topic from a later one of its name, ""
    where the broker has no ids."""

    topic_id: str
    offset: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises BadPayload."""
        topic_id, mark, offset = text.rpartition(":")
        if not mark or not (offset.isascii() and offset.isdigit()):
            raise BadPayload(f"the cursor {text[:80]!r} is not of a partition of Kafka")
        return cls(topic_id, int(offset))

    def __str__(self) -> str:
        return f"{self.topic_id}:{self.offset}"
