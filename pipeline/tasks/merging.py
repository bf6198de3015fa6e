"""Many small batches in one pass of the model: a scoring worker takes along what waits behind its batch.

Their messages are only looked at, so whoever gets them finds the batches held or done, as the ledger allows at any
time. What is promised of a batch stays as it is:

* One that has failed before, or is a part of one, is worked on alone, and so is everything where one attempt must do.
* A pass that fails because of a line says nothing of the others: they are given back uncounted, and not taken along
  again by this process. The batch whose turn it was goes on alone, and counts.
* A worker that is killed or hangs costs each of them one attempt. Alone from then on, only the one at fault fails again.
* Fresh batches take no backfill along, so they do not wait for it; a pass is full with `FULL` lines, `ALONG` batches or `BYTES`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Final, NamedTuple

import polars as pl

from pipeline import detect
from pipeline.errors import RedisUnavailable
from pipeline.ledger.batches import HALF, Claim, Stage
from pipeline.ledger.renewal import Holding
from pipeline.logs import logger
from pipeline.messages.routing import QUEUE_CPU, QUEUE_GPU
from pipeline.tasks.context import Context
from pipeline.tasks.step import End, GivenBack, attempt, outside, suspect

# Distinct lines that fill a pass. A core of a CPU scores 2,100 lines/s ten at a time, 8,000 two hundred at a time and no
# more of them however many there are; 512 take it 0.07 s. A GPU gets what is encoded at once (models/line.py).
FULL: Final = {"cpu": 512, "cuda": 2_048}
ALONG: Final = 64  # batches
BYTES: Final = (
    32 << 20
)  # of their works: what is known of a batch is as long as the batch, however few lines are unknown
APART_MOST: Final = 10_000  # batches that are remembered as not to be taken along

# The works of some batches of one version, with what is known now filled in, in the same order.
Answered = Callable[[Context, str, list[pl.DataFrame]], list[pl.DataFrame]]


class Part(NamedTuple):
    """A batch in hand: its claim, the version it began with, and its work."""

    claim: Claim
    version: str
    work: pl.DataFrame


def merged(context: Context, claim: Claim, held: Holding, answered: Answered) -> Iterator[tuple[Claim, End]]:
    """What becomes of the batch and of those that it takes along (tasks/step.py, `Joint`)."""

    def alone(context: Context, claim: Claim) -> Stage:
        part = _part(context, claim)
        (work,) = answered(context, part.version, [part.work])
        return _handed_on(context, claim, work=work)

    if claim.batch_id in context.apart or suspect(context, claim):
        yield claim, attempt(context, claim, alone)
        return
    groups: dict[str, list[Part]] = {}  # by version, its own first
    for taken, found in _taken(context, claim, held):
        if isinstance(found, Part):
            groups.setdefault(found.version, []).append(found)
        else:
            yield taken, found
    for version, group in groups.items():
        try:
            works = answered(context, version, [part.work for part in group])
        except Exception as exc:  # noqa: BLE001 - it is told by whoever settles the batch
            if len(group) == 1 or outside(exc):
                yield from ((part.claim, exc) for part in group)
                continue
            logger(version=version, batches=len(group)).warning("merging.failed", why=str(exc))
            yield from _apart(context, [part.claim for part in group if part.claim is not claim], exc)
            if group[0].claim is claim:
                yield claim, attempt(context, claim, alone)
            continue
        for part, work in zip(group, works, strict=True):
            yield part.claim, attempt(context, part.claim, partial(_handed_on, work=work))


def _taken(context: Context, claim: Claim, held: Holding) -> Iterator[tuple[Claim, Part | Exception]]:
    """The batch and those to take along, until they are a full pass."""
    full = FULL.get(context.place.partition(":")[0], FULL["cpu"])
    lines: set[tuple[str, int]] = set()
    size = 0
    for taken in chain([claim], _others(context, claim, held)):
        try:
            part = _part(context, taken)
            unknown = detect.unknown(part.work)["pattern_id"].to_list()
        except Exception as exc:  # noqa: BLE001 - it is told by whoever settles the batch
            yield taken, exc
            continue
        yield taken, part
        lines.update((part.version, pattern_id) for pattern_id in unknown)
        size += int(part.work.estimated_size())
        if len(lines) >= full or size >= BYTES:
            return


def _others(context: Context, claim: Claim, held: Holding) -> Iterator[Claim]:
    """Batches behind this one, each claimed when it is asked for."""
    queue = QUEUE_CPU if context.share is None else QUEUE_GPU
    try:
        for batch_id in context.submit.next_ids(queue, ALONG, backfill=claim.backfill):
            if HALF in batch_id or batch_id in context.apart:
                continue
            try:
                other = context.ledger.claim(batch_id, Stage.INFER, context.owner, first=True)
            except RedisUnavailable:
                raise
            except Exception as exc:  # noqa: BLE001 - whose turn it is then says so; those in hand must not suffer
                logger(batch=batch_id).warning("merging.left_alone", why=str(exc))
                context.apart[batch_id] = None
                continue
            if isinstance(other, Claim):
                held.add(other)
                yield other
    except RedisUnavailable:
        return  # what follows says so


def _part(context: Context, claim: Claim) -> Part:
    work = context.ledger.work(claim.batch_id)
    return Part(claim, work["version"][0], work)


def _handed_on(context: Context, claim: Claim, *, work: pl.DataFrame) -> Stage:
    context.ledger.advance(claim, Stage.DRAIN, work)
    return Stage.DRAIN


def _apart(context: Context, claims: list[Claim], exc: Exception) -> Iterator[tuple[Claim, End]]:
    """Who of them is at fault nobody knows, so nobody's attempt counts."""
    for claim in claims:
        context.apart[claim.batch_id] = None
        yield claim, GivenBack(f"scored together with others it failed ({exc}); it is tried alone")
    while len(context.apart) > APART_MOST:
        context.apart.popitem(last=False)
