"""The way in for everybody who has log lines: Python programs, `logweir send`, `logweir run`.

    producer = Producer.connect(Settings.load())
    answer = producer.send(["line", ...], workload="shop/checkout", batch_id="2026-11-20-0001")
    # Accepted(duplicate=False) | Accepted(duplicate=True) | Full(retry_after_s=0.5)

Accepted means: stored exactly once in every sink, whatever happens from here on. A producer imports neither
torch nor the workers' code.
"""

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Self

import polars as pl

from pipeline.controller.watchlist import Watchlist
from pipeline.errors import BadInput
from pipeline.ledger.batches import Accepted, Full, Stage
from pipeline.ledger.ledger import Ledger
from pipeline.messages.app import make_app
from pipeline.messages.submit import Submit
from pipeline.records.batch import LEVELS, MAX_NAME, Batch, Purpose, digest, utc_now
from pipeline.records.schema import RAW_SCHEMA
from pipeline.redis.attach import attached
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.sources import formats
from pipeline.sources.chunks import Chunk
from pipeline.sources.framing import Framer

# What rotation appends: app.log.1, app.log-20261120, app.log.2.gz
ROTATED: Final = re.compile(r"(?<=.)[.-](?:\d{1,3}|\d{8}|\d{4}-\d\d-\d\d)(?=(?:\.gz|\.zst)?$)")
RECORD_FIELDS: Final = ("message", "timestamp", "level", "host", "process", "service")


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
        """A producer on REDIS_URL, or on the stack that runs on the data directory. Raises BadInput without one."""
        settings = attached(settings)
        client = connect(settings)
        return cls(Ledger(client, settings), Submit(make_app(settings), client, settings), settings)

    def send(
        self,
        items: Sequence[str] | Sequence[Mapping[str, Any]],
        *,
        workload: str,
        batch_id: str | None = None,
        source: str = "push",
        backfill: bool | None = None,
    ) -> Accepted | Full:
        """Send raw lines (stack traces are joined with their head line) or records.

        A record is a mapping with `message` and, if known, timestamp (aware datetime or ISO 8601), level, host,
        process, service. The same `batch_id` twice is one batch; without one every call is a new batch. `backfill`: these
        lines wait behind fresh ones; None: when all timestamps are known and old (`backfill_after_s`). Full: nothing
        was taken, try again after `retry_after_s`. Raises BadInput for what cannot be a batch, RedisUnavailable.
        """
        if isinstance(items, str | bytes):
            raise BadInput("send() takes a list of lines or records; wrap a single line in a list")
        check_name("workload", workload)
        bid = check_name("batch id", batch_id if batch_id is not None else uuid.uuid4().hex)
        if not items:
            raise BadInput(f"batch {bid!r} has no lines; leave empty batches out")
        if len(items) > self.settings.batch_records:
            raise BadInput(
                f"batch {bid!r} has {len(items):,} lines; send at most {self.settings.batch_records:,} at once"
            )
        records, formats = _frame(items)
        if records.height > self.settings.batch_records:
            raise BadInput(
                f"batch {bid!r} has {records.height:,} lines; send at most {self.settings.batch_records:,} at once"
            )
        size = int(records["raw"].str.len_bytes().sum())
        if size > self.settings.batch_kib * 1024 * 4:
            raise BadInput(
                f"batch {bid!r} has {size:,} bytes; send at most {self.settings.batch_kib * 4:,} KiB at once"
            )
        return self.accept(
            Batch(
                batch_id=bid,
                workload=workload,
                source=_shown(source),
                source_key=digest("push", workload, bid),
                purpose=Purpose.SCORE,
                arrived=self.clock(),
                formats=formats,
                zone=self.settings.time_zone,
                records=records,
            ),
            backfill=backfill,
        )

    def send_chunk(
        self,
        chunk: Chunk,
        *,
        start: int,
        workload: str,
        source: str,
        source_key: str,
        cursor_key: str,
        purpose: Purpose = Purpose.SCORE,
        after: str | None = None,
        backfill: bool | None = None,
    ) -> Accepted | Full:
        """Send what a source read; its cursor moves in the same step. `start`: offset of the chunk in its source.

        The batch id derives from source and offset, so reading the same place again gives the same batch.
        `source_key` tells a file from its successor after a rotation; `cursor_key` stays, "" keeps no cursor.
        `after`: see `accept`. `backfill`: the lines wait behind fresh ones; None: when the last one is old
        (`backfill_after_s`).
        """
        check_name("workload", workload)
        batch = Batch(
            batch_id=f"{source_key}-{start:x}",
            workload=workload,
            source=_shown(source),
            source_key=source_key,
            purpose=purpose,
            arrived=self.clock(),
            formats=chunk.formats,
            zone=self.settings.time_zone,
            records=chunk.records,
        )
        cursor = chunk.cursor.pack() if cursor_key else ""
        backfill = self._is_old(chunk) if backfill is None else backfill
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
        """The one door: ledger first, then the wake-up. A lost wake-up is sent again by the sweeper.

        `after`: the cursor that the batch continues from, "" for none. Raises CursorMoved when it stands elsewhere.
        `backfill`: it waits behind fresh ones; None: when the time of every record is known, and all are old.
        """
        skip = self._skips(batch)
        if backfill is None:
            times = batch.records["timestamp"]
            backfill = not times.has_nulls() and self._is_past(times.max())
        answer = self.ledger.accept(
            batch, cursor_key=cursor_key, cursor=cursor, after=after, skip=skip, backfill=backfill
        )
        if isinstance(answer, Accepted) and not answer.duplicate and not answer.skipped:
            self.submit.wake(
                Stage.INGEST,
                batch.batch_id,
                backfill=backfill,
                workload=batch.workload,
                lines=batch.physical_lines,
            )
        return answer

    def _is_old(self, chunk: Chunk) -> bool:
        """Whether the last record of what was read is old; files grow at their end. One that shows no time is not."""
        last = chunk.records.tail(1)
        parsed = formats.parse(last, chunk.formats, arrived=self.clock(), zone=self.settings.time_zone)
        return self._is_past(parsed["timestamp"].max())

    def _is_past(self, moment: object) -> bool:
        age = timedelta(seconds=self.settings.backfill_after_s)
        return isinstance(moment, datetime) and self.clock() - moment > age

    def _skips(self, batch: Batch) -> bool:
        """True for what is only counted: lines to be scored of a workload that is off the watchlist, by setting."""
        if self.settings.unwatched == "score" or batch.purpose is not Purpose.SCORE:
            return False
        return not self.watchlist.lately().covers(batch.workload)


def workload_of(path: Path) -> str:
    """A file's workload when none is given: its name without endings that only say how it is stored."""
    name = ROTATED.sub("", path.name)
    for ending in (".gz", ".zst", ".log", ".txt", ".jsonl", ".json"):
        if name.endswith(ending) and len(name) > len(ending):
            name = name.removesuffix(ending)
    return "".join(c if c.isprintable() else "_" for c in name)[:100]


def check_name(what: str, name: str) -> str:
    """Workloads and batch ids: short, printable, not empty. Raises BadInput."""
    if not isinstance(name, str) or not name or len(name) > MAX_NAME or not name.isprintable():
        shown = repr(name) if len(repr(name)) <= 40 else repr(name)[:40] + "..."
        raise BadInput(f"{what} {shown} is not usable; use 1 to {MAX_NAME} printable characters")
    return name


def _shown(source: str) -> str:
    """A source as it can be stored: a file name that is no text shows its odd bytes as escapes."""
    if not isinstance(source, str):
        raise BadInput(f"the source {source!r} is not text; name it as users know it")
    return source.encode("utf-8", "backslashreplace").decode()


def _frame(items: Sequence[str] | Sequence[Mapping[str, Any]]) -> tuple[pl.DataFrame, tuple[str, ...]]:
    try:
        return _columns(items)
    except UnicodeEncodeError as exc:
        number = next(n for n, item in enumerate(items, start=1) if not _is_text(item))
        what = "line" if isinstance(items[0], str) else "record"
        raise BadInput(
            f"{what} {number} holds a character that is not text; decode bytes with errors='replace'"
        ) from exc


def _is_text(item: object) -> bool:
    values = item.values() if isinstance(item, Mapping) else [item]
    texts = [value for value in values if isinstance(value, str)]
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return False
    return True


def _columns(items: Sequence[str] | Sequence[Mapping[str, Any]]) -> tuple[pl.DataFrame, tuple[str, ...]]:
    if all(isinstance(item, str) for item in items):
        framer = Framer()
        lines = [piece for item in items for piece in str(item).rstrip("\r\n").split("\n")]
        frames = [framer.feed(lines), framer.flush()]
        return pl.concat(frames), framer.formats or ()
    if not all(isinstance(item, Mapping) for item in items):
        raise BadInput("a batch holds either lines (str) or records (mappings), not both and nothing else")
    rows = [_record(dict(item), n) for n, item in enumerate(items, start=1) if isinstance(item, Mapping)]
    return pl.DataFrame(rows, schema=RAW_SCHEMA), ()


def _record(item: dict[str, Any], number: int) -> dict[str, Any]:
    unknown = sorted(set(map(str, item)) - set(RECORD_FIELDS))
    if unknown:
        raise BadInput(
            f"record {number} has the unknown field {unknown[0]!r}; the fields are: {', '.join(RECORD_FIELDS)}"
        )
    message = item.get("message")
    if not isinstance(message, str):
        raise BadInput(f"record {number} has no text in 'message'")
    level = item.get("level")
    if level is not None and level not in LEVELS:
        raise BadInput(f"record {number} has the level {level!r}; the levels are: {', '.join(LEVELS)}")
    texts = {name: item.get(name) for name in ("host", "process", "service")}
    for name, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise BadInput(f"record {number} has {name} = {value!r}; it must be text")
    return {
        "raw": message,
        "line": number,
        "lines": message.count("\n") + 1,
        "timestamp": _moment(item.get("timestamp"), number),
        "level": level,
        **texts,
        "message": message,
    }


def _moment(value: object, number: int) -> datetime | None:
    if value is None:
        return None
    try:
        moment = datetime.fromisoformat(value) if isinstance(value, str) else value
        if isinstance(moment, datetime) and moment.tzinfo is not None:
            return moment.astimezone(UTC)
    except (ValueError, OverflowError):  # no time, or none that UTC has a year for
        pass
    raise BadInput(
        f"record {number} has timestamp {value!r}; give an aware datetime or ISO 8601 with an offset, "
        "such as 2026-11-20T10:00:00Z"
    )
