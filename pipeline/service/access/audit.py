"""The audit log: every change that a person makes through the command line or the API, in a Redis stream.

An entry is written after the change, and says who, what, and of which thing. Keys of senders and texts of log
lines are no part of it.
"""

import getpass
import json
import os
from datetime import UTC, datetime
from typing import Any, Final

import redis

from pipeline.errors import BadInput, RedisUnavailable
from pipeline.logs import logger
from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.service.cursors import cursor_position, cursor_text
from pipeline.service.values import AuditEntry, AuditPage
from pipeline.settings import Settings

KEPT: Final = 10_000  # entries; about 3 MB
TEXT: Final = 300  # characters of a target or a detail


def record_change(
    client: "redis.Redis", settings: Settings, *, by: str, action: str, target: str, **details: Any
) -> None:
    """Adds an entry. The change has happened: a Redis that does not answer now is only logged."""
    entry: dict[Any, Any] = {
        "by": by[:TEXT],
        "action": action,
        "target": target[:TEXT],
        "details": json.dumps({k: v for k, v in details.items() if v not in (None, "")}, default=str)[:4_000],
    }
    try:
        with answering():
            client.xadd(Keys(settings.redis.key_prefix).audit, entry, maxlen=KEPT, approximate=True)
    except (RedisUnavailable, redis.RedisError) as exc:
        logger().error("audit.not_written", action=action, why=str(exc))


def read_audit(client: "redis.Redis", settings: Settings, *, limit: int, cursor: str | None) -> AuditPage:
    """Changes, the newest first. Raises RedisUnavailable, BadInput."""
    before = "+" if cursor is None else f"({cursor_position(cursor, str, 'audit')}"
    try:
        with answering():
            raw: Any = client.xrevrange(
                Keys(settings.redis.key_prefix).audit, max=before, min="-", count=limit + 1
            )
    except redis.ResponseError as exc:
        raise BadInput("the cursor names no entry of the audit log; leave it out") from exc
    entries = [_entry(name.decode(), fields) for name, fields in raw[:limit]]
    following = cursor_text(entries[-1].id, "audit") if len(raw) > limit else None
    return AuditPage(entries=entries, next=following)


def user_of_machine() -> str:
    """Whom others may ask about a change: the user as this machine knows them."""
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container's user without a name
        return f"uid {os.getuid()}"


def _entry(name: str, fields: dict[bytes, bytes]) -> AuditEntry:
    text = {key.decode(): value.decode("utf-8", "replace") for key, value in fields.items()}
    try:
        details = json.loads(text.get("details", "{}"))
    except ValueError:  # it was cut
        details = {"text": text["details"]}
    at = datetime.fromtimestamp(int(name.partition("-")[0]) / 1000, UTC)
    return AuditEntry(
        id=name, at=at, by=text["by"], action=text["action"], target=text["target"], details=details
    )
