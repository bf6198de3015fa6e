"""A try to get a request in, for the servers of streams, which have no answer that asks for a retry."""

from typing import TYPE_CHECKING, Final

from pipeline.errors import RedisUnavailable
from pipeline.records.delivery import Full
from pipeline.sources.protocols.contract import Decoded
from pipeline.workers.intake.identity import Identity

if TYPE_CHECKING:
    from pipeline.service.senders import SentBy
    from pipeline.workers.intake.door import Door

# The door has tried for two seconds itself.
_AWAY_S: Final = 1.0


async def seconds_to_next_try(
    door: "Door", decoded: Decoded, *, identity: Identity, sender: "SentBy"
) -> float | None:
    """None when the records are in. While Redis is away that is unknown: without an identity, the next try
    may store them twice."""
    try:
        answer = await door.take(decoded, identity=identity, sender=sender)
    except RedisUnavailable:
        return _AWAY_S
    return answer.retry_after_s if isinstance(answer, Full) else None
