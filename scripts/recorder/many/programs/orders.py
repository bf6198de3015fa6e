"""Carts and orders: PostgreSQL, carts in Redis, payment, and a queue for what happens later. Logs JSON."""

import json
import time
from typing import Any

from common import Log, Refused, UpstreamError, call, hooks, release_fault, route, serve
from database import Database, redis_client

log = Log("orders", "json")
database = Database("orders")
carts = redis_client("cache")
jobs = redis_client("queue")
BAD = release_fault()


def ask(service: str, method: str, path: str, body: Any = None) -> Any:
    begun = time.perf_counter()
    answer = call(service, method, path, body)
    spent = f"{(time.perf_counter() - begun) * 1000:.1f}"
    log("info", "upstream answered", upstream=service, path=path, duration_ms=spent)
    return answer


def add(cart: str, *, body: Any, **_: Any) -> Any:
    item = {"product": int(body["product"]), "quantity": int(body["quantity"])}
    if item["quantity"] < 1 or (BAD == 1 and "sku" not in body):
        raise Refused(422, "quantity must be 1 or more" if BAD is None else "field sku is required")
    if hooks.variant("exception") == 0:
        item = None  # type: ignore[assignment]
    carts.hset(f"cart:{cart}", str(item["product"]), item["quantity"])
    carts.expire(f"cart:{cart}", 120)
    size = carts.hlen(f"cart:{cart}")
    log("info", "cart changed", cart=cart, items=size)
    if hooks.variant("wrong") is not None:
        size = -1
    return {"cart": cart, "items": size}


def place(*, body: Any, **_: Any) -> Any:
    cart = str(body["cart"])
    items = carts.hgetall(f"cart:{cart}")
    if not items:
        raise Refused(409, "cart is empty")
    total = 0.0
    for product, quantity in items.items():
        found = ask("catalog", "GET", f"/products/{product}")
        price = found["price"]
        if hooks.variant("exception") is not None:
            price = found.get("list_price")
        if price is not None and price < 0:
            log("error", "price of product is not plausible", product=product, price=price)
            raise UpstreamError("catalog gave a negative price")
        total += price * int(quantity)
    with database.transaction() as cursor:
        state = "colour" if BAD == 0 else "state"  # release fault 0: a migration that never ran
        order = cursor.rows(
            f"INSERT INTO orders (cart, total, {state}) VALUES (%s, %s, 'placed') RETURNING id", cart, total
        )[0][0]
        for product, quantity in items.items():
            cursor.rows("INSERT INTO items VALUES (%s, %s, %s)", order, int(product), int(quantity))
    log("info", "order created", order=order, items=len(items), total=f"{total:.2f}")
    paid = ask("payments", "POST", "/charges", {"order": order, "amount": round(total, 2)})
    if paid["status"] == "declined":
        database.rows("UPDATE orders SET state = 'declined' WHERE id = %s", order)
        raise Refused(402, "payment declined")
    if abs(paid["amount"] - round(total, 2)) > 0.005:
        log(
            "error",
            "charged amount differs from total",
            order=order,
            total=f"{total:.2f}",
            charged=paid["amount"],
        )
        raise UpstreamError("payments charged another amount")
    database.rows("UPDATE orders SET state = 'paid' WHERE id = %s", order)
    log("info", "payment confirmed", order=order, charge=paid["charge"])
    enqueue(order, items)
    carts.delete(f"cart:{cart}")
    wrong = hooks.variant("wrong")
    return 201, {"order": None if wrong is not None else order, "total": round(total, 2)}


def enqueue(order: int, items: Any) -> None:
    from common import current_trace

    job = {"order": order, "items": items, "trace_id": current_trace(), "queued": time.time()}
    depth = jobs.lpush("fulfilment", json.dumps(job))
    log("info", "fulfilment queued", order=order, depth=depth)


def show(order: str, **_: Any) -> Any:
    rows = database.rows("SELECT id, total, state FROM orders WHERE id = %s", int(order))
    if hooks.variant("exception") is not None:
        rows = [row[:1] for row in rows]
    if not rows:
        raise Refused(404, f"no order {order}")
    wrong = hooks.variant("wrong")
    return {
        "order": rows[0][0],
        "total": float(rows[0][1]),
        "state": None if wrong is not None else rows[0][2],
    }


def advance(order: str, *, body: Any, **_: Any) -> Any:
    rows = database.rows("UPDATE orders SET state = %s WHERE id = %s RETURNING id", body["state"], int(order))
    if not rows:
        raise Refused(404, f"no order {order}")
    log("info", "order state changed", order=order, state=body["state"])
    return {"order": int(order), "state": "placed" if hooks.variant("wrong") is not None else body["state"]}


def stats(**_: Any) -> Any:
    sql = "SELECT state, count(*), coalesce(sum(total), 0) FROM orders GROUP BY state ORDER BY state"
    found = {state: {"count": n, "total": float(total)} for state, n, total in database.rows(sql)}
    if hooks.variant("exception") is not None:
        found = {state: row["sum"] for state, row in found.items()}
    return found


def expire(**_: Any) -> Any:
    sql = (
        "UPDATE orders SET state = 'expired' WHERE state = 'placed' AND placed < now() - interval '20 s' "
        "RETURNING id"
    )
    rows = database.rows(sql)
    log("info", "unpaid orders expired", count=len(rows))
    return {"expired": len(rows)}


if __name__ == "__main__":
    serve(
        "orders",
        log,
        [
            route("POST", r"/carts/(\w+)", add),
            route("POST", r"/orders", place),
            route("GET", r"/orders/(\d+)", show),
            route("POST", r"/orders/(\d+)/state", advance),
            route("GET", r"/stats", stats),
            route("POST", r"/expire", expire),
        ],
    )
