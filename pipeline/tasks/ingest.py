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
from pipeline.tasks.grouping.group_commit import Found, Unstored, commit_together, committed_or_stage, joined
from pipeline.tasks.separate import separate_others
from pipeline.tasks.step import perform_joint
from pipeline.watching.observation import Observed, observe_all

NAME: Final = TASK_INGEST


def run(context: Context, batch_id: str, *_: str) -> str | None:
    if context.app is not None:  # in one process, nothing comes meanwhile
        context.pace.wait()
    joint = partial(commit_together, begin=_begin, stage=Stage.INGEST, queue=QUEUE_INGEST)
    return perform_joint(context, Stage.INGEST, batch_id, joint)


def step(context: Context, claim: Claim) -> Stage | None:
    """The whole work on one batch alone."""
    ((_, found),) = _begin(context, [claim])
    return committed_or_stage(context, claim, found)


def _begin(context: Context, claims: Sequence[Claim]) -> Iterator[Found]:
    """The next stage of each batch with unknown lines, then the results of the others.

    Of a batch of several workloads, those with unknown lines become batches of their own."""
    context.pace.began(sum(claim.records for claim in claims), len(claims))
    batches = frontend.prepared_batches(context, claims, [None] * len(claims))
    versions = versions_for(context, [batch.claim for batch in batches])
    works = detect.distinct_all([batch.records for batch in batches], versions)
    works = detect.answer_all(works, context.verdicts.lookup)
    judged: list[tuple[Prepared, pl.DataFrame]] = []
    parts: dict[str, list[tuple[Prepared, pl.DataFrame]]] = {}
    for batch, work in zip(batches, works, strict=True):
        missed = work["template_id"].null_count()
        metrics.lookups(work.height - missed, missed)
        parts.setdefault(batch.claim.batch_id, []).append((batch, work))
    for claim in claims:
        ended = [(batch, work) for batch, work in parts[claim.batch_id] if _ends_here(claim, work)]
        judged += ended
        if claim.several:
            if len(ended) < len(parts[claim.batch_id]):
                separate_others(context, claim, [batch.claim.workload for batch, _ in ended])
            if not ended:
                yield claim, None
        elif not ended:
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


def versions_for(context: Context, claims: Sequence[Claim]) -> list[str]:
    """The model version that each is answered under. A baseline is learnt from, never judged."""
    scored = {claim.workload for claim in claims if claim.meta.purpose is not Purpose.BASELINE}
    versions = context.versions(scored)
    return [
        (claim.meta.purpose is not Purpose.BASELINE and versions[claim.workload]) or WARMING_VERSION
        for claim in claims
    ]


def unstored(
    context: Context, claims: Sequence[Claim], judged: Sequence[tuple[Prepared, pl.DataFrame]]
) -> Iterator[tuple[Claim, Unstored]]:
    """The results of batches whose lines are all answered, in the order of `claims`."""
    if not judged:
        return
    marks = context.marks.overlay()
    inputs = [detect.Judged(b.records, work, b.claim.meta, b.claim.workload) for b, work in judged]
    unmarked = detect.result_rows_all(inputs)
    rows = []
    for one, plain in zip(inputs, unmarked, strict=True):
        work = marks(one.work, one.workload)
        rows.append(plain if work is one.work else detect.result_rows_all([replace(one, work=work)])[0])
    batches = [batch for batch, _ in judged]
    columns = zip(
        batches,
        [work for _, work in judged],
        rows,
        detect.outcomes_all(rows),
        drift.measure_all([(plain, work) for plain, (_, work) in zip(unmarked, judged, strict=True)]),
        _observed([Observed(b.claim, r, b.sessions) for b, r in zip(batches, rows, strict=True)]),
        strict=True,
    )
    parts: dict[str, list[Unstored]] = {}
    for batch, work, stored, outcomes, measured, observation in columns:
        warming = bool(stored["score"].null_count()) and batch.claim.meta.purpose is Purpose.SCORE
        end = WorkloadEnd(
            workload=batch.claim.workload,
            lines=batch.claim.lines,
            records=batch.claim.records,
            outcomes=_counted(batch.claim, outcomes),
            observation=observation,
        )
        # The first model learnt from rescored lines: they would make its drift look too small.
        if batch.claim.meta.purpose is Purpose.SCORE and not warming and not batch.claim.rescore:
            end = replace(end, version=str(work["version"][0]), measured=measured)
        parts.setdefault(batch.claim.batch_id, []).append(Unstored(rows=stored, warming=warming, ends=(end,)))
    for claim in claims:
        if claim.batch_id in parts:
            yield claim, joined(parts[claim.batch_id])


def _counted(claim: Claim, outcomes: dict[str, int]) -> dict[str, int]:
    """The outcomes that the commit of a batch adds."""
    if claim.meta.purpose is Purpose.BASELINE:
        return outcomes | {"warming": 0}  # a baseline is never judged, so it waits for no model
    if claim.rescore:
        # They were counted when they were stored the first time.
        return outcomes | {"warming": outcomes["warming"] - claim.lines, "unclassified": 0}
    return outcomes


def _observed(several: Sequence[Observed]) -> list[bytes]:
    """The observation of each for the watcher, b"" for none. A fault here does not keep lines from the
    store."""
    try:
        return [b"" if found is None else found.pack() for found in observe_all(several)]
    except (Exception, pl.exceptions.PanicException):  # noqa: BLE001 - good lines are no dead letter
        if len(several) > 1:
            return [_observed([one])[0] for one in several]
        (claim,) = (one.claim for one in several)
        logger(batch=claim.batch_id, workload=claim.workload).exception("batch.not_observed")
        return [b""]
