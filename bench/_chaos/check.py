"""The judge of a chaos run: holds what was asked for and answered (the history) against what is there in the
end.

In the way of Jepsen's checkers: every batch that a producer tried to send is ok, fail or unknown. Of an ok
one each line is stored once, or dead and then poison; an unknown one may be in or not, but as a whole; and
nothing else is there. Redis must have run with `appendfsync always`: what everysec may forget is counted as
lost here."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench._chaos import ends
from bench._chaos.lines import account
from bench._chaos.samples import Watch
from bench._chaos.there import letters, stored
from bench._chaos.told import Told, Violation
from pipeline.ledger.ledger import Ledger
from pipeline.models.registry import Registry
from pipeline.redis.connection import connect
from pipeline.settings import Settings

RSS_MIB: Final = 1_024.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of a run. All counts are physical lines; `recovery` in seconds."""

    faults: int
    accepted_lines: int  # told to a producer, or written to a followed file
    stored_lines: int  # in the Parquet files, copies included
    lost: int
    doubled: int
    dead: int
    dead_poison: int
    violations: tuple[Violation, ...]
    recovery: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain values; `violations` as a number, what they are under `found`."""
        found = [asdict(violation) for violation in self.violations]
        return {**asdict(self), "violations": len(found), "found": found}

    def first(self) -> str:
        """The first violation with its trace, for people; "" when there is none."""
        return explained(self.violations[0]) if self.violations else ""


def check(
    history: Path, settings: Settings, *, rss_mib: float = RSS_MIB, folders: Sequence[Path] = ()
) -> Report:
    """Judge a run that has settled, with its Redis still there. `rss_mib`: resident memory that a process may
    have. `folders`: the data directories of all machines, by default that of the settings.

    Raises ValueError when the history itself is wrong, redis.RedisError when Redis does not answer.
    """
    told = Told.read(history)
    client = connect(settings)
    ledger = Ledger(client, settings)
    waiting, have = letters(ledger), stored(settings)
    discarded = {workload: t.get("discarded", 0) for workload, t in ledger.backlog.totals().items()}
    lines = account(told, have, waiting, discarded)
    violations = [
        *lines.violations,
        *ends.sums(told, have, waiting, ledger),
        *ends.cursors(told, client, ledger),
        *Watch(told, settings, rss_mib).violations(),
        *ends.trainings(told, client, ledger.keys),
        *ends.models(told, Registry(client, settings)),
        *ends.pickles(folders or (settings.data.dir,), client, ledger.keys),
    ]
    client.close()
    violations += [
        Violation(
            invariant=1,
            what=f"the producer {item['who']} died of what is no error of a producer: {item['why'].strip()}",
            trace=told.trace([item]),
        )
        for item in told.deaths
    ]
    if not told.settled:
        violations.append(
            Violation(invariant=1, what="the run did not settle", trace=told.trace(told.samples[-3:]))
        )
    return Report(
        faults=len(told.real_faults()),
        accepted_lines=lines.accepted,
        stored_lines=lines.stored,
        lost=lines.lost,
        doubled=lines.doubled,
        dead=lines.dead,
        dead_poison=lines.dead_poison,
        violations=tuple(violations),
        recovery=recovery(told),
    )


def recovery(told: Told) -> dict[str, Any]:
    """How soon lines flowed again: n, p50, p99, max of the faults after which no time-out has to pass; under
    `waiting` the same of the others, under `by_kind` of each kind of fault. `never`: flows that had not come
    back by the end; they count with how long they were waited for."""
    faults = {item["n"]: item for item in told.real_faults()}
    # A flow beside another fault that waits for a time-out waits for it too.
    flows = [
        (
            {**faults[item["n"]], **({"waits_for": "another"} if item.get("beside") else {})},
            float(item["after_s"]),
        )
        for item in told.flows
        if item["n"] in faults
    ]
    kinds = sorted({fault["kind"] for fault, _ in flows})
    return {
        **_percentiles(after for fault, after in flows if not fault.get("waits_for")),
        "waiting": _percentiles(after for fault, after in flows if fault.get("waits_for")),
        "by_kind": {
            kind: _percentiles(after for fault, after in flows if fault["kind"] == kind) for kind in kinds
        },
        "never": sum(1 for item in told.flows if item.get("never")),
        "unwatched": len(faults.keys() - {item["n"] for item in told.flows}),
    }


def _percentiles(seconds: Iterable[float]) -> dict[str, float]:
    """Nearest rank; zeros of nothing."""
    values = sorted(seconds)
    if not values:
        return {"n": 0, "p50": 0.0, "p99": 0.0, "max": 0.0}

    def rank(share: float) -> float:
        return values[max(0, math.ceil(share * len(values)) - 1)]

    return {"n": len(values), "p50": rank(0.5), "p99": rank(0.99), "max": values[-1]}


def explained(violation: Violation) -> str:
    """A violation for people: the sentence, and an operation a line."""
    lines = [f"invariant {violation.invariant}: {violation.what}"]
    for item in violation.trace:
        facts = " ".join(f"{k}={_short(v)}" for k, v in item.items() if k not in ("t", "op"))
        lines.append(f"  {item['t']:>9.3f} s  {item['op']:<7} {facts}")
    return "\n".join(lines)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 300 else f"{text[:297]}..."
