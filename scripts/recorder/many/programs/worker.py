"""Takes jobs from the Redis queue: reserves stock, moves the order on, has mail sent. Logs plain text."""

import json
import threading
import time
from typing import Any

import redis
from common import Log, Refused, UpstreamError, begin, call, hooks, release_fault, traced
from database import redis_client

log = Log("worker", "text")
BAD = release_fault()
TRIES = 3


def fulfil(job: dict[str, Any]) -> None:
    """One job; raises what its services raise."""
    order = job["order"]
    hooks.before()
    items = job["lines"] if BAD == 0 else job["items"]  # release fault 0: another name for the field
    if hooks.variant("exception") is not None:
        items = list(items)
    for product, quantity in items.items():
        answer = call("catalog", "POST", f"/products/{product}/reserve", {"quantity": int(quantity)})
        if answer["reserved"] != int(quantity):
            log("error", f"catalog reserved {answer['reserved']} of {quantity} for order {order}")
            raise UpstreamError("catalog reserved too little")
    state = "fulfiled" if hooks.variant("wrong") is not None else "fulfilled"
    answer = call("orders", "POST", f"/orders/{order}/state", {"state": state})
    if answer["state"] != state:
        log("error", f"order {order} is {answer['state']} after it was moved to {state}")
        raise UpstreamError("orders kept the old state")
    path = "/mail/send" if BAD == 1 else "/mails"  # release fault 1: a route of the next version
    sent = call("notify", "POST", path, {"order": order, "template": "fulfilled"})
    if not sent.get("message"):
        log("error", f"notify gave no message id for order {order}")
        raise UpstreamError("notify lost a mail")


def take(job: dict[str, Any], jobs: redis.Redis) -> None:
    begun = time.perf_counter()
    waited_ms = (time.time() - job["queued"]) * 1000
    order = job["order"]
    log("info", f"job for order {order} received after {waited_ms:.0f} ms, {len(job['items'])} items")
    try:
        fulfil(job)
    except Refused as exc:
        log("warning", f"job for order {order} dropped: {exc}")
        return
    except UpstreamError as exc:
        tries = job.get("tries", 0) + 1
        if tries < TRIES:
            log("warning", f"job for order {order} failed, try {tries} of {TRIES}: {exc}")
            time.sleep(0.5)
            jobs.lpush("fulfilment", json.dumps(job | {"tries": tries}))
        else:
            log("error", f"job for order {order} given up after {TRIES} tries: {exc}")
        return
    except Exception:  # noqa: BLE001 -- the edge of a job: logged, the next one runs
        log("error", f"job for order {order} crashed", failed=True)
        return
    log("info", f"job for order {order} done in {(time.perf_counter() - begun) * 1000:.1f} ms")


def work() -> None:
    jobs = redis_client("queue")
    while True:
        try:
            found = jobs.brpop(["fulfilment"], timeout=1)
            if found:
                job = json.loads(found[1])  # type: ignore[index]
                with traced(job["trace_id"]):
                    take(job, jobs)
        except redis.RedisError as exc:
            log("error", f"queue is not reachable: {exc}")
            time.sleep(1.0)


if __name__ == "__main__":
    begin(log)
    threads = [threading.Thread(target=work, name=f"worker-{n}") for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    log("info", f"{len(threads)} workers wait for jobs")
    for thread in threads:
        thread.join()
