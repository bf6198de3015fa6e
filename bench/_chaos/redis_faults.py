"""Faults of Redis, its sentinels and the network before it.

A Redis that fails over survives one server at a time. So a fault of a server, or of the master's network,
waits until the group is redundant again."""

import random
import threading
import time
from typing import Any, Final

from bench._chaos.acts import Act, Heal, Missed, healed_by, stopped
from bench._chaos.proxy import Proxy
from bench._chaos.schedule import Fault
from bench._chaos.world import World

POLL_S: Final = 0.25


class RedisFaults:
    """`over` is set when all faults have to end."""

    def __init__(self, world: World, over: threading.Event) -> None:
        self.world = world
        self.servers = world.servers
        self.services = world.services
        self.over = over
        self.acts: dict[str, Act] = {
            "kill_redis": self._alone(lambda fault, _: self._kill(self.servers.master(), fault)),
            "stop_redis": self._alone(lambda *_: self._stop(self.servers.master())),
            "kill_replica": self._alone(lambda fault, rng: self._kill(self._replica(rng), fault)),
            "stop_replica": self._alone(lambda _, rng: self._stop(self._replica(rng))),
            "kill_sentinel": self._alone(lambda fault, _: self._kill(f"sentinel-{fault.target}", fault)),
            "stop_sentinel": self._alone(lambda fault, _: self._stop(f"sentinel-{fault.target}")),
            "cut": self._alone(lambda *_: ({"connections": self._way().cut()}, None)),
            "refuse": self._alone(self._refuse),
            "delay": self._alone(self._delay),
            "half_open": self._alone(self._half_open),
            "client_kill": self._client_kill,
        }
        self._one = threading.Lock()

    def _alone(self, act: Act) -> Act:
        """The act, once the servers are redundant and no other such fault is under way."""
        if not self.world.shape.sentinel:
            return act

        def alone(fault: Fault, rng: random.Random) -> tuple[Any, Heal | None]:
            if not self._one.acquire(blocking=False):
                raise Missed("another server is at fault")
            try:
                if not self.servers.redundant():
                    raise Missed("the servers are not redundant")
                detail, heal = act(fault, rng)
            except BaseException:
                self._one.release()
                raise
            if heal is None:
                self._one.release()
            return detail, None if heal is None else self._released(heal)

        return alone

    def _released(self, heal: Heal) -> Heal:
        def healed() -> None:
            try:
                heal()
            finally:
                self._one.release()

        return healed

    def _replica(self, rng: random.Random) -> str:
        return rng.choice(self.servers.replicas() or [""])

    def _kill(self, name: str, fault: Fault) -> tuple[Any, Heal | None]:
        if not name or not self.services.kill(name):
            raise Missed("Redis does not run")
        self.services.hold(name, fault.for_s)

        def back() -> None:
            while not self.over.is_set() and not (
                self.services.running(name) is not None and self.servers.answers()
            ):
                time.sleep(POLL_S)

        return {"server": name}, back

    def _stop(self, name: str) -> tuple[Any, Heal | None]:
        process = self.services.running(name)
        if process is None:
            raise Missed("Redis does not run")
        return stopped({name: process.pid})

    def _way(self) -> Proxy:
        way = self.servers.way()
        if way is None:
            raise Missed("there is no master")
        return way

    def _refuse(self, *_: Any) -> tuple[Any, Heal | None]:
        way = self._way()
        return {"connections": way.refuse(True)}, healed_by(lambda: way.refuse(False))

    def _delay(self, fault: Fault, _: random.Random) -> tuple[Any, Heal | None]:
        way = self._way()
        way.delay(float(fault.target))
        return {}, lambda: way.delay(0.0)

    def _half_open(self, fault: Fault, rng: random.Random) -> tuple[Any, Heal | None]:
        return {"connections": self._way().half_open(float(fault.target), rng)}, None

    def _client_kill(self, fault: Fault, _: random.Random) -> tuple[Any, Heal | None]:
        return {"connections": self.world.client.client_kill_filter(_type=fault.target, skipme=True)}, None
