"""The records of a window as batches: workloads of few records share one."""

import itertools
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

import msgspec

from pipeline.records.batch import (
    MAX_NAME,
    SEVERAL,
    Batch,
    Purpose,
    as_workload_name,
    digest,
    is_workload_name,
)
from pipeline.records.pushed import PushedRecords, joined_records
from pipeline.sources.protocols.contract import Undecodable
from pipeline.sources.protocols.workloads import UNKNOWN

SOURCE: Final = "intake"
# A workload with an unknown line leaves a shared batch, and its records are read twice. A batch of their own
# costs less for so many.
OWN_RECORDS: Final = 200


class CountedRecords(NamedTuple):
    """Records of a request, their physical lines and their bytes of text."""

    records: PushedRecords
    lines: int
    size: int  # or more


def window_batches(
    requests: Sequence[CountedRecords],
    *,
    arrived: datetime,
    zone: str,
    max_records: int,
    max_bytes: int,
    alone: Callable[[str], bool] = lambda _: False,
) -> list[Batch]:
    """Ids are new with every call: accept the same batches again, not others of the same records.

    `alone`: whether a workload shares its batch with no other."""
    groups = _whole_requests(requests, alone)
    if groups is None:
        records = joined_records([_named(request.records) for request in requests])
        parts = parted_records(records, max_records, max_bytes, alone)
        found = [(workload, part, part.lines) for workload, part in parts]
    else:
        found = [
            (workload, part, lines)
            for workload, several in groups
            for part, lines in _cut_requests(workload, several, max_records, max_bytes)
        ]
    return [
        _batch(workload, msgspec.structs.replace(part, places=None), lines, arrived=arrived, zone=zone)
        for workload, part, lines in found
    ]


def _whole_requests(
    requests: Sequence[CountedRecords], alone: Callable[[str], bool]
) -> list[tuple[str, list[CountedRecords]]] | None:
    """As `parted_records` where each request has one workload, and so belongs to a batch as a whole.

    None where a request has several."""
    by_workload: dict[str, list[CountedRecords]] = {}
    for request in requests:
        workload, *others = set(request.records.workloads or (UNKNOWN,))
        if others:
            return None
        by_workload.setdefault(workload, []).append(request)
    large, shared = _grouped(
        {
            workload: sum(request.records.height for request in several)
            for workload, several in by_workload.items()
        },
        alone,
    )
    found = [(workload, by_workload[workload]) for workload in large]
    if shared is not None:
        sharing = [
            request for request in requests if (request.records.workloads or (UNKNOWN,))[0] not in large
        ]
        found.append((shared, sharing))
    return found


def _grouped(heights: Mapping[str, int], alone: Callable[[str], bool]) -> tuple[Collection[str], str | None]:
    """The workloads that have a batch of their own, in order, and the workload of the batch that all others
    share, None where there are none. `heights`: records of each workload."""
    large = {
        workload: None for workload, height in heights.items() if height >= OWN_RECORDS or alone(workload)
    }
    names = heights.keys() - large
    return large, SEVERAL if len(names) > 1 else next(iter(names), None)


def _cut_requests(
    workload: str, requests: Sequence[CountedRecords], max_records: int, max_bytes: int
) -> Iterator[tuple[PushedRecords, int]]:
    """The records of each batch and their lines."""
    records = joined_records([_named(request.records) for request in requests])
    if workload != SEVERAL:
        records = msgspec.structs.replace(records, workloads=None)
    if records.height <= max_records and sum(request.size for request in requests) <= max_bytes:
        yield records, sum(request.lines for request in requests)
    else:
        for part in _cut(records, max_records, max_bytes):
            yield part, part.lines


def parted_records(
    records: PushedRecords,
    max_records: int,
    max_bytes: int,
    alone: Callable[[str], bool] = lambda _: False,
) -> Iterator[tuple[str, PushedRecords]]:
    """The records of each batch, and its workload. They keep their places; all name their workloads."""
    by_workload = records.rows_by_workload()
    large, shared = _grouped({workload: len(rows) for workload, rows in by_workload.items()}, alone)
    found = [(workload, by_workload[workload]) for workload in large]
    if shared is not None:
        others = (rows for workload, rows in by_workload.items() if workload not in large)
        found.append((shared, sorted(itertools.chain.from_iterable(others))))
    for workload, rows in found:
        for part in _cut(_rows_of(records, rows, named=workload == SEVERAL), max_records, max_bytes):
            yield workload, part


def take_rows(records: PushedRecords, rows: Sequence[int]) -> PushedRecords:
    """These rows, with their workloads, as records of another request."""
    return msgspec.structs.replace(_rows_of(records, rows, named=True), places=None)


def lines_and_bytes(records: PushedRecords) -> tuple[int, int]:
    """Physical lines and bytes of text, as `records.lines` and `records.size`. Raises Undecodable for lone
    surrogates."""
    texts = records.texts
    text = "\n".join(texts)
    parsed = records.messages if records.raws is not None else ()
    named = (records.hosts, records.processes, records.services)
    try:
        size = _bytes_of(text) - max(0, len(texts) - 1) + _bytes_of("".join(filter(None, parsed)))
        _bytes_of("".join(name for column in named for name in set(column or ()) if name))  # few differ
    except UnicodeEncodeError:
        raise Undecodable("a record holds a lone surrogate, which is no text; send valid UTF-8") from None
    return text.count("\n") + 1, size


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def with_usable_names(records: PushedRecords) -> PushedRecords:
    """With names of workloads that can be part of keys and file names."""
    names = records.workloads or [UNKNOWN] * records.height
    different = set(names)
    if records.workloads is not None and all(map(is_workload_name, different)):
        return records
    cleaned = {name: as_workload_name(name)[:MAX_NAME] or UNKNOWN for name in different}
    return msgspec.structs.replace(records, workloads=[cleaned[name] for name in names])


def _named(records: PushedRecords) -> PushedRecords:
    """With a workload for each record."""
    if records.workloads is not None:
        return records
    return msgspec.structs.replace(records, workloads=[UNKNOWN] * records.height)


def _rows_of(records: PushedRecords, rows: Sequence[int], *, named: bool) -> PushedRecords:
    if len(rows) < records.height:
        return records.take(rows, named=named)
    return records if named else msgspec.structs.replace(records, workloads=None)


def _cut(records: PushedRecords, max_records: int, max_bytes: int) -> Iterator[PushedRecords]:
    if records.height <= max_records and records.size <= max_bytes:
        yield records
        return
    named = records.workloads is not None
    rows: list[int] = []
    size = 0
    parsed = records.messages if records.raws is not None else itertools.repeat("", records.height)
    for row, pair in enumerate(zip(records.texts, parsed, strict=True)):
        bytes_of = sum(len((text or "").encode()) for text in pair)
        if rows and (len(rows) >= max_records or size + bytes_of > max_bytes):
            yield _rows_of(records, rows, named=named)
            rows, size = [], 0
        rows.append(row)
        size += bytes_of
    yield _rows_of(records, rows, named=named)


def _batch(workload: str, records: PushedRecords, lines: int, *, arrived: datetime, zone: str) -> Batch:
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
        lines=lines,
        content=batch_id,  # no other batch has this id
    )
