"""How many lines workloads usually write in the parts of a span, by what the watcher has learnt."""

from collections.abc import Mapping, Sequence
from datetime import datetime

import redis

from pipeline.errors import BadPayload
from pipeline.settings import Settings
from pipeline.watching.rates.outlook import ExpectedLines, expected_lines
from pipeline.watching.rates.rates import Rates
from pipeline.watching.state import WatcherState


def expected_rates(
    client: "redis.Redis", settings: Settings, workloads: Sequence[str], ends: Sequence[datetime]
) -> Mapping[str, list[ExpectedLines]]:
    """Of each span between two of these moments, by workload; without those that are not known for long.

    Raises RedisUnavailable."""
    found = {}
    for name, blob in WatcherState(client, settings).rates(workloads).items():
        try:
            known = expected_lines(Rates.unpack(blob).detector, ends)
        except BadPayload:  # of a newer build, or damaged; the watcher says so
            continue
        if known:
            found[name] = known
    return found
