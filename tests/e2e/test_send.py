"""`logweir send` and the verbs that print facts: every way to send, every flag refused that makes no
sense."""

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Command, Up, environment, ordinary, sentence, until


def test_a_file_sent_twice_is_stored_once_and_a_longer_one_only_adds_its_end(trained: Up) -> None:
    path = trained.write(ordinary(40), "twice.log")
    assert trained.send(ordinary(40), "warm-up")["lines"] == 40

    def send() -> dict[str, Any]:
        done = trained.logweir("send", path, "--workload", "twice", "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    assert send() == {"lines": 40, "batches": 1, "duplicates": 0}
    assert send() == {"lines": 0, "batches": 0, "duplicates": 0}
    assert trained.settled("twice")["stored"] == 40
    assert trained.rows("twice")["line"].to_list() == list(range(1, 41))
    with path.open("a") as more:
        more.write("\n".join(ordinary(3)) + "\n")
    assert send()["lines"] == 3
    assert trained.settled("twice")["stored"] == 43
    assert trained.rows("twice")["line"].to_list() == list(range(1, 44))
    assert trained.rows("twice")["record_id"].n_unique() == 43
    assert trained.logweir("send", path, "--workload", "under-another-name", "--wait").returncode == 0
    assert trained.rows("under-another-name").height == 43
    done = trained.logweir("send", path, "--workload", "twice", "--wait")
    assert done.returncode == 0 and "nothing new" in done.stderr
    assert "nothing to wait for" in done.stderr
    path.write_text("\n".join(ordinary(5, start=90)) + "\n")
    done = trained.logweir("send", path, "--workload", "anew", "--wait", "--json")
    assert done.returncode == 0 and "everything accepted is stored" in done.stderr
    assert json.loads(done.stdout) == {"lines": 5, "batches": 1, "duplicates": 0, "dead_lines": 0}
    assert trained.rows("anew").height == 5


def test_a_declared_time_is_read_by_the_workers_and_times_that_are_not_there_are_said(trained: Up) -> None:
    path = trained.write([f"20_11_2026 10h00m{n} WARN shelf {n} is empty" for n in range(10, 30)], "own.log")
    plain = trained.logweir("send", path, "--workload", "untimed", "--wait")
    assert plain.returncode == 0 and "no time recognised" in plain.stderr, plain.stderr
    form = ("--time", "%d_%m_%Y %Hh%Mm%S", "--time-zone", "Europe/Berlin")
    done = trained.logweir("send", path, "--workload", "timed", "--wait", *form)
    assert done.returncode == 0 and "note:" not in done.stderr, done.stderr
    rows = trained.rows("timed").sort("line")
    assert rows["timed"].all() and rows["level"].unique().to_list() == ["warning"]
    assert rows["message"][0] == "shelf 10 is empty"
    assert f"{rows['timestamp'][0]:%Y-%m-%d %H:%M:%S}" == "2026-11-20 09:00:10"
    assert not trained.rows("untimed")["timed"].any()


def test_standard_input_is_sent_and_its_workload_can_be_named(trained: Up) -> None:
    done = trained.logweir("send", "-", "--workload", "pipe", "--json", text=b"one\ntwo\nthree")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["lines"] == 3
    trained.settled("pipe")
    assert trained.rows("pipe")["message"].to_list() == ["one", "two", "three"]
    assert trained.rows("pipe")["source"].unique().to_list() == ["stdin"]
    packed = trained.logweir("send", "-", "--workload", "packed", text=gzip.compress(b"four\nfive\n"))
    assert packed.returncode == 0, packed.stderr
    assert "no time recognised" in packed.stderr
    assert "`logweir formats FILE` for a file of them" in packed.stderr, "it names no file"
    trained.settled("packed")
    assert trained.rows("packed")["message"].to_list() == ["four", "five"]
    assert "cannot be mixed" in sentence(trained.logweir("send", "-", "x.log"))


def test_following_goes_through_a_rename_and_a_truncation_and_goes_on_where_it_stopped(trained: Up) -> None:
    path = trained.folder / "live.log"
    path.write_text("a1\na2\n")
    follow = _follow(trained, path)
    try:
        _messages(trained, {"a1", "a2"})
        with path.open("a") as log:
            log.write("a3\n")
        _messages(trained, {"a1", "a2", "a3"})
        path.rename(trained.folder / "live.log.1")
        path.write_text("b1\nb2\nb3\nb4\nb5\n")
        _messages(trained, {"a1", "a2", "a3", "b1", "b2", "b3", "b4", "b5"})
        with path.open("r+") as log:
            log.truncate(0)
            log.write("c1\n")
        _messages(trained, {"a1", "a2", "a3", "b1", "b2", "b3", "b4", "b5", "c1"})
    finally:
        follow.send_signal(signal.SIGINT)
        assert follow.wait(20) == 130
    with path.open("a") as log:
        log.write("c2\n")
    follow = _follow(trained, path)
    try:
        found = _messages(trained, {"a1", "a2", "a3", "b1", "b2", "b3", "b4", "b5", "c1", "c2"})
        assert len(found) == 10, "none doubled"
    finally:
        follow.send_signal(signal.SIGTERM)
        assert follow.wait(20) == 143


def _follow(up: Up, path: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline.cli", "send", "--follow", str(path), "--workload", "live"],
        env=environment(up.mark, {"LOGWEIR_DATA_DIR": str(up.data)}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _messages(up: Up, wanted: set[str]) -> list[str]:
    def found() -> list[str]:
        rows = up.rows("live")
        have = rows["message"].to_list() if rows.height else []
        return have if set(have) == wanted else []

    return until(found, within_s=40, what=f"exactly {sorted(wanted)} are stored")


def test_the_verbs_that_print_facts_speak_json(trained: Up) -> None:
    def facts(*args: str) -> Any:
        done = trained.logweir(*args, "--json")
        assert done.returncode == 0, (args, done.stderr)
        return json.loads(done.stdout)

    version = trained.training["version"]  # type: ignore[attr-defined]
    assert facts("status")["model"]["version"] == version
    assert facts("doctor")["ok"] is True
    assert [m["version"] for m in facts("models", "list") if m["live"]] == [version]
    assert facts("models", "show")["version"] == version
    assert facts("models", "show", version)["files"]
    assert facts("dead", "list") == []
    rows = facts("results", "--anomalous", "--workload", "base")
    assert any("disk sda1" in r["message"] for r in rows) and all(r["anomalous"] for r in rows)
    assert facts("results", "--since", "1h", "--anomalous") is not None
    assert len(facts("results", "--limit", "3")) == 3


def test_results_since_counts_back_from_now(trained: Up) -> None:
    import datetime

    now = datetime.datetime.now(datetime.UTC)
    old, new = (now - datetime.timedelta(hours=3)), (now - datetime.timedelta(minutes=5))
    trained.send(
        [f"{t:%Y-%m-%dT%H:%M:%SZ} INFO app: at {n}" for n, t in (("past", old), ("late", new))], "since"
    )
    done = trained.logweir("results", "--since", "1h", "--workload", "since", "--json")
    assert [r["message"][-7:] for r in json.loads(done.stdout)] == ["at late"]


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["results", "--since", "yesterday"], "--since"),
        (["results", "--limit", "0"], "above 0"),
        (["models", "show", "m000009-00000000"], "models list"),
        (["models", "show", "../../etc"], "models list"),
        (["dead", "show"], "needs a batch id"),
        (["dead", "retry", "nothing"], "dead list"),
        (["dead", "drop", "x"], "'drop' is not known"),
        (["run"], "FILE"),
        (["run", "x.log", "--limit", "many"], "many"),
        (["run", "x.log", "--workload", ""], "workload"),
        (["run", "x.log", "--time-zone", "Mars/Base"], "Mars/Base"),
        (["run", "in.log", "--masks", "none.toml"], "none.toml"),
        (["run", "in.log", "--report", "no/such/dir/r.html"], "does not exist"),
        (["status", "--config", "none.toml"], "none.toml"),
        (["up", "--colour"], "--colour"),
        (["send", "a", "b", "--follow"], "one file"),
        (["send", ".", "--follow"], "--follow reads one file"),
        (["run", "x.log", "--data-dir", "d"], "--data-dir"),
        (["run", "in.log", "--baseline", "-"], "must be files"),
        (["results", "--since", "999999d"], "--since"),
        (["fly"], "'fly' is not known"),
        ([], "VERB"),
    ],
)
def test_what_makes_no_sense_is_refused_with_exit_code_2(trained: Up, args: list[str], word: str) -> None:
    (trained.folder / "in.log").write_text("x\n")
    done = trained.logweir.inside(*args)
    assert done.returncode == 2, (done.stdout, done.stderr)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("logweir") and word in last and "Traceback" not in done.stderr


def test_the_doctor_leaves_nothing_behind_and_names_a_directory_that_cannot_be_used(logweir: Command) -> None:
    done = logweir("doctor")
    assert done.returncode == 0 and "everything is here" in done.stdout, done.stdout
    assert list(logweir.cwd.iterdir()) == []
    (logweir.cwd / "file").touch()
    done = logweir("doctor", "--json", "--data-dir", "file")
    assert done.returncode == 1
    (bad,) = [check for check in json.loads(done.stdout)["checks"] if not check["ok"]]
    assert bad["what"] == "data directory" and "--data-dir" in bad["found"]


def test_a_setting_that_is_unknown_or_out_of_range_is_refused(logweir: Command) -> None:
    config = logweir.cwd / "logweir.toml"
    config.write_text('colour = "red"\n')
    assert "colour" in sentence(logweir("status", LOGWEIR_CONFIG=str(config)))
    assert "out of range" in sentence(logweir.inside("up", LOGWEIR_INTERNAL_BATCH_RECORDS="0"))
    assert "wrong type" in sentence(logweir.inside("up", LOGWEIR_INTERNAL_BATCH_RECORDS="many"))


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_a_reader_that_has_gone_ends_the_output_quietly(trained: Up, json_flag: list[str]) -> None:
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "pipeline.cli",
            "results",
            "--until",
            "2100-01-01",
            "--limit",
            "600",
            *json_flag,
        ],
        env=environment(trained.mark, {"LOGWEIR_DATA_DIR": str(trained.data)}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as command:
        assert command.stdout is not None and command.stderr is not None
        os.read(command.stdout.fileno(), 10)
        command.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(30)
        assert (command.returncode, command.stderr.read()) == (0, b"")


def test_masks_of_the_user_given_by_a_relative_path_reach_the_workers(logweir: Command) -> None:
    (logweir.cwd / "a.log").write_text("\n".join(f"INFO app: ticket ABC-{n}Z open" for n in range(40)))
    (logweir.cwd / "m.toml").write_text(
        '[[mask]]\nname = "TICKET"\npattern = "ABC-\\\\d+Z"\nexample = "ABC-12Z"\n'
    )
    done = logweir("run", "a.log", "--masks", "m.toml", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["run"]["dead_lines"], facts["run"]["templates"]) == (0, 1)
