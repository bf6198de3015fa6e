"""Stored batches that the ledger does not know any more, until others store their records.

A Redis that lost its last writes has forgotten batches whose results are stored. The source sends the lines
again, perhaps cut otherwise: a follower cuts by time, and halves may become one batch. The same records would
then be stored twice. So a worker that stores a record removes it from the forgotten batches. Nothing is
removed before, because a source may never come back.

In OpenSearch a record has its id, whichever batch brought it, so there is nothing to do.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import polars as pl
import redis

from pipeline.errors import ClaimLost
from pipeline.ledger.backlog import Backlog, has_results
from pipeline.logs import logger
from pipeline.records.batch import Purpose
from pipeline.redis.connection import answering, text_map
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.sink import Last, at_once

KEEP_S: Final = 30 * 86_400
# Redis loses seconds; a worker that stalled may have written minutes after it died. Compaction seals no batch
# before that, and none that is forgotten (sinks/compaction.py).
LOOK_BACK_S: Final = 180.0
MAX_BATCHES: Final = 10_000
# Of the newest batches; a worker keeps 12 bytes for each, and reads a million in about a second.
MAX_RECORDS: Final = 2_000_000
_NO_RESULTS: Final = (b"dead", b"split")
_RUN: Final = ""  # the field that says under which start of Redis the batches were looked for


class Forgotten:
    """The forgotten batches of one purpose; one object per process."""

    def __init__(self, client: "redis.Redis", backlog: Backlog, sink: ParquetSink, purpose: Purpose) -> None:
        keys = backlog.keys
        self._client = client
        self._backlog = backlog
        self._purpose = purpose
        self._keys = keys
        self._key = keys.forgotten(purpose.value)
        self._sink = sink
        self._run = ""
        self._batches: list[str] = []
        self._where = _index([])

    def look(self) -> None:
        """Finds the forgotten batches, once per start of Redis, before any write.

        Raises RedisUnavailable, SinkUnavailable."""
        with answering():
            run = str(self._client.info("server")["run_id"])
            if run == self._run:
                return
            found = text_map(self._client.hgetall(self._key))
        if self._purpose is Purpose.SCORE and has_results(self._backlog.totals()):
            self._sink.expect()  # another or an empty folder must not begin a new set of results
        if found.get(_RUN) != run:
            batches = self._unknown()
            with answering():
                pipe = self._client.pipeline(transaction=True)
                pipe.hset(self._key, mapping={_RUN: run, **dict.fromkeys(batches, "")})
                pipe.expire(self._key, KEEP_S)
                pipe.execute()
            found |= dict.fromkeys(batches, "")
            if batches:
                logger().warning("results.forgotten", batches=len(batches))
        self._read([batch_id for batch_id in found if batch_id != _RUN])
        self._run = run

    def names(self, batch_ids: Sequence[str]) -> list[bool]:
        """Which of these batches are forgotten. Raises RedisUnavailable."""
        if not batch_ids:
            return []
        with answering():
            return [field is not None for field in self._client.hmget(self._key, list(batch_ids))]

    def _read(self, batches: list[str]) -> None:
        """Indexes the records of these batches, newest first."""
        self._batches, parts, records = [], [], 0
        by_age = self._sink.by_age(batches)
        for n, batch_id in enumerate(by_age):
            if records >= MAX_RECORDS:
                logger().warning("results.forgotten_too_many", left_out_batches=len(by_age) - n)
                break
            ids = self._sink.record_ids(batch_id)
            parts.append((len(self._batches), ids))
            self._batches.append(batch_id)
            records += len(ids)
        self._where = _index(parts)

    def taken_over(self, batch_id: str, rows: pl.DataFrame, *, last: Last = at_once) -> None:
        """Removes rows stored under this id from forgotten batches; calls `last` before each change.
        Idempotent.

        Raises RedisUnavailable, SinkUnavailable, and the errors of `last`."""
        hit = self._hit(rows["record_id"])
        if not hit:
            return
        # Another process may have stored such a batch meanwhile; then it stays.
        forgotten = [one for one, there in zip(hit, self.names(hit), strict=True) if there]
        ids = rows["record_id"].to_list()
        removed = [one for one in forgotten if one == batch_id or self._sink.take_out(one, ids, last=last)]
        if removed:
            with answering():
                self._client.hdel(self._key, *removed)
        self._drop({*hit} - {*forgotten} | {*removed})

    def _hit(self, record_ids: pl.Series) -> list[str]:
        """The forgotten batches that have some of these records."""
        hashes_known = self._where["hash"]
        if hashes_known.is_empty():
            return []
        hashes = record_ids.hash()
        places = hashes_known.search_sorted(hashes).clip(0, hashes_known.len() - 1)
        if not (hashes_known.gather(places) == hashes).any():
            return []
        numbers = self._where.filter(pl.col("hash").is_in(hashes.implode()))["batch"].unique().sort()
        return [self._batches[n] for n in numbers]

    def _drop(self, batch_ids: set[str]) -> None:
        places = [n for n, one in enumerate(self._batches) if one in batch_ids]
        self._where = self._where.filter(~pl.col("batch").is_in(places))

    def _unknown(self) -> list[str]:
        """The newest stored batches that the ledger does not know, or whose commit it does not know.

        Results of dead or split batches are removed: Redis forgot a retry, or a worker was killed before it
        noticed the lost claim."""
        latest = self._sink.latest(LOOK_BACK_S, MAX_BATCHES)
        pipe = self._client.pipeline(transaction=False)
        for batch_id in latest:
            pipe.hmget(self._keys.batch(batch_id), "state", "kind")
        with answering():
            entries = pipe.execute()
        unknown = []
        for batch_id, (state, kind) in zip(latest, entries, strict=True):
            if state == b"done" or kind == b"rescore":
                continue
            if state in _NO_RESULTS:
                with suppress(ClaimLost):  # retried meanwhile
                    self._sink.take_out(batch_id, None, last=partial(self._has_no_results, batch_id))
            else:
                unknown.append(batch_id)
        return unknown

    def _has_no_results(self, batch_id: str) -> None:
        with answering():
            state = self._client.hget(self._keys.batch(batch_id), "state")
        if state not in _NO_RESULTS:
            raise ClaimLost(f"the batch {batch_id} is worked on again")


def _index(parts: list[tuple[int, list[str]]]) -> pl.DataFrame:
    """Sorted hashes of record ids, and the batch of each. A collision only costs a look into the batch."""
    frames = [
        pl.DataFrame({"hash": pl.Series(ids, dtype=pl.String).hash()}).with_columns(
            batch=pl.lit(n, dtype=pl.UInt32)
        )
        for n, ids in parts
    ]
    empty = pl.DataFrame(schema={"hash": pl.UInt64, "batch": pl.UInt32})
    return pl.concat([empty, *frames]).sort("hash").rechunk()
