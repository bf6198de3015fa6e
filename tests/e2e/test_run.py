"""`logweir run`: results, refusals of what cannot be used, interrupts, and processes that die in the
middle."""

import json
import os
import signal
import time
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


@pytest.mark.parametrize("way", [FLEET, {}], ids=["fleet", "one-process"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
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
    if number is signal.SIGINT:
        again = logweir("run", "a.log", "--out", "o")
        assert again.returncode == 0, again.stderr
        whole(logweir.cwd / "o", 600)


def test_redis_and_the_trainer_may_be_killed_in_the_middle_of_a_run_and_every_line_is_scored_once(
    logweir: Command,
) -> None:
    write(logweir.cwd / "a.log", [*ordinary(200), *novel(200, "mod")])
    state = logweir.cwd / "o/.logweir"
    few = {"LOGWEIR_INTERNAL_BATCH_RECORDS": "4", "LOGWEIR_TRAIN_SECONDS": "5"}
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
    few = {"LOGWEIR_INTERNAL_BATCH_RECORDS": "100", "LOGWEIR_TRAIN_SECONDS": "200"}  # time cuts no steps
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
