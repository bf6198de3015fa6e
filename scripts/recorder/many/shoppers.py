"""Normal traffic of the set: people who look, search, fill carts, and buy, through the gateway."""

import contextlib
import http.client
import json
import random
import threading
from collections.abc import Callable

WORDS = ("lamp", "desk", "chair", "shelf", "mirror", "carpet", "clock", "vase", "stool", "sofa", "bench")
MORE = ("oak", "steel", "glass", "linen", "walnut", "cork", "brass")
GATEWAY = 28080
WAIT_S = 10.0


class Shopper:
    """One thread of requests, `rate` a second on average."""

    def __init__(self, *, seed: int, rate: float, stop: threading.Event) -> None:
        self._chance = random.Random(seed)
        self._rate = rate
        self._stop = stop
        self._orders: list[int] = []
        self._cart = 0

    def run(self) -> None:
        actions: tuple[tuple[float, Callable[[], object]], ...] = (
            (28, lambda: self._ask("GET", f"/product/{self._product()}")),
            (14, lambda: self._ask("GET", f"/?page={min(39, int(self._chance.expovariate(0.2)))}")),
            (14, lambda: self._ask("GET", f"/search?q={self._words()}")),
            (16, self._buy),
            (8, lambda: self._ask("GET", f"/order/{self._chance.choice(self._orders or [1])}")),
            (0.5, lambda: self._ask("GET", "/wp-login.php")),
        )
        weights = [weight for weight, _ in actions]
        while not self._stop.wait(self._chance.expovariate(self._rate)):
            self._chance.choices(actions, weights)[0][1]()

    def _product(self) -> int:
        if self._chance.random() < 0.01:
            return self._chance.randint(4000, 5000)  # an old link
        return min(int(self._chance.paretovariate(0.5)), 400)

    def _words(self) -> str:
        if self._chance.random() < 0.03:
            return "unicorn"
        return "+".join((self._chance.choice(WORDS), self._chance.choice(MORE)))

    def _ask(self, method: str, path: str, body: object = None) -> object:
        # A visitor sees the faults too; only the servers' logs are recorded.
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            connection = http.client.HTTPConnection("127.0.0.1", GATEWAY, timeout=WAIT_S)
            try:
                data = None if body is None else json.dumps(body)
                agent = {"User-Agent": "Mozilla/5.0 Firefox/132.0", "Content-Type": "application/json"}
                connection.request(method, path, data, agent)
                answer = connection.getresponse()
                found = answer.read()
                return json.loads(found) if answer.status < 300 else None
            finally:
                connection.close()
        return None

    def _buy(self) -> None:
        self._cart += 1
        cart = f"c{self._chance.getrandbits(40):010x}"
        for _ in range(self._chance.randint(1, 3)):
            quantity = 0 if self._chance.random() < 0.02 else self._chance.randint(1, 3)
            self._ask("POST", f"/cart/{cart}", {"product": self._product(), "quantity": quantity})
            self._stop.wait(0.1)
        found = self._ask("POST", "/checkout", {"cart": cart})
        if isinstance(found, dict) and found.get("order"):
            self._orders = [*self._orders[-50:], int(found["order"])]


def start_shoppers(*, seed: int, count: int, rate: float, stop: threading.Event) -> list[threading.Thread]:
    """`rate`: actions a second of all together; buying is an action of two to four requests."""
    people = [Shopper(seed=seed * 1000 + n, rate=rate / count, stop=stop) for n in range(count)]
    threads = [threading.Thread(target=person.run, daemon=True) for person in people]
    for thread in threads:
        thread.start()
    return threads
