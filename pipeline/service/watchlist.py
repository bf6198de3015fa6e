"""The watchlist, with what its patterns cover and what is seen but not watched."""

from collections.abc import Sequence
from datetime import UTC, datetime

import redis

from pipeline.controller.watchlist import Watched, Watchlist, covers, unwatched
from pipeline.ledger.ledger import Ledger
from pipeline.service.access.audit import record_change
from pipeline.service.values import SeenWorkload, WatchedPattern, WatchlistChange, WatchlistView
from pipeline.settings import Settings


def read_watchlist(client: "redis.Redis", settings: Settings) -> WatchlistView:
    """Raises RedisUnavailable."""
    watched = Watchlist(client, settings).look()
    return watchlist_view(watched, Ledger(client, settings).backlog.totals(), settings.watch.unwatched)


def change_watchlist(
    client: "redis.Redis", settings: Settings, patterns: Sequence[str], *, adding: bool, by: str
) -> WatchlistChange:
    """Adds or removes patterns. Raises BadInput, RedisUnavailable."""
    watchlist = Watchlist(client, settings)
    changed = (watchlist.add if adding else watchlist.remove)(*patterns)
    watched = watchlist.look()
    for pattern in changed:
        record_change(
            client, settings, by=by, action="watchlist.add" if adding else "watchlist.remove", target=pattern
        )
    return WatchlistChange(
        changed=changed,
        unchanged=[p for p in dict.fromkeys(patterns) if p not in changed],
        version=watched.version,
        patterns=list(watched.patterns),
    )


def watchlist_view(watched: Watched, totals: dict[str, dict[str, int]], treatment: str) -> WatchlistView:
    """The watchlist with what each pattern covers, and what is seen but not watched."""
    # Once: thousands of patterns by thousands of workloads are seconds already.
    covered = {
        entry.pattern: [name for name in totals if covers([entry.pattern], name)] for entry in watched.entries
    }
    return WatchlistView(
        version=watched.version,
        watched=[
            WatchedPattern(
                pattern=entry.pattern,
                added=entry.added,
                workloads=covered[entry.pattern],
                lines=sum(totals[name].get("accepted", 0) for name in covered[entry.pattern]),
            )
            for entry in watched.entries
        ],
        unwatched=[
            SeenWorkload(
                workload=name,
                lines=totals[name].get("accepted", 0),
                skipped=totals[name].get("skipped", 0),
                last_seen=datetime.fromtimestamp(totals[name].get("last_ms", 0) / 1000, UTC),
            )
            for name in unwatched(watched, totals)
        ],
        unwatched_are=treatment,
    )
