"""What a sync before every answer costs: acceptances per second with appendfsync everysec and always, on this
disk."""

import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

from pipeline.ledger.ledger import Ledger
from pipeline.records.batch import Batch, Purpose, utc_now
from pipeline.records.delivery import Accepted
from pipeline.records.schema import raw_frame
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.workers.stack.private_redis import PrivateRedis

SECONDS: Final = 3.0
SENDERS: Final = (1, 8)
LINES: Final = (100, 2_000)


def measure(_data: Path) -> dict[str, Any]:
    """Accepted batches and lines per second by setting, lines per batch and number of senders; p99 of one
    call."""
    values: dict[str, Any] = {}
    for lines in LINES:
        for senders in SENDERS:
            for fsync in ("everysec", "always"):
                values[f"{fsync}_{lines}_lines_{senders}_senders"] = _run(fsync, lines, senders)
    return values


def _run(fsync: str, lines: int, senders: int) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(prefix="logweir-bench-"))
    settings = Settings(
        data_dir=folder,
        redis_fsync=fsync,
        max_pending_batches=10**6,
        redis_max_mib=2_000,
        max_pending_mib=1_500,
    )
    server = PrivateRedis(settings)
    process = server.start()
    try:
        own = settings.replace(redis_url=server.url)
        took: list[float] = []
        began = time.monotonic()
        threads = [threading.Thread(target=_send, args=(own, n, lines, took)) for n in range(senders)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
    finally:
        process.kill()
        process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)
    took.sort()
    return {
        "batches_per_s": round(len(took) / seconds),
        "lines_per_s": round(len(took) * lines / seconds),
        "p99_ms": round(1000 * took[int(len(took) * 0.99)], 2),
    }


def _send(settings: Settings, number: int, lines: int, took: list[float]) -> None:
    ledger = Ledger(connect(settings), settings)
    frame = raw_frame([f"GET /cart/{i} 200 in {i % 97} ms for 10.0.{i % 250}.7" for i in range(lines)])
    end = time.monotonic() + SECONDS
    n = 0
    while (began := time.monotonic()) < end:
        n += 1
        batch = Batch(
            batch_id=f"b{number}-{n}", workload="w", source="bench", source_key=f"k{number}", purpose=Purpose.SCORE,
            arrived=utc_now(), formats=(), zone="UTC", records=frame,
        )  # fmt: skip
        answer = ledger.intake.accept(batch)
        if not isinstance(answer, Accepted):
            break  # its room is full: what was measured until then counts
        took.append(time.monotonic() - began)
