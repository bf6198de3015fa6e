"""Who sent a request, and a try to get it in, for the servers of all protocols."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pipeline.errors import RedisUnavailable
from pipeline.records.delivery import Full
from pipeline.sources.protocols.contract import Decoded

if TYPE_CHECKING:
    from pipeline.workers.intake.door import Door

# The door has tried for two seconds itself.
_AWAY_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBy:
    """The protocol, the name of the sender's key, and its address."""

    protocol: str
    key: str
    peer: str


async def seconds_to_next_try(
    door: "Door", decoded: Decoded, *, identity: str, sender: SentBy
) -> float | None:
    """None when the records are in. While Redis is away that is unknown: without an identity, the next try
    may store them twice."""
    try:
        answer = await door.take(decoded, identity=identity, sender=sender)
    except RedisUnavailable:
        return _AWAY_S
    return answer.retry_after_s if isinstance(answer, Full) else None
