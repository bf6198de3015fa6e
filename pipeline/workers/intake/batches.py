"""The records of a window as batches: one for each workload, cut where a batch would be too large."""

import itertools
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec

from pipeline.producer import printable_name
from pipeline.records.batch import MAX_NAME, Batch, Purpose, digest
from pipeline.records.pushed import PushedRecords
from pipeline.sources.protocols.contract import Undecodable

SOURCE: Final = "intake"
NAMELESS: Final = "unknown"  # the workload of records that name none


def window_batches(
    requests: Sequence[PushedRecords], *, arrived: datetime, zone: str, max_records: int, max_bytes: int
) -> list[Batch]:
    """Ids are new with every call: accept the same batches again, not others of the same records."""
    by_workload: defaultdict[str, list[PushedRecords]] = defaultdict(list)
    for request in requests:
        for workload, records in by_name(request).items():
            by_workload[workload].append(records)
    return [
        _batch(workload, records, arrived=arrived, zone=zone)
        for workload, parts in by_workload.items()
        for records in _cut(_joined(parts), max_records, max_bytes)
    ]


def by_name(records: PushedRecords) -> dict[str, PushedRecords]:
    """The records of each workload, without that column."""
    names = records.workloads
    if names is None or len(set(names)) == 1:
        return {names[0] if names else NAMELESS: msgspec.structs.replace(records, workloads=None)}
    rows: defaultdict[str, list[int]] = defaultdict(list)
    for row, name in enumerate(names):
        rows[name].append(row)
    return {name: take_rows(records, chosen) for name, chosen in rows.items()}


def text_size(records: PushedRecords) -> int:
    """Bytes of text. Raises Undecodable for lone surrogates."""
    try:
        for column in (records.hosts, records.processes, records.services):
            "".join(text or "" for text in column or ()).encode()
        return records.size
    except UnicodeEncodeError:
        raise Undecodable("a record holds a lone surrogate, which is no text; send valid UTF-8") from None


def with_usable_names(records: PushedRecords) -> PushedRecords:
    """With names of workloads that can be part of keys and file names."""
    names = records.workloads or [NAMELESS] * records.height
    cleaned = {name: printable_name(name)[:MAX_NAME] or NAMELESS for name in set(names)}
    if records.workloads is not None and all(old == new for old, new in cleaned.items()):
        return records
    return msgspec.structs.replace(records, workloads=[cleaned[name] for name in names])


def take_rows(records: PushedRecords, rows: Sequence[int], *, named: bool = False) -> PushedRecords:
    """These rows; `named`: with the column of workloads."""

    def chosen(column: Sequence[Any] | None) -> list[Any] | None:
        return None if column is None else [column[row] for row in rows]

    columns = records.columns if named else records.columns[:-1]
    return PushedRecords(*map(chosen, (records.messages, *columns)))  # type: ignore[arg-type]


def _joined(parts: Sequence[PushedRecords]) -> PushedRecords:
    if len(parts) == 1:
        return parts[0]
    columns = zip(*(part.columns[:-1] for part in parts), strict=True)
    heights = [part.height for part in parts]
    return PushedRecords(
        list(itertools.chain.from_iterable(part.messages for part in parts)),
        *(_column(column, heights) for column in columns),
    )


def _column(parts: Sequence[Any], heights: Sequence[int]) -> Any:
    if all(part is None for part in parts):
        return None
    filled = ([None] * n if part is None else part for part, n in zip(parts, heights, strict=True))
    return list(itertools.chain.from_iterable(filled))


def _cut(records: PushedRecords, max_records: int, max_bytes: int) -> Iterator[PushedRecords]:
    if records.height <= max_records and records.size <= max_bytes:
        yield records
        return
    rows: list[int] = []
    size = 0
    parsed = records.messages if records.raws is not None else itertools.repeat("", records.height)
    for row, pair in enumerate(zip(records.texts, parsed, strict=True)):
        bytes_of = sum(len((text or "").encode()) for text in pair)
        if rows and (len(rows) >= max_records or size + bytes_of > max_bytes):
            yield take_rows(records, rows)
            rows, size = [], 0
        rows.append(row)
        size += bytes_of
    yield take_rows(records, rows)


def _batch(workload: str, records: PushedRecords, *, arrived: datetime, zone: str) -> Batch:
    batch_id = uuid.uuid4().hex
    return Batch(
        batch_id=batch_id,
        workload=workload,
        source=SOURCE,
        source_key=digest(SOURCE, batch_id),
        purpose=Purpose.SCORE,
        arrived=arrived,
        formats=(),
        zone=zone,
        records=records,
    )
