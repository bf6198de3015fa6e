"""Threads, timers and tasks of ours: none of them ends unnoticed."""

import ast
import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from polling import wait_until

from pipeline import upkeep
from pipeline.errors import RedisUnavailable
from pipeline.ledger.renewal import ClaimRenewal
from pipeline.observe.counters import Pusher
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.upkeep import FAILED, FaultSeries, UpkeepThread, call_later, call_soon, start_task, start_thread
from pipeline.workers import heartbeat
from pipeline.workers.heartbeat import Heartbeat
from pipeline.workers.liveness import LivenessMonitor

PIPELINE = Path(__file__).resolve().parent.parent / "pipeline"
HOME = PIPELINE / "upkeep.py"
STARTS = {
    "Thread",
    "Timer",
    "start_new_thread",
    "create_task",
    "ensure_future",
    "call_later",
    "call_at",
    "call_soon",
}
# What gives a future or a coroutine. Nobody would see the fault of one that is dropped.
FUTURES = {"submit", "run_in_executor", "run_coroutine_threadsafe", "to_thread", "gather", "wrap_future"}


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def from_upkeep(tree: ast.Module) -> set[str]:
    """Names that the module has from pipeline.upkeep."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "pipeline.upkeep"
        for alias in node.names
    }


def other_ways(tree: ast.Module) -> Iterator[str]:
    """Threads, timers and tasks that do not begin in pipeline/upkeep.py, and futures that nobody reads."""
    ours = from_upkeep(tree)
    pools = "ThreadPoolExecutor" in ast.dump(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            plain = isinstance(node.func, ast.Name)
            if (name := name_of(node.func)) in STARTS and not (plain and name in ours):
                yield f"{name} in line {node.lineno}"
        elif isinstance(node, ast.ClassDef):
            bases = {name_of(base) for base in node.bases}
            overrides = any(isinstance(one, ast.FunctionDef) and one.name == "run" for one in node.body)
            if bases & {"Thread", "Timer"} or ("UpkeepThread" in bases and overrides):
                yield f"class {node.name} in line {node.lineno}"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            name = name_of(node.value.func)
            if name in FUTURES and name not in ours and (name != "submit" or pools):
                yield f"a dropped {name} in line {node.lineno}"


def test_every_thread_timer_and_task_begins_in_one_place() -> None:
    found = [
        f"{path.relative_to(PIPELINE)}: {way}"
        for path in sorted(PIPELINE.rglob("*.py"))
        if path != HOME
        for way in other_ways(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == [], "begin it by pipeline/upkeep.py, so that its fault ends the process"


@pytest.mark.parametrize(
    "text",
    [
        "threading.Thread(target=work).start()",
        "from threading import Timer\nTimer(1, work)",
        "class Beat(threading.Thread): pass",
        "class Beat(UpkeepThread):\n    def run(self): pass",
        "self._task = asyncio.create_task(work())",
        "asyncio.get_running_loop().call_later(1, work)",
        "loop.run_in_executor(None, work)",
        "from concurrent.futures import ThreadPoolExecutor\npool.submit(work)",
    ],
)
def test_the_walk_finds_other_ways(text: str) -> None:
    assert list(other_ways(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "from pipeline.upkeep import call_later\ncall_later(1, 'beat', work)",
        "class Beat(UpkeepThread):\n    def work(self): pass",
        "found = await loop.run_in_executor(None, work)",
        "coming.append(pool.submit(work))",
        "jobs.submit(job)",
    ],
)
def test_the_walk_leaves_what_somebody_awaits(text: str) -> None:
    assert not list(other_ways(ast.parse(f"async def f():\n    {text}" if "await" in text else text)))


def broken() -> None:
    raise ValueError("nobody expected this")


async def broken_task() -> None:
    broken()


async def in_a_loop(begin: Callable[[], object], ended: list[int]) -> None:
    begin()
    async with asyncio.timeout(10):
        while not ended:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "begin",
    [
        lambda: start_thread("beat", broken),
        lambda: upkeep.start_timer(0.01, "beat", broken),
        lambda: upkeep.submit(ThreadPoolExecutor(1), "beat", broken),
        lambda: start_task("beat", broken_task()),
        lambda: call_later(0.01, "beat", broken),
        lambda: upkeep.call_at(0.0, "beat", broken),
        lambda: call_soon("beat", broken),
    ],
    ids=["thread", "timer", "pool", "task", "call_later", "call_at", "call_soon"],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_that_nobody_expected_is_reported_and_ends_the_process(
    begin: Callable[[], object], ended: list[int]
) -> None:
    with structlog.testing.capture_logs() as logs:
        asyncio.run(in_a_loop(begin, ended))
    assert ended == [FAILED]
    (event,) = [one for one in logs if one["event"] == "upkeep.failed"]
    assert event["part"] == "beat" and event["why"] == "ValueError: nobody expected this"
    ended.clear()


def test_a_process_ends_and_leaves_the_traceback(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "from pipeline.logs import set_up\n"
        "from pipeline.upkeep import start_thread\n"
        "set_up('info', json=True)\n"
        "def work():\n    raise ValueError('nobody expected this')\n"
        "start_thread('beat', work)\n"
        "time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == FAILED
    assert '"event": "upkeep.failed"' in done.stderr and "in work" in done.stderr


def test_a_process_that_ends_anyway_keeps_its_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, time\n"
        "from pipeline.upkeep import start_thread\n"
        "def work():\n    time.sleep(0.2)\n    raise ValueError('its things are gone')\n"
        "start_thread('beat', work)\n"
        "atexit.register(time.sleep, 0.6)\n"
    )
    assert (
        subprocess.run([sys.executable, script], capture_output=True, timeout=50, check=False).returncode == 0
    )


def test_a_cancelled_task_ends_nothing(ended: list[int]) -> None:
    async def work() -> None:
        task = start_task("beat", asyncio.sleep(60))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(work())
    assert ended == []


def test_a_series_of_faults_is_logged_once_and_again_after_a_success() -> None:
    faults = FaultSeries("x.failed", RedisUnavailable)

    def round_(fault: Exception | None) -> None:
        with faults.outlived():
            if fault is not None:
                raise fault

    with structlog.testing.capture_logs() as logs:
        for fault in (
            RedisUnavailable("away"),
            RedisUnavailable("away"),
            None,
            OSError("no file"),
            OSError("no file"),
        ):
            round_(fault)
            assert faults.failing is (fault is not None)
    assert [(one["log_level"], one["why"]) for one in logs] == [
        ("warning", "away"),
        ("error", "OSError: no file"),
    ]


def test_a_thread_that_ends_well_ends_nothing(ended: list[int]) -> None:
    done = threading.Event()
    start_thread("beat", done.set).join()
    assert done.is_set() and ended == []
    assert UpkeepThread("beat").daemon


class NoFiles:
    """Fails as everything fails in a process without a free file; counts the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: object, **__: object) -> Any:
        self.calls += 1
        raise OSError(24, "Too many open files")


def goes_on(thread: threading.Thread, failing: NoFiles) -> bool:
    """Whether the thread still tries after it has failed twice."""
    return wait_until(lambda: failing.calls > 2, timeout_s=10) and thread.is_alive()


def test_liveness_is_looked_at_again_after_an_error() -> None:
    failing = NoFiles()
    monitor = LivenessMonitor(SimpleNamespace(look_s=0.01, stall_s=9.0, queues=(), look=failing))  # type: ignore[arg-type]
    monitor.start()
    assert goes_on(monitor, failing)
    monitor.stopping.set()


def test_a_heartbeat_beats_again_after_an_error(settings: Settings, monkeypatch: Any) -> None:
    failing = NoFiles()
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    heart = Heartbeat(settings, role_name="x", queues=(), name="x")
    monkeypatch.setattr(heart.presence, "beat", failing)
    heart.start()
    assert goes_on(heart, failing)
    heart.leave()


def test_counters_are_pushed_again_after_an_error(monkeypatch: Any) -> None:
    failing = NoFiles()
    monkeypatch.setattr("pipeline.observe.counters.PUSH_S", 0.01)
    pusher = Pusher(None, Keys("x:"), "x")  # type: ignore[arg-type]
    monkeypatch.setattr(pusher, "push", failing)
    pusher.start()
    assert goes_on(pusher, failing)
    pusher._stopping.set()


def test_claims_are_renewed_again_after_an_error_and_a_step_that_hangs_is_still_ended() -> None:
    failing = NoFiles()
    ended: list[object] = []
    claim: Any = SimpleNamespace(batch_id="b")
    renewal = ClaimRenewal([claim], failing, pause_s=0.02, limit_s=0.3, on_timeout=ended.extend)
    began = time.monotonic()
    renewal.start()
    assert wait_until(lambda: bool(ended), timeout_s=10)
    assert failing.calls > 2 and time.monotonic() - began >= 0.2
    renewal.stop()
