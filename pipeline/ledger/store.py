"""The shared base of the ledger's four parts: one Redis connection, key names, scripts, the clock."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import redis

from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings


class LedgerStore:
    """Access to the ledger's keys. Safe for threads, as redis-py's client is."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.settings = settings
        self.keys = Keys(settings.redis.key_prefix)
        self.scripts = Scripts(client)

    def ask(self, command: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A plain Redis command. Raises RedisUnavailable instead of redis-py's errors."""
        with answering():
            return command(*args, **kwargs)

    def now_ms(self) -> int:
        """Redis time in milliseconds, the only clock of the ledger."""
        seconds, micros = self.ask(self.client.time)
        return int(seconds) * 1000 + int(micros) // 1000

    def shares(self, batch_id: str) -> dict[str, int]:
        """The lines of each workload of a batch; {} for an unknown one."""
        key = self.keys.batch(batch_id)
        workload, lines, shares = self.ask(self.client.hmget, key, ["workload", "lines", "shares"])
        if shares is not None:
            return dict(json.loads(shares))
        return {} if workload is None else {text(workload): int(lines or 0)}

    def field_of_each(self, batch_ids: list[str], field: str) -> list[bytes | None]:
        """One field of the entries of several batches, in one round trip."""
        pipe = self.client.pipeline(transaction=False)
        for batch_id in batch_ids:
            pipe.hget(self.keys.batch(batch_id), field)
        return list(self.ask(pipe.execute)) if batch_ids else []


def text(value: Any) -> str:
    """An answer of Redis as text; damaged bytes become replacement characters."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def counters(flat: Mapping[bytes, bytes]) -> dict[str, int]:
    """A hash of counters."""
    return {text(name): int(value) for name, value in flat.items()}
