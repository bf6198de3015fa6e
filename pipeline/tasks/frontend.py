"""The front end of stages ingest and store: from the payloads of batches to prepared records.

A query of Polars costs as much for ten lines as for a thousand, so the batches of a group share each pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import polars as pl

from pipeline import detect
from pipeline.errors import BadPayload
from pipeline.logs import logger
from pipeline.records.columns import Parts, chosen, gathered, heights_of
from pipeline.records.delivery import Claim, Meta
from pipeline.records.pushed import Pushed, PushedLines, PushedRecords
from pipeline.sources.pushed import framed, framed_alike, framed_by_workload
from pipeline.tasks.context import Context
from pipeline.watching.sessions import keys as session_keys

# Pushed records of so many characters are framed in one pass: 30,000 records of 500 characters. Until it
# ends, their texts are in memory twice.
FRAMED_TOGETHER: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Prepared:
    """The records of each workload of some batches behind the front end, in the order of the batches."""

    # Each is that of its batch, as one on the records of a workload, with the formats that framing found.
    claims: Sequence[Claim]
    records: Sequence[pl.DataFrame]  # RAW_SCHEMA with `pattern_id`, `severe`, `key`; with `masked` at ingest
    sessions: Parts[pl.Series] | None  # the session keys of each record; None where they could not be told

    def chosen(self, places: Sequence[int]) -> "Prepared":
        """The workloads at these places."""
        return Prepared(
            [self.claims[place] for place in places],
            chosen(self.records, places),
            None if self.sessions is None else self.sessions.chosen(places),
        )


def prepared_batches(
    context: Context, claims: Sequence[Claim], works: Sequence[pl.DataFrame | None]
) -> Prepared:
    """The batches of these claims, one of several workloads as one of each. `works`: the work of each at
    stage store, None at ingest, which alone sees batches of several workloads.

    Raises what one of them raises, so a group that fails says nothing about most of its batches."""
    members, records = _framed(context, claims, works)
    works_of = dict(zip((claim.batch_id for claim in claims), works, strict=True))
    metas = [claim.meta for claim in members]
    works = [works_of[claim.batch_id] for claim in members]
    prepared = detect.prepare_all(records, metas, context.masks, works)
    return Prepared(members, prepared, _sessions(context, members, prepared))


def _framed(
    context: Context, claims: Sequence[Claim], works: Sequence[pl.DataFrame | None]
) -> tuple[Sequence[Claim], Sequence[pl.DataFrame]]:
    """The records of each claim, with the formats of their headers in its description."""
    payloads = context.ledger.payloads([claim.batch_id for claim in claims if not claim.rescore])
    found: dict[int, list[tuple[Claim, pl.DataFrame]]] = {}
    by_formats: dict[tuple[str, ...], list[tuple[int, PushedLines]]] = {}
    together: list[tuple[int, PushedRecords]] = []
    characters = 0
    for place, (claim, work) in enumerate(zip(claims, works, strict=True)):
        if claim.rescore:
            found[place] = [(claim, _stored(context, claim))]
            continue
        payload = next(payloads)
        earlier = None if work is None else detect.formats_of(work)
        if claim.several:
            payload = _named(claim, payload)
        if isinstance(payload, PushedRecords) and (claim.several or earlier is None):
            together.append((place, payload))
            characters += payload.characters
            if characters >= FRAMED_TOGETHER:
                _add_by_workload(context, claims, together, found)
                together, characters = [], 0
            continue
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
    if together and not found:
        return _by_workload(context, claims, together)[1:]
    if together:
        _add_by_workload(context, claims, together, found)
    pairs = [pair for place in range(len(claims)) for pair in found[place]]
    return [claim for claim, _ in pairs], [records for _, records in pairs]


def _add_by_workload(
    context: Context,
    claims: Sequence[Claim],
    together: Sequence[tuple[int, PushedRecords]],
    found: dict[int, list[tuple[Claim, pl.DataFrame]]],
) -> None:
    """Adds the records of these batches to those found, by the place of their claim."""
    for place, member, rows in zip(*_by_workload(context, claims, together), strict=True):
        found.setdefault(place, []).append((member, rows))


def _by_workload(
    context: Context, claims: Sequence[Claim], together: Sequence[tuple[int, PushedRecords]]
) -> tuple[Sequence[int], list[Claim], Parts[pl.DataFrame]]:
    """The place of its claim, the claim and the records of each workload of these batches."""
    of_batches = [claims[place] for place, _ in together]
    names = [None if claim.several else claim.workload for claim in of_batches]
    rows = framed_by_workload([records for _, records in together], context.formats, names)
    lines = np.add.reduceat(rows.records.whole["lines"].to_numpy().astype(np.int64), rows.records.starts)
    members = []
    metas: dict[tuple[int, tuple[str, ...]], Meta] = {}
    columns = (rows.batches, rows.workloads, rows.formats, lines.tolist(), rows.records.heights)
    for number, workload, formats, n_lines, height in zip(*columns, strict=True):
        claim = of_batches[number]
        if (meta := metas.get((number, formats))) is None:
            meta = metas[number, formats] = replace(claim.meta, formats=formats)
        members.append(
            claim.part(workload, lines=n_lines, records=height, meta=meta)
            if claim.several
            else replace(claim, meta=meta)
        )
    return [together[number][0] for number in rows.batches], members, rows.records


def _named(claim: Claim, payload: pl.DataFrame | Pushed) -> PushedRecords:
    """The payload of a batch of several workloads. Raises BadPayload."""
    if not isinstance(payload, PushedRecords) or payload.workloads is None:
        raise BadPayload(f"the records of batch {claim.batch_id} name no workloads")
    return payload


def _with_formats(claim: Claim, formats: tuple[str, ...]) -> Claim:
    return replace(claim, meta=replace(claim.meta, formats=formats))


def _framed_alone(
    context: Context, claim: Claim, payload: pl.DataFrame | Pushed, earlier: tuple[str, ...] | None
) -> tuple[Claim, pl.DataFrame]:
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
) -> Parts[pl.Series] | None:
    """A fault here does not keep lines from the store."""
    try:
        keys = session_keys.find_keys(gathered(prepared, ["raw", "message"]), context.session_patterns)
    except (Exception, pl.exceptions.PanicException):  # noqa: BLE001 - good lines are no dead letter
        for claim in claims:
            logger(batch=claim.batch_id, workload=claim.workload).exception("batch.not_observed")
        return None
    return Parts(keys, heights_of(prepared))
