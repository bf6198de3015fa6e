"""A hint to every worker that a new model is live. Missing it costs nothing: each compares between batches.

It goes through Celery's control mailbox (`app.control.broadcast`), which a process that only sends can use. The
documented recipe, a `kombu.common.Broadcast` queue, reaches nobody from such a process: its queue has a name of its
own per consumer, and Redis' fan-out needs the exchange and its bindings declared by whoever publishes.
"""

import threading
from typing import Any, Final

import redis
from celery import Celery
from celery.worker.control import control_command
from kombu.exceptions import OperationalError

from pipeline.observe import logger

COMMAND: Final = "logweir_reload"
# Set by the hint, awaited by the reloader of this process. A prefork child has a copy that nobody sets: it polls.
HINT: Final = threading.Event()


@control_command(name=COMMAND)  # type: ignore[untyped-decorator] # celery publishes no types
def _reload(_state: Any) -> dict[str, str]:
    HINT.set()
    return {"ok": "the next batch compares versions"}


def announce(app: Celery) -> None:
    """Broadcast the hint; a broker that is away is no fault."""
    try:
        app.control.broadcast(COMMAND)
    except (OperationalError, redis.RedisError, OSError) as exc:
        logger().info("reload.not_sent", why=str(exc))
