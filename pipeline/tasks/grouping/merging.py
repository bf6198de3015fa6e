"""Many small batches in one pass of the model: a scoring worker takes along the batches that wait behind its
own (tasks/grouping/along.py). The promises to each batch stay:

* A batch that failed before, or a half of one, is scored alone. So is every batch where only one attempt is
  allowed.
* A pass that fails because of a line says nothing about the other batches: each is scored alone then.
* A worker that is killed or hangs costs each batch one attempt. Scored alone, only the one at fault fails
  again.
* Fresh batches take no backfill along, so they do not wait for it. `PASS_LINES`, `PASS_BATCHES` and
  `PASS_BYTES` end a pass.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Final, NamedTuple

import polars as pl

from pipeline import detect
from pipeline.ledger.renewal import ClaimRenewal
from pipeline.logs import logger
from pipeline.messages.routing import QUEUE_CPU, QUEUE_GPU
from pipeline.records.delivery import Claim, Stage
from pipeline.tasks.context import Context
from pipeline.tasks.grouping.along import claim_others
from pipeline.tasks.step import StepResult, attempt, is_external, suspect

# Distinct lines that fill a pass. A CPU core scores 2,100 lines/s ten at a time, 8,000 two hundred at a time,
# and no more beyond; 512 lines take it 0.07 s. A GPU gets as many as one encoding holds (models/line.py).
PASS_LINES: Final = {"cpu": 512, "cuda": 2_048}
PASS_BATCHES: Final = 64
PASS_BYTES: Final = 32 << 20  # of work columns, which are as long as the batch even if few lines are unknown

# Fills in the verdicts that are known by now for batches of one version; keeps their order.
Answer = Callable[[Context, str, list[pl.DataFrame]], list[pl.DataFrame]]


class ClaimedWork(NamedTuple):
    """A claimed batch, the version it began with, and its work columns."""

    claim: Claim
    version: str
    work: pl.DataFrame


def score_together(
    context: Context, claim: Claim, holding: ClaimRenewal, answer: Answer
) -> Iterator[tuple[Claim, StepResult]]:
    """The results of the batch and of those that it takes along (a `JointStep`)."""

    def one(context: Context, claim: Claim) -> Stage:
        batch = _claimed_work(context, claim)
        (work,) = answer(context, batch.version, [batch.work])
        return _hand_on(context, claim, work=work)

    if suspect(context, claim):
        yield claim, attempt(context, claim, one)
        return
    groups: dict[str, list[ClaimedWork]] = {}  # by version, the version of `claim` first
    for member, batch in _fill_pass(context, claim, holding):
        if isinstance(batch, ClaimedWork):
            groups.setdefault(batch.version, []).append(batch)
        else:
            yield member, batch
    for version, group in groups.items():
        try:
            works = answer(context, version, [batch.work for batch in group])
        except Exception as exc:  # noqa: BLE001 - step.py logs it when it settles the batch
            if len(group) == 1 or is_external(exc):
                yield from ((batch.claim, exc) for batch in group)
                continue
            logger(version=version, batches=len(group)).warning("merging.failed", why=str(exc))
            yield from ((batch.claim, attempt(context, batch.claim, one)) for batch in group)
            continue
        for batch, work in zip(group, works, strict=True):
            yield batch.claim, attempt(context, batch.claim, partial(_hand_on, work=work))


def _fill_pass(
    context: Context, claim: Claim, holding: ClaimRenewal
) -> Iterator[tuple[Claim, ClaimedWork | Exception]]:
    """The batch and those to take along, until the pass is full."""
    max_lines = PASS_LINES.get(context.models.place.partition(":")[0], PASS_LINES["cpu"])
    lines: set[tuple[str, int]] = set()
    size = 0
    queue = QUEUE_CPU if context.share is None else QUEUE_GPU
    others = claim_others(context, claim, holding, stage=Stage.INFER, queue=queue, limit=PASS_BATCHES)
    for member in chain([claim], others):
        try:
            batch = _claimed_work(context, member)
            unknown = detect.unknown(batch.work)["pattern_id"].to_list()
        except Exception as exc:  # noqa: BLE001 - step.py logs it when it settles the batch
            yield member, exc
            continue
        yield member, batch
        lines.update((batch.version, pattern_id) for pattern_id in unknown)
        size += int(batch.work.estimated_size())
        if len(lines) >= max_lines or size >= PASS_BYTES:
            return


def _claimed_work(context: Context, claim: Claim) -> ClaimedWork:
    work = context.ledger.work(claim.batch_id)
    return ClaimedWork(claim, work["version"][0], work)


def _hand_on(context: Context, claim: Claim, *, work: pl.DataFrame) -> Stage:
    context.ledger.advance(claim, Stage.DRAIN, work)
    return Stage.DRAIN
