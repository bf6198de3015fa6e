"""That Redis was lost, and what the store gave back (controller/recovery.py), as users read it."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import redis

from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.units import plural

SHOWN_S: Final = 7 * 86_400  # an operator who was away for a week still reads it


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisLoss:
    """Redis came up empty, and the store was not. `restored`: what came back from the store, by noun."""

    at: datetime
    restored: dict[str, int]

    @property
    def sentence(self) -> str:
        """What happened, what came back and what did not."""
        back = ", ".join(plural(count, noun) for noun, count in self.restored.items() if count)
        return (
            f"Redis was empty at {self.at:%Y-%m-%d %H:%M} UTC, and the store was not. {back or 'Nothing'} came "
            "back from the store. Not restored: lines that waited, positions of sources, incidents, learnt "
            "rates and sessions, and which model is live (`logweir models promote VERSION`)"
        )


def remember_loss(client: "redis.Redis", settings: Settings, restored: dict[str, int]) -> None:
    """Records a loss of this moment. Raises RedisUnavailable."""
    entry = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "restored": restored}
    with answering():
        client.set(Keys(settings.redis.key_prefix).redis_loss, json.dumps(entry), ex=SHOWN_S)


def recent_loss(client: "redis.Redis", settings: Settings) -> RedisLoss | None:
    """The last loss, for a week. Raises RedisUnavailable."""
    with answering():
        raw = client.get(Keys(settings.redis.key_prefix).redis_loss)
    if raw is None:
        return None
    entry = json.loads(raw)
    return RedisLoss(at=datetime.fromisoformat(entry["at"]), restored=dict(entry["restored"]))
