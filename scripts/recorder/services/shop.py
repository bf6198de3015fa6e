"""A small web shop over PostgreSQL and Redis; logs to stderr with the standard logging module.

It is one of the programs whose logs `scripts/record_samples` records, so it is written like an
ordinary service: a connection pool, a cache that may fail, carts that may not, tracebacks on errors.
"""

import argparse
import json
import logging
import queue
import random
import re
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pg8000.dbapi
import redis

web = logging.getLogger("shop.web")
cache_log = logging.getLogger("shop.cache")
orders_log = logging.getLogger("shop.orders")
main_log = logging.getLogger("shop.main")

UNIQUE_VIOLATION = "23505"


class PoolTimeout(Exception):
    """No database connection became free in time."""


class Pool:
    """At most `size` connections, each replaced after `lifetime_s`, as most pools do."""

    def __init__(self, connect: Callable[[], Any], *, size: int, lifetime_s: float) -> None:
        self._connect = connect
        self._lifetime_s = lifetime_s
        self._slots = threading.BoundedSemaphore(size)
        self._idle: queue.LifoQueue[tuple[float, Any]] = queue.LifoQueue()

    def _take(self) -> tuple[float, Any]:
        while True:
            try:
                expires, connection = self._idle.get_nowait()
            except queue.Empty:
                break
            if time.monotonic() < expires:
                return expires, connection
            self._discard(connection)
        connection = self._connect()
        return time.monotonic() + self._lifetime_s * random.uniform(0.7, 1.3), connection

    @staticmethod
    def _discard(connection: Any) -> None:
        try:
            connection.close()
        except (pg8000.dbapi.Error, OSError):
            main_log.debug("a connection was already closed")

    @contextmanager
    def connection(self) -> Iterator[Any]:
        """A connection inside a transaction: committed at the end, rolled back on an error."""
        if not self._slots.acquire(timeout=1.0):
            raise PoolTimeout("no database connection became free within 1.0 s")
        try:
            expires, connection = self._take()
            try:
                yield connection
                connection.commit()
            except pg8000.dbapi.DatabaseError:
                # The server answered, so the connection may be fine; one that is not fails here.
                try:
                    connection.rollback()
                except (pg8000.dbapi.Error, OSError):
                    self._discard(connection)
                    expires = 0.0
                if expires:
                    self._idle.put((expires, connection))
                raise
            except Exception:
                self._discard(connection)
                raise
            self._idle.put((expires, connection))
        finally:
            self._slots.release()


class Shop:
    """The routes; each returns (status, body)."""

    def __init__(self, pool: Pool, cache: redis.Redis) -> None:
        self.pool = pool
        self.cache = cache

    def _query(self, sql: str, args: tuple[Any, ...] = ()) -> list[Any]:
        with self.pool.connection() as connection:
            cursor = connection.cursor()
            cursor.execute(sql, args)
            return list(cursor.fetchall()) if cursor.description else []

    def _cached(self, key: str, ttl_s: int, make: Callable[[], Any]) -> Any:
        try:
            found = self.cache.get(key)
        except redis.RedisError as exc:
            cache_log.warning("cache read of %s failed: %s", key, exc)
            found = None
        if found is not None:
            return json.loads(found)
        value = make()
        if value is not None:
            try:
                self.cache.setex(key, ttl_s, json.dumps(value, default=str))
            except redis.RedisError as exc:
                cache_log.warning("cache write of %s failed: %s", key, exc)
        return value

    def product(self, product_id: int) -> tuple[int, Any]:
        def load() -> Any:
            rows = self._query("SELECT id, name, price, stock FROM products WHERE id = %s", (product_id,))
            return list(rows[0]) if rows else None

        row = self._cached(f"product:{product_id}", 3, load)
        return (200, row) if row is not None else (404, {"error": "no such product"})

    def products(self, page: int) -> tuple[int, Any]:
        sql = "SELECT id, name, price FROM products ORDER BY id LIMIT 20 OFFSET %s"
        return 200, self._cached(f"page:{page}", 4, lambda: [list(r) for r in self._query(sql, (page * 20,))])

    def search(self, words: str) -> tuple[int, Any]:
        rows = self._query(
            "SELECT id, name FROM products WHERE description ILIKE %s LIMIT 50", (f"%{words}%",)
        )
        return 200, [list(row) for row in rows]

    def order(self, order_id: int) -> tuple[int, Any]:
        rows = self._query("SELECT id, product_id, quantity, state FROM orders WHERE id = %s", (order_id,))
        return (200, list(rows[0])) if rows else (404, {"error": "no such order"})

    def add_to_cart(self, body: dict[str, Any]) -> tuple[int, Any]:
        key = f"cart:{body.get('cart', '')}"
        count = self.cache.hincrby(key, str(body.get("product", 0)), 1)
        self.cache.expire(key, 60)
        return 200, {"count": count}

    def place_order(self, body: dict[str, Any]) -> tuple[int, Any]:
        quantity = int(body.get("quantity", 0))
        if quantity < 1:
            orders_log.warning("order refused: quantity %d is not positive", quantity)
            return 422, {"error": "quantity must be positive"}
        try:
            with self.pool.connection() as connection:
                cursor = connection.cursor()
                cursor.execute(
                    "INSERT INTO orders (request_key, product_id, quantity, state) "
                    "VALUES (%s, %s, %s, 'paid') RETURNING id",
                    (str(body["key"]), int(body["product"]), quantity),
                )
                order_id = cursor.fetchone()[0]
                cursor.execute(
                    "INSERT INTO audit (order_id, document) VALUES (%s, %s)",
                    (order_id, json.dumps({"order": body, "trail": uuid.uuid4().hex * 30})),
                )
        except pg8000.dbapi.DatabaseError as exc:
            if isinstance(exc.args[0], dict) and exc.args[0].get("C") == UNIQUE_VIOLATION:
                orders_log.info("order with key %s was already placed", body["key"])
                return 409, {"error": "already placed"}
            raise
        orders_log.info("order %d placed: product %s, quantity %d", order_id, body["product"], quantity)
        return 201, {"order": order_id}

    def route(self, method: str, target: str, body: dict[str, Any]) -> tuple[int, Any]:
        parts = urlsplit(target)
        args = parse_qs(parts.query)
        if method == "GET":
            if parts.path in {"/", "/healthz"}:
                return 200, {"shop": "open"}
            if match := re.fullmatch(r"/products/(\d+)", parts.path):
                return self.product(int(match[1]))
            if parts.path == "/products":
                return self.products(int(args.get("page", ["0"])[0]))
            if parts.path == "/search":
                return self.search(args.get("q", [""])[0])
            if match := re.fullmatch(r"/orders/(\d+)", parts.path):
                return self.order(int(match[1]))
        elif parts.path == "/cart":
            return self.add_to_cart(body)
        elif parts.path == "/orders":
            return self.place_order(body)
        return 404, {"error": "no such page"}


class Handler(BaseHTTPRequestHandler):
    """One request: route it, log it, answer it."""

    shop: Shop

    def _serve(self) -> None:
        begun = time.perf_counter()
        request = uuid.uuid4().hex[:8]
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length) if length else b"{}"
        try:
            status, answer = self.shop.route(self.command, self.path, json.loads(raw))
        except Exception:  # noqa: BLE001 -- the edge of a request: logged, answered with 500
            web.exception("[%s] %s %s failed", request, self.command, self.path)
            status, answer = 500, {"error": "internal error"}
        spent_ms = (time.perf_counter() - begun) * 1000
        web.info("[%s] %s %s -> %d in %.1f ms", request, self.command, self.path, status, spent_ms)
        if spent_ms > 150:
            web.warning("[%s] slow request: %s took %.0f ms", request, self.path.split("?")[0], spent_ms)
        payload = json.dumps(answer, default=str).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)
        except (BrokenPipeError, ConnectionResetError):
            web.info("[%s] the client left before the answer was sent", request)

    do_GET = _serve  # noqa: N815 -- the names http.server asks for
    do_POST = _serve  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:
        """The request is logged by `_serve`."""


class Server(ThreadingHTTPServer):
    daemon_threads = False  # so that server_close waits for open requests
    request_queue_size = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--postgres-port", type=int, required=True)
    parser.add_argument("--redis-port", type=int, required=True)
    options = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )

    def connect() -> Any:
        return pg8000.dbapi.connect(
            user="shop",
            host="127.0.0.1",
            port=options.postgres_port,
            database="shop",
            timeout=8,
            application_name="shop",
        )

    cache = redis.Redis(host="127.0.0.1", port=options.redis_port, socket_timeout=2, decode_responses=True)
    Handler.shop = Shop(Pool(connect, size=8, lifetime_s=5.0), cache)
    server = Server(("127.0.0.1", options.port), Handler)
    server.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def stop(*_: Any) -> None:
        main_log.info("SIGTERM received, finishing open requests")
        threading.Thread(target=server.shutdown).start()

    signal.signal(signal.SIGTERM, stop)
    main_log.info("listening on 127.0.0.1:%d", options.port)
    server.serve_forever(poll_interval=0.1)
    server.server_close()
    main_log.info("all requests finished, stopped")


if __name__ == "__main__":
    main()
