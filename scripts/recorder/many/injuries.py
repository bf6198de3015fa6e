"""Eight kinds of faults, the services that each kind may hit, and how each is made and repaired.

Four kinds are a wrong turn in the code of a service (programs/common.py, `Hooks`): exception, wrong value,
latency, CPU. A fifth, memory, is a leak there until the process has no more, or a Redis that is full. Loss
drops packets in the kernel (network.py). `down` ends a service. `deploy` starts a release with a mistake.
"""

import json
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from recorder.many.network import descendants, lose_packets
from recorder.many.stack import LISTENS, OWN, PYTHON, Services

FAULT_S = 15.0
LOSS = 0.4  # of the packets that arrive
VARIANTS = 2  # ways in which one service can have a fault of one kind

TARGETS: dict[str, tuple[str, ...]] = {
    "exception": OWN,
    "wrong": ("catalog", "search", "orders", "payments", "notify", "worker"),
    "latency": OWN,
    "cpu": ("web", "catalog", "search", "orders", "payments", "worker", "notify"),
    "memory": ("web", "catalog", "search", "orders", "payments", "worker", "notify", "cache"),
    "loss": ("web", "catalog", "search", "orders", "payments", "notify", "postgres", "cache", "queue"),
    "down": ("catalog", "search", "orders", "payments", "notify", "worker", "postgres", "cache", "queue"),
    "deploy": OWN,
}
SELDOM = ("payments", "worker", "notify")  # asked about once a second
DONE = {
    "exception": "Code of {service} took a path that raises an exception (way {variant}).",
    "wrong": "Code of {service} answered with a wrong value and no error of its own (way {variant}).",
    "latency": "{service} slept {seconds} s before it worked on a request.",
    "cpu": "{service} burnt {seconds} s of CPU time for each request.",
    "memory": "{service} kept {mib} MiB more with each request until its limit.",
    "memory/cache": "Redis was filled with large keys under the policy noeviction.",
    "loss": "{loss:.0%} of the packets that arrive at {service} were dropped.",
    "down": "{service} was ended with {signal} and started again {fault_s:.0f} s later.",
    "deploy": "A release of {service} with a mistake (number {variant}), rolled back {fault_s:.0f} s later.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Injury:
    """One fault: `variant` picks one of VARIANTS ways, `seconds` and `mib` the strength."""

    kind: str
    service: str
    variant: int
    seconds: float = 0.0
    mib: int = 0

    @property
    def done(self) -> str:
        text = DONE.get(f"{self.kind}/{self.service}", DONE[self.kind])
        sig = self.signal.name
        return text.format(
            service=self.service, variant=self.variant, seconds=self.seconds, mib=self.mib, loss=LOSS,
            signal=sig, fault_s=FAULT_S,
        )  # fmt: skip

    @property
    def signal(self) -> signal.Signals:
        if self.variant:
            return signal.SIGTERM if self.service != "postgres" else signal.SIGINT
        # PostgreSQL's SIGQUIT: at once, without a checkpoint, and its children end too.
        return signal.SIGKILL if self.service != "postgres" else signal.SIGQUIT


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When an injury was there (Unix time); `noted`: traces whose code took the wrong turn."""

    injury: Injury
    start: float
    repaired: float
    end: float
    noted: tuple[str, ...]


def plan(seed: int, *, each: int) -> list[Injury]:
    """`each` faults of every kind, no service twice in a kind, in a random order."""
    chance = random.Random(seed)
    found = []
    for kind, services in TARGETS.items():
        for service in chance.sample(services, each):
            found.append(
                Injury(
                    kind=kind,
                    service=service,
                    variant=chance.randrange(VARIANTS),
                    seconds=round(
                        chance.uniform(1.0, 1.8) if kind == "latency" else chance.uniform(0.25, 0.5), 2
                    ),
                    mib=chance.choice((12, 20)) * (2 if service in SELDOM else 1),
                )
            )
    chance.shuffle(found)
    return found


def run_injury(injury: Injury, stack: Services, *, recovery_s: float) -> Span:
    """Makes the fault, waits, repairs, waits for the recovery; repairs even when it is interrupted."""
    make, repair = _WAYS.get(injury.kind, (_ask_code, _ask_no_more))
    if injury.kind == "memory" and injury.service == "cache":
        make, repair = _fill_cache, _empty_cache
    start = time.time()
    try:
        make(injury, stack)
        time.sleep(max(0.0, start + FAULT_S - time.time()))
    finally:
        repair(injury, stack)
    repaired = time.time()
    time.sleep(recovery_s)
    notes = stack.fault_file(injury.service).with_suffix(".traces")
    noted = tuple(dict.fromkeys(notes.read_text().split())) if notes.exists() else ()
    notes.unlink(missing_ok=True)
    return Span(injury=injury, start=start, repaired=repaired, end=time.time(), noted=noted)


def _ask_code(injury: Injury, stack: Services) -> None:
    share = 1.0 if injury.kind in ("memory", "deploy") else 0.8
    order = {"kind": injury.kind, "variant": injury.variant, "share": share}
    order |= {"seconds": injury.seconds, "mib": injury.mib}
    path = stack.fault_file(injury.service)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(order))
    new.rename(path)


def _ask_no_more(injury: Injury, stack: Services) -> None:
    stack.fault_file(injury.service).unlink(missing_ok=True)
    if injury.kind == "wrong" and injury.service == "worker":  # else the batch jobs complain for ever
        stack.psql("UPDATE orders SET state = 'fulfilled' WHERE state = 'fulfiled'")


def _stop_leak(injury: Injury, stack: Services) -> None:
    _ask_no_more(injury, stack)
    if injury.service in PYTHON:  # a Node service without memory ended by itself; it was started again
        stack.stop_service(injury.service)
        stack.start_service(injury.service)


def _lose(injury: Injury, stack: Services) -> None:
    until = time.monotonic() + FAULT_S
    while time.monotonic() < until:  # again and again: the process opens new sockets
        if process := stack.processes.get(injury.service):
            lose_packets(descendants(process.pid), LOSS)
        time.sleep(0.3)


def _lose_no_more(injury: Injury, stack: Services) -> None:
    if process := stack.processes.get(injury.service):
        lose_packets(descendants(process.pid), 0)


def _end(injury: Injury, stack: Services) -> None:
    stack.stop_service(injury.service, injury.signal)


def _start(injury: Injury, stack: Services) -> None:
    stack.start_service(injury.service)


def _deploy(injury: Injury, stack: Services) -> None:
    stack.release(injury.service, fault=str(injury.variant))


def _roll_back(injury: Injury, stack: Services) -> None:
    stack.release(injury.service, back=True)


def _redis(service: str, *commands: tuple[bytes | str, ...]) -> bool:
    """Sends commands one by one; False: one of them was answered with an error."""
    with socket.create_connection(("127.0.0.1", LISTENS[service]), timeout=10) as connection:
        for command in commands:
            parts = [part if isinstance(part, bytes) else part.encode() for part in command]
            lengths = b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
            connection.sendall(b"*%d\r\n%s" % (len(parts), lengths))
            if connection.recv(4096).startswith(b"-"):
                return False
    return True


def _fill_cache(_: Injury, __: Services) -> None:
    _redis("cache", ("CONFIG", "SET", "maxmemory-policy", "noeviction"))
    ended = threading.Event()
    until = time.monotonic() + FAULT_S
    number, size = 0, 1 << 20
    while time.monotonic() < until and not ended.is_set():
        if _redis("cache", ("SET", f"session-dump:{number}", b"x" * size)):
            number += 1
        else:  # full for this size: try a smaller one, down to keys of 256 bytes
            size = max(256, size // 2)
            ended.wait(0.05 if size > 256 else 0.3)


def _empty_cache(_: Injury, __: Services) -> None:
    _redis(
        "cache", ("CONFIG", "SET", "maxmemory-policy", "allkeys-lru"),
        *(("DEL", f"session-dump:{number}") for number in range(3000)),
    )  # fmt: skip


Way = tuple[Callable[[Injury, Services], None], Callable[[Injury, Services], None]]
_WAYS: dict[str, Way] = {
    "memory": (_ask_code, _stop_leak),
    "loss": (_lose, _lose_no_more),
    "down": (_end, _start),
    "deploy": (_deploy, _roll_back),
}
