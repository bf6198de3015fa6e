"""GPU leases: time to take and give back, 1,000 waiters on one device, and 10,000 operations under
torture."""

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench import _evidence, _torture
from bench._running import scratch
from bench._waiters import USE_S, WHOLE
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import Need
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.workers.stack.private_redis import PrivateRedis

CYCLES: Final = 5_000
LEASES: Final = 500
WAITERS: Final = 1_000
WAITER_PROCESSES: Final = 8
WAITERS_MOST_S: Final = 300.0
SMALL: Final = Need(memory_mib=1_000, compute_percent=10)


def measure(_data: Path) -> dict[str, Any]:
    with scratch() as folder, _pool(folder / "idle") as pool:
        alone = _alone(pool)
    with scratch() as folder, _pool(folder / "waiters") as pool:
        waiters = _waiters(folder, pool)
    with scratch() as folder:
        torture = _torture.run(folder, plan := _torture.Torture())
    if torture["operations"] < plan.operations:
        raise RuntimeError(f"only {torture['operations']} operations were done in {plan.most_s:.0f} s")
    return {
        **alone,
        "two_holders": torture.pop("two_holders") + waiters.pop("two_holders"),
        "over_capacity": torture.pop("over_capacity"),
        "waiters": waiters,
        "torture": torture,
    }


@contextmanager
def _pool(folder: Path) -> Iterator[Pool]:
    """A pool of one made-up device on a Redis of its own, with AOF as in production."""
    settings = Settings(data_dir=folder, key_prefix="bench", gpu_node_ttl_ms=3_600_000)
    server = PrivateRedis(settings)
    process = server.start()
    try:
        settings = settings.replace(redis_url=server.url)
        pool = Pool(connect(settings), settings)
        pool.ledger.clear_quarantine()
        pool.report(_evidence.report(1))
        yield pool
    finally:
        process.terminate()
        process.wait(20)


def _alone(pool: Pool) -> dict[str, Any]:
    """Nobody else wants anything: ask, get, give back; and the whole context manager with its two threads."""

    def cycle() -> None:
        pool.release(pool.request(SMALL, holder="bench", timeout_s=1.0))

    def lease() -> None:
        with pool.lease(SMALL):
            pass

    _timed(cycle, 200)  # connections, scripts and caches are warm
    cycles, leases = _timed(cycle, CYCLES), _timed(lease, LEASES)
    return {
        "cycles_per_s": round(1000 / float(cycles.mean())),
        "p50_ms": round(float(np.percentile(cycles, 50)), 2),
        "p99_ms": round(float(np.percentile(cycles, 99)), 2),
        "lease_p50_ms": round(float(np.percentile(leases, 50)), 2),
        "lease_p99_ms": round(float(np.percentile(leases, 99)), 2),
    }


def _timed(work: Any, n: int) -> np.ndarray:
    times = np.empty(n)
    for i in range(n):
        began = time.perf_counter()
        work()
        times[i] = (time.perf_counter() - began) * 1000
    return times


def _waiters(folder: Path, pool: Pool) -> dict[str, Any]:
    """All ask for the one whole device while somebody has it; from when it is given back until all have had
    it.

    Each keeps it for a millisecond, which is in the time per grant. Raises RuntimeError when not all have had
    it."""
    told = {
        "url": pool.settings.redis.url,
        "prefix": pool.settings.redis.key_prefix,
        "node_ttl_ms": pool.settings.internal.gpu_node_ttl_ms,
        "threads": WAITERS // WAITER_PROCESSES,
    }
    (folder / "waiters.json").write_text(json.dumps(told), encoding="utf-8")
    first = pool.request(WHOLE, holder="bench", ttl_ms=int(WAITERS_MOST_S * 1000))
    workers = [
        subprocess.Popen([sys.executable, "-m", "bench._waiters", str(folder), str(number)])
        for number in range(WAITER_PROCESSES)
    ]
    try:
        end = time.monotonic() + WAITERS_MOST_S
        while int(pool.client.hlen(pool.planner.waiting)) < WAITERS and time.monotonic() < end:
            time.sleep(0.1)
        idle = _idle(pool)
        before, began = _work(pool), time.monotonic()
        pool.release(first)
        for worker in workers:
            worker.wait(max(1.0, end - time.monotonic()))
    finally:
        for worker in workers:
            worker.kill()
    seconds, after = time.monotonic() - began, _work(pool)
    uses = sorted(
        tuple(use)
        for path in folder.glob("uses*.json")
        for use in json.loads(path.read_text(encoding="utf-8"))
    )
    if len(uses) != WAITERS:
        raise RuntimeError(f"only {len(uses)} of {WAITERS} waiters had the device")
    return {
        "n": len(uses),
        "use_ms_each": 1000 * USE_S,
        "grants_per_s": round(len(uses) / seconds, 1),
        "commands_per_grant": round((after["commands"] - before["commands"]) / len(uses), 1),
        "scripts_per_grant": round((after["scripts"] - before["scripts"]) / len(uses), 1),
        "redis_cpu_ms_per_grant": round(1000 * (after["cpu_s"] - before["cpu_s"]) / len(uses), 2),
        **idle,
        # By the clock, and by the tokens, which grow from holder to holder.
        "two_holders": sum(a[1] > b[0] or a[2] >= b[2] for a, b in itertools.pairwise(uses)),
    }


def _work(pool: Pool) -> dict[str, float]:
    """What Redis has done so far: commands of clients and what scripts call, scripts, and its CPU seconds."""
    commands = pool.client.info("commandstats")
    cpu = pool.client.info("cpu")
    return {
        "commands": sum(one["calls"] for one in commands.values()),
        "scripts": commands.get("cmdstat_evalsha", {}).get("calls", 0),
        "cpu_s": cpu["used_cpu_sys"] + cpu["used_cpu_user"],
    }


def _idle(pool: Pool, seconds: float = 5.0) -> dict[str, float]:
    """What those who wait cost while nothing changes."""
    before = _work(pool)
    time.sleep(seconds)
    after = _work(pool)
    return {
        "waiting_scripts_per_s": round((after["scripts"] - before["scripts"]) / seconds, 1),
        "waiting_redis_cpu_percent": round(100 * (after["cpu_s"] - before["cpu_s"]) / seconds, 1),
    }
