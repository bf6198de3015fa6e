"""Stage ingest: parse, mask, answer from the cache. When every line is known, this task is all there is."""

from dataclasses import replace
from functools import partial
from typing import Final

import polars as pl

from pipeline import detect
from pipeline.controller import drift
from pipeline.drain.verdicts import WARMING_VERSION
from pipeline.errors import BadPayload
from pipeline.logs import logger
from pipeline.messages.routing import QUEUE_INGEST, TASK_INGEST
from pipeline.observe import counters as metrics
from pipeline.records.batch import Purpose
from pipeline.records.delivery import Claim, Meta, Stage
from pipeline.sources.pushed import framed
from pipeline.tasks.context import Context
from pipeline.tasks.group_commit import Unstored, commit, commit_together
from pipeline.tasks.step import perform_joint
from pipeline.watching.observation import observe
from pipeline.watching.sessions import keys as session_keys

NAME: Final = TASK_INGEST


def run(context: Context, batch_id: str, *_: str) -> str | None:
    joint = partial(commit_together, begin=results_or_stage, stage=Stage.INGEST, queue=QUEUE_INGEST)
    return perform_joint(context, Stage.INGEST, batch_id, joint)


def step(context: Context, claim: Claim) -> Stage | None:
    """The whole work on one batch alone."""
    found = results_or_stage(context, claim)
    if isinstance(found, Stage):
        return found
    commit(context, claim, found)
    return None


def results_or_stage(context: Context, claim: Claim) -> Stage | Unstored:
    """The results, or the next stage where lines are unknown."""
    records, meta = records_of(context, claim)
    prepared = detect.prepare(records, meta, context.masks)
    work = detect.distinct(prepared, version_for(context, claim))
    version = work["version"][0]
    work = detect.answer(work, context.verdicts.lookup(version, work["key"].to_list()))
    missed = detect.unknown(work).height
    metrics.lookups(work.height - missed, missed)
    if not missed:
        return unstored(context, claim, prepared, work)
    then = Stage.DRAIN if version == WARMING_VERSION else Stage.INFER
    context.ledger.advance(claim, then, detect.with_rows(work, prepared))
    return then


def records_of(context: Context, claim: Claim) -> tuple[pl.DataFrame, Meta]:
    """The records of the batch, for a rescored one from the sink. Raises BadPayload, TooNew.

    The meta has the formats that framing found in pushed lines.
    """
    if not claim.rescore:
        records, formats = framed(context.ledger.payload(claim.batch_id), claim.meta.formats)
        return records, replace(claim.meta, formats=formats)
    with context.at_sink(claim.meta.purpose) as sink:
        stored = sink.read(claim.batch_id, claim.workload)
    if stored is None:
        raise BadPayload(
            f"the stored results of batch {claim.batch_id} are gone; they cannot be scored again"
        )
    return detect.stored_records(stored, claim.meta), claim.meta


def version_for(context: Context, claim: Claim) -> str:
    """The model version this batch is answered under. A baseline is learnt from, never judged."""
    if claim.meta.purpose is Purpose.BASELINE:
        return WARMING_VERSION
    return context.version(claim.workload) or WARMING_VERSION


def finish(context: Context, claim: Claim, prepared: pl.DataFrame, work: pl.DataFrame) -> None:
    """Store the results, then commit. Raises ClaimLost."""
    commit(context, claim, unstored(context, claim, prepared, work))


def unstored(context: Context, claim: Claim, prepared: pl.DataFrame, work: pl.DataFrame) -> Unstored:
    """The results of a batch whose lines are all answered."""
    unmarked = detect.result_rows(prepared, work, claim.meta, claim.workload)
    marked = context.marks.lay_over(work, claim.workload)
    rows = unmarked if marked is work else detect.result_rows(prepared, marked, claim.meta, claim.workload)
    warming = bool(rows["score"].null_count()) and claim.meta.purpose is Purpose.SCORE
    outcomes = detect.outcomes(rows)
    if claim.meta.purpose is Purpose.BASELINE:
        outcomes["warming"] = 0  # a baseline is never judged, so it waits for no model
    if claim.rescore:
        # They were counted when they were stored the first time.
        outcomes["warming"] -= claim.lines
        outcomes["unclassified"] = 0
    # The first model learnt from rescored lines: they would make its drift look too small.
    judged = claim.meta.purpose is Purpose.SCORE and not warming and not claim.rescore
    return Unstored(
        rows=rows,
        warming=warming,
        outcomes=outcomes,
        version=work["version"][0] if judged else "",
        measured=drift.measure(unmarked, work) if judged else {},
        observation=_observed(context, claim, prepared, rows),
    )


def _observed(context: Context, claim: Claim, prepared: pl.DataFrame, rows: pl.DataFrame) -> bytes:
    """The observation of the batch for the watcher, b"" for none. A fault here does not keep lines from the
    store."""
    try:
        observation = observe(claim, rows, session_keys.extract(prepared, context.session_patterns))
        return b"" if observation is None else observation.pack()
    except (Exception, pl.exceptions.PanicException):  # noqa: BLE001 - good lines are no dead letter
        logger(batch=claim.batch_id, workload=claim.workload).exception("batch.not_observed")
        return b""
