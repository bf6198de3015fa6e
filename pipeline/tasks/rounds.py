"""Rounds of the tasks of beat. A round that meets a fault leaves its work to the next one."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import redis

from pipeline.errors import BadPayload, LogweirError, RedisUnavailable, Retryable
from pipeline.logs import logger
from pipeline.tasks.context import Context


@contextmanager
def reporting_faults(
    context: Context,
    stage: str,
    *,
    event: str,
    faults: tuple[type[LogweirError], ...] = (Retryable, BadPayload),
) -> Iterator[None]:
    """Logs a fault as `event`, and status shows it under `stage`. An absent Redis is only logged."""
    try:
        yield
    except (RedisUnavailable, redis.RedisError) as exc:
        logger().warning("redis.away", why=str(exc))
    except faults as exc:
        logger().warning(event, why=str(exc))
        with suppress(RedisUnavailable):
            context.presence.complain(stage, str(exc))
