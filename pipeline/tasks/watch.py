"""What beat asks for every `watch_s`: fold what stored batches said into sessions, rates and incidents.

One process watches at a time, whichever takes the message. What fails waits for the next round: observations stay in
their list, which is bounded.
"""

import os
import threading
import time
from contextlib import suppress
from typing import Final

import redis

from pipeline.errors import RedisUnavailable, Retryable
from pipeline.ledger.batches import Stage
from pipeline.logs import logger
from pipeline.messages.routing import TASK_WATCH
from pipeline.observe import counters as metrics
from pipeline.redis.leases import WATCH, Mode, Refused
from pipeline.tasks.context import Context
from pipeline.tasks.step import HUNG
from pipeline.watching.watcher import Told

NAME: Final = TASK_WATCH
# After one that hung the watcher rests for so many times as long, so that its process stores batches meanwhile.
REST: Final = 5


def run(context: Context, *_: str) -> None:
    # Nothing ends a thread, and whoever hangs in a sink here would keep batches from being stored.
    alarm = threading.Timer(context.settings.step_s, _hung, [context])
    alarm.daemon = True
    alarm.start()
    try:
        if not context.watcher.state.rests():
            watch(context)
    except (RedisUnavailable, redis.RedisError) as exc:
        logger().warning("redis.away", why=str(exc))
    except Retryable as exc:
        logger().warning("watch.waits", why=str(exc))
        with suppress(RedisUnavailable):
            context.presence.complain("watch", str(exc))
    finally:
        alarm.cancel()


def _hung(context: Context) -> None:
    """As a step that does not end: the process goes, and whoever supervises it starts another."""
    after_s = context.settings.step_s
    logger().error("watch.hung", in_sink=context.in_sink, after_s=after_s, rests_s=REST * after_s)
    with suppress(RedisUnavailable, redis.RedisError):
        context.watcher.state.rest(REST * after_s)
    metrics.flush()
    os._exit(HUNG)


def watch(context: Context, *, end: bool = False) -> bool:
    """Rounds until nothing is left to do or time is up; False when somebody else watches, or more is left.

    `end`: nothing more will come (watching/watcher.py), and nothing is stored in this process.
    """
    watcher, now = context.watcher, time.monotonic
    turns = watcher.turns
    if not turns.begin(now(), waits=not end and _waits(context)):
        return False
    # Asking again as the same holder renews; watching/watched.lua compares the token, so no quarantine is needed.
    lease = context.leases.request(WATCH, Mode.EXCLUSIVE, context.owner)
    if isinstance(lease, Refused):
        return False
    left = 0
    try:
        with context.leases.holding(lease) as held:
            while not held.lost.is_set():
                told = watcher.round(lease.token, end=end)
                left = told.left
                _count(told)
                if not told.more:
                    return True
                if not turns.goes_on(now(), waits=not end and _waits(context), left=left):
                    return False
    finally:
        turns.end(now(), left=left)
    return False


def _waits(context: Context) -> bool:
    """Whether batches wait for the stage that this process works for."""
    return context.ledger.counts().get(f"stage:{Stage.STORE.value}", 0) > 0


def _count(told: Told) -> None:
    kinds = [item.kind for item in told.found]
    metrics.watched(told.observations, told.judged, kinds)
    if kinds:
        logger().info("watch.found", findings=len(kinds), kinds=sorted(set(kinds)))
