"""The usual numbers of a template, as the watcher has learnt them from its workloads."""

from collections.abc import Sequence

import redis

from pipeline.errors import BadPayload
from pipeline.service.stored.values import UsualValues
from pipeline.settings import Settings
from pipeline.watching.numbers.alarms import quantity
from pipeline.watching.numbers.numbers import Numbers
from pipeline.watching.numbers.sketch import quantiles
from pipeline.watching.numbers.variable import Variable
from pipeline.watching.state import WatcherState
from pipeline.watching.values.bins import EXACT

_WILD = "it jumps as an id does and is not followed"


def usual_values(
    client: "redis.Redis", settings: Settings, workloads: Sequence[str], template_id: int
) -> list[UsualValues]:
    """Of each variable of the template that a workload has values of. Raises RedisUnavailable."""
    found: list[UsualValues] = []
    for workload, blob in WatcherState(client, settings).distributions(workloads).items():
        try:
            state = Numbers.unpack(blob)
        except BadPayload:  # of a newer build, or damaged; the watcher says so
            continue
        found += [
            _usual(workload, variable)
            for variable in state.variables.values()
            if variable.template_id == template_id and variable.counts
        ]
        found += [
            UsualValues(workload=workload, name=name, kind=None, values=0, summary=_WILD)
            for one, name in state.wild
            if one == template_id
        ]
    return found


def _usual(workload: str, variable: Variable) -> UsualValues:
    kind, counts = variable.kind, variable.counts
    if kind in EXACT:
        total = sum(counts.values())
        shares = sorted(counts.items(), key=lambda one: -one[1])[:3]
        summary = ", ".join(f"{number} {weight / total:.0%}" for number, weight in shares)
    else:
        median, high = (quantity(kind, value) for value in quantiles(kind, counts, (0.5, 0.9)))
        summary = f"median {median}, 90 % quantile {high}"
    return UsualValues(
        workload=workload,
        name=variable.name,
        kind=kind.value,
        values=round(sum(counts.values())),
        summary=summary,
    )
