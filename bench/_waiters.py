"""Many needs that wait for one device at a time: `python -m bench._waiters FOLDER NUMBER` is a process with
some of them."""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import redis

from pipeline.gpu.pool import Pool
from pipeline.gpu.values import LeaseMode, Need
from pipeline.settings import Settings

WHOLE = Need(mode=LeaseMode.EXCLUSIVE)
APART_S: Final = 0.02  # between two that begin to wait: a socket takes 511 connections at a time
USE_S: Final = 0.001  # of the device by each: long enough for a second holder to be seen


def main(folder: Path, number: int) -> None:
    """Every thread asks once, uses what it got for a moment and gives it back; when that was goes to a
    file."""
    told: dict[str, Any] = json.loads((folder / "waiters.json").read_text(encoding="utf-8"))
    settings = Settings(redis_url=told["url"], key_prefix=told["prefix"], gpu_node_ttl_ms=told["node_ttl_ms"])
    # One process stands for many here: each of its threads blocks on a connection of its own.
    pool = Pool(redis.Redis.from_url(told["url"], max_connections=4 * told["threads"]), settings)
    uses: list[tuple[int, int, int]] = []

    def one(name: str) -> None:
        lease = pool.request(WHOLE, holder=name, timeout_s=None)
        begin = time.monotonic_ns()
        time.sleep(USE_S)
        uses.append((begin, time.monotonic_ns(), lease.token))
        pool.release(lease)

    threads = [
        threading.Thread(target=one, args=(f"w{number}-{i}",), daemon=True) for i in range(told["threads"])
    ]
    for thread in threads:
        thread.start()
        time.sleep(APART_S)
    for thread in threads:
        thread.join()
    (folder / f"uses{number}.json").write_text(json.dumps(uses), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
