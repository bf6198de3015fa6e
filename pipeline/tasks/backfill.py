"""The task of a reader: takes a free slot of a backfill and reads its pieces.

The sweep sends a wake-up for each slot that has work and no reader. So neither a lost message nor a killed
reader holds a backfill up for longer than a lease."""

import random
from typing import Final

import redis

from pipeline.errors import BadInput, BadPayload, RedisUnavailable, StoreUnavailable, TooNew
from pipeline.logs import logger
from pipeline.messages.routing import TASK_BACKFILL
from pipeline.producer import Producer
from pipeline.redis.leases import Lease
from pipeline.sources.backfill.archive import archive_of
from pipeline.sources.backfill.pieces import BackfillPlan
from pipeline.tasks.context import Context
from pipeline.tasks.reader import ReaderSlot, SlotReader, Stopped

NAME: Final = TASK_BACKFILL
# A reader takes the next message after so long, so that several backfills share the readers.
TURN_S: Final = 30.0


def run(context: Context, name: str = "", *_: str) -> None:
    try:
        read_turn(context, name)
    except (RedisUnavailable, redis.RedisError) as exc:
        logger(backfill=name).warning("redis.away", why=str(exc))


def read_turn(context: Context, name: str) -> None:
    """Reads pieces of this backfill for one turn; nothing where each of its slots has a reader."""
    plans = context.plans
    try:
        plan = plans.plan(name)
    except (BadPayload, TooNew) as exc:
        logger(backfill=name).error("backfill.unreadable", why=str(exc))
        return
    found = None if plan is None else _free_slot(context, name)
    if plan is None or found is None:
        return
    slot, lease = found
    try:
        with context.leases.holding(lease) as holding:
            more = _reader(context, plan, ReaderSlot(plan=plan, name=slot, holding=holding)).work(
                within_s=TURN_S
            )
    except Stopped:
        return
    except (StoreUnavailable, BadInput, ModuleNotFoundError) as exc:
        # This machine cannot reach the archive: another one may, and the sweep calls again.
        logger(backfill=name).warning("backfill.waits", why=str(exc))
        plans.complain(name, f"a reader on {context.owner.partition(':')[0]} waits: {exc}")
        return
    if more:
        context.submit.read(name)


def call_readers(context: Context) -> int:
    """Sends wake-ups for slots that have work and no reader; returns how many."""
    sent = 0
    for name in context.plans.active():
        missing = len(context.plans.free_slots(name))
        if missing:
            missing -= context.submit.readers_called(name)
        for _ in range(missing):
            sent += context.submit.read(name)
    return sent


def _free_slot(context: Context, name: str) -> tuple[str, Lease] | None:
    slots = context.plans.free_slots(name)
    random.shuffle(slots)  # readers that wake together ask for different ones
    for slot in slots:
        lease = context.leases.request(context.plans.resource(name, slot), context.owner)
        if isinstance(lease, Lease):
            return slot, lease
    return None


def _reader(context: Context, plan: BackfillPlan, slot: ReaderSlot) -> SlotReader:
    """Raises StoreUnavailable, BadInput or ModuleNotFoundError where this machine cannot read the archive."""
    archive = archive_of(plan.place)
    archive.check(plan.root)
    producer = Producer(context.ledger, context.submit, context.settings.replace(time_zone=plan.zone))
    return SlotReader(context.plans, producer, archive, slot)
