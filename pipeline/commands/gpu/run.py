"""`logweir gpu run -- CMD`: waits for a lease of this host, runs CMD in it, gives it back however CMD ends.

The lease is renewed while CMD lives. When it is lost, or has to be given back, CMD gets SIGTERM, a grace,
SIGKILL (commands/gpu/supervised.py). Every process that CMD starts is registered with the lease. So the
device is not leased again while the driver still sees one of them, even if this process is killed.
"""

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from pipeline.commands.common import err, printable
from pipeline.commands.gpu.pool_watch import POLL_S, PoolWatch
from pipeline.commands.gpu.request import (
    LATER,
    lease_words,
    name_explained,
    need_of,
    program_environment,
    request_name,
    seconds_of,
    user,
)
from pipeline.commands.gpu.supervised import KILLED_S, NOT_STARTED, SupervisedProgram
from pipeline.errors import BadInput, LeaseRefused, RedisUnavailable
from pipeline.gpu.leasing.renewal import LeaseInUse
from pipeline.gpu.node import host_lock, mps
from pipeline.gpu.node.enforce import filled
from pipeline.gpu.node.engine import JobContainer
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.node.watchdog import GRACE_S, Watchdog, Word
from pipeline.gpu.policy.explain import device_views, short, why_it_waits
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import HEADROOM_MIB, LeaseMode, PoolLease
from pipeline.logs import set_up
from pipeline.redis.keeper import SAFE
from pipeline.settings import Settings, inherited
from pipeline.units import seconds

TOO_MUCH: Final = 137  # as when the kernel ends a program that takes too much memory
TELL_S: Final = 2.0  # between two words about what is waited for
WAIT_S: Final = 0.1
OVER_S: Final = GRACE_S  # How long a program may use more than it leased.
BEFORE_S: Final = 1.0  # A program that must give back has been killed so long before its lease is revoked.
KILLING_S: Final = 1.0  # Of a lost lease: for the kernel to end what was killed, and for us to notice.
# Passed on to the program. Ctrl-Z is not: a stopped program would keep its GPU.
PASSED_ON: Final = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGWINCH")


def main(args: argparse.Namespace, pool: Pool, settings: Settings) -> int:
    """The exit code of the program, or one of our own (docs/gpu.md)."""
    command = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not command:
        raise BadInput("name the program after --, as in `logweir gpu run --memory 4GiB -- python train.py`")
    if args.json:
        raise BadInput(
            "standard output is the program's here; leave out --json and use `logweir gpu leases --json`"
        )
    set_up(args.log_level or "error")  # the words below tell the fate of the lease
    node, grace_s = this_node(), seconds_of("--grace", args.grace, 10.0)
    console = err()
    tell = WaitReporter(pool, request_name(args, Path(command[0]).name), console)
    need, holder = need_of(args, pool, node=node), f"{user()}:{os.getpid()}"
    wait_s = None if args.wait is None else seconds_of("--wait", args.wait, 0.0)
    try:
        with name_explained(pool, tell.request_id, holder, LeaseRefused):
            lease = pool.request(
                need, holder=holder, request_id=tell.request_id, timeout_s=wait_s, go_on=tell
            )
    except LeaseRefused as exc:
        return _say(console, str(exc), LATER)
    running = Run(
        pool, lease, settings=settings, command=command, grace_s=grace_s, console=console,
        allocator=not args.no_torch_limit,
    )  # fmt: skip
    try:
        return running.run(reported=tell.told or sys.stderr.isatty())
    except LeaseRefused as exc:
        return _say(console, str(exc), LATER)


class WaitReporter:
    """Says on standard error what is waited for, whenever that changes."""

    def __init__(self, pool: Pool, request_id: str, console: Console) -> None:
        self.pool, self.request_id, self.console = pool, request_id, console
        self.told = False
        self._said = ""
        self._next = 0.0

    def __call__(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + TELL_S
        with suppress(RedisUnavailable):
            snapshot = self.pool.snapshot()
            request = next((r for r in snapshot.waiting if r.request_id == self.request_id), None)
            why = "" if request is None else why_it_waits(snapshot, request, device_views(snapshot))
            if why and _gist(why) != self._said:
                self._said, self.told = _gist(why), True
                _note(self.console, f"{self.request_id} waits: {why}")


class Stop(IntEnum):
    """Why the program was asked to end; a stronger reason leaves less time."""

    NOT = 0
    REQUESTED = 1
    TOO_MUCH = 2
    LOST = 3


class Run:
    """One program in one lease."""

    def __init__(
        self,
        pool: Pool,
        lease: PoolLease,
        *,
        settings: Settings,
        command: list[str],
        grace_s: float,
        console: Console,
        allocator: bool = True,
        locked: Collection[str] | None = None,
        container: JobContainer | None = None,
    ) -> None:
        """`locked`: the devices to lock on this machine; None: all of the lease. `container`: where the
        command runs, or else here."""
        self.container = container
        self.allocator = allocator
        self.locked = [part.uuid for part in lease.parts if locked is None or part.uuid in locked]
        self.pool, self.settings, self.lease = pool, settings, lease
        self.command, self.grace_s, self.console = command, grace_s, console
        self.node = this_node()
        self.warned = False
        ttl_s = lease.ttl_ms / 1000
        # A loss is noticed after SAFE of the TTL; so much later no process may use the device.
        self.lost_s = min(grace_s, max(0.0, (1 - SAFE) * ttl_s - min(KILLING_S, ttl_s / 10)))
        self.alone_s = min(grace_s, SAFE * ttl_s)  # it was renewed within a beat before we died
        self.stopped = Stop.NOT
        self.cancelled = threading.Event()  # set from outside: the program is asked to end
        self.cancelled_why = "it was cancelled"
        self.code = LATER  # when it was
        self.give_up_at: float | None = None
        self._asked = False
        self._told_of_mps = False

    def run(self, *, reported: bool) -> int:
        """Returns the exit code; the lease has been given back then."""
        with self.pool.holding(self.lease) as in_use, ExitStack() as locks:
            variables = program_environment(
                self.pool, self.lease, self.settings, node=self.node, allocator=self.allocator
            )
            alone = self.lease.need.mode is LeaseMode.EXCLUSIVE
            fds: tuple[int, ...] = ()
            for uuid in self.locked:
                lock = locks.enter_context(
                    host_lock.host_lock(host_lock.HOST_DIRECTORY, uuid, exclusive=alone)
                )
                fds += lock.fds
                if lock.fd is None:
                    _note(
                        self.console,
                        f"{short(uuid)} cannot be locked on this machine (no file in "
                        f"{host_lock.HOST_DIRECTORY}), so only the lease keeps other stacks here off it; as root "
                        f"`install -d -m {host_lock.MODE:o} -g GROUP {host_lock.HOST_DIRECTORY}` makes it the "
                        "directory of a group of yours",
                    )
            if not self.pool.activate(self.lease, pids=(), host=self.node):
                raise LeaseRefused(
                    f"lease {self.lease.lease_id} was lost before the program began; try again"
                )
            if reported:
                _note(self.console, f"{self.lease.lease_id} has {lease_words(self.lease)}")
            supervised = self._supervised(filled(self.command, variables), variables, fds)
            try:
                with supervised:
                    supervised.begin(variables)
                    daemon = mps.limiting(variables, path=inherited("PATH").get("PATH", mps.PATHS))
                    pids = self._pids(supervised)
                    look = PoolWatch(self.pool, self.lease, pids, node=self.node, daemon=daemon)
                    with _passing_on(supervised), look:
                        self._mind(supervised, in_use, look)
            finally:
                contained = self.container is not None and not self.container.remove()
                if supervised.survivors or contained:
                    in_use.dirty()  # its memory stays taken until the driver no longer sees these
        return self._result(supervised)

    def _supervised(
        self, command: list[str], variables: Mapping[str, str], fds: tuple[int, ...]
    ) -> SupervisedProgram:
        removal: list[str] = []
        if self.container is not None:
            command = self.container.arguments(command, variables)
            removal = self.container.removal
        return SupervisedProgram(
            command, grace_s=self.grace_s, alone_s=self.alone_s, fds=fds, removal=removal
        )

    def _pids(self, supervised: SupervisedProgram) -> Callable[[], tuple[int, ...]]:
        """The processes of the program, in its container too."""
        container = self.container
        if container is None:
            return supervised.pids
        return lambda: (*supervised.pids(), *container.pids())

    def _mind(self, supervised: SupervisedProgram, in_use: LeaseInUse, look: PoolWatch) -> None:
        """Until the program has ended, or cannot be ended. Never waits for Redis."""
        began, next_compare = False, 0.0
        watch = self._watchdog(supervised, look)
        while not supervised.wait(WAIT_S):
            if supervised.program_pid is not None and not began:
                began = True
                look.at_once()
            if self.cancelled.is_set():
                self._stop(supervised, Stop.REQUESTED, self.cancelled_why, self.grace_s)
            if in_use.lost.is_set():
                self._stop(supervised, Stop.LOST, f"the lease is lost ({in_use.why()})", self.lost_s)
            elif in_use.yield_by_ms is not None:
                self._give_back(supervised, in_use, look.seconds_until(in_use.yield_by_ms))
            if time.monotonic() >= next_compare:
                next_compare = time.monotonic() + POLL_S
                self._compare(supervised, watch)
                self._warn_of_mps(look.unlimited)
            if self.give_up_at is not None and time.monotonic() > self.give_up_at:
                return

    def _warn_of_mps(self, why: str) -> None:
        """Only warn: torch's own limit is not set under MPS, so the watchdog alone enforces the lease."""
        if why and not self._told_of_mps:
            self._told_of_mps = True
            _note(
                self.console, f"{why}; until then the program is ended only when it is seen to use too much"
            )

    def _watchdog(self, supervised: SupervisedProgram, look: PoolWatch) -> Watchdog | None:
        """None for whole devices: what is never leased there is free for their one program too."""
        if self.lease.need.mode is LeaseMode.EXCLUSIVE:
            return None
        return Watchdog(
            self._pids(supervised),
            {part.uuid: part.memory_mib for part in self.lease.parts},
            look.devices,
            # CUDA's own share differs by device and driver; the headroom is there for that.
            tolerance_mib=HEADROOM_MIB,
            grace_s=OVER_S,
        )

    def _compare(self, supervised: SupervisedProgram, watch: Watchdog | None) -> None:
        """Compare use with the lease: warn first, end the program when the excess stays."""
        for verdict in [] if watch is None else watch.check(time.monotonic()):
            if verdict.word is Word.KILL:
                self._stop(supervised, Stop.TOO_MUCH, verdict.why, self.grace_s, TOO_MUCH)
            elif verdict.word is Word.WARN and not self.warned:
                self.warned = True
                _note(self.console, verdict.why)

    def _give_back(self, supervised: SupervisedProgram, in_use: LeaseInUse, left_s: float | None) -> None:
        """A preemptible program is asked to end at once, any other as late as its grace allows."""
        if left_s is None:
            return
        within_s = max(0.0, left_s - BEFORE_S)
        if self.lease.need.preemptible or within_s <= self.grace_s:
            self._stop(supervised, Stop.REQUESTED, f"the GPU is to be given back ({in_use.why()})", within_s)
        elif not self._asked:
            self._asked = True
            end = within_s - self.grace_s
            _note(
                self.console,
                f"somebody needs this GPU ({in_use.why()}); the program may go on for {seconds(end)}",
            )

    def _stop(
        self, supervised: SupervisedProgram, kind: Stop, why: str, within_s: float, code: int = LATER
    ) -> None:
        """Once for each kind of reason, the stronger after the weaker; the first one gives the exit code."""
        if kind <= self.stopped:
            return
        if not self.stopped:
            self.code = code
        self.stopped = kind
        _note(self.console, f"{why}: the program is asked to end, and ended after {seconds(within_s)}")
        supervised.stop(within_s)
        self.give_up_at = time.monotonic() + within_s + 2 * KILLED_S

    def _result(self, supervised: SupervisedProgram) -> int:
        if supervised.failed:
            program = printable(supervised.command[0])
            return _say(
                self.console,
                f"{program!r} cannot be started: {supervised.failed}",
                supervised.code or NOT_STARTED,
            )
        if supervised.survivors:
            pids = ", ".join(map(str, supervised.survivors))
            _note(
                self.console, f"process {pids} cannot be ended; what was leased stays taken until it has gone"
            )
        if self.stopped:
            return self.code
        return LATER if supervised.code is None else supervised.code


@contextmanager
def _passing_on(supervised: SupervisedProgram) -> Iterator[None]:
    """Signals meant for the program reach it; what was ignored (nohup) stays so, and Ctrl-Z is."""
    before: dict[int, Any] = {}

    def pass_on(number: int, _frame: object) -> None:
        supervised.signal(number)

    for name in PASSED_ON:
        number = getattr(signal, name)
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, pass_on)
    before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _gist(why: str) -> str:
    """The message without its numbers: seconds that count down are no news."""
    return "".join(c for c in why if not c.isdigit() and c != ".")


def _note(console: Console, words: str) -> None:
    console.print(f"logweir: {printable(words)}", markup=False, soft_wrap=True)


def _say(console: Console, words: str, code: int) -> int:
    _note(console, words)
    return code
