"""Normal traffic: shoppers on many loopback addresses, a health checker, and people who close the page
early."""

import contextlib
import http.client
import json
import random
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from recorder.software import HTTP, HTTPS

AGENTS = (
    "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/130.0.0.0 "
    "Safari/537.36",
    "Mozilla/5.0 (Macintosh; Intel Mac OS X 10.15; rv:132.0) Gecko/20100101 Firefox/132.0",
    "Mozilla/5.0 (iPhone; CPU iPhone OS 18_1 like Mac OS X) AppleWebKit/605.1.15 (KHTML, like Gecko) "
    "Mobile/15E148",
    "Mozilla/5.0 (Linux; Android 15; Pixel 9) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/130.0.0.0 Mobile",
    "okhttp/4.12.0",
)
STATIC = ("site.css", "shop.js", "logo.svg", "banner.jpg")


@dataclass(slots=True, kw_only=True)
class Shopper:
    """One visitor after another from one thread, `rate` requests a second at most."""

    seed: int
    rate: float
    stop: threading.Event
    chance: random.Random = field(init=False)
    orders: list[int] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    seen: str = "Thu, 01 Jan 2026 00:00:00 GMT"  # Last-Modified of a file fetched before

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def run(self) -> None:
        actions: tuple[tuple[float, Callable[[], None]], ...] = (
            (30, lambda: self._get(f"/products/{self._product()}")),
            (14, lambda: self._get(f"/products?page={self.chance.randint(0, 30)}")),
            (12, self._static),
            (9, lambda: self._get("/")),
            (5, lambda: self._get(f"/search?q={self.chance.choice(('lamp', 'c4ca', 'desk', '1f0e'))}")),
            (8, self._cart),
            (9, self._order),
            (5, lambda: self._get(f"/orders/{self.chance.choice(self.orders or [1])}")),
            (6, self._pay),
            (1, self._leave_early),
            (0.4, lambda: self._get(self.chance.choice(("/favicon.ico", "/wp-login.php", "/.env")))),
            (0.3, lambda: self._post("/cart", {"note": "x" * 70_000})),
        )
        weights = [weight for weight, _ in actions]
        while not self.stop.is_set():
            action = self.chance.choices(actions, weights)[0][1]
            # A visitor sees the faults too; only the servers' logs are recorded.
            with contextlib.suppress(OSError, http.client.HTTPException):
                action()
            self.stop.wait(self.chance.expovariate(self.rate))

    def _product(self) -> int:
        if self.chance.random() < 0.02:
            return self.chance.randint(90_000, 99_999)  # an old link: 404
        return min(int(self.chance.paretovariate(0.4)), 40_000)

    def _send(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> http.client.HTTPResponse:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        me = f"127.0.{self.chance.randint(1, 9)}.{self.chance.randint(1, 25)}"
        connection = http.client.HTTPSConnection(
            "127.0.0.1", HTTPS, timeout=12, context=context, source_address=(me, 0)
        )
        try:
            sent = {"Host": "shop.example", "User-Agent": self.chance.choice(AGENTS), **(headers or {})}
            if self.chance.random() < 0.6:
                sent["Referer"] = (
                    f"https://shop.example{self.chance.choice(('/', '/products', '/search?q=lamp'))}"
                )
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            answer_body = answer.read()
            if answer.status == 201:
                self.orders = [*self.orders[-50:], int(json.loads(answer_body)["order"])]
            return answer
        finally:
            connection.close()

    def _get(self, path: str) -> None:
        self._send("GET", path)

    def _post(self, path: str, body: dict[str, object]) -> None:
        self._send("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _static(self) -> None:
        if self.chance.random() < 0.04:
            self._get(f"/static/old-{self.chance.randint(1, 9)}.png")
            return
        known = self.chance.random() < 0.5
        headers = {"If-Modified-Since": self.seen} if known else {}
        answer = self._send("GET", f"/static/{self.chance.choice(STATIC)}", headers=headers)
        self.seen = answer.getheader("Last-Modified") or self.seen

    def _cart(self) -> None:
        self._post("/cart", {"cart": self.chance.randint(1, 500), "product": self._product()})

    def _order(self) -> None:
        again = bool(self.keys) and self.chance.random() < 0.05  # a double click: 409
        key = self.chance.choice(self.keys) if again else str(uuid.UUID(int=self.chance.getrandbits(128)))
        self.keys = [*self.keys[-20:], key]
        quantity = 0 if self.chance.random() < 0.03 else self.chance.randint(1, 5)
        self._post("/orders", {"key": key, "product": self._product(), "quantity": quantity})

    def _pay(self) -> None:
        amount = round(self.chance.lognormvariate(4, 1), 2)
        self._post(f"/payments/{self.chance.choice(self.orders or [1])}", {"amount": amount})

    def _leave_early(self) -> None:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        with socket.create_connection(("127.0.0.1", HTTPS), timeout=5) as plain:
            secured = context.wrap_socket(plain)
            secured.sendall(
                b"GET /search?q=zzz HTTP/1.1\r\nHost: shop.example\r\nUser-Agent: okhttp/4.12.0\r\n\r\n"
            )
            time.sleep(0.01)
            secured.close()


def check_health(stop: threading.Event) -> None:
    """What a load balancer asks every two seconds."""
    while not stop.wait(2.0):
        connection = http.client.HTTPConnection("127.0.0.1", HTTP, timeout=12)
        try:
            headers = {"Host": "shop.example", "User-Agent": "health-check/1.0"}
            connection.request("GET", "/healthz", headers=headers)
            connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            pass  # seen in the servers' logs
        finally:
            connection.close()


class Load:
    """All of the traffic; `stop` returns when every thread has ended."""

    def __init__(self, *, seed: int, shoppers: int, rate: float) -> None:
        self._stop = threading.Event()
        people = [
            Shopper(seed=seed * 1000 + i, rate=rate / shoppers, stop=self._stop) for i in range(shoppers)
        ]
        targets: list[Callable[[], None]] = [p.run for p in people]
        targets.append(lambda: check_health(self._stop))
        self._threads = [threading.Thread(target=target, daemon=True) for target in targets]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(15)
