"""Stage ingest: parse, mask, answer from the cache. When every line is known, this task is all there is."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import polars as pl

from pipeline import detect
from pipeline.controller.drift_counts import measure_all
from pipeline.drain.verdicts import WARMING_VERSION
from pipeline.logs import logger
from pipeline.messages.routing import QUEUE_INGEST, TASK_INGEST
from pipeline.observe import counters as metrics
from pipeline.records.batch import Purpose
from pipeline.records.columns import chosen, heights_of, joined
from pipeline.records.delivery import Claim, Stage, WorkloadEnd
from pipeline.tasks import frontend
from pipeline.tasks.context import Context
from pipeline.tasks.frontend import Prepared
from pipeline.tasks.grouping.group_commit import Found, Unstored, commit_together, committed_or_stage
from pipeline.tasks.separate import separate_others
from pipeline.tasks.step import perform_joint
from pipeline.watching.observation import observe_all

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
    versions = versions_for(context, batches.claims)
    works = detect.distinct_all(batches.records, versions)
    works = detect.answer_all(works, context.verdicts.lookup)
    heights = heights_of(works)
    missed = detect.unknown_in_each(works)
    metrics.lookups(sum(heights) - sum(missed), sum(missed))
    judged: list[int] = []
    places_of: dict[str, list[int]] = {}
    for place, batch in enumerate(batches.claims):
        places_of.setdefault(batch.batch_id, []).append(place)
    for claim in claims:
        places = places_of[claim.batch_id]
        # Lines that wait for a model wait in a batch of their workload.
        ended = [
            place
            for place in places
            if not missed[place] and not (claim.several and versions[place] == WARMING_VERSION)
        ]
        judged += ended
        if claim.several:
            if len(ended) < len(places):
                separate_others(context, claim, [batches.claims[place].workload for place in ended])
            if not ended:
                yield claim, None
        elif not ended:
            (place,) = places
            work, records = works[place], batches.records[place]
            then = Stage.DRAIN if versions[place] == WARMING_VERSION else Stage.INFER
            context.ledger.advance(
                claim, then, detect.with_rows(work, records, batches.claims[place].meta.formats)
            )
            yield claim, then
    yield from unstored(context, claims, batches.chosen(judged), chosen(works, judged))


def versions_for(context: Context, claims: Sequence[Claim]) -> list[str]:
    """The model version that each is answered under. A baseline is learnt from, never judged."""
    scored = {claim.workload for claim in claims if claim.meta.purpose is not Purpose.BASELINE}
    versions = context.versions(scored)
    return [
        (claim.meta.purpose is not Purpose.BASELINE and versions[claim.workload]) or WARMING_VERSION
        for claim in claims
    ]


def unstored(
    context: Context, claims: Sequence[Claim], judged: Prepared, works: Sequence[pl.DataFrame]
) -> Iterator[tuple[Claim, Unstored]]:
    """The results of batches whose lines are all answered, in the order of `claims`."""
    members = judged.claims
    if not members:
        return
    inputs = detect.Judged(
        judged.records, works, [claim.meta for claim in members], [claim.workload for claim in members]
    )
    unmarked = detect.result_rows_all(inputs)
    rows = _marked(context, inputs, unmarked)
    waiting = detect.unscored_in_each(rows)
    versions = detect.work_versions(works)
    columns = zip(
        members,
        versions,
        waiting,
        detect.outcomes_all(rows),
        measure_all(unmarked, works),
        _observed(members, rows, [None] * len(members) if judged.sessions is None else judged.sessions),
        strict=True,
    )
    ends: dict[str, list[WorkloadEnd]] = {}
    warming: dict[str, bool] = {}
    for claim, version, unscored, outcomes, measured, observation in columns:
        scored = claim.meta.purpose is Purpose.SCORE
        # The first model learnt from rescored lines: they would make its drift look too small.
        drifts = scored and not unscored and not claim.rescore
        end = WorkloadEnd(
            workload=claim.workload,
            lines=claim.lines,
            records=claim.records,
            outcomes=_counted(claim, outcomes),
            version=version if drifts else "",
            measured=measured if drifts else {},
            observation=observation,
        )
        ends.setdefault(claim.batch_id, []).append(end)
        warming[claim.batch_id] = scored and unscored
    at = 0
    for claim in claims:
        if found := ends.get(claim.batch_id):
            stored = joined(rows, at, at + len(found))
            # Of several workloads, those that wait for a model have left the batch.
            waits = len(found) == 1 and warming[claim.batch_id]
            yield claim, Unstored(rows=stored, warming=waits, ends=tuple(found))
            at += len(found)


def _marked(context: Context, judged: detect.Judged, rows: Sequence[pl.DataFrame]) -> Sequence[pl.DataFrame]:
    """The result rows as people see them: marks are laid over them."""
    marks = context.marks.overlay_if_any()
    if marks is None:
        return rows
    found = list(rows)
    for place, (work, workload) in enumerate(zip(judged.works, judged.workloads, strict=True)):
        marked = marks(work, workload)
        if marked is not work:
            found[place] = detect.result_rows(judged.prepared[place], marked, judged.metas[place], workload)
    return found


def _counted(claim: Claim, outcomes: dict[str, int]) -> dict[str, int]:
    """The outcomes that the commit of a batch adds."""
    if claim.meta.purpose is Purpose.BASELINE:
        return outcomes | {"warming": 0}  # a baseline is never judged, so it waits for no model
    if claim.rescore:
        # They were counted when they were stored the first time.
        return outcomes | {"warming": outcomes["warming"] - claim.lines, "unclassified": 0}
    return outcomes


def _observed(
    claims: Sequence[Claim], rows: Sequence[pl.DataFrame], sessions: Sequence[pl.Series | None]
) -> list[bytes]:
    """The observation of each for the watcher, b"" for none. A fault here does not keep lines from the
    store."""
    try:
        return [b"" if found is None else found.pack() for found in observe_all(claims, rows, sessions)]
    except (Exception, pl.exceptions.PanicException):  # noqa: BLE001 - good lines are no dead letter
        if len(claims) > 1:
            each = zip(claims, rows, sessions, strict=True)
            return [_observed([claim], [some], [keys])[0] for claim, some, keys in each]
        (claim,) = claims
        logger(batch=claim.batch_id, workload=claim.workload).exception("batch.not_observed")
        return [b""]
