"""The task of beat every `tick_s`: one controller at a time decides about trainings. Changed templates
are written to OpenSearch."""

from typing import Final, cast

import redis

from pipeline.drain.templates import unpack_template
from pipeline.errors import BadPayload, RedisUnavailable, Rejected, SinkUnavailable, TooNew
from pipeline.logs import logger
from pipeline.messages.routing import TASK_TICK
from pipeline.redis.connection import answering, byte_map
from pipeline.redis.leases import CONTROLLER, Refused
from pipeline.redis.scripts import Scripts
from pipeline.tasks.context import Context

NAME: Final = TASK_TICK
WRITTEN_AT_ONCE: Final = 2_000  # templates; a tick must not keep the store worker from its batches


def run(context: Context, *_: str) -> None:
    try:
        tick(context)
    except (RedisUnavailable, redis.RedisError) as exc:
        logger().warning("redis.away", why=str(exc))


def tick(context: Context) -> list[str]:
    """Decide, unless another process is at it; returns the ids of the requested trainings."""
    lease = context.leases.request(CONTROLLER, context.owner)
    if isinstance(lease, Refused):
        return []
    with context.leases.holding(lease):
        requested = context.controller.tick()
    for request_id in requested:
        logger(request=request_id).info("controller.retrains")
        context.submit.train(request_id)
    if "opensearch" in context.settings.data.sinks:
        tell_templates(context)
    return requested


def tell_templates(context: Context) -> int:
    """Write changed templates to their OpenSearch index; returns how many. A failed write is tried again next
    tick."""
    from pipeline.opensearch.client import opensearch_client
    from pipeline.sinks.template_index import write_templates

    keys = context.ledger.keys
    with answering():
        changed = byte_map(context.client.hgetall(keys.templates_untold))
        ids = list(changed)[:WRITTEN_AT_ONCE]
        stored = context.client.hmget(keys.templates, ids) if ids else []
    templates, newer = [], set()
    for template_id, blob in zip(ids, cast("list[bytes | None]", stored), strict=True):
        try:
            if blob is not None:
                templates.append(unpack_template(int(template_id), blob))
        except TooNew:
            newer.add(template_id)  # that build writes it
        except BadPayload as exc:
            logger(template=template_id).warning("templates.unread", why=str(exc))
    try:
        written = (
            write_templates(opensearch_client(context.settings), context.settings, templates)
            if templates
            else 0
        )
    except (SinkUnavailable, Rejected) as exc:
        logger().warning("templates.not_told", why=str(exc))
        context.presence.complain("templates", str(exc))
        return 0
    if not ids:
        return 0
    pairs = [x for i in ids if i not in newer for x in (i, changed[i])]
    if pairs:
        Scripts(context.client).run("drain/told", [keys.templates_untold], pairs)
    return written
