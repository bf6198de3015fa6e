"""Workloads leave a batch of several: each becomes a batch of its own, which takes the way of any other.

Only stage ingest knows batches of several workloads. A workload with a line that nobody has judged yet needs
further stages, and a batch that keeps failing is told apart by its workloads first.
"""

from collections.abc import Collection
from functools import partial

from pipeline.errors import BadPayload
from pipeline.records.delivery import Claim, Stage
from pipeline.records.pushed import PushedRecords
from pipeline.tasks.context import Context


def separate_others(context: Context, claim: Claim, staying: Collection[str]) -> None:
    """Leaves only these workloads in the batch, none: it has ended.

    Raises ClaimLost, BadPayload, SinkUnavailable."""
    records = context.ledger.payload(claim.batch_id)
    if not isinstance(records, PushedRecords) or records.workloads is None:
        raise BadPayload(f"the records of batch {claim.batch_id} name no workloads")
    rows = records.rows_by_workload()
    stay = sorted(row for workload in staying for row in rows.pop(workload))
    parts = {workload: records.take(several) for workload, several in rows.items()}
    if not stay:
        # An earlier try may have stored them all; with records that stay, the next write replaces those.
        with context.at_sink(claim.meta.purpose) as sink:
            sink.remove(claim.batch_id, claim.workload, last=partial(context.ledger.check, claim))
    ids = context.ledger.separate(claim, parts, records.take(stay, named=True) if stay else None)
    for part_id, workload in ids.items():
        lines = parts[workload].lines
        context.submit.wake(Stage.INGEST, part_id, backfill=claim.backfill, workload=workload, lines=lines)
