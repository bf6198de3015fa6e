"""The shop's background worker: ships orders and refills stock; logs to stdout as JSON lines.

It is one of the programs whose logs `scripts/record_samples` records.
"""

import argparse
import json
import signal
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pg8000.dbapi
import redis


def log(level: str, event: str, **facts: Any) -> None:
    """One JSON line."""
    stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
    print(json.dumps({"time": stamp, "level": level, "event": event, **facts}), flush=True)


class Worker:
    """Runs each job on its schedule; a job that fails is logged and tried again at its next time."""

    def __init__(self, postgres_port: int, redis_port: int) -> None:
        self.postgres_port = postgres_port
        self.cache = redis.Redis(host="127.0.0.1", port=redis_port, socket_timeout=2)
        self.connection: Any = None

    def _execute(self, sql: str) -> list[Any]:
        if self.connection is None:
            self.connection = pg8000.dbapi.connect(
                user="worker",
                host="127.0.0.1",
                port=self.postgres_port,
                database="shop",
                timeout=8,
                application_name="worker",
            )
            log("info", "database_connected")
        cursor = self.connection.cursor()
        cursor.execute(sql)
        rows = list(cursor.fetchall()) if cursor.description else []
        self.connection.commit()
        return rows

    def ship(self) -> None:
        rows = self._execute(
            "UPDATE orders SET state = 'shipped' WHERE id IN (SELECT id FROM orders WHERE state = 'paid' "
            "ORDER BY id LIMIT 20 FOR UPDATE SKIP LOCKED) RETURNING id, product_id, quantity"
        )
        for order, product, quantity in rows:
            log("info", "order_shipped", order=order, product=product, quantity=quantity)

    def count(self) -> None:
        (open_orders,) = self._execute("SELECT count(*) FROM orders WHERE state = 'paid'")[0]
        self.cache.set("open_orders", open_orders)
        log("info", "orders_counted", open=open_orders)

    def refill(self) -> None:
        rows = self._execute(
            "UPDATE products SET stock = stock + 1 WHERE id IN "
            "(SELECT (random() * 39999)::int + 1 FROM generate_series(1, 300)) RETURNING id"
        )
        log("info", "stock_refilled", products=len(rows))

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()

    def run(self, name: str, job: Callable[[], None]) -> None:
        begun = time.perf_counter()
        try:
            job()
        except (pg8000.dbapi.Error, redis.RedisError, OSError) as exc:
            detail = exc.args[0] if exc.args else ""
            text = detail.get("M") if isinstance(detail, dict) else str(exc)
            log("error", "job_failed", job=name, error_type=type(exc).__name__, error=text)
            if not isinstance(exc, redis.RedisError):
                self.connection = None
        else:
            log("debug", "job_done", job=name, ms=round((time.perf_counter() - begun) * 1000, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--postgres-port", type=int, required=True)
    parser.add_argument("--redis-port", type=int, required=True)
    options = parser.parse_args()

    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    worker = Worker(options.postgres_port, options.redis_port)
    log("info", "worker_started", version="1.4.2")
    turn = 0
    while not stopping.wait(0.5):
        worker.run("ship", worker.ship)
        if turn % 4 == 0:
            worker.run("count", worker.count)
        if turn % 20 == 0:
            worker.run("refill", worker.refill)
        turn += 1
    log("info", "worker_stopping", signal="SIGTERM", turns=turn)
    worker.close()


if __name__ == "__main__":
    main()
