"""Charges cards against a ledger in PostgreSQL; declines above a limit. Logs logfmt."""

import random
import time
from typing import Any

from common import Log, Refused, hooks, release_fault, route, serve
from database import Database

log = Log("payments", "logfmt")
database = Database("payments")
BAD = release_fault()
LIMIT = 2_400.0


def authorise(amount: float) -> str:
    """What the card network does: a few milliseconds and a code."""
    time.sleep(random.uniform(0.004, 0.025))
    codes: dict[str, str] = {"ok": f"A{random.randrange(10**6):06d}"}
    if BAD == 1:  # release fault 1: sends the amount in cents to a limit in euros
        amount *= 100
    if hooks.variant("exception") == 0:
        return codes["approval"]
    return codes["ok"] if amount <= LIMIT else ""


def charge(*, body: Any, **_: Any) -> Any:
    order, amount = int(body["order"]), float(body["amount"])
    if amount <= 0 or BAD == 0:  # release fault 0: the new validation refuses everything
        raise Refused(422, "amount must be positive" if amount <= 0 else "currency is missing")
    code = authorise(amount)
    if not code:
        log("warn", "charge declined", order=order, amount=f"{amount:.2f}", reason="over limit")
        return {"status": "declined", "amount": amount, "charge": None}
    if hooks.variant("exception") is not None:
        amount = float(f"EUR {amount}")
    wrong = hooks.variant("wrong")
    booked = amount if wrong is None else round(amount * (10 if wrong == 0 else 0.5), 2)
    row = database.rows(
        "INSERT INTO ledger (order_id, amount, code) VALUES (%s, %s, %s) RETURNING id", order, booked, code
    )[0]
    log("info", "charge authorised", order=order, charge=row[0], amount=f"{booked:.2f}", code=code)
    return {"status": "authorised", "amount": booked, "charge": row[0]}


def ledger(**_: Any) -> Any:
    row = database.rows("SELECT count(*), coalesce(sum(amount), 0) FROM ledger")[0]
    return {"count": row[0], "total": float(row[1])}


if __name__ == "__main__":
    serve("payments", log, [route("POST", r"/charges", charge), route("GET", r"/ledger", ledger)])
