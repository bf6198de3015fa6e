"""When the oldest unfinished batch of each lane was accepted.

The scripts that begin and end batches keep `in_flight`: a batch by its lane and its time (`in_flight_score`
of redis/lua/_prelude.lua). `due` holds the same batches by when the sweeper looks at them, which says nothing
of their age: the sweep puts those that wait longest behind all others.
"""

from typing import Final, cast

import redis

from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.redis.scripts import Scripts

FRESH: Final = 0
BACKFILL: Final = 1
RESCORED: Final = 2
_LANE: Final = 1 << 42  # of a score; the rest is the time
_MANY: Final = 1_000  # entries of one call


class OldestInFlight:
    """Reads of `in_flight`. Every method raises RedisUnavailable."""

    def __init__(self, client: "redis.Redis", keys: Keys) -> None:
        self.client, self.keys = client, keys
        self.scripts = Scripts(client)

    def oldest(self) -> dict[int, int]:
        """By lane, when its oldest unfinished batch was accepted, in ms; lanes without one are missing."""
        first = self._first()
        if not self._agrees(first):
            self._heal()
            first = self._first()
        return {lane: int(score) - lane * _LANE for lane, (_, score) in first.items()}

    def _first(self) -> dict[int, tuple[bytes, float]]:
        lanes = (FRESH, BACKFILL, RESCORED)
        with answering():
            pipe = self.client.pipeline(transaction=False)
            for lane in lanes:
                low, high = lane * _LANE, f"({(lane + 1) * _LANE}"
                pipe.zrangebyscore(self.keys.in_flight, low, high, start=0, num=1, withscores=True)
            found = pipe.execute()
        return {lane: entries[0] for lane, entries in zip(lanes, found, strict=True) if entries}

    def _agrees(self, first: dict[int, tuple[bytes, float]]) -> bool:
        """Whether `due` has as many batches, these among them. An earlier build knows `due` alone."""
        with answering():
            pipe = self.client.pipeline(transaction=True)
            pipe.zcard(self.keys.due)
            pipe.zcard(self.keys.in_flight)
            for batch_id, _ in first.values():
                pipe.zscore(self.keys.due, batch_id)
            due, in_flight, *scores = pipe.execute()
        return bool(due == in_flight) and None not in scores

    def _heal(self) -> None:
        with answering():
            pipe = self.client.pipeline(transaction=True)
            pipe.zrange(self.keys.due, 0, -1)
            pipe.zrange(self.keys.in_flight, 0, -1)
            due, in_flight = (set(ids) for ids in pipe.execute())
        changes: list[bytes | str] = []
        for batch_id in in_flight - due:
            changes += (batch_id, "")
        missing = list(due - in_flight)
        with answering():
            pipe = self.client.pipeline(transaction=False)
            for batch_id in missing:
                pipe.hmget(self.keys.batch(batch_id.decode()), "accepted_ms", "kind", "backfill")
            entries = cast("list[list[bytes | None]]", pipe.execute() if missing else [])
        for batch_id, (accepted_ms, kind, backfill) in zip(missing, entries, strict=True):
            if accepted_ms is not None:
                lane = RESCORED if kind == b"rescore" else BACKFILL if backfill == b"1" else FRESH
                changes += (batch_id, str(lane * _LANE + int(accepted_ms)))
        for begin in range(0, len(changes), 2 * _MANY):
            part = changes[begin : begin + 2 * _MANY]
            self.scripts.run("ledger/heal_in_flight", [self.keys.due, self.keys.in_flight], part)
