"""How far a Redis fails over: its replicas, its sentinels, when it refuses writes. For `logweir doctor`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import redis

from pipeline.redis.sentinels import Sentinels
from pipeline.settings import Settings
from pipeline.settings.values import SentinelAddress, is_sentinel

MAX_LAG_S: Final = 2  # of a replica; masters should refuse writes beyond it


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """What a server says of its replicas. `min_replicas` and `max_lag_s`: None where CONFIG is forbidden."""

    role: str
    online: int  # replicas that follow
    lagging: int  # those of them that are more than MAX_LAG_S behind
    min_replicas: int | None
    max_lag_s: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SentinelView:
    """What one sentinel knows of the master; `trouble` alone where it says nothing."""

    name: str
    master: str = ""  # host:port
    quorum: int = 0
    sentinels: int = 0  # that it knows, itself included
    trouble: str = ""


def replication(client: "redis.Redis") -> Replication:
    """Raises redis.RedisError."""
    facts: Any = client.info("replication")
    followers: list[Any] = [
        value for name, value in facts.items() if name[5:].isdigit() and isinstance(value, dict)
    ]
    online = [follower for follower in followers if follower.get("state") == "online"]
    try:
        limits: Any = client.config_get("min-replicas-*")
    except redis.ResponseError:
        limits = {}
    found = {_text(name): int(value) for name, value in limits.items()}
    return Replication(
        role=str(facts.get("role", "")),
        online=len(online),
        lagging=sum(int(follower.get("lag", 0)) > MAX_LAG_S for follower in online),
        min_replicas=found.get("min-replicas-to-write"),
        max_lag_s=found.get("min-replicas-max-lag"),
    )


def views(url: str) -> list[SentinelView]:
    """Each sentinel of an address is asked."""
    address = SentinelAddress.parse(url)
    asking, found = Sentinels(address), []
    for number, (host, port) in enumerate(address.sentinels):
        name, state = f"{host}:{port}", asking.question(number, address.master)
        if isinstance(state, str):
            found.append(SentinelView(name=name, trouble=state))
            continue
        found.append(
            SentinelView(
                name=name,
                master=f"{state['ip']}:{state['port']}",
                quorum=int(state["quorum"]),
                sentinels=int(state["num-other-sentinels"]) + 1,
            )
        )
    return found


def checks(settings: Settings, client: "redis.Redis") -> list[dict[str, Any]]:
    """Rows for `doctor`; none for a Redis of its own without replicas. Raises redis.RedisError."""
    url, needed = settings.redis.url or "", settings.redis.replicas_ack
    found = replication(client)
    by_sentinels = is_sentinel(url)
    if not (by_sentinels or needed or found.online):
        return []
    rows = [_sentinel_row(views(url))] if by_sentinels else []
    return [*rows, _replica_row(found, needed), _limit_row(found)]


def _sentinel_row(views: Sequence[SentinelView]) -> dict[str, Any]:
    answering = [view for view in views if not view.trouble]
    masters = sorted({view.master for view in answering})
    quorum = max((view.quorum for view in answering), default=0)
    peers = max((view.sentinels for view in answering), default=0)
    trouble = [f"{view.name} {view.trouble}" for view in views if view.trouble]
    if len(masters) > 1:
        trouble.append(f"they name different masters: {', '.join(masters)}")
    if peers < 3:
        trouble.append(f"sentinels that they know: {peers}; run three on three machines")
    if not peers // 2 < quorum <= peers:
        trouble.append(f"a quorum of {quorum} of {peers} is no majority; set {peers // 2 + 1}")
    text = (
        f"{len(answering)} of {len(views)} answer, quorum {quorum}, master {', '.join(masters) or 'unknown'}"
    )
    return _row("sentinels", text, trouble)


def _replica_row(found: Replication, needed: int) -> dict[str, Any]:
    trouble = []
    if found.role != "master":
        trouble.append(f"this server is a {found.role or 'server without a role'}; name the master")
    if found.online < needed:
        trouble.append(f"redis_replicas_ack = {needed} refuses every push until there are more")
    elif found.online < max(needed + 1, 2):
        trouble.append("one more is needed: writes stop at the next fail-over")
    if found.lagging:
        trouble.append(f"{found.lagging} of them more than {MAX_LAG_S} s behind")
    if found.online and not needed:
        trouble.append("redis_replicas_ack = 0: a fail-over may lose the last pushes; set it to 1")
    return _row("Redis replicas", f"{found.online} follow, redis_replicas_ack {needed}", trouble)


def _limit_row(found: Replication) -> dict[str, Any]:
    if found.min_replicas is None:
        return _row("Redis min-replicas", "the server does not say how it is set", [])
    text = f"min-replicas-to-write {found.min_replicas}, min-replicas-max-lag {found.max_lag_s}"
    trouble = []
    if found.min_replicas < 1 or not found.max_lag_s:
        trouble.append(
            "a master that was cut off takes writes that are lost; set min-replicas-to-write 1 and "
            f"min-replicas-max-lag {MAX_LAG_S}"
        )
    elif found.online < found.min_replicas:
        trouble.append(f"writes are refused while fewer replicas follow than {found.min_replicas}")
    return _row("Redis min-replicas", text, trouble)


def _row(what: str, text: str, trouble: Sequence[str]) -> dict[str, Any]:
    return {"what": what, "warning": bool(trouble), "found": "; ".join([text, *trouble])}


def _text(name: object) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)
