"""What is broken on purpose, how it is repaired, and which lines belong to it.

`break_it` returns when the fault has lasted long enough, `repair` puts things right. `causes` are the rules
of attribution: a record of that log, inside the fault's window and of a shape that the baseline never shows,
belongs to the fault when its text matches. They are written from what each program prints for that failure.
"""

import os
import re
import resource
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from recorder.software import POSTGRES, Stack, wait_until


def _nothing(_: Stack) -> None:
    """For faults that end by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One way to break the stack."""

    id: str
    name: str
    done: str  # what was done, in one sentence for labels.json
    break_it: Callable[[Stack], None]
    repair: Callable[[Stack], None] = _nothing
    causes: Mapping[str, str] = field(default_factory=dict)  # log -> pattern; answers go by status 5xx


def _log_since(stack: Stack, log: str, offset: int) -> str:
    with (stack.logs / log).open("rb") as handle:
        handle.seek(offset)
        return handle.read().decode("utf-8", "replace")


# -- expired certificate -------------------------------------------------------------------------


def _expire_certificate(stack: Stack) -> None:
    stack.present_certificate("expired")
    stack.processes["payments"].send_signal(signal.SIGHUP)
    time.sleep(15)


def _renew_certificate(stack: Stack) -> None:
    stack.present_certificate("payments")
    stack.processes["payments"].send_signal(signal.SIGHUP)


# -- a killed database backend -------------------------------------------------------------------


def _backends(stack: Stack) -> list[int]:
    """Process ids of the shop's own database connections."""
    parent = stack.processes["postgres"].pid
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue  # it ended between the two looks
        if int(fields[1]) == parent and b"shop shop" in command:
            found.append(int(entry.name))
    return sorted(found)


def _kill_backend(stack: Stack) -> None:
    wait_until("the shop holds a database connection", lambda: bool(_backends(stack)))
    os.kill(_backends(stack)[0], signal.SIGKILL)
    time.sleep(5)


# -- connection limit ----------------------------------------------------------------------------


def _startup(user: str, database: str, program: str) -> bytes:
    pairs = ("user", user, "database", database, "application_name", program, "")
    body = struct.pack("!i", 196608) + b"".join(part.encode() + b"\0" for part in pairs)
    return struct.pack("!i", len(body) + 4) + body


def _take_connections(_: Stack) -> None:
    """A report generator that leaks: it takes every free connection and holds it for 12 s."""
    held: list[socket.socket] = []
    until = time.monotonic() + 12
    try:
        while time.monotonic() < until:
            one = socket.create_connection(("127.0.0.1", POSTGRES), timeout=5)
            one.sendall(_startup("reports", "shop", "reports"))
            if one.recv(1) == b"E":
                one.close()
                time.sleep(0.4)
            else:
                held.append(one)
    finally:
        for one in held:
            one.sendall(b"X\0\0\0\4")  # Terminate, so that the server sees an orderly end
            one.close()


# -- the service behind nginx is gone ------------------------------------------------------------


def _kill_shop(stack: Stack) -> None:
    stack.end(f"shop-{stack.shop_port}", signal.SIGKILL)
    time.sleep(10)


def _start_shop(stack: Stack) -> None:
    stack.start_shop(stack.shop_port)


# -- a lock that is held too long ----------------------------------------------------------------


def _hold_lock(stack: Stack) -> None:
    stack.psql(
        "BEGIN; ALTER TABLE orders ADD COLUMN IF NOT EXISTS gift_note text; SELECT pg_sleep(12); COMMIT",
        user="reports",
        program="reports",
    )


# -- Redis cannot save ---------------------------------------------------------------------------


def _forbid_saving(stack: Stack) -> None:
    offset = (stack.logs / "redis.log").stat().st_size
    (stack.work / "redis").chmod(0o500)
    wait_until(
        "Redis fails to save",
        lambda: "Background saving error" in _log_since(stack, "redis.log", offset),
        seconds=40,
    )
    time.sleep(10)


def _allow_saving(stack: Stack) -> None:
    offset = (stack.logs / "redis.log").stat().st_size
    (stack.work / "redis").chmod(0o700)
    wait_until(
        "Redis saves again",
        lambda: "terminated with success" in _log_since(stack, "redis.log", offset),
        seconds=40,
    )


# -- disk full -----------------------------------------------------------------------------------


def _limit_file_size(stack: Stack, limit: int) -> None:
    parent = stack.processes["postgres"].pid
    for pid in (parent, *_backends(stack)):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def _fill_disk(stack: Stack) -> None:
    """Fills the small tmpfs of the audit table; without the right to mount one, a limit on file size."""
    if stack.mounted:
        with (stack.work / "bulk" / "ballast").open("wb", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(b"\0" * 65536)
            except OSError:
                pass  # full: that is the fault
    else:
        _limit_file_size(stack, max(f.stat().st_size for f in (stack.work / "bulk").rglob("*")))
    time.sleep(15)


def _free_disk(stack: Stack) -> None:
    if stack.mounted:
        (stack.work / "bulk" / "ballast").unlink()
    else:
        _limit_file_size(stack, resource.RLIM_INFINITY)


# ------------------------------------------------------------------------------------------------

FAULTS = (
    Fault(
        id="certificate-expired",
        name="Expired certificate upstream",
        done="The payment service was given a certificate that had expired, for 15 s; nginx verifies it.",
        break_it=_expire_certificate,
        repair=_renew_certificate,
        causes={
            "nginx-error.log": r"upstream SSL certificate verify error|SSL_do_handshake\(\) failed",
        },
    ),
    Fault(
        id="backend-killed",
        name="kill -9 of a PostgreSQL backend",
        done="One server process of PostgreSQL was killed with SIGKILL; it reset itself and recovered.",
        break_it=_kill_backend,
        causes={
            "postgres.log": r"signal 9|terminating (any other|connection because of crash)|recover|reinitializing"
            r"|interrupted|redo |invalid record length|in recovery mode|not yet accepting|not properly shut down"
            r"|could not (send|receive) data|shared memory|end-of-recovery",
            "shop.log": r"network error|InterfaceError|Connection(Reset|Refused)|terminating connection"
            r"|recovery mode|not yet accepting|crash of another server process",
            "worker.log": r"network error|InterfaceError|terminating connection|recovery mode|not yet accepting"
            r"|crash of another",
        },
    ),
    Fault(
        id="connection-limit",
        name="PostgreSQL connection limit reached",
        done="A client took every free database connection (max_connections = 30) and held them for 12 s.",
        break_it=_take_connections,
        causes={
            "postgres.log": r"too many clients|remaining connection slots|reports@shop LOG:  disconnection",
            "shop.log": r"too many clients|remaining connection slots|PoolTimeout",
            "worker.log": r"too many clients|remaining connection slots",
        },
    ),
    Fault(
        id="upstream-gone",
        name="kill -9 of the web service",
        done="The HTTP service behind nginx was killed with SIGKILL and started again 10 s later.",
        break_it=_kill_shop,
        repair=_start_shop,
        causes={
            "nginx-error.log": r"connect\(\) failed \(111|upstream prematurely closed|recv\(\) failed \(104"
            r"|no live upstreams",
        },
    ),
    Fault(
        id="lock-timeout",
        name="Statements time out behind a lock",
        done="A migration changed the orders table and kept its lock for 12 s; statement_timeout is 2 s.",
        break_it=_hold_lock,
        causes={
            "postgres.log": r"statement timeout|still waiting for|acquired \w+Lock|pg_sleep|canceling autovacuum"
            r"|skipping (vacuum|analyze)|duration: \d{4,}\.",
            "shop.log": r"statement timeout|PoolTimeout|slow request: \S+ took \d{4,} ms",
            "worker.log": r"network error|timed out|statement timeout",  # its own limit on an answer is 8 s
        },
    ),
    Fault(
        id="redis-cannot-save",
        name="Redis cannot write its snapshot",
        done="Redis lost the right to write to its directory, so that saving failed and it refused writes.",
        break_it=_forbid_saving,
        repair=_allow_saving,
        causes={
            "redis.log": r"Failed opening the temp RDB|Background saving error|Permission denied",
            "shop.log": r"MISCONF",
            "worker.log": r"MISCONF",
        },
    ),
    Fault(
        id="disk-full",
        name="Disk full for a PostgreSQL tablespace",
        done="The small file system of the audit table's tablespace was filled to the last byte for 15 s.",
        break_it=_fill_disk,
        repair=_free_disk,
        causes={
            "postgres.log": r"could not (extend|write)|No space left|File too large",
            "shop.log": r"could not (extend|write)|No space left|File too large",
        },
    ),
)

# Answers that say "we failed": their shape is that of any answer, so the status decides instead.
STATUS_5XX = {
    "nginx-access.log": re.compile(r'" 5\d\d \d+ "'),
    "shop.log": re.compile(r" INFO shop\.web: \[\w+\] .* -> 5\d\d in "),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """When a fault was there; `end` includes the seconds of recovery after the repair. Unix time."""

    fault: Fault
    start: float
    repaired: float
    end: float


def run_fault(fault: Fault, stack: Stack, *, tail_s: float, stop: threading.Event) -> Window:
    """Breaks, repairs, and waits for the recovery; repairs even when it is interrupted."""
    start = time.time()
    try:
        fault.break_it(stack)
    except subprocess.CalledProcessError as exc:
        raise RuntimeError(f"fault {fault.id} could not be made: {exc.stderr.strip()[-300:]}") from exc
    finally:
        fault.repair(stack)
    repaired = time.time()
    stop.wait(tail_s)
    return Window(fault=fault, start=start, repaired=repaired, end=time.time())
