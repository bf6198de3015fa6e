"""The way in for log lines: Python programs, `logweir send`, `logweir run`.

    from pipeline import Producer, Settings

    producer = Producer.connect(Settings.load())
    answer = producer.send(["line", ...], workload="shop/checkout", batch_id="2026-11-20-0001")
    # Accepted(duplicate=False) | Accepted(duplicate=True) | Full(retry_after_s=0.5)

Accepted means: stored exactly once in every sink, whatever happens from here on. A producer sends unparsed
lines, workers parse them. So it needs neither Polars nor NumPy nor torch, and no code of the workers.
"""

import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import redis

from pipeline.controller.watchlist import Watchlist
from pipeline.errors import BadInput, RedisUnavailable
from pipeline.ledger.intake import CursorStep
from pipeline.ledger.ledger import Ledger
from pipeline.messages.submit import Submit
from pipeline.records.batch import (
    MAX_NAME,
    SEVERAL,
    Batch,
    Purpose,
    as_workload_name,
    digest,
    is_workload_name,
    utc_now,
)
from pipeline.records.delivery import Accepted, Full, Known, RequestIdentity, Stage
from pipeline.records.pushed import PushedLines, PushedRecords, not_text, pushed
from pipeline.redis.attach import attached
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.sources.folders import rotation

if TYPE_CHECKING:
    from pipeline.sources.chunks import Chunk

# Lines older than this wait behind fresh ones. A sender that was down for minutes is no backfill.
BACKFILL_AFTER: Final = timedelta(hours=1)


class Producer:
    """Accepts batches into the ledger and wakes a worker. Safe to use from several threads."""

    def __init__(
        self, ledger: Ledger, submit: Submit, settings: Settings, *, clock: Callable[[], datetime] = utc_now
    ) -> None:
        self.ledger = ledger
        self.submit = submit
        self.settings = settings
        self.clock = clock
        self.watchlist = Watchlist(ledger.client, settings)

    @classmethod
    def connect(cls, settings: Settings) -> Self:
        """A producer on REDIS_URL, or on the stack of the data directory. Raises BadInput without one."""
        from pipeline.messages.app import make_app  # Celery takes longer to import than all else

        settings = attached(settings)
        client, app = connect(settings), make_app(settings)
        # Flower sees a wake-up when a worker receives it. To announce it earlier takes as long as to send it.
        app.conf.task_send_sent_event = False
        return cls(Ledger(client, settings), Submit(app, client, settings), settings)

    def send(
        self,
        items: Collection[str] | Collection[Mapping[str, Any]],
        *,
        workload: str,
        batch_id: str | None = None,
        source: str = "push",
        backfill: bool | None = None,
    ) -> Accepted | Full:
        """Send raw lines (stack traces are joined with their head line) or records.

        A record is a mapping with `message` and, if known, timestamp (aware datetime or ISO 8601), level,
        host, process, service. The same `batch_id` twice is one batch; without one every call is a new batch.
        `backfill`: these lines wait behind fresh ones. None: records do whose timestamps are all known and
        old (`BACKFILL_AFTER`); raw lines count as fresh, because workers parse their times.

        Full: nothing was taken, try again after `retry_after_s`. Raises BadInput for anything that cannot be
        a batch, RedisUnavailable when it is unknown whether the batch is in: send it again under the same id.
        """
        if isinstance(items, str | bytes | Mapping) or not isinstance(items, Collection):
            raise BadInput("send() takes a list of lines or records; wrap a single line in a list")
        check_workload(workload)
        bid = check_batch_id(batch_id if batch_id is not None else uuid.uuid4().hex)
        if not len(items):
            raise BadInput(f"batch {bid!r} has no lines; leave empty batches out")
        if len(items) > self.settings.internal.batch_records:
            raise self._too_many(bid, len(items))
        records = pushed(items)
        try:
            size = records.size
            if records.height > self.settings.internal.batch_records and (
                (heads := records.heads()) > self.settings.internal.batch_records
            ):
                raise self._too_many(bid, heads)
            if size > self.settings.internal.batch_kib * 1024 * 4:
                raise BadInput(
                    f"batch {bid!r} has {size:,} bytes; send at most "
                    f"{self.settings.internal.batch_kib * 4:,} KiB at once"
                )
            return self.accept(
                Batch(
                    batch_id=bid,
                    workload=workload,
                    source=_shown(source),
                    source_key=digest("push", workload, bid),
                    purpose=Purpose.SCORE,
                    arrived=self.clock(),
                    formats=(),
                    zone=self.settings.intake.time_zone,
                    records=records,
                ),
                backfill=backfill,
            )
        except UnicodeEncodeError as exc:
            raise not_text(items) from exc

    def _too_many(self, batch_id: str, lines: int) -> BadInput:
        limit = self.settings.internal.batch_records
        return BadInput(f"batch {batch_id!r} has {lines:,} lines; send at most {limit:,} at once")

    def send_chunk(
        self,
        chunk: "Chunk",
        *,
        workload: str,
        source: str,
        source_key: str,
        cursor_key: str,
        purpose: Purpose = Purpose.SCORE,
        after: str | None = None,
        backfill: bool | None = None,
    ) -> Accepted | Full:
        """Send a chunk of a source; its cursor moves in the same step.

        The batch id derives from source and offset, so reading the same place again gives the same batch.
        `source_key` tells a file from its successor after a rotation; `cursor_key` stays, "" keeps no cursor.
        `after`: see `accept`. `backfill`: the lines wait behind fresh ones; None: when the last one is old
        (`BACKFILL_AFTER`).
        """
        check_workload(workload)
        batch = Batch(
            batch_id=f"{source_key}-{chunk.start:x}",
            workload=workload,
            source=_shown(source),
            source_key=source_key,
            purpose=purpose,
            arrived=self.clock(),
            formats=chunk.formats,
            zone=self.settings.intake.time_zone,
            records=chunk.records,
        )
        cursor = chunk.cursor.pack() if cursor_key else ""
        if backfill is None:
            # Files grow at their end.
            backfill = self.is_past(chunk.latest(arrived=batch.arrived, zone=batch.zone))
        return self.accept(batch, cursor_key=cursor_key, cursor=cursor, after=after, backfill=backfill)

    def accept(
        self,
        batch: Batch,
        *,
        cursor_key: str = "",
        cursor: str = "",
        after: str | None = None,
        backfill: bool | None = None,
    ) -> Accepted | Full:
        """The only way in: ledger first, then the wake-up. The sweeper sends a lost wake-up again.

        `after`: the cursor that the batch continues from, "" for none. Raises CursorMoved for another one.
        `backfill`: the batch waits behind fresh ones; None: when the time of every record is known and old.
        """
        if backfill is None:
            backfill = self.is_past(_latest(batch))
        with _explained():
            answer = self.ledger.intake.accept(
                batch,
                cursor_key=cursor_key,
                cursor=cursor,
                after=after,
                skip=self._is_skipped(batch),
                backfill=backfill,
            )
        if isinstance(answer, Accepted) and not answer.duplicate and not answer.skipped:
            self._wake(batch, backfill=backfill)
        return answer

    def accept_all(
        self,
        batches: Sequence[Batch],
        requests: Sequence[RequestIdentity],
        *,
        dead: Mapping[str, str] | None = None,
        backfill: bool = False,
        step: CursorStep | None = None,
    ) -> Accepted | Full | Known:
        """The batches of several requests to the intake, all or none.

        Known: some of the requests are in already and nothing was taken. `dead` and `step`: see
        Intake.accept_all. Raises RedisUnavailable when it is unknown whether the batches are in: accept the
        same ones again."""
        with _explained():
            dead = dead or {}
            skip = {
                batch.batch_id for batch in batches if self._is_skipped(batch) and batch.batch_id not in dead
            }
            answer = self.ledger.intake.accept_all(
                batches, requests, skip=skip, dead=dead, backfill=backfill, step=step
            )
        if isinstance(answer, Accepted) and not answer.duplicate:
            waiting = [one for one in batches if one.batch_id not in skip and one.batch_id not in dead]
            self.submit.wake_new(waiting, backfill=backfill)
        return answer

    def _wake(self, batch: Batch, *, backfill: bool) -> None:
        """The batch is in: whatever goes wrong from here on, the sweeper wakes a worker."""
        with suppress(Exception):
            self.submit.wake(
                Stage.INGEST,
                batch.batch_id,
                backfill=backfill,
                workload=batch.workload,
                lines=batch.physical_lines,
            )

    def is_past(self, moment: object) -> bool:
        """Whether lines that end at this moment wait behind fresh ones."""
        return isinstance(moment, datetime) and self.clock() - moment > BACKFILL_AFTER

    def skips(self, workload: str) -> bool:
        """True for workloads off the watchlist, whose lines are only counted if the settings say so."""
        return self.settings.watch.unwatched != "score" and not self.watchlist.lately().covers(workload)

    def _is_skipped(self, batch: Batch) -> bool:
        """Batches of several workloads have none that is skipped."""
        return batch.purpose is Purpose.SCORE and batch.workload != SEVERAL and self.skips(batch.workload)


@contextmanager
def _explained() -> Iterator[None]:
    """Other errors of Redis become RedisUnavailable: an answer that is none, a script forgotten twice."""
    try:
        yield
    except (redis.RedisError, OSError) as exc:
        raise RedisUnavailable(
            f"Redis did not answer as it should ({type(exc).__name__}: {exc}); send the batch again "
            "under its id"
        ) from exc


def _latest(batch: Batch) -> object:
    """The newest time of the records; None where the time of one is not known."""
    if isinstance(batch.records, PushedLines | PushedRecords):
        return batch.records.latest
    times = batch.records["timestamp"]
    return None if times.has_nulls() else times.max()


def workload_of_file(path: Path) -> str:
    """A file's workload when none is given: its name without endings that only say how it is stored."""
    name = rotation(path.name).live
    for ending in (".log", ".txt", ".jsonl", ".json"):
        if name.endswith(ending) and len(name) > len(ending):
            name = name.removesuffix(ending)
    return as_workload_name(name)[:100]


def check_workload(name: str) -> str:
    """The name, if it can be that of a workload. Raises BadInput."""
    if not isinstance(name, str) or not is_workload_name(name):
        raise BadInput(
            f"workload {_quoted(name)} is not usable; use 1 to {MAX_NAME} printable characters without * and ?"
        )
    return name


def check_batch_id(name: str) -> str:
    """The name, if it can be a batch id. Raises BadInput."""
    if not isinstance(name, str) or not name or len(name) > MAX_NAME or not name.isprintable():
        raise BadInput(f"batch id {_quoted(name)} is not usable; use 1 to {MAX_NAME} printable characters")
    return name


def _quoted(name: object) -> str:
    return repr(name) if len(repr(name)) <= 40 else repr(name)[:40] + "..."


def _shown(source: str) -> str:
    """A source as it can be stored: a file name that is no text shows its odd bytes as escapes."""
    if not isinstance(source, str):
        raise BadInput(f"the source {source!r} is not text; name it as users know it")
    return source.encode("utf-8", "backslashreplace").decode()
