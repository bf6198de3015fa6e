"""The task of beat every `watch_s`: rounds of the watcher over the observations of stored batches.

One process watches at a time, whichever takes the message. After a failure the next round tries again:
observations stay in their list, which is bounded.
"""

import os
import time
from contextlib import suppress
from typing import Final

import redis

from pipeline.errors import RedisUnavailable, Retryable
from pipeline.ledger.ledger import MAX_OBSERVATIONS, MAX_OBSERVED_BYTES
from pipeline.logs import logger
from pipeline.messages.routing import TASK_WATCH
from pipeline.observe import counters as metrics
from pipeline.records.delivery import Stage
from pipeline.redis.leases import WATCH, Refused
from pipeline.tasks.context import Context
from pipeline.tasks.rounds import reporting_faults
from pipeline.tasks.step import HUNG
from pipeline.upkeep import start_timer
from pipeline.watching.time_budget import ALL, FLOOD, HALF, flood_share
from pipeline.watching.watcher import RoundSummary

NAME: Final = TASK_WATCH
# After a round that hung the watcher pauses for so many times as long, so that its process stores batches.
PAUSE: Final = 5


def run(context: Context, *_: str) -> None:
    # A thread that hangs in a sink cannot be ended, and would keep batches from being stored.
    alarm = start_timer(context.settings.stack.step_s, "watch-limit", _hung, context)
    try:
        with reporting_faults(context, "watch", event="watch.waits", faults=(Retryable,)):
            if not context.watcher.state.paused():
                watch_stored(context)
    finally:
        alarm.cancel()


def _hung(context: Context) -> None:
    """Ends the process, as for a step that hangs; its supervisor starts another one."""
    after_s = context.settings.stack.step_s
    logger().error("watch.hung", in_sink=context.in_sink, after_s=after_s, rests_s=PAUSE * after_s)
    with suppress(RedisUnavailable, redis.RedisError):
        context.watcher.state.pause(PAUSE * after_s)
    metrics.flush()
    os._exit(HUNG)


def watch_stored(context: Context, *, end: bool = False) -> bool:
    """Rounds until nothing is left to do or time is up; False while another process watches, or if more is
    left.

    `end`: nothing more will come (watching/watcher.py), and this process stores nothing.
    """
    watcher, now = context.watcher, time.monotonic
    rotation = watcher.rotation
    share = ALL if end else _share(context)
    if not rotation.begin(now(), share=share):
        return False
    # A request by the same holder renews. watching/watched.lua compares the token, so no quarantine is
    # needed.
    lease = context.leases.request(WATCH, context.owner)
    if isinstance(lease, Refused):
        return False
    unread = 0
    try:
        with context.leases.holding(lease) as renewal:
            while not renewal.lost.is_set():
                context.begin_watching()
                summary = watcher.round(lease.token, end=end, flood=share < HALF)
                unread = summary.unread
                _count(summary)
                if not summary.more:
                    return not unread  # something is left where a fault keeps every round from being written
                if summary.only_behind and not end and any(context.ledger.backlog.pending()):
                    return False  # minutes of old logs can wait; lines on their way cannot
                share = ALL if end else _share(context)
                if not rotation.goes_on(now(), share=share, unread=unread):
                    return False
    finally:
        rotation.end(now(), unread=unread)
    return False


def _share(context: Context) -> float:
    """The share of this process' time that watching may take now (watching/time_budget.py)."""
    counts = context.ledger.backlog.counts()
    share = HALF if counts.get(f"stage:{Stage.STORE.value}", 0) > 0 else ALL
    taken, waiting, size = context.ledger.backlog.unobserved()
    age_s = context.watcher.age.note(time.monotonic(), taken=taken, waiting=waiting)
    if counts.get("batches", 0) < FLOOD:
        return share
    full = max(waiting / MAX_OBSERVATIONS, size / MAX_OBSERVED_BYTES)
    return min(share, flood_share(age_s=age_s, full=full))


def _count(summary: RoundSummary) -> None:
    kinds = [item.kind for item in summary.found]
    metrics.watched(summary.observations, summary.judged, kinds)
    if kinds:
        logger().info("watch.found", findings=len(kinds), kinds=sorted(set(kinds)))
