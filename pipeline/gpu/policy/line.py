"""The line: who is served next, in order, where many needs want the same.

A plan that grants or reserves writes the line beside it. When a lease ends, the ledger hands it on to the
first in the line without a new plan, if that need wants what the ended lease had. The line is worth nothing
once anything else of the pool has changed.
"""

import heapq
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Final

from pipeline.gpu.policy.fairness import Shares, need_size
from pipeline.gpu.values import PoolRequest

LONGEST: Final = (
    128  # Requests travel with the commit, about 500 bytes each; a plan of 1,000 needs costs more.
)


def next_in_line(
    shares: Shares,
    queues: Mapping[str, Sequence[PoolRequest]],
    first: PoolRequest,
    granted: Collection[str],
) -> tuple[str, ...]:
    """The request with the reservation, and those that one plan would serve after it.

    `queues`: the waiting needs of its priority, the highest, by tenant and age. Every turn is charged, as
    grants of one plan are. Alone the first is named where a tenant has a quota or a budget, because the end
    of a lease may then open the pool to an earlier need, or close it to a later one.
    """
    if any(shares.bounded(tenant) for tenant in queues):
        return (first.request_id,)
    line = [first.request_id]
    shares.add(first.need.tenant, *need_size(first.need))
    waiting = {
        tenant: iter([r for r in requests if r.request_id != line[0] and r.request_id not in granted])
        for tenant, requests in queues.items()
    }
    if len(waiting) == 1:
        rest = (request.request_id for request in chain(*waiting.values()))
        return (*line, *(name for name, _ in zip(rest, range(LONGEST - 1), strict=False)))
    heap = [shares.order(tenant) for tenant in waiting]
    heapq.heapify(heap)
    while heap and len(line) < LONGEST:
        tenant = heap[0][2]
        request = next(waiting[tenant], None)
        if request is None:
            heapq.heappop(heap)
            continue
        line.append(request.request_id)
        shares.add(tenant, *need_size(request.need))
        heapq.heapreplace(heap, shares.order(tenant))
    return tuple(line)
