"""Connections to Redis, and its errors as ours."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, ClassVar, Final, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import SentinelConnectionPool

from pipeline.errors import BadSetting, RedisUnavailable
from pipeline.redis.sentinels import Sentinels, tls_of
from pipeline.settings import Settings
from pipeline.settings.values import SentinelAddress, is_sentinel

# Sentinels name another master within 2 to 5 s. A frozen one is waited for no longer.
FAILOVER_S: Final = 5.0
# The words of a server that is no master any more, or not one that may write.
DEMOTED: Final = ("READONLY", "NOREPLICAS", "MASTERDOWN")
# The words of a server that answers no command now, whatever the command is. "BUSY " is somebody's script
# that runs for seconds; BUSYGROUP and BUSYKEY are answers to a command of ours.
_SURROUNDINGS: Final = (
    *(
        "OOM",
        "MISCONF",
        "LOADING",
        "out of memory",
        "BUSY ",
        "TRYAGAIN",
        "CLUSTERDOWN",
        "max number of clients",
    ),
)
_BY_CLASS: Final = (  # redis-py takes the code off these messages
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
)


@cache
def _answering(kind: type) -> type:
    """Connections of this kind that take any answer to PING as a sign of life.

    Redis refuses even PING while its disk is full, and still answers every command that only reads."""

    class Answering(kind):  # type: ignore[misc]
        def _send_ping(self) -> None:
            with suppress(redis.ResponseError):
                super()._send_ping()

    return Answering


class _Together(redis.ConnectionPool):
    """A pool that closes idle connections of all pools in this process when one connection breaks.

    The others are most likely broken too, and each would be noticed by its own time-out only.
    """

    # Replaced as a whole and never locked: a process may be forked at any moment.
    _all: ClassVar[tuple["weakref.ref[_Together]", ...]] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.connection_class = _answering(self.connection_class)
        _Together._all = (*(other for other in _Together._all if other() is not None), weakref.ref(self))

    def release(self, connection: Any) -> None:
        super().release(connection)
        if connection._sock is None:  # `is_connected` says so only since redis-py 8
            drop_idle()


class _MasterPool(_Together, SentinelConnectionPool):
    """Connections to the master that the sentinels name.

    redis-py compares addresses only while it connects, so a connection that is kept may lead to an earlier
    master. It is dropped when that one refuses a write, or when a pool of this process finds another."""

    moves: ClassVar[int] = 0

    def disconnect(self, inuse_connections: bool = True) -> None:
        super().disconnect(inuse_connections)
        self.sentinel_manager.close_idle()


def drop_idle() -> None:
    """Closes the idle connections of this process. The next command connects anew, to the master of then."""
    for reference in _Together._all:
        if (pool := reference()) is not None:
            pool.disconnect(inuse_connections=False)


def master_moves() -> int:
    """How often this process has found another master. A subscription from before hears nothing any more."""
    return _MasterPool.moves


def _moved() -> None:
    _MasterPool.moves += 1
    drop_idle()


def open_pool(
    url: str, *, timeout_s: float, connect_s: float, check_every_s: int = 0
) -> redis.ConnectionPool:
    """The pool of a REDIS_URL, without connections yet.

    Nothing is ever repeated here: a command whose answer was lost may have run, and only the caller knows
    whether it is idempotent. The default of redis-py differs between its constructors. Raises BadSetting."""
    options: dict[str, Any] = {
        "socket_connect_timeout": connect_s,
        "health_check_interval": check_every_s,
        "retry": Retry(NoBackoff(), 0),
    }
    if not is_sentinel(url):
        return _Together.from_url(url, socket_timeout=timeout_s, **options)
    address = SentinelAddress.parse(url)
    return _MasterPool(
        address.master,
        Sentinels(address, _moved),
        db=address.database,
        username=address.username,
        password=address.password,
        socket_timeout=min(timeout_s, FAILOVER_S),
        **options,
        **tls_of(address),
    )


def replica_count(client: "redis.Redis") -> int:
    """How many replicas the sentinels know; 0 without sentinels. Raises redis.ConnectionError."""
    pool: Any = client.connection_pool
    return int(pool.sentinel_manager.replicas(pool.service_name)) if isinstance(pool, _MasterPool) else 0


def replaced(client: "redis.Redis", run_id: str) -> str:
    """Why the sentinels may take another master than the server of this run id, "" where they do not."""
    pool: Any = client.connection_pool
    return str(pool.sentinel_manager.replaced(pool.service_name, run_id))


def connect(settings: Settings, *, timeout_s: float = 10) -> "redis.Redis":
    """A client for the ledger, with short time-outs and without repetitions. Raises BadSetting."""
    if settings.redis.url is None:
        raise BadSetting(
            f"no logweir stack runs on {settings.data.dir}; start it with `logweir up`, or set REDIS_URL or "
            "--data-dir"
        )
    pool = open_pool(settings.redis.url, timeout_s=timeout_s, connect_s=min(5, timeout_s), check_every_s=10)
    return redis.Redis.from_pool(pool)


@contextmanager
def answering() -> Iterator[None]:
    """Around every Redis command: redis-py's errors that heal become RedisUnavailable."""
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError) as exc:
        raise RedisUnavailable(f"Redis does not answer ({exc}); it is tried again") from exc
    except redis.ResponseError as exc:
        if is_demoted(exc):
            drop_idle()
            raise RedisUnavailable(f"Redis takes no writes now ({exc}); it is tried again") from exc
        if is_refusal(exc):
            raise RedisUnavailable(
                f"Redis refuses to work ({exc}); give it memory or disk space, or end the script that runs there"
            ) from exc
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
    """True for an answer that is not about our command: memory, disk, a script of somebody that runs for
    seconds, loading, failover. Time or an operator heals it."""
    if is_demoted(error) or isinstance(error, _BY_CLASS):
        return True
    return any(word in str(error) for word in _SURROUNDINGS)


def is_demoted(error: Exception) -> bool:
    """True for an answer of a server that is no master any more, or one that has lost its replicas."""
    # redis-py takes the code off a ReadOnlyError. Redis before 7 wraps the code of a script's error.
    return isinstance(error, redis.exceptions.ReadOnlyError) or any(word in str(error) for word in DEMOTED)


def now_ms(client: "redis.Redis") -> int:
    """The clock that counts, in milliseconds. Raises RedisUnavailable."""
    with answering():
        seconds, micros = client.time()
    return int(seconds) * 1000 + int(micros) // 1000
