"""The embedded stack: start, warming and training, the hot path, both queues, and one stack per directory."""

import json
import os
from pathlib import Path

import polars as pl
import redis

from e2e.harness import (
    ORDER,
    Command,
    Up,
    marked,
    orders,
    ordinary,
    running,
    sentence,
    until,
)


def test_before_the_first_model_every_line_is_warming_and_none_is_normal_or_dropped(trained: Up) -> None:
    rows, status = trained.warming  # type: ignore[attr-defined]
    assert rows.height == 601
    assert rows["score"].null_count() == rows["anomalous"].null_count() == 601
    assert rows["model_version"].null_count() == 601
    assert set(map(tuple, rows["reasons"].to_list())) == {("warming",)}
    assert status["model"] is None
    assert (
        status["workloads"]["base"] | {"stored": 601, "warming": 601, "normal": 0}
        == status["workloads"]["base"]
    )


def test_after_training_the_same_rows_have_scores_and_the_counts_are_the_same(trained: Up) -> None:
    before, _ = trained.warming  # type: ignore[attr-defined]
    rows, t = trained.rows("base"), trained.status()["workloads"]["base"]
    assert rows["record_id"].sort().to_list() == before["record_id"].sort().to_list()
    assert rows["score"].null_count() == 0
    assert rows["model_version"].unique().to_list() == [trained.training["version"]]  # type: ignore[attr-defined]
    assert (t["accepted"], t["stored"], t["warming"], t["in_flight"]) == (601, 601, 0, 0)
    assert t["anomalous"] + t["normal"] == 601
    assert rows.filter(rows["anomalous"])["message"].str.contains("disk sda1").any()


def test_a_batch_of_known_lines_is_one_task(trained: Up) -> None:
    trained.send(ordinary(600, start=5000), "hot")
    trained.send(ordinary(600, start=9000), "hot")
    rows = trained.rows("hot")
    assert rows.height == 1200
    second = trained.events("ingest-1", "batch.step")[-1]
    assert (second["records"], second["then"]) == (600, "-")
    for other in ("infer-cpu", "drain", "store"):
        assert second["batch"] not in {e["batch"] for e in trained.events(other, "batch.step")}


def test_a_mark_holds_from_the_next_batch_on_and_until_it_is_revoked(trained: Up) -> None:
    def judged(minute: int) -> tuple[bool, str]:
        trained.send([f"2026-11-20T12:{minute:02d}:00Z ERROR app: fan of rack {minute} failed twice"], "fans")
        newest = trained.rows("fans").sort("timestamp").row(-1, named=True)
        return newest["anomalous"], newest["reasons"][0]

    marked = trained.logweir("mark", "2026-11-20T12:09:00Z ERROR app: fan of rack 9 failed twice", "normal")
    assert marked.returncode == 0, marked.stderr
    anomalous, why = judged(1)
    assert anomalous is False and why.startswith("marked:normal by ")
    assert trained.logweir("mark", "--revoke", "app: fan of rack 7 failed twice").returncode == 0
    anomalous, why = judged(2)
    assert anomalous is True and not why.startswith("marked")


def test_a_session_of_known_lines_that_went_wrong_is_found_among_the_results(trained: Up) -> None:
    normal = orders(20, start=4000)
    wrong = orders(1, start=5000, steps=(ORDER[0], *ORDER[2:]))
    trained.send([*normal, *wrong], "orders")
    assert trained.rows("orders")["anomalous"].sum() == 0, "no line is wrong by itself"
    found = until(
        lambda: trained.rows("orders", of_lines=False).to_dicts(), within_s=20, what="the order is found"
    )
    assert len(found) == 1 and ": session order-5000, 3 events" in found[0]["message"]
    assert (found[0]["source"], found[0]["lines"], found[0]["level"]) == ("logweir:sessions", 0, "warning")
    shown = trained.logweir("results", "--anomalous", "--workload", "orders", "--json")
    assert [row["message"] for row in json.loads(shown.stdout)] == [found[0]["message"]]
    totals = trained.settled("orders")
    assert totals["stored"] == totals["accepted"] == 4 * 3_020 + 3


def test_a_calm_line_that_was_never_said_before_is_listed_and_opens_no_incident(trained: Up) -> None:
    trained.send(
        ["2026-11-20T11:59:00Z INFO app: cache poisoned with 7 entries", *ordinary(5, start=700)], "news"
    )
    (row,) = trained.rows("news").filter(pl.col("message").str.contains("poisoned")).to_dicts()
    shown = trained.logweir("results", "--news", "--since", "2026-11-20", "--workload", "news", "--json")
    (one,) = json.loads(shown.stdout)
    assert (one["message"], one["record_id"], one["records"]) == (row["message"], row["record_id"], 1)
    learnt = trained.training["lines"]  # type: ignore[attr-defined]
    assert one["why"] == f"never seen in {learnt:,} lines; usually “refreshed”"
    until(
        lambda: "still looking" not in trained.logweir("incidents").stdout,
        what="the watcher has seen the line",
    )
    incidents = json.loads(trained.logweir("incidents", "--json").stdout)
    assert not [one for one in incidents if "news" in one["workloads"]]


def test_a_second_stack_on_the_same_directory_says_so_and_exits_2(trained: Up) -> None:
    said = sentence(trained.logweir("up"))
    assert str(trained.process.pid) in said and str(trained.data) in said and "already" in said
    assert trained.status()["workers"], "the first one goes on"


def test_it_is_ready_within_its_bound_and_says_how_long_it_took(trained: Up) -> None:
    assert 0 < trained.facts["ready_s"] < 60
    assert set(trained.facts["workers"]) == {
        "ingest-1", "infer-cpu", "drain", "store", "train", "beat",
    }  # fmt: skip


def test_with_a_redis_url_it_uses_that_redis_and_starts_none(redis_url: str) -> None:
    prefix = f"e2e{os.getpid()}"
    with running({"REDIS_URL": redis_url, "LOGWEIR_KEY_PREFIX": prefix}) as up:
        assert not (up.data / "redis").exists()
        done = up.logweir("send", up.write(ordinary(10)), "--workload", "w")
        assert done.returncode == 0, done.stderr
        until(lambda: up.rows("w").height == 10, what="lines are stored")
        assert up.stop() == 0
    with redis.Redis.from_url(redis_url) as client:
        for pattern in (f"{{{prefix}}}:*", f"{prefix}:*"):
            for key in client.scan_iter(match=pattern):
                client.delete(key)


def test_without_a_stack_every_verb_that_needs_one_says_how_to_start_it(logweir: Command) -> None:
    (logweir.cwd / "a.log").write_text("x\n")
    for verb in (["send", "a.log"], ["status"], ["train"], ["models", "list"], ["dead", "list"]):
        assert "`logweir up`" in sentence(logweir(*verb))


def test_every_process_of_a_stack_is_found_by_what_looks_for_orphans(trained: Up) -> None:
    names = " ".join(" ".join(p.cmdline()) for p in marked(trained.mark))
    for word in ("-server", "ingest-1", "infer-cpu", "drain", "store", "train", "beat"):
        assert word in names


def test_without_flower_nothing_listens(trained: Up) -> None:
    assert trained.facts["flower"] is None and trained.status()["flower"] is None
    assert not any("pipeline.workers.flower" in p.cmdline() for p in marked(trained.mark))
    assert trained.listeners() == set()


def test_the_state_of_a_stack_is_readable_by_nobody_else(trained: Up) -> None:
    path = Path(trained.data / "stack.json")
    assert path.stat().st_mode & 0o077 == 0
    assert json.loads(path.read_text())["pid"] == trained.process.pid
