"""Blame that units pass on: an anomalous line that names another unit reports that one's failure.

A line that is only unusual counts where no normal unit has its pattern: callers warn of wrong answers.
A caller whose dependency fails is louder than the dependency, and every caller of the caller is loud as well.
So the evidence of a unit walks along the names in these lines: of every occasion (a trace, else a second)
that has a name, PASSED goes to the units named, in equal parts; the rest stays. The answer is where
the walk ends, an absorbing Markov chain. Walks over call graphs rank causes of failures in the same way
(MicroRank, WWW 2021; MonitorRank, SIGMETRICS 2013); here names replace the graph, so no traces are needed.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import polars as pl

from pipeline.watching.named_words import LEAST_CHARS, named_ports, named_words
from pipeline.watching.units.evidence import new_patterns
from pipeline.watching.units.tails import Floats
from pipeline.watching.units.unit_lines import UnitTable

PASSED: Final = (
    0.9  # up to 0.99 as many of 40 faults come first, with 0.8 one fewer, with 0.5 four (docs/LOG.md)
)
MAX_NAMED: Final = 2_000  # units; the walk solves equations of so many unknowns
# Names of units that sentences use as ordinary words: they name the unit only with a port.
ORDINARY: Final = frozenset({
    "access", "application", "audit", "backup", "block", "client", "cluster", "config", "connection",
    "console", "container", "controller", "core", "cron", "daemon", "data", "debug", "default", "device",
    "disk", "driver", "engine", "error", "event", "events", "file", "files", "handler", "host", "http",
    "image", "index", "info", "init", "input", "job", "jobs", "kernel", "lease", "leases", "listener",
    "local", "log", "logger", "login", "logs", "main", "manager", "master", "memory", "message", "messages",
    "metrics", "monitor", "network", "node", "output", "pod", "pool", "port", "process", "processor",
    "producer", "query", "reader", "record", "request", "root", "security", "server", "service", "session",
    "shell", "site", "socket", "source", "state", "status", "stream", "sync", "system", "table", "task",
    "test", "thread", "time", "timer", "trace", "version", "volume", "watcher", "writer",
})  # fmt: skip
# What Kubernetes (no vowels) and Compose append to the name of a service: replica set and pod, or a number.
_REPLICA: Final = re.compile(r"(?:(?:-[bcdfghjklmnp-tv-xz\d]{8,10})?-[bcdfghjklmnp-tv-xz\d]{5}|[-_]\d+)$")


def passed_on(table: UnitTable, normal: UnitTable | None = None) -> pl.DataFrame:
    """`at`, `to` (rows of units of one window) and `share` of the evidence of `at` that goes to `to`.

    `normal`: units that said on which ports they listen as well. An address names the only unit that listens
    on its port; replicas share one."""
    empty = pl.DataFrame(schema={"at": pl.Int64, "to": pl.Int64, "share": pl.Float64})
    if table.flags.is_empty() or table.size > MAX_NAMED:
        return empty
    called: dict[int, dict[str, list[int]]] = {}  # window -> name, or ":" and port -> rows
    ports = _ports_of([table] if normal is None else [table, normal])
    for row, (unit, window) in enumerate(table.units.select("unit", "window").iter_rows()):
        for name in names_of(unit) | ports.get(unit, set()):
            called.setdefault(window, {}).setdefault(name, []).append(row)
    windows = table.units["window"].to_list()
    named: list[tuple[int, int, int]] = []
    patterns = _searched(table, normal)
    flags = table.flags.join(patterns.select("at", "pattern_id").unique(), on=["at", "pattern_id"])
    for at, pattern, text in patterns.select("at", "pattern_id", "text").drop_nulls().iter_rows():
        named += [(at, pattern, to) for to in sorted(_named(text, called.get(windows[at], {}), at))]
    if not named:
        return empty
    targets = pl.DataFrame(
        named, schema={"at": pl.Int64, "pattern_id": pl.UInt64, "to": pl.Int64}, orient="row"
    )
    key = ["at", "occasion"]
    pairs = flags.join(targets, on=["at", "pattern_id"]).select(*key, "to").unique()
    pairs = pairs.with_columns((1.0 / pl.len().over(key)).alias("part"))
    occasions = flags.group_by("at").agg(pl.col("occasion").n_unique().alias("all"))
    return (
        pairs.group_by("at", "to")
        .agg(pl.col("part").sum())
        .join(occasions, on="at")
        .select("at", "to", (PASSED * pl.col("part") / pl.col("all")).alias("share"))
        .sort("at", "to")
    )


def _searched(table: UnitTable, normal: UnitTable | None) -> pl.DataFrame:
    """The rows of `patterns` that are flagged, or that no normal unit has."""
    flagged = table.patterns.filter(pl.col("flagged") > 0)
    if normal is None or normal is table:
        return flagged
    return pl.concat([flagged, new_patterns(table, normal).filter(pl.col("flagged") == 0)])


def walked(evidence: Floats, passed: pl.DataFrame) -> Floats:
    """Where the evidence of each unit ends. Its sum stays. Evidence below zero does not walk."""
    if passed.is_empty():
        return evidence
    involved = np.unique(np.concatenate([passed["at"].to_numpy(), passed["to"].to_numpy()]))
    place = {row: n for n, row in enumerate(involved.tolist())}
    shares = np.zeros((involved.size, involved.size))
    for at, to, share in passed.iter_rows():
        shares[place[at], place[to]] = share
    begun = np.maximum(0.0, evidence[involved])
    visits = np.linalg.solve((np.eye(involved.size) - shares).T, begun)
    found = evidence.copy()
    found[involved] = visits * (1.0 - shares.sum(axis=1)) + np.minimum(0.0, evidence[involved])
    return found


def _ports_of(tables: Sequence[UnitTable]) -> dict[str, set[str]]:
    """The names by port of each unit; of a port of several units none."""
    pairs = pl.concat([table.ports for table in tables]).unique()
    alone = pairs.filter(pl.len().over("port") == 1)
    found: dict[str, set[str]] = {}
    for unit, port in alone.iter_rows():
        found.setdefault(unit, set()).add(f":{port}")
    return found


def names_of(unit: str) -> set[str]:
    """Names of it in texts of others, in lower case: its own, the last part of a path, a pod's service."""
    last = unit.rsplit("/", 1)[-1]
    found = {unit.lower(), last.lower(), last.split(".", 1)[0].lower(), _REPLICA.sub("", last).lower()}
    return {name for name in found if len(name) >= LEAST_CHARS and not name.isdigit()}


def _named(text: str, called: Mapping[str, Sequence[int]], at: int) -> set[int]:
    """The rows that a text of row `at` names. A name that `at` shares with others says nothing."""
    found: set[int] = set()
    for word, port in named_words(text):
        if word in ORDINARY and not port:
            continue
        names = (word, word.partition(".")[0]) if port else (word,)
        for name in names:
            rows = called.get(name, ())
            found.update(() if at in rows else rows)
    for number in named_ports(text):
        rows = called.get(f":{number}", ())
        found.update(() if at in rows else rows)
    return found
