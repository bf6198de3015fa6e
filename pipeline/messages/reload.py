"""A hint to every worker that a new model is live. Missing it costs nothing: each compares between batches.

It goes through Celery's control mailbox (`app.control.broadcast`), which a process that only sends can use. A
`kombu.common.Broadcast` queue, the documented recipe, reaches no consumer from there. Each consumer's queue
has its own name, and Redis' fan-out needs the publisher to declare the exchange and its bindings."""

from typing import Final

import redis
from celery import Celery
from kombu.exceptions import OperationalError

from pipeline.logs import logger

COMMAND: Final = "logweir_reload"


def announce(app: Celery) -> None:
    """Broadcast the hint; a broker that is away is no fault."""
    try:
        app.control.broadcast(COMMAND)
    except (OperationalError, redis.RedisError, OSError) as exc:
        logger().info("reload.not_sent", why=str(exc))
