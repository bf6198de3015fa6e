"""Stage infer: score the distinct unknown masked lines with the version the batch began with.

A process of the GPU queue scores under its share of the pool; without one it hands the batch to the CPU queue at once.
"""

import time
from typing import Final

from pipeline import detect, metrics
from pipeline.batches import Claim, Stage
from pipeline.errors import DeviceFailed, LogweirError
from pipeline.models.threshold import Evidence
from pipeline.routing import QUEUE_CPU, TASK_INFER
from pipeline.tasks.context import Context
from pipeline.tasks.step import perform

NAME: Final = TASK_INFER


def run(context: Context, batch_id: str, *_: str) -> str | None:
    if context.share is None:
        context.prepare()  # a cold start takes seconds, which are no part of a step
        return perform(context, Stage.INFER, batch_id, step)
    with context.share.using() as ours:
        if ours:
            return perform(context, Stage.INFER, batch_id, step)
        # Training holds or wants the GPU: the batch goes on without it.
        backfill = bool(context.ledger.backfills([batch_id]))
        context.submit.wake(Stage.INFER, batch_id, backfill=backfill, queue=QUEUE_CPU)
    return None


def step(context: Context, claim: Claim) -> Stage | None:
    work = context.ledger.work(claim.batch_id)
    version = work["version"][0]
    # Another batch may have brought the answers while this one waited: each line is scored once.
    work = detect.answer(work, context.verdicts.lookup(version, detect.unknown(work)["key"].to_list()))
    rows = detect.unknown(work)
    if not rows.is_empty():
        work = detect.with_evidence(work, _score(context, version, rows["masked"].to_list()))
    context.ledger.advance(claim, Stage.DRAIN, work)
    return Stage.DRAIN


def _score(context: Context, version: str, masked: list[str]) -> list[Evidence]:
    """Raises BadBundle; DeviceFailed for whatever a GPU raises, which is no fault of the lines: the CPU may score them."""
    try:
        model = context.scorer(version)
        began = time.monotonic()
        evidence = model.score(masked)
        metrics.scored(len(masked), time.monotonic() - began, context.place)
        return evidence
    except Exception as exc:
        if isinstance(exc, LogweirError) or context.share is None or context.place == "cpu":
            raise
        context.share.fail(exc)
        raise DeviceFailed(f"the GPU failed ({type(exc).__name__}); the batch is scored elsewhere") from exc
