"""The front end of stages ingest and store: from the payloads of batches to prepared records.

A query of Polars costs as much for ten lines as for a thousand, so the batches of a group share each pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import polars as pl

from pipeline import detect
from pipeline.errors import BadPayload
from pipeline.logs import logger
from pipeline.records.columns import gathered, parted
from pipeline.records.delivery import Claim, Meta
from pipeline.records.pushed import Pushed, PushedLines, PushedRecords
from pipeline.sources.pushed import framed, framed_alike, framed_by_workload, framed_records
from pipeline.tasks.context import Context
from pipeline.watching.sessions import keys as session_keys


@dataclass(frozen=True, slots=True)
class Prepared:
    """The records of one workload of a batch behind the front end."""

    claim: Claim  # that of the batch as one on these records, with the formats that framing found
    records: pl.DataFrame  # RAW_SCHEMA with `pattern_id`, `severe` and `key`; with `masked` at ingest
    sessions: pl.Series | None  # the session keys of each record; None where they could not be told


def prepared_batches(
    context: Context, claims: Sequence[Claim], works: Sequence[pl.DataFrame | None]
) -> list[Prepared]:
    """The batches of these claims, one of several workloads as one of each. `works`: the work of each at
    stage store, None at ingest, which alone sees batches of several workloads.

    Raises what one of them raises, so a group that fails says nothing about most of its batches."""
    read = _framed(context, claims, works)
    works_of = dict(zip((claim.batch_id for claim in claims), works, strict=True))
    prepared = detect.prepare_all(
        [(rows, claim.meta) for claim, rows in read],
        context.masks,
        [works_of[claim.batch_id] for claim, _ in read],
    )
    members = [claim for claim, _ in read]
    sessions = _sessions(context, members, prepared)
    return [
        Prepared(claim, rows, keys) for claim, rows, keys in zip(members, prepared, sessions, strict=True)
    ]


def _framed(
    context: Context, claims: Sequence[Claim], works: Sequence[pl.DataFrame | None]
) -> list[tuple[Claim, pl.DataFrame]]:
    """The records of each claim, with the formats of their headers in its description."""
    found: dict[int, list[tuple[Claim, pl.DataFrame]]] = {}
    by_formats: dict[tuple[str, ...], list[tuple[int, PushedLines]]] = {}
    for place, (claim, work) in enumerate(zip(claims, works, strict=True)):
        if claim.rescore:
            found[place] = [(claim, _stored(context, claim))]
            continue
        payload = context.ledger.payload(claim.batch_id)
        if claim.several:
            found[place] = _by_workload(context, claim, payload)
            continue
        earlier = None if work is None else detect.formats_of(work)
        if isinstance(payload, PushedLines) and earlier is None:
            current = context.formats.of(claim.workload)
            if current is not None:
                by_formats.setdefault(current, []).append((place, payload))
                continue
        found[place] = [_framed_alone(context, claim, payload, earlier)]
    for formats, several in by_formats.items():
        rows = framed_alike([payload for _, payload in several], formats)
        for (place, payload), records in zip(several, rows, strict=True):
            claim = claims[place]
            if records is None:
                found[place] = [_framed_alone(context, claim, payload, None)]
            else:
                found[place] = [(_with_formats(claim, formats), records)]
    return [one for place in range(len(claims)) for one in found[place]]


def _by_workload(
    context: Context, claim: Claim, payload: pl.DataFrame | Pushed
) -> list[tuple[Claim, pl.DataFrame]]:
    """The records of each workload. Raises BadPayload."""
    if not isinstance(payload, PushedRecords) or payload.workloads is None:
        raise BadPayload(f"the records of batch {claim.batch_id} name no workloads")
    found = []
    metas: dict[tuple[str, ...], Meta] = {}
    for workload, rows, formats in framed_by_workload(payload, context.formats):
        if (meta := metas.get(formats)) is None:
            meta = metas[formats] = replace(claim.meta, formats=formats)
        lines = int(rows["lines"].sum())
        found.append((claim.part(workload, lines=lines, records=rows.height, meta=meta), rows))
    return found


def _with_formats(claim: Claim, formats: tuple[str, ...]) -> Claim:
    return replace(claim, meta=replace(claim.meta, formats=formats))


def _framed_alone(
    context: Context, claim: Claim, payload: pl.DataFrame | Pushed, earlier: tuple[str, ...] | None
) -> tuple[Claim, pl.DataFrame]:
    if isinstance(payload, PushedRecords) and earlier is None:
        records, formats = framed_records(payload, claim.workload, context.formats)
        return _with_formats(claim, formats), records
    records, formats = framed(payload, claim.meta.formats, earlier=earlier)
    if isinstance(payload, PushedLines) and earlier is None:
        context.formats.tell(claim.workload, formats)
    return _with_formats(claim, formats), records


def _stored(context: Context, claim: Claim) -> pl.DataFrame:
    """The records of a batch that is scored again. Raises BadPayload."""
    with context.at_sink(claim.meta.purpose) as sink:
        stored = sink.read(claim.batch_id, claim.workload)
    if stored is None:
        raise BadPayload(
            f"the stored results of batch {claim.batch_id} are gone; they cannot be scored again"
        )
    return detect.stored_records(stored, claim.meta)


def _sessions(
    context: Context, claims: Sequence[Claim], prepared: Sequence[pl.DataFrame]
) -> list[pl.Series | None]:
    """A fault here does not keep lines from the store."""
    try:
        keys = session_keys.find_keys(gathered(prepared, ["raw", "message"]), context.session_patterns)
    except (Exception, pl.exceptions.PanicException):  # noqa: BLE001 - good lines are no dead letter
        for claim in claims:
            logger(batch=claim.batch_id, workload=claim.workload).exception("batch.not_observed")
        return [None] * len(prepared)
    return list(parted(keys, [rows.height for rows in prepared]))
