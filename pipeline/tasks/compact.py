"""A task of beat, less often than the sweep: a round of compaction over the stored results, after the store
has a copy of what people decided (controller/recovery.py) and the usage records of ended GPU leases
(tasks/usage.py).

One process compacts at a time, by a lease. A round yields to batches that wait for the stage of this process,
to a flood of batches, which needs the processors, and to the watcher behind a flood. Files of commits can
wait a minute, lines and alarms cannot.
"""

import time
from typing import Final

from pipeline.controller.recovery import copy_decisions, enter
from pipeline.logs import logger
from pipeline.messages.routing import TASK_COMPACT
from pipeline.records.delivery import Stage
from pipeline.redis.leases import COMPACTION, Refused
from pipeline.store.choose import open_store
from pipeline.store.identity import identity
from pipeline.tasks.context import Context
from pipeline.tasks.rounds import reporting_faults
from pipeline.tasks.usage import store_usage
from pipeline.watching.time_budget import FLOOD

NAME: Final = TASK_COMPACT
# Rounds in a row that waiting batches may postpone.
YIELDS: Final = 6
COPIED_EVERY_S: Final = 30.0


def run(context: Context, *_: str) -> None:
    keep_decisions(context)
    store_usage(context)
    with reporting_faults(context, "compact", event="compaction.waits"):
        if "parquet" in context.settings.data.sinks and not _yields(context):
            compact(context)


def keep_decisions(context: Context) -> None:
    """Copies what people decided into the store, after the recovery of a Redis that was emptied."""
    with reporting_faults(context, "store", event="decisions.not_copied"):
        objects = open_store(context.settings.data.store)
        here = identity(objects, make=False)
        if here is None:
            return
        enter(context.client, context.settings, objects, here.id)
        if time.monotonic() - context.decisions_copied_s > COPIED_EVERY_S:
            copy_decisions(context.client, context.settings, objects)
            context.decisions_copied_s = time.monotonic()


def compact(context: Context) -> None:
    """One round for each purpose; nothing while another process compacts."""
    lease = context.leases.request(COMPACTION, context.owner)
    if isinstance(lease, Refused):
        return
    with context.leases.holding(lease):
        for purpose, compactor in context.compactors.items():
            forgotten = context.forgotten(purpose)
            if forgotten is not None:
                forgotten.look()
            with context.at_sink(purpose):
                tally = compactor.round()
            if tally.merged or tally.removed or tally.expired:
                logger(purpose=purpose.value).info(
                    "results.compacted",
                    parts=tally.merged,
                    rows=tally.rows,
                    removed=tally.removed,
                    expired=tally.expired,
                )


def _yields(context: Context) -> bool:
    """Whether batches wait for the stage of this process, or a flood of them or of observations has come; not
    for ever."""
    counts = context.ledger.backlog.counts()
    waiting = counts.get(f"stage:{Stage.STORE.value}", 0) > 0 or counts.get("batches", 0) >= FLOOD
    waiting = waiting or context.ledger.backlog.observed()[1] >= FLOOD
    context.compaction_yields = context.compaction_yields + 1 if waiting else 0
    return waiting and context.compaction_yields <= YIELDS
