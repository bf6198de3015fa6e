"""One stage of one batch, or of several: claim, work, settle. Every task that moves a batch runs through
here.

The claim comes before the work and counts as an attempt, so a killed worker counts too. What every batch
needs from the process, such as its masks, is loaded before the claim. External faults (Redis, a full disk, a
lease, a damaged model, a setting) give the batch back uncounted. Faults of the batch are counted: after the
last attempt the ledger bisects the batch, or makes a single record a dead letter. A step that hangs counts as
such a fault: its process ends itself."""

import errno
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

import redis

from pipeline import detect
from pipeline.errors import (
    BadBundle,
    BadInput,
    BadMask,
    BadPayload,
    BadSetting,
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
from pipeline.ledger.renewal import ClaimRenewal
from pipeline.logs import logger
from pipeline.observe import counters as metrics
from pipeline.records.delivery import HALF, Claim, Stage
from pipeline.redis.connection import is_refusal
from pipeline.sources.pushed import framed
from pipeline.tasks.context import Context
from pipeline.tasks.separate import separate_others

# A step returns the next stage of its batch, or None once the batch is committed.
Step = Callable[[Context, Claim], Stage | None]


# The result of the work on one batch: its next stage, or why it has none.
StepResult = Stage | Exception | None
# Works on the batch and on others that it adds to the holding; yields each result once, as soon as it is
# known.
JointStep = Callable[[Context, Claim, ClaimRenewal], Iterable[tuple[Claim, StepResult]]]


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The end of a step after the ledger has recorded it."""

    outcome: str  # one of counters.OUTCOMES
    next: Stage | None = None  # the stage whose workers are woken
    reason: str | None = None  # why the step was not done; None: it was
    waits_for: str | None = None  # one of counters.REASONS, for a batch that waits


RETRY_S: Final = 2.0
WAITS_FOR: Final = (
    (SinkUnavailable, "sink"),
    (RedisUnavailable, "redis"),
    (DeviceFailed, "device"),
    (LeaseRefused, "lease"),
    (ModelUnavailable, "model"),
    (BadBundle, "model"),
)
# The only errors of the system that a record may cause, as a name of a file. All others are the machine's.
ERRNOS_OF_RECORDS: Final = frozenset((errno.EINVAL, errno.ENAMETOOLONG, errno.EILSEQ))
NO_THREAD: Final = "can't start new thread"  # Python says it as a RuntimeError
# A half has fewer lines and so less time, but always enough to load a model.
HALF_MIN_S: Final = 30.0
# The exit code of a process whose step hung.
HUNG: Final = 74
# Stack frames that are logged of a hung step.
STACK_FRAMES: Final = 12


def perform(context: Context, stage: Stage, batch_id: str, step: Step) -> str | None:
    """Run `step` on the batch if this process gets its claim; the reason if the step was not done.

    The reason is for readers: the ledger already has its consequences.
    """

    def joint(context: Context, claim: Claim, _: ClaimRenewal) -> Iterator[tuple[Claim, StepResult]]:
        yield claim, attempt(context, claim, step)

    return perform_joint(context, stage, batch_id, joint)


def perform_joint(context: Context, stage: Stage, batch_id: str, joint: JointStep) -> str | None:
    """`perform` with a step that may take other batches along. All of them share the time limit."""
    log = logger(batch=batch_id, stage=stage.value)
    reason = None
    try:
        try:
            context.prepare()
        except (BadInput, OSError) as exc:
            # The sweeper sends the batch again; `prepare` reads the files again until they are repaired.
            log.error("worker.not_prepared", why=str(exc))
            context.presence.complain(stage.value, str(exc))
            metrics.step_ended(stage, "away")
            return str(exc)
        claim = context.ledger.claim(batch_id, stage, context.owner)
        if isinstance(claim, str):
            if claim == "newer":
                why = f"batch {batch_id} is of a newer build; its workers take it, update this one"
                context.presence.complain(stage.value, why)
            log.debug("batch.left_alone", why=claim)
            metrics.step_ended(stage, "skipped")
            return None
        limit_s = _limit_s(context, claim)
        holding: ClaimRenewal | None = None
        try:
            with context.ledger.holding(
                claim, limit_s=limit_s, on_timeout=lambda claims: _end_hung(context, claims, limit_s)
            ) as holding:
                for member, result in joint(context, claim, holding):
                    end = _settle(context, member, result)
                    holding.drop(member)
                    _report(context, member, end, holding.held_s(member))
                    if member is claim:
                        reason = end.reason
        except (OSError, RuntimeError, ImportError) as exc:
            if isinstance(exc, redis.ConnectionError | redis.TimeoutError) or not is_external(exc):
                raise
            reason = str(exc)
            for member in [claim] if holding is None else holding.claims():
                _settle(context, member, exc)
    except (RedisUnavailable, redis.ConnectionError, redis.TimeoutError) as exc:
        # The claims expire and the sweeper sends their batches again.
        log.warning("redis.away", why=str(exc))
        metrics.step_ended(stage, "away")
        return str(exc)
    return reason


def attempt(context: Context, claim: Claim, step: Step) -> StepResult:
    """The result of `step` on one batch. An exhausted batch is not tried: `_settle` gives it up."""
    if claim.exhausted:
        return None
    try:
        return step(context, claim)
    except Exception as exc:  # noqa: BLE001 - _settle logs it with its traceback
        return exc


def suspect(context: Context, claim: Claim) -> bool:
    """True if the batch may have caused an earlier failure, so that no other batch may share its pass."""
    return claim.attempts > 1 or HALF in claim.batch_id or context.settings.internal.max_attempts == 1


def is_external(exc: Exception) -> bool:
    """True for a fault of the surroundings, which says nothing about the batch."""
    match exc:
        case Retryable() | BadBundle() | BadMask() | BadSetting():
            return True
        case redis.ConnectionError() | redis.TimeoutError():
            return True
        case redis.ResponseError():
            return is_refusal(exc)
        case OSError():
            return exc.errno is not None and exc.errno not in ERRNOS_OF_RECORDS
        case RuntimeError():
            return str(exc) == NO_THREAD
        case ImportError():  # of a package that this installation lacks, or cannot read now
            return True
    return False


def _limit_s(context: Context, claim: Claim) -> float:
    """The time limit of a step: `step_s`, less for a half, so that bisecting soon finds a line that hangs."""
    limit_s = context.settings.stack.step_s
    if HALF not in claim.batch_id:
        return limit_s
    return min(limit_s, max(HALF_MIN_S, limit_s * claim.records / context.settings.internal.batch_records))


def _end_hung(context: Context, claims: list[Claim], limit_s: float) -> None:
    """End the process. A supervisor starts another process.

    The attempt counts unless the sink does not answer. It counts for every batch of the pass: the one at
    fault is unknown, and each is tried alone next time. The first batch pauses for `limit_s`, so that others
    get their turn."""
    in_sink, first = context.in_sink, claims[0]
    why = f"stage {first.stage} did not end within {limit_s:g} s"
    if in_sink:
        why += ": the results are not stored or read; look after their disk or their server"
    log = logger(batch=first.batch_id, stage=first.stage.value, attempt=first.attempts)
    log.error("step.hung", why=why, records=first.records, batches=len(claims), where=_main_stack())
    with suppress(RedisUnavailable, redis.RedisError):  # then their claims expire
        for claim in claims:
            delay_s = limit_s if claim is first else 0.0
            context.ledger.release(claim, reason=why, delay_s=delay_s, counted=not in_sink)
        if in_sink:
            context.presence.complain(first.stage.value, why)
    for claim in claims:
        metrics.step_ended(claim.stage, "hung")
        if in_sink:
            metrics.waited(claim.stage, "sink")
    metrics.flush()
    context.end_process(HUNG)


def _main_stack() -> str:
    """The stack of the main thread: tasks run there, in solo workers and in processes of a pool."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame, limit=STACK_FRAMES)) if frame else "?"


def _settle(context: Context, claim: Claim, result: StepResult) -> StepEnd:
    """Record the result in the ledger, unless the step has done so itself."""
    log = logger(batch=claim.batch_id, stage=claim.stage.value, attempt=claim.attempts)
    try:
        if claim.exhausted:
            return _give_up(context, claim, claim.error)
        match result:
            case None | Stage():
                return StepEnd("done", next=result)
            case ClaimLost():
                raise result
            case BadBundle() if _restarts(context, claim, str(result)):
                return StepEnd("done", next=Stage.INGEST)
            case LogweirError() if is_external(result):
                return _wait(context, claim, str(result), _waits_for(result))
            case redis.ResponseError() if is_external(result):
                why = f"Redis refuses to work ({result}); give it memory or disk space"
                return _wait(context, claim, why, "redis")
            case OSError() | RuntimeError() | ImportError() if is_external(result):
                why = f"this machine refuses to work ({result}); look after its disk, files and permissions"
                return _wait(context, claim, why, metrics.OTHER)
            case _ if is_external(result):
                return _wait(context, claim, f"Redis does not answer ({result}); it is tried again", "redis")
            case Rejected():
                # The store has named the records: a retry or bisection would only find the same ones.
                log.warning("batch.rejected", why=str(result), records=len(result.ids))
                return _give_up(context, claim, str(result), result.ids)
            case _:
                log.error("batch.failed", exc_info=result)
                return _fail(context, claim, f"{type(result).__name__}: {result}")
    except ClaimLost as exc:
        log.warning("claim.lost", why=str(exc))
        return StepEnd("lost", reason=str(exc))


def _report(context: Context, claim: Claim, end: StepEnd, took_s: float) -> None:
    """Wake the next stage, count and log."""
    if end.next is not None:
        context.submit.wake(
            end.next, claim.batch_id, backfill=claim.backfill, workload=claim.workload, lines=claim.lines
        )
    metrics.took(claim.stage, took_s)
    metrics.step_ended(claim.stage, end.outcome)
    if end.waits_for is not None:
        metrics.waited(claim.stage, end.waits_for)
    if end.outcome == "done":
        log = logger(batch=claim.batch_id, stage=claim.stage.value)
        log.info("batch.step", records=claim.records, ms=round(took_s * 1000), then=end.next or "-")


def _waits_for(exc: Exception) -> str:
    """The label in metrics of the thing that a batch waits for after `exc`."""
    return next((word for kind, word in WAITS_FOR if isinstance(exc, kind)), metrics.OTHER)


def _wait(context: Context, claim: Claim, why: str, waits_for: str) -> StepEnd:
    """Give the batch back, uncounted, and show operators what it waits for. Raises ClaimLost."""
    logger(batch=claim.batch_id, stage=claim.stage.value).warning("batch.waits", why=why)
    context.presence.complain(claim.stage.value, why)
    context.ledger.release(claim, reason=why, delay_s=RETRY_S, counted=False)
    return StepEnd("waits", reason=why, waits_for=waits_for)


def _fail(context: Context, claim: Claim, why: str) -> StepEnd:
    """Count a fault of the batch; give the batch up after its last attempt. Raises ClaimLost."""
    if claim.attempts >= context.settings.internal.max_attempts:
        return _give_up(context, claim, why)
    context.ledger.release(claim, reason=why, delay_s=0.2 * claim.attempts, counted=True)
    return StepEnd("failed", next=claim.stage, reason=why)


def _restarts(context: Context, claim: Claim, why: str) -> bool:
    """Send a batch whose model cannot be read here back to ingest; False if nothing else can be done with it
    there."""
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
    if chosen == version:
        return False
    context.ledger.advance(claim, Stage.INGEST)
    return True


def _give_up(context: Context, claim: Claim, why: str, refused: Collection[str] = ()) -> StepEnd:
    """Bisect the batch or make it a dead letter. `refused`: ids of records that the store refused. Raises
    ClaimLost."""
    why = why or "it failed without a reason"
    if claim.several:
        with suppress(BadPayload):  # unreadable: a dead letter
            return _told_apart(context, claim, why)
    try:
        refused_rows: list[int] = []
        if not claim.rescore:
            if refused:
                refused_rows = row_numbers(context, claim, refused)
            # A worker may have died between storing and committing: the rows of a batch that is given up must
            # go.
            with context.at_sink(claim.meta.purpose) as sink:
                sink.remove(claim.batch_id, claim.workload, last=lambda: context.ledger.check(claim))
        halves = context.ledger.give_up(claim, why, apart=refused_rows, framing=framed)
    except SinkUnavailable as exc:
        return _wait(context, claim, str(exc), "sink")
    for half in halves:
        context.submit.wake(Stage.INGEST, half, backfill=claim.backfill, workload=claim.workload)
    times = "the first attempt" if claim.attempts == 1 else f"{claim.attempts} attempts"
    return StepEnd("split" if halves else "dead", reason=f"given up after {times}: {why}")


def _told_apart(context: Context, claim: Claim, why: str) -> StepEnd:
    """Makes a batch of each workload, so that one at fault ends up alone. Raises BadPayload, ClaimLost."""
    try:
        separate_others(context, claim, ())
    except SinkUnavailable as exc:
        return _wait(context, claim, str(exc), "sink")
    return StepEnd("split", reason=f"told apart by workload: {why}")


def row_numbers(context: Context, claim: Claim, record_ids: Collection[str]) -> list[int]:
    """The rows of these records in the batch, in the order of acceptance."""
    records, formats = framed(context.ledger.payload(claim.batch_id), claim.meta.formats)
    prepared = detect.prepare(records, replace(claim.meta, formats=formats), context.masks)
    ids = detect.record_ids(prepared, claim.meta)
    return [row for row, record_id in enumerate(ids) if record_id in record_ids]
