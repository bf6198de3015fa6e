"""Redis users of node agents: each has a password of its own, and reaches the pool alone.

An agent reports devices, ends overdue leases and plans, so it is trusted with the whole pool. It reaches no
log line, no queue of workers, no key of people, and no submitted job: a job is a command for another machine.
"""

import hashlib
import secrets
from typing import Final
from urllib.parse import quote, urlsplit, urlunsplit

import redis

from pipeline.errors import BadInput, NotFound
from pipeline.gpu.leasing.pool_ledger import NAMES, NAMES_PER_REQUEST
from pipeline.gpu.policy.fairness import is_name
from pipeline.redis.connection import answering
from pipeline.redis.keys import Keys
from pipeline.service.access.audit import record_change
from pipeline.settings import Settings
from pipeline.settings.values import is_sentinel

# What a script or a plan of the pool touches beside the names of the ledger.
BESIDE: Final = ("accounts", "planning", "planned")
COMMANDS: Final = (
    "-@all", "+@read", "+@write", "+@transaction", "+@pubsub", "+@scripting", "+@connection", "-@dangerous",
    "-scan", "-randomkey", "-script|flush", "-function", "+info", "+time",
)  # fmt: skip


def agent_user(prefix: str, name: str) -> str:
    """The name of the Redis user of an agent."""
    return f"{prefix}-agent-{name}"


def agent_rules(prefix: str) -> list[str]:
    """The rights of an agent, as `ACL SETUSER` takes them."""
    keys = Keys(prefix)
    own = [keys.gpu(name) for name in (*NAMES, *BESIDE)]
    families = [f"{keys.gpu(name)}*" for name in NAMES_PER_REQUEST]
    shared = [keys.epoch, keys.events, keys.workers, keys.serving, keys.metrics("agent")]
    patterns = [f"~{name}" for name in (*own, *families, *shared)]
    return ["reset", "on", *patterns, f"&{keys.gpu('told', '*')}", *COMMANDS]


def add_agent(client: "redis.Redis", settings: Settings, name: str, *, by: str) -> tuple[str, bool]:
    """A Redis user for one agent: its REDIS_URL, said this once, and whether a restarted Redis knows it.

    A second call gives a new password. Raises BadInput, RedisUnavailable."""
    url = settings.redis.url or ""
    if not is_name(name):
        raise BadInput(
            f"{name[:80]!r} is no name of an agent; use letters, digits, dots, dashes and underscores"
        )
    if is_sentinel(url):
        raise BadInput(
            "users of a Redis that fails over are set on each of its servers; run there: ACL SETUSER "
            f"{agent_user(settings.redis.key_prefix, name)} '>PASSWORD' "
            + " ".join(agent_rules(settings.redis.key_prefix))
        )
    user, secret = agent_user(settings.redis.key_prefix, name), secrets.token_urlsafe(32)
    digest = hashlib.sha256(secret.encode()).hexdigest()
    rules = agent_rules(settings.redis.key_prefix)
    _administer(client, "SETUSER", user, *rules, f"#{digest}")
    record_change(client, settings, by=by, action="gpu.agent.add", target=name)
    return _with_login(url, user, secret), _saved(client)


def remove_agent(client: "redis.Redis", settings: Settings, name: str, *, by: str) -> bool:
    """The user goes, and its connections end; whether a restarted Redis knows that. Raises NotFound,
    BadInput, RedisUnavailable."""
    if not _administer(client, "DELUSER", agent_user(settings.redis.key_prefix, name)):
        raise NotFound(f"there is no agent {name[:80]!r}; `logweir gpu agents` lists them")
    record_change(client, settings, by=by, action="gpu.agent.remove", target=name)
    return _saved(client)


def agent_names(client: "redis.Redis", settings: Settings) -> list[str]:
    """The agents that have a user. Raises BadInput, RedisUnavailable."""
    begin = agent_user(settings.redis.key_prefix, "")
    users = [user.decode() if isinstance(user, bytes) else str(user) for user in _administer(client, "USERS")]
    return sorted(user.removeprefix(begin) for user in users if user.startswith(begin))


def _administer(client: "redis.Redis", *words: str) -> list[bytes | str]:
    """An ACL command. The number of users that it deleted is the length of its answer."""
    try:
        with answering():
            answer = client.execute_command("ACL", *words)  # type: ignore[no-untyped-call]
    except redis.exceptions.NoPermissionError as exc:
        raise BadInput(
            f"this Redis user may not change users ({exc}); use one with the right to ACL in REDIS_URL"
        ) from exc
    except redis.ResponseError as exc:
        raise BadInput(f"Redis does not take the user ({exc}); its version must be 7.0 or newer") from exc
    return list(answer) if isinstance(answer, list | tuple) else [""] * int(answer not in (0, b"0"))


def _saved(client: "redis.Redis") -> bool:
    """Writes the users to the server's file; False where it has none, and forgets them when it restarts."""
    try:
        with answering():
            client.execute_command("ACL", "SAVE")  # type: ignore[no-untyped-call]
    except redis.ResponseError:
        return False
    return True


def _with_login(url: str, user: str, secret: str) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{quote(user, safe='')}:{quote(secret, safe='')}@{host}"))
