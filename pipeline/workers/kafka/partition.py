"""A partition that this process reads: its records since the last accept, and the batches made of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from pipeline.ledger.intake import CursorStep
from pipeline.records.batch import Batch, Purpose, digest
from pipeline.records.held import HeldRecords
from pipeline.records.payload import content_of
from pipeline.records.pushed import PushedRecords
from pipeline.settings import Settings
from pipeline.settings.kafka import KafkaSource
from pipeline.sources.kafka.client import Place
from pipeline.sources.kafka.cursor import PartitionCursor
from pipeline.sources.kafka.values import KafkaRecord, read_values
from pipeline.workers.intake.batches import parted_records

RECORD_BYTES: Final = 200  # of an object for a record, without its value


def record_bytes(record: KafkaRecord) -> int:
    return len(record.value or b"") + RECORD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBatches:
    """The input of one accept. `records` counts those of Kafka; `lines` are those of the batches."""

    batches: Sequence[Batch]
    dead: dict[str, str]  # why batches cannot be read, by id
    step: CursorStep
    backfill: bool
    records: int
    tombstones: int
    unreadable: int
    lines: int
    next_offset: int


@dataclass(slots=True, kw_only=True, eq=False)
class Partition:
    """`offset` is of the next record to take in, as `cursor`, the ledger's text, says it."""

    cluster: str
    place: Place
    cursor: PartitionCursor
    token: int = 0
    held: HeldRecords[KafkaRecord] = field(default_factory=lambda: HeldRecords(record_bytes))
    out_of_range: bool = False  # Kafka has no record at the offset behind them
    end: int = 0  # behind the last record in Kafka, as of the last look
    lines: int = 0  # taken in by this process

    @property
    def name(self) -> str:
        """As people write it."""
        return f"{self.place[0]}/{self.place[1]}"

    @property
    def source_key(self) -> str:
        """Names the partition in ids of records, whose lines are offsets. A topic made anew has others."""
        return digest("kafka", self.cluster, *map(str, self.place), self.cursor.topic_id)

    def add(self, record: KafkaRecord) -> None:
        if record.offset >= self.next_offset:  # older ones were fetched before the partition was reopened
            self.held.add(record)

    @property
    def next_offset(self) -> int:
        """Of the next record to fetch."""
        return self.held.records[-1].offset + 1 if self.held else self.cursor.offset

    def is_full(self, settings: Settings) -> bool:
        s = settings.internal
        return len(self.held) >= s.batch_records or self.held.size >= s.batch_kib * 1024

    def prepare(
        self,
        source: KafkaSource,
        settings: Settings,
        *,
        arrived: datetime,
        alone: Callable[[str], bool],
        is_past: Callable[[object], bool],
    ) -> PreparedBatches:
        """The batches of all records. Their ids derive from their contents."""
        records = self.held.offer()
        read = read_values(source, self.place[0], records)
        batches: list[Batch] = []
        dead: dict[str, str] = {}
        s = settings.internal
        if read.records is not None:
            for workload, part in parted_records(read.records, s.batch_records, s.batch_kib * 4096, alone):
                batches.append(self._batch(workload, part, arrived, settings))
        if read.unreadable is not None:
            (workload,) = set(read.unreadable.workloads or ())
            one = self._batch(workload, read.unreadable, arrived, settings)
            offsets = read.unreadable.places or []
            more = f" and {len(offsets) - 1} more" if len(offsets) > 1 else ""
            dead[one.batch_id] = f"{self.name} offset {offsets[0]}{more}: {read.why}"
            batches.append(one)
        end = PartitionCursor(self.cursor.topic_id, records[-1].offset + 1)
        return PreparedBatches(
            batches=batches,
            dead=dead,
            step=CursorStep(
                key=cursor_key(self.cluster, self.place), cursor=str(end), after=str(self.cursor)
            ),
            backfill=read.records is not None and is_past(read.records.latest),
            records=len(records),
            tombstones=read.tombstones,
            unreadable=read.unreadable.height if read.unreadable is not None else 0,
            lines=sum(batch.physical_lines for batch in batches),
            next_offset=end.offset,
        )

    def accepted(self, prepared: PreparedBatches) -> None:
        """The prepared batches are in: the cursor stands behind them."""
        self.cursor = PartitionCursor(self.cursor.topic_id, prepared.next_offset)
        self.lines += prepared.lines
        self.held.accepted()

    def _batch(self, workload: str, records: PushedRecords, arrived: datetime, settings: Settings) -> Batch:
        content = content_of(workload, records)
        return Batch(
            batch_id=f"{self.source_key}-{content}",
            workload=workload,
            source=f"kafka:{self.name}",
            source_key=self.source_key,
            purpose=Purpose.SCORE,
            arrived=arrived,
            formats=(),
            zone=settings.intake.time_zone,
            records=records,
            content=content,
        )


def cursor_key(cluster: str, place: Place) -> str:
    """The name of a partition's cursor in the ledger."""
    return digest("cursor", "kafka", cluster, *map(str, place))
