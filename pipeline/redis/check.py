"""Whether the Redis that was named can serve, asked before anything starts."""

from collections.abc import Mapping
from typing import Final

import redis
from redis.sentinel import MasterNotFoundError

from pipeline.errors import BadInput, NoRedis
from pipeline.redis.connection import is_demoted, is_refusal, open_pool
from pipeline.redis.tls import REMEDIES, failure, remedy_in
from pipeline.settings import Settings
from pipeline.settings.values import SENTINELS_TLS_SCHEME, masked_url

OLDEST_REDIS: Final = (7, 0)
OLDEST: Final = "Redis 7.0 or Valkey"
CHECK_S: Final = 5.0
# Reads the clock and writes, as every script of ours does.
PROBE: Final = "redis.call('TIME') redis.call('SET', KEYS[1], '1', 'EX', 5) return 1"


def product(facts: Mapping[str, object]) -> str:
    """Name and version from the answer to INFO server, where a Valkey calls itself a Redis 7.2 as well."""
    if "valkey_version" in facts:
        return f"Valkey {facts['valkey_version']}"
    return f"Redis {facts.get('redis_version', 'of unknown version')}"


def check_redis(settings: Settings, *, timeout_s: float = CHECK_S, writes: bool = True) -> None:
    """Raises BadInput in one sentence when the Redis cannot be used: wrong password, too old, full; NoRedis
    while none answers.

    `writes`: False for a command that only asks, which also works while the disk of Redis is full."""
    url = masked_url(settings.redis.url or "")
    try:
        # Short time-outs and no second try: somebody waits for the answer.
        client = redis.Redis.from_pool(
            open_pool(settings.redis.url or "", timeout_s=timeout_s, connect_s=timeout_s)
        )
        if client.get_encoder().decode_responses:
            raise BadInput(
                f"{url} asks for decoded answers, but payloads are bytes; leave decode_responses out"
            )
        version = str(client.info("server")["redis_version"])
        if tuple(int(x) for x in version.split(".")[:2]) < OLDEST_REDIS:
            raise BadInput(f"Redis at {url} is version {version}; at least {OLDEST} is needed")
        if writes:
            _try_rights(client, settings.redis.key_prefix)
        else:
            client.get(f"{settings.redis.key_prefix}:probe")
    except MasterNotFoundError as exc:
        remedied = remedy_in(str(exc)) or "start the sentinels and Redis, or correct REDIS_URL"
        raise BadInput(f"{exc}; {remedied} ({url})") from exc
    except redis.AuthenticationError as exc:
        raise BadInput(
            f"Redis at {url} {_login(str(exc))}; set the right user and password in REDIS_URL"
        ) from exc
    except redis.ResponseError as exc:
        raise BadInput(f"Redis at {url} {_refusal(exc)}") from exc
    except redis.BusyLoadingError as exc:
        raise NoRedis(f"Redis at {url} still reads its data ({exc}); try again", loading=True) from exc
    except redis.TimeoutError as exc:
        raise NoRedis(
            f"Redis at {url} did not answer within {timeout_s:.0f} s; look after it or correct REDIS_URL"
        ) from exc
    except redis.ConnectionError as exc:
        text, tls = str(exc), url.startswith(("rediss://", SENTINELS_TLS_SCHEME))
        if cause := failure(text, tls=tls):
            raise BadInput(f"Redis at {url} {cause} ({text}); {REMEDIES[cause]}") from exc
        raise NoRedis(f"Redis at {url} does not answer ({text}); start it or correct REDIS_URL") from exc
    except (redis.RedisError, ValueError, KeyError, TypeError) as exc:
        raise BadInput(f"{url} is no usable Redis ({exc}); correct REDIS_URL") from exc


def _try_rights(client: "redis.Redis", prefix: str) -> None:
    """One command of each kind that a user needs the right to, on both kinds of key that we write: ours and
    Celery's."""
    name = f"{prefix}:probe"
    client.ping()
    client.set(name, "1", ex=5)
    client.get(name)
    client.publish(name, "")
    with client.pipeline(transaction=True) as pipe:
        pipe.get(name)
        pipe.execute()
    client.eval(PROBE, 1, f"{{{prefix}}}:probe")


def _login(text: str) -> str:
    # Redis gives a lesson on HELLO here.
    missing = "NOAUTH" in text or "Authentication required" in text or "HELLO must be called" in text
    return "refuses the login: it wants a password" if missing else f"refuses the login ({text})"


def _refusal(error: redis.ResponseError) -> str:
    """The meaning of an error answer, and its remedy."""
    text = str(error)
    if any(word in text for word in ("NOAUTH", "WRONGPASS", "invalid password")):
        return f"{_login(text)}; set the right user and password in REDIS_URL"
    if isinstance(error, redis.exceptions.NoPermissionError) or any(
        word in text for word in ("NOPERM", "ACL failure", "The user executing the script can't run")
    ):
        return f"does not let this user work ({text}); give it the rights in docs/operations.md"
    if "unknown command" in text and "HELLO" in text:
        return f"is too old ({text}); at least {OLDEST} is needed"
    if "DB index" in text:
        return f"has no such database ({text}); correct the number at the end of REDIS_URL"
    if is_demoted(error):
        return f"does not take writes ({text}); name the master, or bring its replicas back"
    if is_refusal(error):
        return f"does not take writes ({text}); give it memory or disk space"
    return f"refuses to work ({text}); correct REDIS_URL or that server"
