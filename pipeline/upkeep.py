"""Threads, timers and tasks of ours. None of them ends unnoticed.

All of them begin here (`tests/test_upkeep.py` walks the code). A fault that leaves one is reported with its
traceback and ends the process: its supervisor starts another one, and what it held expires. A process that
goes on without its renewals, its window or its answers would look alive and do nothing. Faults that a loop
outlives on purpose are a `FaultSeries`.

asyncio is imported where it is used: a verb such as `--help` would wait for it."""

import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pipeline.logs import logger

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

FAILED: Final = 70  # exit code EX_SOFTWARE of sysexits.h: an internal fault
end: Callable[[int], object] = os._exit  # tests replace it
_tasks: "set[asyncio.Task[Any]]" = set()  # the loop itself has only weak references


def last_resort(name: str, fault: BaseException) -> None:
    """Reports the fault that ended the thread or task `name`, and ends the process with FAILED.

    While the interpreter ends anyway, the fault is only reported: a thread then loses what it works with."""
    with suppress(Exception):  # standard error may be closed
        logger().critical("upkeep.failed", part=name, why=f"{type(fault).__name__}: {fault}", exc_info=fault)
    if threading.main_thread().is_alive():
        end(FAILED)


class UpkeepThread(threading.Thread):
    """A thread whose fault ends the process. Subclasses override `work`."""

    def __init__(
        self, name: str, work: Callable[..., object] | None = None, *args: Any, daemon: bool = True
    ) -> None:
        super().__init__(name=name, daemon=daemon)
        self._work, self._work_args = work, args

    def work(self) -> None:
        """All that the thread does."""
        if self._work is not None:
            self._work(*self._work_args)

    def run(self) -> None:
        try:
            self.work()
        except BaseException as exc:  # noqa: BLE001 - panics of Polars are no Exceptions
            last_resort(self.name, exc)


def start_thread(name: str, work: Callable[..., object], *args: Any, daemon: bool = True) -> UpkeepThread:
    """A thread that does `work(*args)` from now on."""
    thread = UpkeepThread(name, work, *args, daemon=daemon)
    thread.start()
    return thread


def start_timer(after_s: float, name: str, work: Callable[..., object], *args: Any) -> threading.Timer:
    """A daemon thread that does `work(*args)` in `after_s` seconds, unless it is cancelled before."""
    timer = threading.Timer(after_s, _guarded, [name, work, *args])
    timer.name, timer.daemon = name, True
    timer.start()
    return timer


def submit(executor: Executor, name: str, work: Callable[..., T], *args: Any) -> "Future[T]":
    """Work in a thread of `executor` whose future nobody has to read."""
    return executor.submit(_guarded, name, work, *args)


def start_task(name: str, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """A task that goes on in the running loop although nobody waits for it. It may be cancelled."""
    task = start_awaited_task(name, work)
    task.add_done_callback(_look)
    return task


def start_awaited_task(name: str, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """A task whose result, or fault, goes to those who await it."""
    import asyncio

    task = asyncio.get_running_loop().create_task(work, name=name)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


def call_at(when: float, name: str, work: Callable[[], object]) -> "asyncio.TimerHandle":
    """`work` in the running loop, at a moment of the loop's clock."""
    import asyncio

    return asyncio.get_running_loop().call_at(when, _guarded, name, work)


def call_later(after_s: float, name: str, work: Callable[..., object], *args: Any) -> "asyncio.TimerHandle":
    """`work(*args)` in the running loop, in `after_s` seconds."""
    import asyncio

    return asyncio.get_running_loop().call_later(after_s, _guarded, name, work, *args)


def call_soon(name: str, work: Callable[[], object]) -> None:
    """`work` in the next iteration of the running loop."""
    import asyncio

    asyncio.get_running_loop().call_soon(_guarded, name, work)


class FaultSeries:
    """The faults that a loop outlives. The first of a series is logged, and a success ends the series."""

    def __init__(self, event: str, *known: type[Exception], log: Any = None) -> None:
        """`known`: faults that have a remedy; others are logged with a traceback. `log`: with its context."""
        self.failing = False
        self._event, self._known, self._log = event, known, log

    @contextmanager
    def outlived(self) -> Iterator[None]:
        """Around one round of the loop. Every Exception ends here."""
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - the next round may succeed, and the loop must go on
            self.add(exc)
        else:
            self.failing = False

    def add(self, fault: Exception) -> None:
        """One more fault."""
        if not self.failing:
            known = isinstance(fault, self._known)
            log = self._log or logger()
            if known:
                log.warning(self._event, why=str(fault))
            else:
                log.error(self._event, why=f"{type(fault).__name__}: {fault}", exc_info=fault)
        self.failing = True


def _guarded(name: str, work: Callable[..., T], *args: Any) -> T:
    try:
        return work(*args)
    except BaseException as exc:
        last_resort(name, exc)
        raise


def _look(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        last_resort(task.get_name(), fault)
