"""Connections to PostgreSQL and Redis of the Python services."""

import queue
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pg8000.dbapi
import redis
from common import PORTS, Log, current_trace


class Database:
    """A pool of at most `size` connections. Statements carry the trace id in a comment (sqlcommenter)."""

    def __init__(self, user: str, *, size: int = 5) -> None:
        self._user = user
        self._slots = threading.BoundedSemaphore(size)
        self._idle: queue.LifoQueue[Any] = queue.LifoQueue()

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        """A cursor; committed at the end, rolled back and closed on an error."""
        if not self._slots.acquire(timeout=1.5):
            raise TimeoutError("no database connection became free within 1.5 s")
        try:
            connection = self._take()
            try:
                yield Cursor(connection.cursor())
                connection.commit()
            except BaseException:
                self._close(connection)
                raise
            self._idle.put(connection)
        finally:
            self._slots.release()

    def _take(self) -> Any:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return pg8000.dbapi.connect(
                self._user, host="127.0.0.1", port=PORTS["postgres"], database="shop", timeout=3,
                application_name=self._user,
            )  # fmt: skip

    @staticmethod
    def _close(connection: Any) -> None:
        try:
            connection.close()
        except (pg8000.dbapi.Error, OSError):
            return

    def rows(self, sql: str, *args: Any) -> list[Any]:
        with self.transaction() as cursor:
            return cursor.rows(sql, *args)


class Cursor:
    """A cursor whose statements name their trace."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    def rows(self, sql: str, *args: Any) -> list[Any]:
        trace = current_trace()
        comment = f" /*trace_id='{trace}'*/" if trace and re.fullmatch(r"[0-9a-f-]+", trace) else ""
        self._cursor.execute(sql + comment, args)
        return list(self._cursor.fetchall()) if self._cursor.description else []


def redis_client(name: str) -> redis.Redis:
    return redis.Redis(
        port=PORTS[name], decode_responses=True, socket_timeout=2.0, socket_connect_timeout=2.0, retry=None
    )


class Cache:
    """Reads and writes that may fail: a cache is no reason to refuse a request."""

    def __init__(self, log: Log) -> None:
        self._redis = redis_client("cache")
        self._log = log

    def get(self, key: str) -> str | None:
        try:
            return self._redis.get(key)  # type: ignore[return-value]
        except redis.RedisError as exc:
            self._log("warning", "cache read failed", key=key, error=exc)
            return None

    def put(self, key: str, value: str, ttl_s: int) -> None:
        try:
            self._redis.setex(key, ttl_s, value)
        except redis.RedisError as exc:
            self._log("warning", "cache write failed", key=key, error=exc)
