"""The records of a window as batches: workloads of few records share one."""

import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Final

import msgspec

from pipeline.producer import printable_name
from pipeline.records.batch import MAX_NAME, SEVERAL, Batch, Purpose, digest
from pipeline.records.pushed import PushedRecords, joined_records
from pipeline.sources.protocols.contract import Undecodable
from pipeline.sources.protocols.workloads import UNKNOWN

SOURCE: Final = "intake"
# A workload with an unknown line leaves a shared batch, and its records are read twice. A batch of their own
# costs less for so many.
OWN_RECORDS: Final = 200


def window_batches(
    requests: Sequence[PushedRecords],
    *,
    arrived: datetime,
    zone: str,
    max_records: int,
    max_bytes: int,
    alone: Callable[[str], bool] = lambda _: False,
) -> list[Batch]:
    """Ids are new with every call: accept the same batches again, not others of the same records.

    `alone`: whether a workload shares its batch with no other."""
    records = joined_records([_named(request) for request in requests])
    return [
        _batch(workload, msgspec.structs.replace(part, places=None), arrived=arrived, zone=zone)
        for workload, part in parted_records(records, max_records, max_bytes, alone)
    ]


def parted_records(
    records: PushedRecords,
    max_records: int,
    max_bytes: int,
    alone: Callable[[str], bool] = lambda _: False,
) -> Iterator[tuple[str, PushedRecords]]:
    """The records of each batch, and its workload. They keep their places; all name their workloads."""
    sharing: list[int] = []
    found: list[tuple[str, list[int]]] = []
    for workload, rows in records.rows_by_workload().items():
        if len(rows) >= OWN_RECORDS or alone(workload):
            found.append((workload, rows))
        else:
            sharing += rows
    shared = sorted(sharing)
    names = {(records.workloads or [])[row] for row in shared}
    if shared:
        found.append((SEVERAL if len(names) > 1 else names.pop(), shared))
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
        size = len(text.encode()) - max(0, len(texts) - 1) + len("".join(filter(None, parsed)).encode())
        "".join(filter(None, itertools.chain.from_iterable(column or () for column in named))).encode()
    except UnicodeEncodeError:
        raise Undecodable("a record holds a lone surrogate, which is no text; send valid UTF-8") from None
    return text.count("\n") + 1, size


def with_usable_names(records: PushedRecords) -> PushedRecords:
    """With names of workloads that can be part of keys and file names."""
    names = records.workloads or [UNKNOWN] * records.height
    different = set(names)
    if records.workloads is not None and all(map(_is_usable, different)):
        return records
    cleaned = {name: _usable(name) for name in different}
    return msgspec.structs.replace(records, workloads=[cleaned[name] for name in names])


def _is_usable(name: str) -> bool:
    return name.isprintable() and 0 < len(name) <= MAX_NAME


def _usable(name: str) -> str:
    if _is_usable(name):
        return name
    return printable_name(name)[:MAX_NAME] or UNKNOWN


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
        content=batch_id,  # no other batch has this id
    )
