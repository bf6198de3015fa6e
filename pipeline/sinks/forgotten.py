"""Result files of batches that the ledger does not know any more, until others store their records.

A Redis that lost its last writes has forgotten batches whose results are on disk. The source sends the lines
again, perhaps cut otherwise: a follower cuts by time, and halves may become one batch. The same records would
then stand in two files. So a worker that stores a record removes it from the forgotten files. Nothing is
removed before, because a source may never come back.

In OpenSearch a record has its id, whichever batch brought it, so there is nothing to do.
"""

from contextlib import suppress
from functools import partial
from typing import Final

import polars as pl
import redis

from pipeline.errors import ClaimLost
from pipeline.logs import logger
from pipeline.records.batch import Purpose
from pipeline.redis.connection import answering, text_map
from pipeline.redis.keys import Keys
from pipeline.sinks.parquet import ParquetSink
from pipeline.sinks.sink import Last, at_once

KEEP_S: Final = 30 * 86_400
# Redis loses seconds; a worker that stalled may have written minutes after it died.
LOOK_BACK_S: Final = 180.0
MAX_FILES: Final = 10_000
# Of the newest files; a worker keeps 12 bytes for each, and reads a million in about a second.
MAX_RECORDS: Final = 2_000_000
_NO_RESULTS: Final = (b"dead", b"split")
_RUN: Final = ""  # the field that says under which start of Redis the files were looked for


class Forgotten:
    """The forgotten files of one purpose; one object per process."""

    def __init__(self, client: "redis.Redis", keys: Keys, files: ParquetSink, purpose: Purpose) -> None:
        self._client = client
        self._keys = keys
        self._key = keys.forgotten(purpose.value)
        self._files = files
        self._run = ""
        self._names: list[str] = []
        self._where = _index([])

    def look(self) -> None:
        """Finds the forgotten files, once per start of Redis, before any write.

        Raises RedisUnavailable, SinkUnavailable."""
        with answering():
            run = str(self._client.info("server")["run_id"])
            if run == self._run:
                return
            found = text_map(self._client.hgetall(self._key))
        if found.get(_RUN) != run:
            names = self._unknown()
            with answering():
                pipe = self._client.pipeline(transaction=True)
                pipe.hset(self._key, mapping={_RUN: run, **dict.fromkeys(names, "")})
                pipe.expire(self._key, KEEP_S)
                pipe.execute()
            found |= dict.fromkeys(names, "")
            if names:
                logger().warning("results.forgotten", files=len(names))
        self._read([name for name in found if name != _RUN])
        self._run = run

    def _read(self, names: list[str]) -> None:
        """Indexes the records of these files, newest first."""
        self._names, parts, records = [], [], 0
        by_age = self._files.by_age(names)
        for n, name in enumerate(by_age):
            if records >= MAX_RECORDS:
                logger().warning("results.forgotten_too_many", left_out_files=len(by_age) - n)
                break
            ids = self._files.record_ids(name)
            parts.append((len(self._names), ids))
            self._names.append(name)
            records += len(ids)
        self._where = _index(parts)

    def taken_over(self, batch_id: str, rows: pl.DataFrame, *, last: Last = at_once) -> None:
        """Removes rows stored under this id from forgotten files; calls `last` before each change.
        Idempotent.

        Raises RedisUnavailable, SinkUnavailable, and the errors of `last`."""
        hit = self._hit(rows["record_id"])
        if not hit:
            return
        # Another process may have stored the batch of such a file meanwhile; then the file stays.
        with answering():
            still = self._client.hmget(self._key, hit)
        forgotten = [name for name, there in zip(hit, still, strict=True) if there is not None]
        own_name, ids = self._files.name(batch_id, rows), rows["record_id"].to_list()
        removed = [
            name for name in forgotten if name == own_name or self._files.take_out(name, ids, last=last)
        ]
        if removed:
            with answering():
                self._client.hdel(self._key, *removed)
        self._drop({*hit} - {*forgotten} | {*removed})

    def _hit(self, record_ids: pl.Series) -> list[str]:
        """The forgotten files that have some of these records."""
        hashes_known = self._where["hash"]
        if hashes_known.is_empty():
            return []
        hashes = record_ids.hash()
        places = hashes_known.search_sorted(hashes).clip(0, hashes_known.len() - 1)
        if not (hashes_known.gather(places) == hashes).any():
            return []
        files = self._where.filter(pl.col("hash").is_in(hashes.implode()))["file"].unique().sort()
        return [self._names[n] for n in files]

    def _drop(self, names: set[str]) -> None:
        places = [n for n, name in enumerate(self._names) if name in names]
        self._where = self._where.filter(~pl.col("file").is_in(places))

    def _unknown(self) -> list[str]:
        """The newest files whose batch, or its commit, the ledger does not know.

        Files of dead or split batches are removed: Redis forgot a retry, or a worker was killed before it
        noticed the lost claim."""
        latest = self._files.latest(LOOK_BACK_S, MAX_FILES)
        pipe = self._client.pipeline(transaction=False)
        for _, batch_id in latest:
            pipe.hmget(self._keys.batch(batch_id), "state", "kind")
        with answering():
            entries = pipe.execute()
        unknown = []
        for (name, batch_id), (state, kind) in zip(latest, entries, strict=True):
            if state == b"done" or kind == b"rescore":
                continue
            if state in _NO_RESULTS:
                with suppress(ClaimLost):  # retried meanwhile
                    self._files.take_out(name, None, last=partial(self._has_no_results, batch_id))
            else:
                unknown.append(name)
        return unknown

    def _has_no_results(self, batch_id: str) -> None:
        with answering():
            state = self._client.hget(self._keys.batch(batch_id), "state")
        if state not in _NO_RESULTS:
            raise ClaimLost(f"the batch {batch_id} is worked on again")


def _index(parts: list[tuple[int, list[str]]]) -> pl.DataFrame:
    """Sorted hashes of record ids, and the file of each. A collision only costs a look into the file."""
    frames = [
        pl.DataFrame({"hash": pl.Series(ids, dtype=pl.String).hash()}).with_columns(
            file=pl.lit(n, dtype=pl.UInt32)
        )
        for n, ids in parts
    ]
    empty = pl.DataFrame(schema={"hash": pl.UInt64, "file": pl.UInt32})
    return pl.concat([empty, *frames]).sort("hash").rechunk()
