"""Stage ingest: parse, mask, answer from the cache. When every line is known, this task is all there is."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import polars as pl

from pipeline import detect
from pipeline.controller import drift
from pipeline.drain.verdicts import WARMING_VERSION
from pipeline.logs import logger
from pipeline.messages.routing import QUEUE_INGEST, TASK_INGEST
from pipeline.observe import counters as metrics
from pipeline.records.batch import Purpose
from pipeline.records.delivery import Claim, Stage, WorkloadEnd
from pipeline.tasks import frontend
from pipeline.tasks.context import Context
from pipeline.tasks.frontend import Prepared
from pipeline.tasks.group_commit import Found, Unstored, commit_together, committed_or_stage, joined
from pipeline.tasks.separate import separate_others
from pipeline.tasks.step import perform_joint
from pipeline.watching.observation import observe

NAME: Final = TASK_INGEST


def run(context: Context, batch_id: str, *_: str) -> str | None:
    joint = partial(commit_together, begin=_begin, stage=Stage.INGEST, queue=QUEUE_INGEST)
    return perform_joint(context, Stage.INGEST, batch_id, joint)


def step(context: Context, claim: Claim) -> Stage | None:
    """The whole work on one batch alone."""
    ((_, found),) = _begin(context, [claim])
    return committed_or_stage(context, claim, found)


def _begin(context: Context, claims: Sequence[Claim]) -> Iterator[Found]:
    """The next stage of each batch with unknown lines, then the results of the others.

    Of a batch of several workloads, those with unknown lines become batches of their own."""
    batches = frontend.prepared_batches(context, claims, [None] * len(claims))
    versions = [version_for(context, batch.claim) for batch in batches]
    works = detect.distinct_all([batch.records for batch in batches], versions)
    works = detect.answer_all(works, context.verdicts.lookup)
    judged: list[tuple[Prepared, pl.DataFrame]] = []
    parts: dict[str, list[tuple[Prepared, pl.DataFrame]]] = {}
    for batch, work in zip(batches, works, strict=True):
        missed = work["template_id"].null_count()
        metrics.lookups(work.height - missed, missed)
        parts.setdefault(batch.claim.batch_id, []).append((batch, work))
    for claim in claims:
        known = [(batch, work) for batch, work in parts[claim.batch_id] if _ends_here(claim, work)]
        judged += known
        if claim.several:
            if len(known) < len(parts[claim.batch_id]):
                separate_others(context, claim, [batch.claim.workload for batch, _ in known])
            if not known:
                yield claim, None
        elif not known:
            ((batch, work),) = parts[claim.batch_id]
            then = Stage.DRAIN if work["version"][0] == WARMING_VERSION else Stage.INFER
            context.ledger.advance(
                claim, then, detect.with_rows(work, batch.records, batch.claim.meta.formats)
            )
            yield claim, then
    yield from unstored(context, claims, judged)


def _ends_here(claim: Claim, work: pl.DataFrame) -> bool:
    """True if all lines have their verdict. Lines that wait for a model wait in a batch of their workload."""
    if claim.several and work["version"][0] == WARMING_VERSION:
        return False
    return not work["template_id"].null_count()


def version_for(context: Context, claim: Claim) -> str:
    """The model version this batch is answered under. A baseline is learnt from, never judged."""
    if claim.meta.purpose is Purpose.BASELINE:
        return WARMING_VERSION
    return context.version(claim.workload) or WARMING_VERSION


def unstored(
    context: Context, claims: Sequence[Claim], judged: Sequence[tuple[Prepared, pl.DataFrame]]
) -> Iterator[tuple[Claim, Unstored]]:
    """The results of batches whose lines are all answered, in the order of `claims`."""
    if not judged:
        return
    marks = context.marks.overlay()
    inputs = [detect.Judged(b.records, work, b.claim.meta, b.claim.workload) for b, work in judged]
    parts: dict[str, list[Unstored]] = {}
    for (batch, work), one, unmarked in zip(judged, inputs, detect.result_rows_all(inputs), strict=True):
        marked = marks(work, batch.claim.workload)
        rows = unmarked if marked is work else detect.result_rows_all([replace(one, work=marked)])[0]
        parts.setdefault(batch.claim.batch_id, []).append(_unstored(batch, work, unmarked, rows))
    for claim in claims:
        if claim.batch_id in parts:
            yield claim, joined(parts[claim.batch_id])


def _unstored(batch: Prepared, work: pl.DataFrame, unmarked: pl.DataFrame, rows: pl.DataFrame) -> Unstored:
    claim = batch.claim
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
    end = WorkloadEnd(
        workload=claim.workload,
        lines=claim.lines,
        records=claim.records,
        outcomes=outcomes,
        version=work["version"][0] if judged else "",
        measured=drift.measure(unmarked, work) if judged else {},
        observation=_observed(claim, rows, batch.sessions),
    )
    return Unstored(rows=rows, warming=warming, ends=(end,))


def _observed(claim: Claim, rows: pl.DataFrame, sessions: pl.Series | None) -> bytes:
    """The observation of the batch for the watcher, b"" for none. A fault here does not keep lines from the
    store."""
    try:
        observation = observe(claim, rows, sessions)
        return b"" if observation is None else observation.pack()
    except (Exception, pl.exceptions.PanicException):  # noqa: BLE001 - good lines are no dead letter
        logger(batch=claim.batch_id, workload=claim.workload).exception("batch.not_observed")
        return b""
