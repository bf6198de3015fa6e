"""What is there after a chaos run: the lines in the Parquet files, and the batches in Redis that are not
stored.

Lines are told apart by the mark that each carries, ` mark=<workload>#<number>`; a record of many lines
carries as many."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import polars as pl

from bench._chaos.told import MOST, Violation
from pipeline.errors import BadPayload, StoreUnavailable
from pipeline.ledger.ledger import Ledger
from pipeline.records.batch import Purpose
from pipeline.records.delivery import HALF, UNFINISHED
from pipeline.records.verdict import OURS
from pipeline.redis.connection import text_map
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of
from pipeline.sinks.manifest import Part
from pipeline.sinks.parquet import ParquetSink
from pipeline.sources.pushed import framed
from pipeline.units import listed

MARK: Final = r"mark=(\S+)#(\d+)"
_MARKS: Final = r"mark=\S+#\d+"
_ROWS: Final[dict[str, Any]] = {
    "record_id": pl.String, "workload": pl.String, "lines": pl.UInt32, "file": pl.String,
    "marks": pl.List(pl.String), "told": pl.Boolean,
}  # fmt: skip
MARK_SCHEMA: Final[dict[str, Any]] = {"workload": pl.String, "number": pl.Int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A batch in Redis that has not been stored: dead, or still in flight. `marks` is None where its payload
    is damaged."""

    batch_id: str
    state: str
    shares: dict[str, int]  # lines of each workload
    rescore: bool
    reason: str
    marks: pl.DataFrame | None  # workload, number

    @property
    def root(self) -> str:
        """The batch that was accepted, of which this may be a half."""
        return self.batch_id.partition(HALF)[0]

    @property
    def lines(self) -> int:
        return sum(self.shares.values())

    @property
    def workload(self) -> str:
        """For people, where it has several."""
        return listed(sorted(self.shares))


@dataclass(slots=True)
class Stored:
    """What the Parquet files hold. `lines`: one row per mark (workload, number, owner, record_id, file)."""

    lines: pl.DataFrame
    physical: dict[str, int]  # lines by workload, as the rows count them
    violations: list[Violation] = field(default_factory=list)


def stored(settings: Settings) -> Stored:
    """Reads all results. A file that cannot be read is a violation, and the others are read."""
    found = Stored(pl.DataFrame(), {})
    sinks = [parquet_of(settings, purpose) for purpose in Purpose]
    frames = [_rows(sink, part, found) for sink in sinks for part in sink.parts()]
    rows = pl.concat([pl.DataFrame(schema=_ROWS), *frames])
    unmarked = rows.filter(pl.col("marks").list.len() == 0)
    for row in unmarked.head(MOST).iter_rows(named=True):
        what = f"a line that nobody sent is stored: {row['record_id']} of {row['workload']} in {short(row['file'])}"
        found.violations.append(Violation(invariant=1, what=what))
    for name, wrong in (
        ("hold more or fewer lines than they say", pl.col("marks").list.len() != pl.col("lines")),
        ("have another message than their line", ~pl.col("told")),
    ):
        bad = rows.filter((pl.col("marks").list.len() > 0) & wrong)
        if bad.height:
            what = (
                f"{bad.height} records {name}, the first is {bad['record_id'][0]} in {short(bad['file'][0])}"
            )
            found.violations.append(Violation(invariant=1, what=what))
    found.physical = dict(rows.group_by("workload").agg(pl.col("lines").cast(pl.Int64).sum()).iter_rows())
    found.lines = (
        rows.select("record_id", "file", owner="workload", mark="marks")
        .explode("mark")
        .drop_nulls("mark")
        .with_columns(**_named(pl.col("mark")))
        .drop("mark")
    )
    return found


def _rows(sink: ParquetSink, part: Part, found: Stored) -> pl.DataFrame:
    """The lines of a part; none of one that cannot be read, which is a violation."""
    marks = pl.coalesce("raw", "message").str.extract_all(_MARKS)
    try:
        rows = sink.files.read(part)
    except (pl.exceptions.PolarsError, OSError, StoreUnavailable) as exc:
        what = f"{part.name} cannot be read, so it is half written: {exc}"
        found.violations.append(Violation(invariant=1, what=what))
        return pl.DataFrame(schema=_ROWS)
    return (
        rows.filter(~pl.col("record_id").str.starts_with(OURS))  # of no line
        .with_columns(marks=marks, file=pl.lit(part.name))
        .select(
            *("record_id", "workload", "lines", "file", "marks"),
            told=pl.col("message").str.contains(pl.col("marks").list.first(), literal=True),
        )
    )


def _named(mark: pl.Expr) -> dict[str, pl.Expr]:
    return {"workload": mark.str.extract(MARK, 1), "number": mark.str.extract(MARK, 2).cast(pl.Int64)}


def letters(ledger: Ledger) -> list[Letter]:
    """All batches that are dead or unfinished."""
    client, keys = ledger.client, ledger.keys
    ids = {cast("bytes", i).decode() for key in (keys.dead, keys.due) for i in client.zrange(key, 0, -1)}
    found = []
    for batch_id in sorted(ids):
        entry = text_map(client.hgetall(keys.batch(batch_id)))
        if entry.get("state") not in (*UNFINISHED, "dead"):
            continue
        found.append(
            Letter(
                batch_id=batch_id,
                state=entry["state"],
                shares=ledger.store.shares(batch_id),
                rescore=entry.get("kind") == "rescore",
                reason=entry.get("error", ""),
                marks=_marks_of(ledger, batch_id),
            )
        )
    return found


def _marks_of(ledger: Ledger, batch_id: str) -> pl.DataFrame | None:
    try:
        raw = (
            framed(ledger.payload(batch_id))[0]
            .select(mark=pl.col("raw").str.extract_all(_MARKS))
            .explode("mark")
        )
    except (BadPayload, pl.exceptions.PolarsError):
        return None
    return raw.drop_nulls("mark").select(**_named(pl.col("mark")))


def short(file: str) -> str:
    """A file for people."""
    return Path(file).name
