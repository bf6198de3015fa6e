"""Stage ingest: parse, mask, answer from the cache. When every line is known, this task is all there is."""

from typing import Final

import polars as pl

from pipeline import detect
from pipeline.controller import drift
from pipeline.drain.verdicts import WARMING_VERSION
from pipeline.errors import BadPayload, ClaimLost
from pipeline.ledger import Claim, Stage
from pipeline.records import RAW_SCHEMA, Purpose
from pipeline.routing import TASK_INGEST
from pipeline.tasks.context import Context
from pipeline.tasks.step import perform

NAME: Final = TASK_INGEST


def run(context: Context, batch_id: str) -> str | None:
    return perform(context, Stage.INGEST, batch_id, step)


def step(context: Context, claim: Claim) -> Stage | None:
    prepared = detect.prepare(records_of(context, claim), claim.meta, context.masks)
    work = detect.distinct(prepared, version_for(context, claim))
    version = work["version"][0]
    work = detect.answer(work, context.verdicts.lookup(version, work["key"].to_list()))
    if detect.unknown(work).is_empty():
        finish(context, claim, prepared, work)
        return None
    then = Stage.DRAIN if version == WARMING_VERSION else Stage.INFER
    context.ledger.advance(claim, then, work)
    return then


def records_of(context: Context, claim: Claim) -> pl.DataFrame:
    """The batch's records; of a rescored batch, as they were stored the first time. Raises BadPayload."""
    if not claim.rescore:
        return context.ledger.payload(claim.batch_id)
    stored = context.sink(claim.meta.purpose).read(claim.batch_id, claim.workload)
    if stored is None:
        raise BadPayload(
            f"the stored results of batch {claim.batch_id} are gone; they cannot be scored again"
        )
    return stored.select(list(RAW_SCHEMA))


def version_for(context: Context, claim: Claim) -> str:
    """The model version this batch is answered under. A baseline is learnt from, never judged."""
    if claim.meta.purpose is Purpose.BASELINE:
        return WARMING_VERSION
    return context.version(claim.workload) or WARMING_VERSION


def finish(context: Context, claim: Claim, prepared: pl.DataFrame, work: pl.DataFrame) -> None:
    """Store the results, then commit. Written before committed: a crash in between writes the same file again.

    Raises ClaimLost. Whoever stalled past his claim must not write over what its next owner stored.
    """
    rows = detect.results(prepared, work, claim.meta, claim.workload)
    sink = context.sink(claim.meta.purpose)
    context.ledger.check(claim)
    sink.write(claim.batch_id, rows)
    warming = bool(rows["score"].null_count()) and claim.meta.purpose is Purpose.SCORE
    outcomes = detect.outcomes(rows)
    if claim.rescore:
        # They were counted when they were stored the first time.
        outcomes["warming"] -= claim.lines
        outcomes["unclassified"] = 0
    try:
        # What is scored again is what the first model learnt from: its drift would look too small.
        judged = claim.meta.purpose is Purpose.SCORE and not warming and not claim.rescore
        context.ledger.commit(
            claim,
            warming=warming,
            outcomes=outcomes,
            version=work["version"][0] if judged else "",
            measured=drift.measure(rows, work) if judged else {},
        )
    except ClaimLost:
        # The claim was lost while we wrote. Of a batch that was split or buried meanwhile nothing may stay here.
        if not claim.rescore and context.ledger.state(claim.batch_id) in ("split", "dead"):
            sink.remove(claim.batch_id, claim.workload)
        raise
