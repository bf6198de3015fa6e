"""Usage records of ended GPU leases go from Redis into the table `usage` of the store, each exactly once.

The table takes records that it lacks, and only then they leave Redis. A process that is killed between the
two leaves records that the next one finds stored and removes.
"""

import time
from typing import Final

from pipeline.gpu.job_files import sweep_job_files
from pipeline.logs import logger
from pipeline.redis.leases import COMPACTION, Refused
from pipeline.settings.values import kept_results
from pipeline.store.choose import open_store
from pipeline.tasks.context import Context
from pipeline.tasks.rounds import reporting_faults

AT_ONCE: Final = 5_000  # records of one part
MAINTAIN_S: Final = 600.0


def store_usage(context: Context) -> None:
    """One round; nothing while another process compacts. Faults are logged, the records stay in Redis."""
    with reporting_faults(context, "usage", event="usage.waits"):
        due = time.monotonic() - context.usage_maintained_s > MAINTAIN_S
        if not due and not context.ended_leases.count():
            return
        lease = context.leases.request(COMPACTION, context.owner)
        if isinstance(lease, Refused):
            return
        with context.leases.holding(lease):
            drain_usage(context)
            if due:
                keep_s = kept_results(context.settings.data.results_keep).get("usage")
                context.usage_table.maintain(keep_s)
                _forget_job_files(context)
                context.usage_maintained_s = time.monotonic()


def _forget_job_files(context: Context) -> None:
    """Remove files of jobs whose record is gone."""
    jobs = context.jobs
    known = {job.job_id for job in (*jobs.live(), *jobs.ended())}
    if removed := sweep_job_files(open_store(context.settings.data.store), known):
        logger(files=removed).info("gpu.job_files_removed")


def drain_usage(context: Context) -> int:
    """Stores the records that wait; how many were new. Raises RedisUnavailable, StoreUnavailable,
    BadPayload."""
    stored = 0
    while waiting := context.ended_leases.oldest(AT_ONCE):
        stored += context.usage_table.add([record for _, record in waiting])
        context.ended_leases.remove([name for name, _ in waiting])
    if stored:
        logger(records=stored).info("usage.stored")
    return stored
