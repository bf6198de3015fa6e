"""A hint to every worker that a new model is live. Missing it costs nothing: each compares between batches."""

from typing import Any, Final

import redis
from celery import Celery
from celery.worker.control import control_command
from kombu.exceptions import OperationalError

from pipeline.observe import logger

COMMAND: Final = "logweir_reload"


@control_command(name=COMMAND)  # type: ignore[untyped-decorator] # celery publishes no types
def _reload(_state: Any) -> dict[str, str]:
    logger().info("reload.hint")
    return {"ok": "the next batch compares versions"}


def announce(app: Celery) -> None:
    """Broadcast the hint; a broker that is away is no fault."""
    try:
        app.control.broadcast(COMMAND)
    except (OperationalError, redis.RedisError, OSError) as exc:
        logger().info("reload.not_sent", why=str(exc))
