"""Which workloads operators care about: patterns with a version, in Redis.

    watchlist = Watchlist.connect(Settings.load())
    watchlist.add("prod/shop/*")            # cluster / namespace / deployment
    watchlist.look().covers("prod/shop/cart")

A pattern matches part by part; `*` stands for any text and `?` for one character within a part, and parts
left out at the end match anything: `prod` watches the whole cluster. Adding makes models appear (controller),
removing changes nothing but what is watched from then on.
"""

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Self

import msgspec
import redis

from pipeline.errors import BadInput
from pipeline.records.batch import MAX_NAME
from pipeline.records.remembered import remembered
from pipeline.redis.attach import attached
from pipeline.redis.connection import answering, connect, text_map
from pipeline.redis.keys import SHARED, Keys
from pipeline.redis.scripts import Scripts
from pipeline.settings import Settings

MAX_PATTERNS: Final = 10_000
NestedWorkloads = dict[str, dict[str, list[str]]]  # of Opni: cluster -> namespace -> deployments
FRESH_S: Final = 1.0  # how long a producer goes by what it read


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchEntry:
    """One pattern and since when it is watched."""

    pattern: str
    added: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """The watchlist at one moment. Its version grows with every change."""

    version: int = 0
    entries: tuple[WatchEntry, ...] = ()

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(entry.pattern for entry in self.entries)

    def covers(self, workload: str) -> bool:
        """True when some pattern matches the workload."""
        return covers(self.patterns, workload)


class Watchlist:
    """Add, remove, look. Every method raises RedisUnavailable."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.keys = Keys(settings.redis.key_prefix)
        self.scripts = Scripts(client)
        self._seen = (0.0, Watched())

    @classmethod
    def connect(cls, settings: Settings) -> Self:
        """The watchlist of REDIS_URL, or of the stack on the data directory. Raises BadInput without one."""
        settings = attached(settings)
        return cls(connect(settings), settings)

    def add(self, *patterns: str) -> list[str]:
        """Watch these too; returns the new ones. Raises BadInput before anything is changed."""
        return self._change("add", [check_pattern(p) for p in patterns])

    def remove(self, *patterns: str) -> list[str]:
        """Stop watching; returns those that were watched. Models stay as they are."""
        return self._change("remove", patterns)

    def look(self) -> Watched:
        """The list as it is now, sorted by pattern."""
        with answering():
            raw = text_map(self.client.hgetall(self.keys.watch))
        version = int(raw.pop("", "0"))
        entries = (
            WatchEntry(pattern=p, added=datetime.fromtimestamp(int(json.loads(text)["added_ms"]) / 1000, UTC))
            for p, text in sorted(raw.items())
        )
        return Watched(version=version, entries=tuple(entries))

    def lately(self) -> Watched:
        """The list as it was within the last second, for callers that ask for every batch."""
        at, watched = self._seen
        if time.monotonic() - at > FRESH_S or not at:
            watched = self.look()
            self._seen = (time.monotonic(), watched)
        return watched

    def _change(self, verb: str, patterns: Iterable[str]) -> list[str]:
        answer = self.scripts.run("training/watchlist", [self.keys.watch], [verb, MAX_PATTERNS, *patterns])
        if answer[0] == b"full":
            raise BadInput(
                f"the watchlist holds {MAX_PATTERNS:,} patterns, its limit; use wildcards, such as "
                "prod/*/cart"
            )
        return [item.decode() for item in answer[1:]]


def check_pattern(pattern: str) -> str:
    """Raises BadInput for what can be no pattern."""
    if not pattern or len(pattern) > MAX_NAME or not pattern.isprintable():
        shown = repr(pattern) if len(pattern) <= MAX_NAME else repr(pattern[:40]) + "..."
        raise BadInput(
            f"{shown} is no workload pattern; write cluster/namespace/deployment, with * and ? as wildcards, "
            "such as prod/shop/*"
        )
    return pattern


def patterns_of(workloads: Mapping[str, Mapping[str, Iterable[str]]]) -> list[str]:
    """{cluster: {namespace: [deployment]}} of Opni as patterns. Raises BadInput."""
    return sorted(
        {
            check_pattern("/".join(part for part in (cluster, namespace, deployment) if part))
            for cluster, namespaces in workloads.items()
            for namespace, deployments in namespaces.items()
            for deployment in deployments
        }
    )


def nested_patterns(text: bytes, name: str) -> list[str]:
    """The patterns of a file with Opni's workloads, alone or below `workloads`. Raises BadInput."""
    try:
        found = msgspec.json.decode(text)
        if isinstance(found, dict) and isinstance(found.get("workloads"), dict) and _is_outer(found):
            found = found["workloads"]
        patterns = patterns_of(msgspec.convert(found, NestedWorkloads))
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise BadInput(
            f"the workloads of {name} cannot be read ({exc}); "
            'write {"cluster": {"namespace": ["deployment"]}} as JSON'
        ) from exc
    if not patterns:
        raise BadInput(f"{name} names no workload; write them as {{cluster: {{namespace: [deployment]}}}}")
    return patterns


def _is_outer(found: Mapping[str, object]) -> bool:
    """Whether `workloads` is a message of Opni, and no cluster of that name."""
    inner = found["workloads"]
    return isinstance(inner, dict) and not any(isinstance(one, list) for one in inner.values())


def covers(patterns: Iterable[str], workload: str) -> bool:
    """True when one of the patterns matches the workload."""
    return any(_compiled(pattern).fullmatch(workload) for pattern in patterns)


def model_of(workload: str, own_models: Iterable[str]) -> str:
    """The model of a workload: its own where a pattern of `own_models` matches, else SHARED."""
    return workload if workload != SHARED and covers(own_models, workload) else SHARED


def unmatched(patterns: Iterable[str], workloads: Iterable[str]) -> list[str]:
    """The patterns that match none of these workloads."""
    names = list(workloads)
    return [p for p in patterns if not any(_compiled(p).fullmatch(w) for w in names)]


def unwatched(watched: Watched, workloads: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Workloads seen but not watched, most lines first: what a user may pick from."""
    names = [name for name in workloads if not watched.covers(name)]
    return sorted(names, key=lambda name: (-workloads[name].get("accepted", 0), name))


# More than one full list: with one pattern too many for it, a cache that is asked in order answers nothing.
@remembered(2 * MAX_PATTERNS, MAX_NAME)
def _compiled(pattern: str) -> re.Pattern[str]:
    # Parts left out at the end match anything.
    return re.compile("/".join(map(_part, pattern.split("/"))) + "(?:/.*)?", re.DOTALL)


def _part(part: str) -> str:
    """One part as an expression. Text between two stars matches at its first place, as in `fnmatch`.

    Backtracking over all places would take years for a pattern such as *a*a*a*a*b.
    """
    first, *pieces = (
        "".join("[^/]" if c == "?" else re.escape(c) for c in piece) for piece in part.split("*")
    )
    if not pieces:
        return first
    *inner, last = pieces
    return first + "".join(f"(?>[^/]*?{piece})" for piece in inner if piece) + "[^/]*" + last
