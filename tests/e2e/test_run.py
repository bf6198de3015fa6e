"""`logweir run`: results, refusals of what cannot be used, interrupts, and processes that die in the
middle."""

import json
import os
import re
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import psutil
import pytest

from e2e.harness import FLEET, Command, is_redis, marked, nothing_left, novel, ordinary, sentence, until

EARLIER = ("results/date=d/workload=w/x.parquet", "templates.parquet", "summary.json", "report.html")


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def stored(out: Path) -> pl.DataFrame:
    # By a pattern, as other programs read them.
    return pl.read_parquet(out / "results/**/*.parquet", hive_partitioning=False).sort("line")


def earlier(out: Path) -> Path:
    """A finished run of before, as small as it may be."""
    for name in (".logweir/lock", *EARLIER):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("<!doctype html> of before")
    return out


def untouched(out: Path) -> None:
    """The run of before is all there is."""
    found = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file() and ".logweir" not in p.parts}
    assert found == set(EARLIER)
    assert all((out / name).read_text() == "<!doctype html> of before" for name in EARLIER)


def whole(out: Path, lines: int) -> None:
    """Every line is stored once, nothing half-written lies about."""
    rows = stored(out)
    assert rows["line"].to_list() == list(range(1, lines + 1))
    assert rows["record_id"].n_unique() == lines
    assert not list(out.rglob("*.part"))


def test_a_run_stores_every_line_once_and_a_second_one_into_the_same_directory_replaces_it(
    logweir: Command,
) -> None:
    write(logweir.cwd / "old.log", ordinary(300))
    write(logweir.cwd / "new.log", [*ordinary(40), "2026-11-20T10:30:00Z ERROR app: disk sda1 failed"])
    first = logweir("run", "old.log", "--json")
    assert first.returncode == 0, first.stderr
    assert "Traceback" not in first.stderr
    whole(logweir.cwd / "logweir-out", 300)
    second = logweir("run", "new.log", "--baseline", "old.log")
    assert second.returncode == 0, second.stderr
    out = logweir.cwd / "logweir-out"
    whole(out, 41)
    rows = stored(out)
    assert rows.filter(pl.col("anomalous"))["line"].to_list() == [41]
    assert second.stdout.startswith("1 incident, 1 finding in 41 lines\n") and "disk sda" in second.stdout
    about = json.loads((out / "summary.json").read_text())["run"]
    assert (about["lines_read"], about["baseline_lines"], about["dead_lines"]) == (41, 300, 0)
    assert (out / "report.html").stat().st_size and (out / "templates.parquet").stat().st_size
    nothing_left(logweir.mark, within_s=5)


# Worker processes merge files once the run has looked up which files its results need, and not before.
MERGING = """
import os, sys, time
if "store" in sys.orig_argv:
    from pipeline.sinks import compaction
    compaction.MERGE_PARTS, compaction.MERGE_AGE_S = 2, 0.0
    merges = compaction.Compactor._merges
    compaction.Compactor._merges = lambda *args: merges(*args) if os.path.exists(os.environ["MERGES"]) else []
elif "run" in sys.orig_argv:
    from pipeline.sinks import compaction
    looked = compaction.kept_keys
    def slowly(sink):
        found = looked(sink)
        open(os.environ["MERGES"], "w").close()
        time.sleep(6)
        return found
    compaction.kept_keys = slowly
"""


def test_no_worker_rewrites_results_while_a_run_removes_the_files_that_are_none(logweir: Command) -> None:
    write(logweir.cwd / "a.log", ordinary(300))
    (logweir.cwd / "site").mkdir()
    (logweir.cwd / "site/sitecustomize.py").write_text(MERGING)
    done = logweir(
        "run",
        "a.log",
        PYTHONPATH=str(logweir.cwd / "site"),
        MERGES=str(logweir.cwd / "merges"),
        LOGWEIR_INTERNAL_LEASE_TTL_MS="2000",
        LOGWEIR_INTERNAL_SWEEP_S="0.2",
        LOGWEIR_INTERNAL_BATCH_RECORDS="20",
        **FLEET,
    )
    assert done.returncode == 0, done.stderr
    assert (logweir.cwd / "merges").exists()
    whole(logweir.cwd / "logweir-out", 300)


def test_two_runs_of_the_same_standard_input_give_the_same_records(logweir: Command) -> None:
    text = "".join(f"request {i % 7} served in {i} ms\n" for i in range(60)).encode()
    found = []
    for out in ("a", "b"):
        done = logweir("run", "-", "--out", out, text=text)
        assert done.returncode == 0, done.stderr
        assert "stdin: no time recognised" in done.stdout and "/stdin" not in done.stdout
        assert json.loads((logweir.cwd / out / "summary.json").read_text())["run"]["inputs"] == ["stdin"]
        found.append(stored(logweir.cwd / out))
        assert found[-1]["source"].unique().to_list() == ["stdin"] == found[-1]["workload"].unique().to_list()
    assert found[0]["record_id"].equals(found[1]["record_id"])


def test_an_output_directory_of_somebody_else_is_left_alone(logweir: Command) -> None:
    write(logweir.cwd / "a.log", ordinary(5))
    photos = logweir.cwd / "photos"
    photos.mkdir()
    (photos / "cat.jpg").write_bytes(b"x")
    said = sentence(logweir("run", "a.log", "--out", photos))
    assert "not empty" in said and str(photos) in said
    assert [p.name for p in photos.iterdir()] == ["cat.jpg"]
    assert "is a file" in sentence(logweir("run", "a.log", "--out", photos / "cat.jpg"))
    assert "cannot be written" in sentence(logweir("run", "a.log", "--out", photos / "cat.jpg" / "below"))


def test_two_runs_into_one_directory_at_the_same_time_cannot_spoil_each_other(logweir: Command) -> None:
    write(logweir.cwd / "a.log", ordinary(300))
    first = logweir.start("run", "a.log", "--out", "o", LOGWEIR_INTERNAL_BATCH_RECORDS="20")
    until(lambda: list((logweir.cwd / "o").rglob("*.parquet")), what="the first run has begun")
    first.send_signal(signal.SIGSTOP)  # so that it has not ended when the second one comes
    try:
        said = sentence(logweir("run", "a.log", "--out", "o"))
    finally:
        first.send_signal(signal.SIGCONT)
    assert str(first.pid) in said and "already" in said
    assert first.wait(120) == 0, (logweir.cwd / "err").read_text()
    whole(logweir.cwd / "o", 300)


# Both signals raise the same in the command, so each is sent to one kind of run.
@pytest.mark.parametrize(
    ("number", "code", "way"),
    [(signal.SIGINT, 130, FLEET), (signal.SIGTERM, 143, {})],
    ids=["fleet", "one-process"],
)
def test_an_interrupted_run_leaves_no_process_and_no_half_written_file_and_the_next_one_works(
    logweir: Command, number: signal.Signals, code: int, way: dict[str, str]
) -> None:
    write(logweir.cwd / "a.log", ordinary(600))
    out = earlier(logweir.cwd / "o")
    run = logweir.start("run", "a.log", "--out", "o", LOGWEIR_INTERNAL_BATCH_RECORDS="20", **way)
    until(lambda: list((out / ".logweir/next").rglob("*.parquet")), what="the first results")
    run.send_signal(number)
    assert run.wait(40) == code
    nothing_left(logweir.mark, within_s=2)
    untouched(out)
    assert not (out / ".logweir/next").exists() and not list(out.rglob("*.part"))
    said = (logweir.cwd / "err").read_text()
    assert "Traceback" not in said and said.rstrip().endswith("logweir: stopped")
    again = logweir("run", "a.log", "--out", "o")
    assert again.returncode == 0, again.stderr
    whole(logweir.cwd / "o", 600)


def test_redis_and_the_trainer_may_be_killed_in_the_middle_of_a_run_and_every_line_is_scored_once(
    logweir: Command,
) -> None:
    write(logweir.cwd / "a.log", [*ordinary(200), *novel(200, "mod")])
    state = logweir.cwd / "o/.logweir"
    few = {"LOGWEIR_INTERNAL_BATCH_RECORDS": "4"}
    run = logweir.start("run", "a.log", "--out", "o", **few, **FLEET)
    until(lambda: list((logweir.cwd / "o").rglob("*.parquet")), what="the first results")
    for process in marked(logweir.mark):
        if is_redis(process):
            process.kill()
    until(lambda: "training" in (logweir.cwd / "err").read_text(), what="the training begins")
    trainer = until(
        lambda: [p for p in marked(logweir.mark) if _trains(p)], what="the trainer's process and its child"
    )
    until(lambda: any((state / "models").glob(".*")) or _busy(trainer), what="the training works")
    for process in trainer:
        process.kill()
    assert run.wait(150) == 0, (logweir.cwd / "err").read_text()
    whole(logweir.cwd / "o", 400)
    assert stored(logweir.cwd / "o")["score"].null_count() == 0
    nothing_left(logweir.mark, within_s=2)


def _trains(process: psutil.Process) -> bool:
    return "pipeline.workers.train" in process.cmdline()


def _busy(processes: list[psutil.Process]) -> bool:
    return any(p.is_running() and p.memory_info().rss > 260 * 2**20 for p in processes)


@pytest.mark.parametrize("way", [FLEET, {}], ids=["fleet", "one-process"])
def test_a_run_that_is_killed_outright_leaves_no_orphan_and_the_earlier_report(
    logweir: Command, way: dict[str, str]
) -> None:
    write(logweir.cwd / "a.log", ordinary(2000))
    out = earlier(logweir.cwd / "o")
    report = logweir.cwd / "page.html"
    report.write_text("<!doctype html> of before")
    words = ("run", "a.log", "--out", "o", "--report", report)
    run = logweir.start(*words, LOGWEIR_INTERNAL_BATCH_RECORDS="20", **way)
    until(lambda: list((out / ".logweir/next").rglob("*.parquet")), what="the first results")
    began = time.monotonic()
    os.kill(run.pid, signal.SIGKILL)
    run.wait(10)
    nothing_left(logweir.mark, within_s=20)
    assert time.monotonic() - began < 20
    untouched(out)
    assert report.read_text() == "<!doctype html> of before"


def test_a_run_in_one_process_finds_what_the_fleet_finds(logweir: Command) -> None:
    lines = [*ordinary(300), *novel(30, "mod"), "2026-11-20T10:30:00Z ERROR app: disk sda1 failed"]
    write(logweir.cwd / "a.log", lines)
    few = {"LOGWEIR_INTERNAL_BATCH_RECORDS": "100"}
    for out, way in (("one", {}), ("fleet", FLEET)):
        done = logweir("run", "a.log", "--out", out, **few, **way)
        assert done.returncode == 0, done.stderr
    found = [stored(logweir.cwd / out).drop("template_id", "model_version") for out in ("one", "fleet")]
    assert found[0].equals(found[1])
    assert found[0]["anomalous"].to_list()[-1] and found[0]["score"].null_count() == 0
    one, fleet = (
        pl.read_parquet(logweir.cwd / out / "templates.parquet").select("template", "count").sort("template")
        for out in ("one", "fleet")
    )
    assert one.equals(fleet)
    assert not (logweir.cwd / "one/.logweir/logs").exists(), "no worker was started"


def test_a_run_on_local_times_east_of_greenwich_finds_the_burst_of_the_last_hour_and_says_why(
    logweir: Command,
) -> None:
    now = datetime.now(UTC)
    lines = []
    for ago in range(12 * 60, 0, -1):
        local = now + timedelta(hours=2) - timedelta(minutes=ago)
        lines += [
            f"{local:%Y-%m-%d %H:%M}:{second:02} INFO request {ago * 60 + second} took {second} ms"
            for second in (range(60) if 40 <= ago <= 60 else range(0, 60, 15))
        ]
    (logweir.cwd / "app.log").write_text("\n".join(lines) + "\n")
    said = logweir("run", "app.log")
    assert said.returncode == 0, said.stderr
    assert "came 60 times in the minute" in said.stdout
    (note,) = (line for line in (said.stdout + said.stderr).splitlines() if "ahead of the clock" in line)
    assert re.search(
        r"[\d,]+ lines are up to (2\.0 h|1\d\d min) ahead of the clock; is it the time zone\?", note
    )
