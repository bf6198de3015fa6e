"""How soon a trickle is stored and how a flood is cut; bounds so wide that a busy machine keeps them."""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import polars as pl

from e2e.harness import Up, environment, until
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink

RATE = 200
SECONDS = 6
P99_MOST_S = 3.0
BATCH_RECORDS = Settings().internal.batch_records
FLOOD = 6 * BATCH_RECORDS


@contextlib.contextmanager
def sending(up: Up, *args: str, stdin: int = subprocess.DEVNULL) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeline.cli", "send", *args],
        env=environment(up.mark, {"LOGWEIR_DATA_DIR": str(up.data)}),
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(30)


def lines(first: int, count: int) -> Iterator[str]:
    for number in range(first, first + count):
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        yield f"{stamp} INFO app: user {number} logged in from 10.0.{number % 250}.7 in {number % 97} ms\n"


def stored(up: Up, workload: str) -> pl.DataFrame:
    """Rows with `wait_s`: from the time in the line to the commit of its batch."""
    sink = ParquetSink(up.data / "results")
    frames = []
    for batch, written_ms in sink.written(sink.manifest()).items():
        rows = sink.read(batch, workload)
        if rows is not None:
            named = datetime.fromtimestamp(written_ms / 1000, UTC)
            frames.append(
                rows.with_columns(
                    (pl.lit(named) - pl.col("timestamp"))
                    .dt.total_milliseconds()
                    .truediv(1000)
                    .alias("wait_s"),
                    pl.lit(batch).alias("file"),
                )
            )
    return pl.concat(frames)


def write_evenly(log: IO[Any], first: int, count: int) -> None:
    began, made = time.monotonic(), 0
    while made < count:
        due = min(count, int((time.monotonic() - began) * RATE) + 1)
        log.writelines(lines(first + made, due - made))
        log.flush()
        made = due
        time.sleep(0.005)


def test_a_trickle_is_stored_soon_and_a_stack_trace_in_it_stays_whole(trained: Up, tmp_path: Path) -> None:
    path, workload = tmp_path / "trickle.log", "trickle"
    trace = "2026-11-20T10:00:00Z ERROR app: broken\n" + "".join(
        f"\tat a.B.c{n}(B.java:{n})\n" for n in range(9)
    )
    with path.open("w") as log, sending(trained, "--follow", str(path), "--workload", workload):
        log.writelines(lines(0, 300))
        log.flush()
        until(lambda: trained.totals(workload).get("stored") == 300, what="the first lines are stored")
        write_evenly(log, 300, RATE * SECONDS // 2)
        log.write(trace)
        write_evenly(log, 1_000, RATE * SECONDS // 2)
        wanted = 300 + RATE * SECONDS + trace.count("\n")
        until(lambda: trained.totals(workload).get("stored", 0) >= wanted, what="all lines are stored")
    rows = stored(trained, workload)
    assert rows["lines"].sum() == wanted and rows["record_id"].n_unique() == rows.height
    broken = pl.col("message").str.contains("broken")
    assert rows.filter(broken)["raw"].to_list() == [trace.rstrip("\n")]
    waits = rows.filter((pl.col("line") > 300) & ~broken)["wait_s"]
    assert waits.len() == RATE * SECONDS
    p99 = waits.quantile(0.99)
    assert p99 is not None and p99 < P99_MOST_S
    files = rows.filter(pl.col("line") > 300)["file"].n_unique()
    assert 2 <= files < 8 * (SECONDS + P99_MOST_S), "batches, not lines one by one"


def test_a_flood_through_a_pipe_makes_full_batches(trained: Up) -> None:
    with sending(trained, "-", "--workload", "flood", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write("".join(lines(0, FLOOD)).encode())
        process.stdin.close()
        assert process.wait(60) == 0
    assert trained.settled("flood")["stored"] == FLOOD
    rows = stored(trained, "flood")
    assert rows["record_id"].n_unique() == rows.height == FLOOD
    full = rows.group_by("file").len().filter(pl.col("len") == BATCH_RECORDS).height
    assert full >= FLOOD // BATCH_RECORDS // 2


def test_lines_of_a_pipe_that_stays_open_are_stored_without_waiting_for_more(trained: Up) -> None:
    with sending(trained, "-", "--workload", "slow-pipe", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        for number in range(3):
            process.stdin.write("".join(lines(number, 1)).encode())
            process.stdin.flush()
            until(
                lambda n=number: trained.totals("slow-pipe").get("stored") == n + 1,  # type: ignore[misc]
                within_s=30,
                what="the line is stored while the pipe is open",
            )
        process.stdin.close()
        assert process.wait(30) == 0
