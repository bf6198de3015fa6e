"""Group commit: a worker stores the batches that wait behind its own with it, in one commit of the results.

Each batch is still committed in the ledger by its own id, and its claim is checked before the results become
visible. A group that fails because of one batch says nothing about the others: each is stored alone then.

Most of a commit waits: for the disk, and for Redis. So where more batches wait, the step goes on with the
next group while one thread commits this one. At most one group is in the thread, groups are committed in
their turn, and a batch counts as done when its commit has ended. The step begins no group after `CHAIN_S`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import polars as pl

from pipeline.errors import ClaimLost, RedisUnavailable
from pipeline.ledger.renewal import ClaimRenewal
from pipeline.logs import logger
from pipeline.messages.routing import of_class
from pipeline.messages.spent import spent
from pipeline.records.batch import Purpose
from pipeline.records.delivery import Claim, Stage, WorkloadEnd
from pipeline.tasks.context import Context
from pipeline.tasks.grouping.along import claim_others
from pipeline.tasks.step import StepResult, attempt, is_external, suspect

# A group ends with as many records as three large batches have. One pass and one commit of these take a
# sixth less of a processor than three. Fresh lines wait behind a group.
GROUP_RECORDS: Final = 30_000
GROUP_BATCHES: Final = 64
# Groups of a step begin so long. Fresh batches wait behind it, and a worker that is told to end finishes it.
CHAIN_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unstored:
    """The results of a batch, and what its commit tells the ledger."""

    rows: pl.DataFrame  # RESULT_SCHEMA
    warming: bool
    ends: tuple[WorkloadEnd, ...]


# A batch with its results, or the stage that has to come first, or None where it has ended.
Found = tuple[Claim, Stage | Unstored | None]
# The work on batches up to their results. It may stop at one with an error.
Begin = Callable[[Context, Sequence[Claim]], Iterator[Found]]
# The batches of a group that are to be stored, by the place of their results.
Groups = dict[Purpose, list[tuple[Claim, Unstored]]]
Results = list[tuple[Claim, StepResult]]


def commit_together(
    context: Context, claim: Claim, holding: ClaimRenewal, *, begin: Begin, stage: Stage, queue: str
) -> Iterator[tuple[Claim, StepResult]]:
    """The results of the batch and of those that it takes along (a `JointStep`).

    Their messages are taken out of the queue then. To receive one costs as much as the work on its batch."""
    ended = []
    for member, result in _together(context, claim, holding, begin=begin, stage=stage, queue=queue):
        yield member, result
        if member is not claim and (result is None or isinstance(result, Stage)):
            ended.append(member.batch_id)
    withdrawn = context.submit.withdraw(queue, ended, backfill=claim.backfill)
    for batch_id in ended:
        if batch_id not in withdrawn:  # this process has it already, or another one
            spent.add(of_class(queue, backfill=claim.backfill), batch_id)


def _together(
    context: Context, claim: Claim, holding: ClaimRenewal, *, begin: Begin, stage: Stage, queue: str
) -> Iterator[tuple[Claim, StepResult]]:
    def one(context: Context, claim: Claim) -> Stage | None:
        ((_, found),) = begin(context, [claim])
        return committed_or_stage(context, claim, found)

    if claim.exhausted or suspect(context, claim):
        yield claim, attempt(context, claim, one)
        return
    others = claim_others(context, claim, holding, stage=stage, queue=queue, limit=GROUP_BATCHES)
    until = time.monotonic() + CHAIN_S
    members = _filled(others, claim)
    committing: Future[Results] | None = None
    try:
        while members:
            if committing is not None and any(member.rescore or member.several for member in members):
                yield from committing.result()  # the work on these asks the sink, which is for one thread
                committing = None
            groups: Groups = {}
            for member, found in _results(context, members, begin):
                if isinstance(found, Unstored):
                    groups.setdefault(member.meta.purpose, []).append((member, found))
                else:
                    yield member, found
            if committing is not None:
                yield from committing.result()
                committing = None
            members = []
            if _goes_on(context, claim, queue, until):
                members = _filled(others)
            if members:
                committing = context.committer.submit(_commit_groups, context, groups)
            else:
                yield from _commit_groups(context, groups)
    finally:
        if committing is not None:
            wait([committing])


def _goes_on(context: Context, claim: Claim, queue: str, until: float) -> bool:
    """Whether the step may begin another group: there is time, and no fresh batch waits behind backfill."""
    if context.app is None or time.monotonic() >= until:
        return False
    try:
        return not (claim.backfill and context.submit.next_ids(queue, 1))
    except RedisUnavailable:
        return False  # the next call to Redis reports it


def _filled(others: Iterator[Claim], *first: Claim) -> list[Claim]:
    """A group of the batches `first` and of others, which are claimed as they are taken."""
    members, records = list(first), sum(member.records for member in first)
    while records < GROUP_RECORDS and (member := next(others, None)) is not None:
        members.append(member)
        records += member.records
    return members


def _results(
    context: Context, members: list[Claim], begin: Begin
) -> Iterator[tuple[Claim, Stage | Unstored | Exception | None]]:
    """The batches together; from one that fails on, each alone."""
    waiting = {member.batch_id: member for member in members}
    try:
        for member, found in begin(context, members):
            del waiting[member.batch_id]
            yield member, found
    except Exception as exc:  # noqa: BLE001 - step.py logs it when it settles the batch
        if len(members) == 1 or is_external(exc):
            yield from ((member, exc) for member in waiting.values())
            return
        logger(batches=len(members)).info("group_commit.apart", why=str(exc))  # the one at fault raises again
    for member in waiting.values():
        try:
            yield from begin(context, [member])
        except Exception as exc:  # noqa: BLE001 - step.py logs it when it settles the batch
            yield member, exc


def committed_or_stage(context: Context, claim: Claim, found: Stage | Unstored | None) -> Stage | None:
    """Stores the results of one batch, where there are some, then commits it: after a crash in between, they
    are written again.

    Raises ClaimLost: a stalled process must not overwrite the results of the claim's next holder.
    """
    if not isinstance(found, Unstored):
        return found
    ((_, result),) = _commit(context, claim.meta.purpose, [(claim, found)])
    if isinstance(result, Exception):
        raise result
    return None


def _commit_groups(context: Context, groups: Groups) -> Results:
    return [result for purpose, group in groups.items() for result in _commit(context, purpose, group)]


def _commit(context: Context, purpose: Purpose, group: list[tuple[Claim, Unstored]]) -> Results:
    try:
        claimed = _store(context, purpose, group)
    except Exception as exc:  # noqa: BLE001 - step.py logs it when it settles the batch
        if len(group) == 1 or is_external(exc):
            return [(member, exc) for member, _ in group]
        logger(batches=len(group)).warning("group_commit.failed", why=str(exc))
        return [result for one in group for result in _commit(context, purpose, [one])]
    return [(member, _in_ledger(context, member, found, claimed)) for member, found in group]


def _in_ledger(context: Context, claim: Claim, found: Unstored, claimed: set[str]) -> StepResult:
    """Commits a batch whose results are stored, if it is still ours."""
    try:
        if claim.batch_id not in claimed:
            raise ClaimLost(f"batch {claim.batch_id} is no longer ours; its new owner goes on")
        context.ledger.commit_all(claim, found.ends, warming=found.warming)
    except ClaimLost as exc:
        _take_back(context, claim)
        return exc
    except Exception as exc:  # noqa: BLE001 - step.py logs it when it settles the batch
        return exc
    return None


def _store(context: Context, purpose: Purpose, group: list[tuple[Claim, Unstored]]) -> set[str]:
    """Stores the batches whose claims are ours; their ids. Raises what a sink raises."""
    claims = [member for member, _ in group]
    claimed = set(_still_claimed(context, claims))
    while claimed:
        members = [(member, found) for member, found in group if member.batch_id in claimed]

        def check(members: list[tuple[Claim, Unstored]] = members) -> None:
            if len(_still_claimed(context, [member for member, _ in members])) < len(members):
                raise ClaimLost("a claim of the group was lost")

        forgotten = context.forgotten(purpose)
        try:
            with context.at_sink(purpose) as sink:
                if forgotten is not None:
                    forgotten.look()
                sink.write_all([(member.batch_id, found.rows) for member, found in members], last=check)
                if forgotten is not None:
                    for member, found in members:
                        forgotten.taken_over(
                            member.batch_id, found.rows, last=partial(context.ledger.check, member)
                        )
        except ClaimLost:
            claimed = set(_still_claimed(context, [member for member, _ in members]))
            if len(claimed) == len(members):
                raise
            continue
        break
    return claimed


def _still_claimed(context: Context, claims: list[Claim]) -> list[str]:
    """The ids of the batches whose claims are ours; the claims are renewed."""
    answers = context.ledger.renew_all(claims)
    return [claim.batch_id for claim, renewed in zip(claims, answers, strict=True) if renewed]


def _take_back(context: Context, claim: Claim) -> None:
    """Removes the rows of a batch whose claim was lost during the write, if it stands nowhere else.

    If the batch was bisected or became a dead letter, its rows must go. So must they if Redis has forgotten
    it: its source sends it again, perhaps cut otherwise."""
    if claim.rescore:
        return
    with suppress(ClaimLost), context.at_sink(claim.meta.purpose) as sink:
        sink.remove(claim.batch_id, claim.workload, last=partial(_stands_nowhere, context, claim))


def _stands_nowhere(context: Context, claim: Claim) -> None:
    """Raises ClaimLost if the batch was sent again: another process may have stored it."""
    state = context.ledger.state(claim.batch_id)
    if state not in ("", "split", "dead", "discarded"):
        raise ClaimLost(f"the claim on batch {claim.batch_id} was lost; others have it in {state}")
