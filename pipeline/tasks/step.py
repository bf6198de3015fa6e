"""One stage of one batch, or of several: claim, do the step, hand on. Every task that moves a batch runs through here.

The claim is taken before the step and counted as an attempt, so that a killed worker counts too. Faults of the
surroundings (Redis, a full disk, a lease, a damaged model) give the batch back uncounted; faults of the batch are
counted, and after the last attempt it is split, or buried when it is a single record. A step that does not end is such
a fault too: its process ends itself.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import redis

from pipeline import detect
from pipeline.errors import (
    BadBundle,
    ClaimLost,
    DeviceFailed,
    LeaseRefused,
    LogweirError,
    ModelUnavailable,
    RedisUnavailable,
    Rejected,
    Retryable,
    SinkUnavailable,
)
from pipeline.ledger.batches import HALF, Claim, Stage
from pipeline.ledger.renewal import Holding
from pipeline.logs import logger
from pipeline.observe import counters as metrics
from pipeline.redis.connection import is_refusal
from pipeline.sources.pushed import framed
from pipeline.tasks.context import Context

# A step says where the batch goes next; None: it is committed.
Step = Callable[[Context, Claim], Stage | None]


@dataclass(frozen=True, slots=True)
class GivenBack:
    """Nothing is wrong with the batch, and it is not done: it is tried again at once, uncounted."""

    why: str


# What came of a batch: where it goes next, or why it does not.
End = Stage | GivenBack | Exception | None
# A step of the batch whose turn it is and of those that it adds to what is held; each is told of once, as soon as it ends.
Joint = Callable[[Context, Claim, Holding], Iterable[tuple[Claim, End]]]

RETRY_S: Final = 2.0
WAITS_FOR: Final = (
    (SinkUnavailable, "sink"),
    (RedisUnavailable, "redis"),
    (DeviceFailed, "device"),
    (LeaseRefused, "lease"),
    (ModelUnavailable, "model"),
    (BadBundle, "model"),
)
# A part of a batch that was given up has fewer lines, so it has less time; but always enough to load a model.
PART_S: Final = 30.0
# The exit code of a process whose step did not end.
HUNG: Final = 74
# Of the stack of a step that did not end: enough to see where it waits.
WHERE_FRAMES: Final = 12


def perform(context: Context, stage: Stage, batch_id: str, step: Step) -> str | None:
    """Run `step` on the batch if it is ours to run; the reason when it was and the step was not done.

    The reason is for people: whatever follows from it stands in the ledger already.
    """

    def one(context: Context, claim: Claim, _: Holding) -> Iterator[tuple[Claim, End]]:
        yield claim, attempt(context, claim, step)

    return perform_joint(context, stage, batch_id, one)


def perform_joint(context: Context, stage: Stage, batch_id: str, joint: Joint) -> str | None:
    """`perform` with a step that may take other batches along. The time a step may take holds for all of them."""
    log = logger(batch=batch_id, stage=stage.value)
    began = time.monotonic()
    why = None
    try:
        claim = context.ledger.claim(batch_id, stage, context.owner)
        if isinstance(claim, str):
            if claim == "newer":
                context.presence.complain(
                    stage.value, f"batch {batch_id} is of a newer build; its workers take it, update this one"
                )
            log.debug("batch.left_alone", why=claim)
            metrics.step(stage, "skipped")
            return None
        limit_s = _limit_s(context, claim)
        with context.ledger.holding(
            claim, at_most_s=limit_s, late=lambda claims: _hung(context, claims, limit_s)
        ) as held:
            for ended, end in joint(context, claim, held):
                then, reason = _settled(context, ended, end)
                held.drop(ended)
                _told(context, ended, then, reason, time.monotonic() - began)
                if ended is claim:
                    why = reason
    except (RedisUnavailable, redis.ConnectionError, redis.TimeoutError) as exc:
        # What is claimed expires by itself and the sweeper sends it again.
        log.warning("redis.away", why=str(exc))
        metrics.step(stage, "away")
        return str(exc)
    return why


def attempt(context: Context, claim: Claim, step: Step) -> End:
    """What comes of a step of one batch. One that has used up its attempts is given up, not tried."""
    if claim.exhausted:
        return None
    try:
        return step(context, claim)
    except Exception as exc:  # noqa: BLE001 - whoever settles the batch tells it, with its traceback
        return exc


def suspect(context: Context, claim: Claim) -> bool:
    """Whether the batch may be at fault for what happened before: then others must not suffer with it."""
    return claim.attempts > 1 or HALF in claim.batch_id or context.settings.internal.max_attempts == 1


def outside(exc: Exception) -> bool:
    """Whether it is a fault of the surroundings, which says nothing of the batch."""
    return isinstance(exc, Retryable | BadBundle | redis.ConnectionError | redis.TimeoutError) or (
        isinstance(exc, redis.ResponseError) and is_refusal(exc)
    )


def _limit_s(context: Context, claim: Claim) -> float:
    """How long the step may take: `step_s`, and less for a part of a batch, so that bad lines are soon found."""
    limit = context.settings.stack.step_s
    if HALF not in claim.batch_id:
        return limit
    return min(limit, max(PART_S, limit * claim.records / context.settings.internal.batch_records))


def _hung(context: Context, claims: list[Claim], limit_s: float) -> None:
    """The step does not end, and nothing ends a thread: the process goes, and whoever supervises it starts another.

    The attempt stays counted, unless it is the sink that does not answer: of several batches too, since nobody knows
    which one hangs, and each is tried alone then. The first one rests for as long as it took, so that others get their
    turn.
    """
    in_sink, first = context.in_sink, claims[0]
    why = f"stage {first.stage} did not end within {limit_s:g} s"
    if in_sink:
        why += ": the results are not stored or read; look after their disk or their server"
    log = logger(batch=first.batch_id, stage=first.stage.value, attempt=first.attempts)
    log.error("step.hung", why=why, records=first.records, batches=len(claims), where=_where())
    with suppress(RedisUnavailable, redis.RedisError):  # then their claims expire
        for claim in claims:
            rest_s = limit_s if claim is first else 0.0
            context.ledger.release(claim, reason=why, delay_s=rest_s, counted=not in_sink)
        if in_sink:
            context.presence.complain(first.stage.value, why)
    for claim in claims:
        metrics.step(claim.stage, "hung")
        if in_sink:
            metrics.waited(claim.stage, "sink")
    metrics.flush()
    os._exit(HUNG)


def _where() -> str:
    """What the main thread is at: tasks run there, in solo workers and in processes of a pool."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame, limit=WHERE_FRAMES)) if frame else "?"


def _settled(context: Context, claim: Claim, end: End) -> tuple[Stage | None, str | None]:
    """(where the batch goes next, why the step was not done)."""
    try:
        if claim.exhausted:
            return None, _give_up(context, claim, claim.error)
        if isinstance(end, GivenBack):
            # Its message lies in the queue, or the sweeper sends another one.
            context.ledger.release(claim, reason=end.why, delay_s=0.0, counted=False)
            metrics.step(claim.stage, "waits")
            return None, end.why
        if isinstance(end, Exception):
            return _failed(context, claim, end)
    except ClaimLost as exc:
        return None, _lost(claim, exc)
    return end, None


def _told(context: Context, claim: Claim, then: Stage | None, why: str | None, took_s: float) -> None:
    if then is not None:
        _wake(context, claim, then)
    metrics.took(claim.stage, took_s)
    if why is None:
        metrics.step(claim.stage, "done")
        log = logger(batch=claim.batch_id, stage=claim.stage.value)
        log.info("batch.step", records=claim.records, ms=round(took_s * 1000), then=then or "-")


def _failed(context: Context, claim: Claim, exc: Exception) -> tuple[Stage | None, str | None]:
    """(where the batch goes next, why the step was not done) after what the step has raised. Raises ClaimLost."""
    if isinstance(exc, ClaimLost):
        return None, _lost(claim, exc)
    if isinstance(exc, BadBundle) and _replaced(context, claim, str(exc)):
        return Stage.INGEST, None
    if isinstance(exc, LogweirError) and outside(exc):
        return None, _wait(context, claim, str(exc), _for(exc))
    if isinstance(exc, redis.ResponseError) and outside(exc):
        why = f"Redis refuses to work ({exc}); give it memory or disk space"
        return None, _wait(context, claim, why, "redis")
    if outside(exc):
        return None, _wait(context, claim, f"Redis does not answer ({exc}); it is tried again", "redis")
    log = logger(batch=claim.batch_id, stage=claim.stage.value, attempt=claim.attempts)
    if isinstance(exc, Rejected):
        # The store knows which records; trying them again, or halving around them, would only find out the same.
        log.warning("batch.rejected", why=str(exc), records=len(exc.ids))
        return None, _give_up(context, claim, str(exc), exc.ids)
    log.error("batch.failed", exc_info=exc)
    why = f"{type(exc).__name__}: {exc}"
    if claim.attempts >= context.settings.internal.max_attempts:
        return None, _give_up(context, claim, why)
    context.ledger.release(claim, reason=why, delay_s=0.2 * claim.attempts, counted=True)
    metrics.step(claim.stage, "failed")
    _wake(context, claim, claim.stage)
    return None, why


def _lost(claim: Claim, exc: ClaimLost) -> str:
    logger(batch=claim.batch_id, stage=claim.stage.value).warning("claim.lost", why=str(exc))
    metrics.step(claim.stage, "lost")
    return str(exc)


def _wake(context: Context, claim: Claim, stage: Stage) -> None:
    context.submit.wake(
        stage, claim.batch_id, backfill=claim.backfill, workload=claim.workload, lines=claim.lines
    )


def _for(exc: Exception) -> str:
    """What a batch waits for after this, as metrics name it."""
    return next((word for kind, word in WAITS_FOR if isinstance(exc, kind)), metrics.OTHER)


def _wait(context: Context, claim: Claim, why: str, reason: str) -> str:
    """Give the batch back, uncounted, and say to operators what it waits for."""
    logger(batch=claim.batch_id, stage=claim.stage.value).warning("batch.waits", why=why)
    context.presence.complain(claim.stage.value, why)
    context.ledger.release(claim, reason=why, delay_s=RETRY_S, counted=False)
    metrics.step(claim.stage, "waits")
    metrics.waited(claim.stage, reason)
    return why


def _replaced(context: Context, claim: Claim, why: str) -> bool:
    """The batch began under a model that cannot be read here, and it can begin again under another one."""
    if claim.stage not in (Stage.INFER, Stage.DRAIN):
        return False
    version = context.ledger.work(claim.batch_id)["version"][0]
    if version in {live.version for live in context.registry.live()}:
        # Ingest must not choose it either, or the batch would come back here.
        context.registry.report_fault(version, why)
    try:
        chosen = context.version(claim.workload)
    except ModelUnavailable:
        return False
    if chosen is None or chosen == version:
        return False
    context.ledger.advance(claim, Stage.INGEST)
    return True


def _give_up(context: Context, claim: Claim, why: str, refused: Collection[str] = ()) -> str:
    """Split the batch or bury it. `refused`: record ids that the store named as the ones at fault."""
    why = why or "it failed without a reason"
    try:
        apart: list[int] = []
        if not claim.rescore:
            if refused:
                apart = rows_of(context, claim, refused)
            # A worker may have died between storing and committing; a split or dead batch must not be stored as well.
            with context.at_sink(claim.meta.purpose) as sink:
                sink.remove(claim.batch_id, claim.workload, last=lambda: context.ledger.check(claim))
        halves = context.ledger.give_up(claim, why, apart=apart, framing=framed)
        metrics.step(claim.stage, "split" if halves else "dead")
        for half in halves:
            context.submit.wake(Stage.INGEST, half, backfill=claim.backfill, workload=claim.workload)
    except ClaimLost as exc:
        _lost(claim, exc)
    except SinkUnavailable as exc:
        return _wait(context, claim, str(exc), "sink")
    times = "the first attempt" if claim.attempts == 1 else f"{claim.attempts} attempts"
    return f"given up after {times}: {why}"


def rows_of(context: Context, claim: Claim, record_ids: Collection[str]) -> list[int]:
    """Where these records stand in the batch, in the order they were accepted."""
    records, formats = framed(context.ledger.payload(claim.batch_id), claim.meta.formats)
    prepared = detect.prepare(records, replace(claim.meta, formats=formats), context.masks)
    ids = detect.record_ids(prepared, claim.meta)
    return [row for row, record_id in enumerate(ids) if record_id in record_ids]
