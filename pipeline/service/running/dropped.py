"""What was lost on its way in or to the watcher, counted since the deployment began."""

from collections.abc import Mapping
from typing import Final

import redis

from pipeline.ledger.ledger import Ledger
from pipeline.observe.counters import (
    DROPPED,
    MESSAGES_DROPPED,
    MESSAGES_SHORTENED,
    NATS_PAYLOADS,
    ROLES,
)
from pipeline.redis.connection import answering, text_map
from pipeline.redis.keys import Keys
from pipeline.service.values import DroppedCount
from pipeline.settings import Settings

# Field of a role's hash, or how its name begins, and what one of it is.
_PUSHED: Final = {
    MESSAGES_DROPPED.name: "messages to the intake for which there was no room",
    MESSAGES_SHORTENED.name: "messages to the intake that were stored without their end",
    f"{NATS_PAYLOADS.name}|outcome=dropped": "payloads of NATS for which there was no room",
    DROPPED.name: "messages in the queues that were none of ours, or damaged",
}
_LEDGER: Final = {"source_lost": "records that Kafka or NATS removed before they were read"}
_WATCHER: Final = {
    "dropped": "stored batches that the watcher never saw, because their list was full",
    "workloads": "workloads whose rates were forgotten for want of room",
}


def read_dropped(client: "redis.Redis", settings: Settings) -> list[DroppedCount]:
    """Those of which there is at least one. Raises RedisUnavailable."""
    backlog, keys = Ledger(client, settings).backlog, Keys(settings.redis.key_prefix)
    with answering():
        pipe = client.pipeline(transaction=False)
        for role in ROLES:
            pipe.hgetall(keys.metrics(role))
        pushed = [text_map(found) for found in pipe.execute()]
    counts: dict[str, int] = {
        kind: round(sum(_amount(of_role, kind) for of_role in pushed)) for kind in _PUSHED
    }
    words = {**_PUSHED, **_LEDGER, **_WATCHER}
    ledger, watcher = backlog.counts(), backlog.watching()
    counts |= {kind: ledger.get(kind, 0) for kind in _LEDGER}
    counts |= {kind: int(watcher[kind]) for kind in _WATCHER}
    return [DroppedCount(kind=kind, count=n, what=words[kind]) for kind, n in counts.items() if n]


def _amount(counted: Mapping[str, str], kind: str) -> float:
    return sum(float(value) for name, value in counted.items() if name == kind or name.startswith(f"{kind}|"))
