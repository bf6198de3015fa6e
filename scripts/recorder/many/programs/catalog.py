"""The catalogue: products from PostgreSQL behind a Redis cache, and their stock. Logs plain text."""

import json
from typing import Any

from common import Handler, Log, Refused, hooks, release_fault, route, serve
from database import Cache, Database

log = Log("catalog", "text")
database = Database("catalog")
cache = Cache(log)
BAD = release_fault()
PRICE = "unit_price" if BAD == 1 else "price"  # release fault 1: a column that only the next schema has


def as_product(row: Any) -> dict[str, Any]:
    product = {"id": row[0], "name": row[1], "price": float(row[2]), "stock": row[3]}
    wrong = hooks.variant("wrong")
    if wrong == 0:
        product["price"] = -product["price"]
    elif wrong == 1:
        product["price"] = None
    if BAD == 0:
        product["amount"] = product.pop("price")  # release fault 0: the field was renamed
    return product


def load(product_id: int) -> dict[str, Any]:
    rows = database.rows(f"SELECT id, name, {PRICE}, stock FROM products WHERE id = %s", product_id)
    kind = hooks.variant("exception")
    if kind == 0:
        rows = [row[:3] for row in rows]
    elif kind == 1:
        rows = [(*row[:2], f"EUR {row[2]}", row[3]) for row in rows]
    if not rows:
        raise Refused(404, f"no product {product_id}")
    return as_product(rows[0])


def product(product_id: str, **_: Any) -> Any:
    key = f"product:{product_id}"
    if found := cache.get(key):
        log("info", f"product {product_id} from cache")
        return json.loads(found)
    loaded = load(int(product_id))
    log("info", f"product {product_id} from database, stock {loaded['stock']}")
    cache.put(key, json.dumps(loaded), 4)
    return loaded


def page(*, query: dict[str, str], **_: Any) -> Any:
    number = int(query.get("page", 0))
    if found := cache.get(f"page:{number}"):
        return json.loads(found)
    sql = f"SELECT id, name, {PRICE}, stock FROM products ORDER BY id LIMIT 10 OFFSET %s"
    rows = database.rows(sql, number * 10)
    if hooks.variant("exception") is not None:
        rows = [row[:2] for row in rows]
    products = [as_product(row) for row in rows]
    log("info", f"page {number} loaded, {len(products)} products")
    cache.put(f"page:{number}", json.dumps(products), 5)
    return products


def reserve(product_id: str, *, body: Any, **_: Any) -> Any:
    quantity = int(body["quantity"])
    with database.transaction() as cursor:
        rows = cursor.rows(
            "UPDATE products SET stock = stock - %s WHERE id = %s AND stock >= %s RETURNING stock",
            *(quantity, int(product_id), quantity),
        )
        if not rows:
            cursor.rows("UPDATE products SET stock = 60 WHERE id = %s", int(product_id))
    if not rows:
        log("warning", f"stock of product {product_id} is below {quantity}, refill ordered")
        raise Refused(409, "out of stock")
    log("info", f"reserved {quantity} of product {product_id}, {rows[0][0]} left")
    return {"reserved": 0 if hooks.variant("wrong") is not None else quantity, "left": rows[0][0]}


def stock_value(**_: Any) -> Any:
    row = database.rows("SELECT count(*), sum(stock), sum(stock * price) FROM products")[0]
    return {"products": row[0], "pieces": row[1], "value": float(row[2])}


class CatalogHandler(Handler):
    def report(self, path: str, status: int, size: int, spent_ms: float) -> None:
        self.log("info", f"{self.command} {path} -> {status} {size} bytes in {spent_ms:.1f} ms")


if __name__ == "__main__":
    serve(
        "catalog",
        log,
        [
            route("GET", r"/products", page),
            route("GET", r"/products/(\d+)", product),
            route("POST", r"/products/(\d+)/reserve", reserve),
            route("GET", r"/stock/value", stock_value),
        ],
        CatalogHandler,
    )
