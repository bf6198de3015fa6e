"""A try to get records in, for servers whose clients are held back until it succeeds."""

from typing import Final

from pipeline.errors import RedisUnavailable
from pipeline.records.delivery import Full
from pipeline.sources.protocols.contract import Decoded
from pipeline.workers.intake.door import Door
from pipeline.workers.intake.taking import SentBy

# The door has tried for two seconds itself.
_AWAY_S: Final = 1.0


async def seconds_to_next_try(door: Door, decoded: Decoded, *, identity: str, sender: SentBy) -> float | None:
    """None when the records are in. While Redis is away that is unknown: without an identity, the next try
    may store them twice."""
    try:
        answer = await door.take(decoded, identity=identity, sender=sender)
    except RedisUnavailable:
        return _AWAY_S
    return answer.retry_after_s if isinstance(answer, Full) else None
