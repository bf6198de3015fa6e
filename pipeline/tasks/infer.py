"""Stage infer: one pass scores the distinct unknown masked lines of many batches (grouping/merging.py).

A line is scored with the version that its batch began with, and once by a process. The verdict cache holds it
only after drain has learnt it, so a process remembers its evidence until then.

A process of the GPU queue scores under its share of the pool. Without a share it hands the batch to the CPU
queue."""

import time
from collections.abc import Iterator, Mapping
from typing import Final

import polars as pl

from pipeline import detect
from pipeline.errors import DeviceFailed, LogweirError
from pipeline.ledger.renewal import ClaimRenewal
from pipeline.messages.routing import QUEUE_CPU, TASK_INFER
from pipeline.models.evidence import Evidence
from pipeline.observe import counters as metrics
from pipeline.records.columns import Parts
from pipeline.records.delivery import Claim, Stage
from pipeline.tasks.context import Context
from pipeline.tasks.grouping.merging import score_together
from pipeline.tasks.step import StepResult, perform_joint

NAME: Final = TASK_INFER


def run(context: Context, batch_id: str, *_: str) -> str | None:
    if context.share is None:
        context.models.prepare()  # a cold start takes seconds, which are no part of a step
        return perform_joint(context, Stage.INFER, batch_id, step)
    with context.share.using() as on_device:
        if on_device:
            return perform_joint(context, Stage.INFER, batch_id, step)
        # Training holds or wants the GPU: the batch goes on without it.
        backfill = bool(context.ledger.backlog.backfills([batch_id]))
        context.submit.wake(Stage.INFER, batch_id, backfill=backfill, queue=QUEUE_CPU)
    return None


def step(context: Context, claim: Claim, holding: ClaimRenewal) -> Iterator[tuple[Claim, StepResult]]:
    """Score the batch and those that wait behind it."""
    return score_together(context, claim, holding, answered)


def answered(context: Context, version: str, works: list[pl.DataFrame]) -> list[pl.DataFrame]:
    """Add the verdicts that are known by now, and evidence for all other lines."""
    work = works[0] if len(works) == 1 else pl.concat(works)
    # Another batch may have brought the answers meanwhile: each line is scored once.
    keys = detect.unknown(work)["key"].unique().to_list()
    work = detect.answer(work, context.verdicts.lookup(version, keys))
    rows = detect.unknown(work).unique("pattern_id", keep="first", maintain_order=True)
    if not rows.is_empty():
        lines = dict(zip(rows["pattern_id"].to_list(), rows["masked"].to_list(), strict=True))
        work = detect.with_evidence(work, _evidence(context, version, lines))
    return list(Parts(work, [each.height for each in works]))


def _evidence(context: Context, version: str, lines: Mapping[int, str]) -> dict[int, Evidence]:
    """The evidence of masked lines by `pattern_id`."""
    known = context.evidence
    found = {i: known[version, i] for i in lines if (version, i) in known}
    if new := [i for i in lines if i not in found]:
        found |= zip(new, _score(context, version, [lines[i] for i in new]), strict=True)
        known.update({(version, i): found[i] for i in new})
    return found


def _score(context: Context, version: str, masked: list[str]) -> list[Evidence]:
    """Raises BadBundle, and DeviceFailed for any error of a GPU: no fault of the lines, which the CPU may
    score."""
    try:
        model = context.models.scorer(version)
        began = time.monotonic()
        evidence = model.score(masked)
        metrics.scored(len(masked), time.monotonic() - began, context.models.place)
        return evidence
    except Exception as exc:
        if isinstance(exc, LogweirError) or context.share is None or context.models.place == "cpu":
            raise
        context.share.fail(exc)
        raise DeviceFailed(f"the GPU failed ({type(exc).__name__}); the batch is scored elsewhere") from exc
