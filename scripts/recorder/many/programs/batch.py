"""A scheduler of small batch jobs: reconciliation, expiry, stock report, search index. Logs JSON."""

import time
import uuid
from collections.abc import Callable
from typing import Any

from common import Log, Refused, UpstreamError, begin, call, hooks, release_fault, traced
from database import Database

log = Log("batch", "json")
database = Database("batch", size=1)
BAD = release_fault()
_seen = {"gap": 0.0}


def reconcile() -> dict[str, Any]:
    """The ledger must hold what the orders say; a charge in flight is no difference."""
    booked = call("payments", "GET", "/ledger")
    orders = call("orders", "GET", "/stats")
    if hooks.variant("exception") is not None:
        booked = booked["rows"]
    paid = sum(row["total"] for state, row in orders.items() if state in ("paid", "fulfilled"))
    strange = sorted(set(orders) - {"placed", "paid", "fulfilled", "declined", "expired"})
    if strange:
        log("error", "orders are in an unknown state", states=strange, count=orders[strange[0]]["count"])
    gap = round(booked["total"] - paid, 2)
    if abs(gap - _seen["gap"]) > 8_000:
        log("error", "ledger and orders differ", ledger=booked["total"], orders=round(paid, 2), gap=gap)
    _seen["gap"] = gap
    return {"charges": booked["count"], "gap": gap}


def expire_orders() -> dict[str, Any]:
    return dict(call("orders", "POST", "/expire-orders" if BAD == 1 else "/expire"))


def report_stock() -> dict[str, Any]:
    value = dict(call("catalog", "GET", "/stock/value"))
    if hooks.variant("exception") is not None:
        value["mean"] = value["value"] / (value["products"] - 400)
    column = "amount" if BAD == 0 else "value"
    database.rows(
        f"INSERT INTO stock_reports (pieces, {column}) VALUES (%s, %s)", value["pieces"], value["value"]
    )
    return value


def refresh_index() -> dict[str, Any]:
    products = call("catalog", "GET", f"/products?page={int(time.time()) % 40}")
    if hooks.variant("exception") is not None:
        products = [product["title"] for product in products]
    return dict(call("search", "POST", "/index", [{"id": p["id"], "name": p["name"]} for p in products]))


JOBS: tuple[tuple[str, Callable[[], dict[str, Any]]], ...] = (
    ("reconcile", reconcile),
    ("refresh-index", refresh_index),
    ("expire-orders", expire_orders),
    ("stock-report", report_stock),
)


def run(name: str, job: Callable[[], dict[str, Any]]) -> None:
    begun = time.perf_counter()
    with traced(str(uuid.uuid4())):
        log("info", "job started", job=name)
        try:
            hooks.before()
            found = job()
        except (UpstreamError, Refused) as exc:
            log("error", "job failed", job=name, error=exc)
        except Exception:  # noqa: BLE001 -- the edge of a job: logged, the next one runs
            log("error", "job crashed", job=name, failed=True)
        else:
            spent = f"{(time.perf_counter() - begun) * 1000:.1f}"
            log("info", "job finished", job=name, duration_ms=spent, **found)


if __name__ == "__main__":
    begin(log)
    log("info", "schedule loaded", jobs=len(JOBS))
    turn = 0
    while True:
        time.sleep(2.0)
        run(*JOBS[turn % len(JOBS)])
        turn += 1
