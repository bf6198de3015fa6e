"""Ten days of a made-up shop: three to learn from, and a week.

On the fourth day of the week comes a deploy, on the sixth the database refuses connections for ten minutes,
and on the seventh two nightly jobs stay away."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

TRAINING_DAYS: Final = 3
WEEK_DAYS: Final = 7
DEPLOY_DAY: Final = 4  # of the week
FAULT_DAY: Final = 6
MISSING_DAY: Final = 7
JOB: Final = "backup of shop"
REPORT: Final = "report of sales"  # of a job that is a workload of its own
REFUSED: Final = "connection refused"
CRON: Final = "shop/cron"
SALES: Final = "shop/sales"
SEED: Final = 27
_DAY_S: Final = 86_400
_DEPLOY_S: Final = 10 * 3600
_FAULT_S: Final = 14 * 3600
_FAULT_LASTS_S: Final = 600
_NIGHT_S: Final = 3 * 3600
_MORNING_S: Final = 5 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class ShopLine:
    at: datetime
    workload: str
    text: str  # the line as it is logged


# Lines a day, workload, level, message with places for random values. The known errors are those that every
# public server has, about 70 a day.
_CALM: Final = (
    (1500, "shop/web", "INFO", "GET /products/{n} 200 in {ms} ms"),
    (600, "shop/web", "INFO", "GET / 200 in {ms} ms"),
    (400, "shop/web", "INFO", "POST /cart 201 in {ms} ms"),
    (120, "shop/web", "INFO", "GET /search?q={word} 200 in {ms} ms"),
    (80, "shop/web", "INFO", "client {ip} closed the connection"),
    (300, "shop/api", "INFO", "cart {n} has {few} items"),
    (200, "shop/api", "INFO", "order {n} placed by customer {n}"),
    (200, "shop/api", "INFO", "payment of order {n} accepted after {ms} ms"),
    (60, "shop/api", "INFO", "mail about order {n} sent"),
    (30, "shop/api", "INFO", "cache of prices renewed, {n} entries"),
    (24, "shop/api", "INFO", "session of customer {n} expired"),
    (3, "shop/api", "INFO", "newsletter list exported, {n} addresses"),
    (96, "shop/db", "INFO", "checkpoint complete: wrote {n} buffers"),
    (48, "shop/db", "INFO", "automatic vacuum of table orders: {n} rows removed"),
    (24, "shop/db", "INFO", "automatic analyze of table carts took {ms} ms"),
)
_KNOWN: Final = (
    (20, "shop/web", "ERROR", "SSL handshake failed with {ip}: bad key share"),
    (15, "shop/web", "ERROR", "access to /admin forbidden for {ip}"),
    (12, "shop/api", "ERROR", "payment of order {n} declined: insufficient funds"),
    (8, "shop/db", "ERROR", "duplicate key value violates unique constraint customers_mail of row {n}"),
    (6, "shop/api", "ERROR", "mail about order {n} failed: mailbox full"),
    (4, "shop/api", "WARN", "request to the carrier timed out after {ms} ms, trying again"),
    (3, "shop/web", "ERROR", "upload from {ip} rejected: body too large, {n} bytes"),
    (2, "shop/api", "ERROR", "invalid coupon {word} in cart {n}"),
)
_AFTER_DEPLOY: Final = (
    (200, "shop/api", "INFO", "stock of product {n} reserved until the order is paid"),
    (40, "shop/api", "INFO", "recommendations for customer {n} read from the new index in {ms} ms"),
    (20, "shop/web", "INFO", "GET /wishlist/{n} 200 in {ms} ms"),
)
_JOB: Final = (
    (0, "INFO", JOB + " started"),
    (95, "INFO", "dumped {n} rows of shop in {ms} ms"),
    (130, "INFO", "uploaded dump of shop, {n} KiB"),
    (134, "INFO", JOB + " done"),
)
_REPORT: Final = (
    (0, "INFO", REPORT + " begins"),
    (40, "INFO", "read {n} orders in {ms} ms"),
    (75, "INFO", REPORT + " written, {n} rows"),
)
_WORDS: Final = ("lamp", "chair", "table", "cup", "shelf", "sofa")


def shop_lines(start: datetime, seed: int = SEED) -> list[ShopLine]:
    """In the order of time. `start`: midnight of the first day of training."""
    draw = random.Random(seed)
    lines = [line for day in range(TRAINING_DAYS + WEEK_DAYS) for line in _day(start, day, draw)]
    return sorted(lines, key=lambda line: line.at)


def _day(start: datetime, day: int, draw: random.Random) -> Iterator[ShopLine]:
    of_week = day - TRAINING_DAYS + 1
    midnight = start + timedelta(days=day)

    def line(second: float, workload: str, level: str, message: str) -> ShopLine:
        at = midnight + timedelta(seconds=second)
        return ShopLine(
            at=at,
            workload=workload,
            text=f"{at:%Y-%m-%d %H:%M:%S},{at.microsecond // 1000:03} {level} {_said(message, draw)}",
        )

    down = range(_FAULT_S, _FAULT_S + _FAULT_LASTS_S) if of_week == FAULT_DAY else range(0)
    for per_day, workload, level, message in (*_CALM, *_KNOWN):
        for second in _times(per_day, draw):
            if workload != "shop/db" or int(second) not in down:
                yield line(second, workload, level, message)
    for second in range(600, _DAY_S, 1800):
        yield line(second + draw.random(), CRON, "INFO", "session opened for user root")
    if of_week != MISSING_DAY:
        for begin, workload, job in ((_NIGHT_S, CRON, _JOB), (_MORNING_S, SALES, _REPORT)):
            for after, level, message in job:
                second = begin + after * draw.uniform(0.9, 1.1) + 2 * draw.random()
                yield line(second, workload, level, message)
    if of_week == DEPLOY_DAY:
        yield line(_DEPLOY_S - 8, "shop/api", "INFO", "stopping, {few} requests are under way")
        yield line(_DEPLOY_S, "shop/api", "INFO", "shop 2.4.0 started, listening on port 8080")
    if of_week >= DEPLOY_DAY:
        for per_day, workload, level, message in _AFTER_DEPLOY:
            for second in _times(per_day, draw):
                if of_week > DEPLOY_DAY or second > _DEPLOY_S:
                    yield line(second, workload, level, message)
    for second in down[::10]:
        yield line(
            second + draw.random(),
            "shop/api",
            "ERROR",
            "cannot reach the database at 10.0.0.5:5432: " + REFUSED,
        )
        yield line(second + 1 + draw.random(), "shop/web", "ERROR", "POST /cart 502 in {ms} ms")


def _times(per_day: float, draw: random.Random) -> list[float]:
    """Seconds of a day at which a line comes about so often, more by day than at night."""
    times, second = [], 0.0
    while (second := second + draw.expovariate(1.6 * per_day / _DAY_S)) < _DAY_S:
        hour = second / 3600
        if draw.random() < (0.25 + 0.75 * math.exp(-(((hour - 14) / 6) ** 2))):
            times.append(second)
    return times


def _said(message: str, draw: random.Random) -> str:
    return message.format(
        n=draw.randrange(1000, 100_000),
        few=draw.randrange(1, 9),
        ms=round(draw.lognormvariate(3.2, 0.5)),
        ip=f"{draw.randrange(11, 200)}.{draw.randrange(256)}.{draw.randrange(256)}.{draw.randrange(1, 255)}",
        word=draw.choice(_WORDS),
    )


def first_midnight() -> datetime:
    """Fixed, so that every run has the same lines; a Monday."""
    return datetime(2026, 11, 2, tzinfo=UTC)
