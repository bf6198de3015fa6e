"""What the store gives back to a Redis that came up empty, and the copy that makes it possible.

Redis is empty, and the store is not, if its volume was lost, its damaged journal was removed, somebody
emptied it, or REDIS_URL names another one. Templates come back from their journal (drain/journal.py), and
what people decided from a copy that a worker renews. Everything else is lost, and status says so for a week.

Redis names its store (`keys.store`) only once a recovery is complete, and nothing is copied from a Redis that
names none. So a recovery that was interrupted begins again, and an empty Redis never replaces the copy.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

import redis

from pipeline.drain.journal import Journal, Kept
from pipeline.drain.verdicts import Verdicts
from pipeline.errors import BadPayload, StoreUnavailable
from pipeline.logs import logger
from pipeline.models.registry import machine_of
from pipeline.observe.losses import remember_loss
from pipeline.records.wire import Codec
from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.store.objects import Objects

COPY: Final = "decisions/copy"
AT_ONCE: Final = 1_000  # templates of one script: some 10 ms in which Redis answers nobody else
# Redis hashes that only people change, and what one of their fields is.
DECISIONS: Final = {
    "marks": "mark",
    "silences": "silence",
    "incident_states": "incident decision",
    "watch": "watched name",
    "sender_keys": "key",
}
_WIRE: Final = Codec(
    dict[str, dict[bytes, bytes]], version=1, what=f"{COPY} of the store"
)  # hash -> field -> value


def enter(client: "redis.Redis", settings: Settings, objects: Objects, store_id: str) -> None:
    """Names the store in a Redis that names none, after what it lost came back from there.

    Raises RedisUnavailable, StoreUnavailable, TooNew.
    """
    key = Keys(settings.redis.key_prefix).store
    with answering():
        if client.exists(key):
            return
    restored = recover(client, settings, objects)
    if any(restored.values()):
        remember_loss(client, settings, restored)
        logger(**{kind.replace(" ", "_"): many for kind, many in restored.items()}).warning(
            "redis.lost", why="it was empty, and the store was not"
        )
    entry = {"id": store_id, "url": objects.url, "machine": machine_of(settings)}
    with answering():
        client.set(key, json.dumps(entry, sort_keys=True), nx=True)


def recover(client: "redis.Redis", settings: Settings, objects: Objects) -> dict[str, int]:
    """Brings back what Redis lacks and the store has; how much the store has, by noun. May run twice."""
    keys = Keys(settings.redis.key_prefix)
    templates = Journal(objects).read()
    _restore_templates(client, settings, templates)
    counts = {"template": len(templates)}
    raw = objects.get(COPY)
    for name, fields in _decisions(raw).items() if raw is not None else ():
        if name in DECISIONS:
            _restore_decisions(client, keys(name), fields)
            counts[DECISIONS[name]] = len(fields) - (b"" in fields)
    return counts


def copy_decisions(client: "redis.Redis", settings: Settings, objects: Objects) -> None:
    """Raises RedisUnavailable, StoreUnavailable."""
    keys = Keys(settings.redis.key_prefix)
    before = objects.tagged(COPY)  # read first, so that an older copy never replaces a newer one
    pipe = client.pipeline(transaction=True)
    pipe.exists(keys.store)
    for name in DECISIONS:
        pipe.hgetall(keys(name))
    with answering():
        named, *found = pipe.execute()
    decisions = {name: dict(sorted(fields.items())) for name, fields in zip(DECISIONS, found, strict=True)}
    content = _WIRE.pack(decisions)
    if not named or (before is None and not any(found)) or (before is not None and before[0] == content):
        return
    objects.swap(COPY, content, None if before is None else before[1])


def _decisions(raw: bytes) -> dict[str, dict[bytes, bytes]]:
    try:
        return _WIRE.unpack(raw)
    except BadPayload as exc:
        raise StoreUnavailable(f"{exc}; restore it from a backup, or remove it if there is none") from exc


def _restore_decisions(client: "redis.Redis", key: str, fields: Mapping[bytes, bytes]) -> None:
    """Adds the fields that the hash lacks. If it has a version, that changes."""
    pipe = client.pipeline(transaction=True)
    for field, value in fields.items():
        pipe.hsetnx(key, field, value)
    if b"" in fields:
        pipe.hincrby(key, "", 1)
    with answering():
        pipe.execute()


def _restore_templates(client: "redis.Redis", settings: Settings, templates: Mapping[int, Kept]) -> None:
    """Writes the templates whose id Redis lacks."""
    keys, verdicts = Keys(settings.redis.key_prefix), Verdicts(client, settings)
    ids = list(templates)
    for at in range(0, len(ids), AT_ONCE):
        wanted = ids[at : at + AT_ONCE]
        written = False
        while not written:  # a learner may write one of them between the two calls
            with answering():
                found: Any = client.hmget(keys.templates, [str(i) for i in wanted])
            lacking = [i for i, blob in zip(wanted, found, strict=True) if blob is None]
            written = verdicts.learn("", {}, templates=[(i, *templates[i]) for i in lacking])
