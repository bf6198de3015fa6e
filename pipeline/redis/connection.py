"""Connections to Redis, and its errors as ours."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from pipeline.errors import BadSetting, RedisUnavailable
from pipeline.settings import Settings


class _Pool(redis.ConnectionPool):
    """A pool that closes idle connections of all pools in this process when one connection breaks.

    The others are most likely broken too, and each would be noticed by its own time-out only.
    """

    # Replaced as a whole and never locked: a process may be forked at any moment.
    _all: ClassVar[tuple["weakref.ref[_Pool]", ...]] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _Pool._all = (*(reference for reference in _Pool._all if reference() is not None), weakref.ref(self))

    def release(self, connection: Any) -> None:
        super().release(connection)
        if connection._sock is None:  # `is_connected` says so only since redis-py 8
            for reference in _Pool._all:
                if (pool := reference()) is not None:
                    pool.disconnect(inuse_connections=False)


def connect(settings: Settings, *, timeout_s: float = 10) -> "redis.Redis":
    """A client for the ledger, with short time-outs. Raises BadSetting.

    The client never repeats a command by itself: a command whose answer was lost may have run, and only the
    caller knows whether it is idempotent. The default of redis-py differs between its constructors."""
    if settings.redis.url is None:
        raise BadSetting("no Redis is known; set REDIS_URL, or start the embedded stack with `logweir up`")
    pool = _Pool.from_url(
        settings.redis.url,
        socket_timeout=timeout_s,
        socket_connect_timeout=min(5, timeout_s),
        health_check_interval=10,
        retry=Retry(NoBackoff(), 0),
    )
    return redis.Redis.from_pool(pool)


@contextmanager
def answering() -> Iterator[None]:
    """Around every Redis command: redis-py's errors that heal become RedisUnavailable."""
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError) as exc:
        raise RedisUnavailable(f"Redis does not answer ({exc}); it is tried again") from exc
    except redis.ResponseError as exc:
        if is_refusal(exc):
            raise RedisUnavailable(f"Redis refuses to work ({exc}); give it memory or disk space") from exc
        raise


def byte_map(raw: Any) -> dict[bytes, bytes]:
    """A HGETALL answer with the type it has: redis-py cannot tell bytes from decoded text."""
    return cast("dict[bytes, bytes]", raw)


def byte_set(raw: Any) -> set[bytes]:
    """A SMEMBERS answer with the type it has."""
    return cast("set[bytes]", raw)


def text_map(raw: Any) -> dict[str, str]:
    """A HGETALL answer as text."""
    return {
        name.decode("utf-8", "replace"): value.decode("utf-8", "replace")
        for name, value in byte_map(raw).items()
    }


def is_refusal(error: Exception) -> bool:
    """True for an answer of Redis that heals by itself or by an operator: memory, disk, loading, failover."""
    if isinstance(error, redis.exceptions.OutOfMemoryError | redis.exceptions.ReadOnlyError):
        return True  # redis-py takes the code off these messages
    words = ("OOM", "MISCONF", "LOADING", "READONLY", "NOREPLICAS", "MASTERDOWN", "out of memory")
    return any(word in str(error) for word in words)


def now_ms(client: "redis.Redis") -> int:
    """The clock that counts, in milliseconds. Raises RedisUnavailable."""
    with answering():
        seconds, micros = client.time()
    return int(seconds) * 1000 + int(micros) // 1000
