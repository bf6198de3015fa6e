"""Adding and revoking keys, with the entry in the audit log. The key itself is in none."""

from collections.abc import Sequence
from dataclasses import dataclass

import redis

from pipeline.errors import BadInput, NotFound
from pipeline.service.access.audit import record_change
from pipeline.service.access.keys import SEND, SenderKeys
from pipeline.service.values import KeyView, NewKey
from pipeline.settings import Settings
from pipeline.units import span


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyAsked:
    """A wanted key. `only`: patterns of workloads; `lasts`: 12h, 90d; `tenant`: with `infer` or `gpu`."""

    name: str
    scopes: Sequence[str] = (SEND,)
    workload: str = ""
    only: Sequence[str] = ()
    lasts: str | None = None
    tenant: str = ""


def add_key(
    client: "redis.Redis", settings: Settings, asked: KeyAsked, *, by: str, flag: str = "lasts"
) -> NewKey:
    """A new key, in the only place where it is ever said. Raises BadInput, RedisUnavailable."""
    try:
        length = span(asked.lasts) if asked.lasts else None
    except OverflowError:
        length = None
    if asked.lasts and not length:
        raise BadInput(f"{flag} {asked.lasts[:40]!r} is no length of time; write 12h or 90d")
    secret = SenderKeys(client, settings).add(
        asked.name,
        workload=asked.workload,
        patterns=asked.only,
        scopes=asked.scopes,
        lasts=length,
        tenant=asked.tenant,
    )
    scopes = tuple(dict.fromkeys(asked.scopes))
    record_change(client, settings, by=by, action="key.add", target=asked.name, scopes=list(scopes))
    return NewKey(name=asked.name, key=secret, scopes=scopes)


def revoke_key(
    client: "redis.Redis", settings: Settings, name: str, *, by: str, remedy: str = "/api/v1/keys lists"
) -> None:
    """Within a second it is refused everywhere. Raises NotFound, RedisUnavailable."""
    if not SenderKeys(client, settings).revoke(name):
        raise NotFound(f"there is no key {name[:60]!r}; {remedy} those that are")
    record_change(client, settings, by=by, action="key.revoke", target=name)


def read_keys(client: "redis.Redis", settings: Settings) -> list[KeyView]:
    """All keys without their secrets, by name. Raises RedisUnavailable."""
    return [
        KeyView(
            name=key.name,
            scopes=key.scopes,
            workload=key.workload or None,
            only=list(key.patterns),
            created=key.created,
            expires=key.expires,
            tenant=key.tenant or None,
        )
        for key in SenderKeys(client, settings).look()
    ]
