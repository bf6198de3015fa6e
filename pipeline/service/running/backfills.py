"""Backfills, and how far they are."""

import redis

from pipeline.settings import Settings
from pipeline.sources.backfill.plans import BackfillView, Plans


def read_backfills(client: "redis.Redis", settings: Settings, limit: int | None = None) -> list[BackfillView]:
    """The newest that are remembered, the newest first; None: all. Raises RedisUnavailable."""
    plans = Plans(client, settings)
    return [view for name in plans.names()[:limit] if (view := plans.view(name)) is not None]
