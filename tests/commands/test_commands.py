"""The verbs in this process, on a real Redis without workers: hostile data, closed streams, what is waited
for."""

import argparse
import gzip
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import redis
from command_line import Verb, command_line

from pipeline import cli
from pipeline.cli import parser
from pipeline.commands.run.plan import RunOutcome
from pipeline.commands.send import tracking as own_module
from pipeline.commands.send.tracking import BatchTracking
from pipeline.commands.train import learnt_from
from pipeline.controller.training_status import Status
from pipeline.errors import RedisUnavailable
from pipeline.ledger.ledger import Ledger
from pipeline.observe.presence import Presence
from pipeline.records.batch import Batch, LearntFrom, Purpose
from pipeline.records.delivery import Claim, Meta, Stage
from pipeline.records.schema import RESULT_SCHEMA, raw_frame
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink
from pipeline.store.choose import open_store

NOW = datetime(2026, 11, 20, 10, tzinfo=UTC)
HOSTILE = "[/red]x"


@pytest.fixture
def verb(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Verb]:
    """Runs a command line here, on this test's own keys and directories."""
    for module in ("send.verb", "run.verb"):
        monkeypatch.setattr(f"pipeline.commands.{module}.set_up", lambda _level: None)
    with command_line(settings, monkeypatch, capsys) as run:
        yield run


@pytest.fixture
def ledger(client: "redis.Redis", settings: Settings) -> Ledger:
    return Ledger(client, settings)


def accept(ledger: Ledger, batch_id: str, lines: int = 1, workload: str = "shop") -> str:
    batch = Batch(
        batch_id=batch_id,
        workload=workload,
        source="app.log",
        source_key="00112233aabbccdd",
        purpose=Purpose.SCORE,
        arrived=NOW,
        formats=(),
        zone="UTC",
        records=raw_frame([f"line {n}" for n in range(lines)]),
    )
    ledger.intake.accept(batch)
    return batch_id


def claimed(ledger: Ledger, batch_id: str) -> Claim:
    claim = ledger.claim(batch_id, Stage.INGEST, "worker")
    assert isinstance(claim, Claim), claim
    return claim


def finish(ledger: Ledger, batch_id: str, *, warming: bool = False) -> None:
    ledger.commit(claimed(ledger, batch_id), warming=warming, outcomes={})


def bury(ledger: Ledger, batch_id: str) -> None:
    assert ledger.give_up(claimed(ledger, batch_id), "it cannot be read") == []


# Data that looks like markup, or like anything else than what it is


@pytest.mark.parametrize("workload", [HOSTILE, "[bold]y", ":boom:"])
def test_a_workload_that_looks_like_markup_is_shown_by_status_as_it_is(
    verb: Verb, ledger: Ledger, workload: str
) -> None:
    accept(ledger, "b", workload=workload)
    said = verb("status")
    assert said.code == 1, said.err  # no worker runs here
    assert workload in said.out


def test_a_dead_letter_cannot_steer_the_terminal(verb: Verb, ledger: Ledger) -> None:
    accept(ledger, "b", workload=HOSTILE + "\x1b[2J")
    bury(ledger, "b")
    said = verb("dead", "list")
    assert said.code == 0 and HOSTILE in said.out
    assert "\x1b" not in said.out


def store(settings: Settings, **changes: Any) -> Path:
    row = dict.fromkeys(RESULT_SCHEMA) | {
        "record_id": "r", "source": "app.log", "line": 1, "lines": 1, "timestamp": NOW, "timed": True,
        "workload": "shop", "message": "hello", "raw": "hello",
    }  # fmt: skip
    sink = ParquetSink(settings.data.results)
    sink.write("a", pl.DataFrame([row | changes], schema=RESULT_SCHEMA))
    return sink.files.file(sink.parts()[-1])


def test_results_are_shown_as_they_are(verb: Verb, settings: Settings) -> None:
    store(settings, workload=HOSTILE, message="[/bold] \x1b[2J\nend", level="[/]")
    said = verb("results")
    assert said.code == 0, said.err
    assert HOSTILE in said.out and "[/bold]" in said.out and "\x1b" not in said.out


def test_a_result_without_a_time_shows_none(verb: Verb, settings: Settings) -> None:
    store(settings, timed=False)
    assert "no time" in (shown := verb("results").out) and f"{NOW:%H:%M}" not in shown


def test_results_take_wildcards_and_name_the_filter_that_nothing_matches(
    verb: Verb, settings: Settings
) -> None:
    place = store(settings, workload="shop/web", level="error", template_id=17).parents[3]
    for asked in (
        ("--workload", "shop/*"),
        ("--level", "warning"),
        ("--text", "HELL"),
        ("--template", "T17"),
    ):
        assert "hello" in verb("results", *asked).out
    said = verb("results", "--workload", "bank/*", "--level", "error")
    assert (said.code, said.out) == (
        0,
        f"no line in {place} matches --workload 'bank/*' --level 'error'; workloads there: shop/web\n",
    )
    assert verb("results", "--until", "2026-11-20T00:00").out.startswith(
        f"no line in {place} matches --until"
    )
    assert "> " in verb("results", "--context", "2").out


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--since", "yesterday"), ("--until", "7 days"), ("--template", "cart")],
)
def test_results_refuse_what_they_cannot_read(verb: Verb, flag: str, value: str) -> None:
    said = verb("results", flag, value)
    assert said.code == 2 and value in said.err


def test_a_directory_that_looks_like_markup_can_be_empty(verb: Verb, tmp_path: Path) -> None:
    place = tmp_path / (HOSTILE.replace("/", "") + ":boom:") / ("d" * 90)
    said = verb("results", "--data-dir", str(place))
    assert (said.code, said.out) == (0, f"no results in {place / 'results'}\n")


def test_a_damaged_result_file_is_named_in_one_sentence(verb: Verb, settings: Settings) -> None:
    path = store(settings)
    path.write_bytes(b"PAR1 is how it begins")
    said = verb("results")
    assert said.code == 1
    assert said.err.startswith("logweir: results cannot be read from") and str(path) in said.err
    assert "Traceback" not in said.err


def test_a_model_version_that_cannot_be_read_is_listed_as_nobodys_own(verb: Verb, settings: Settings) -> None:
    open_store(settings.data.store).put("versions/m000001-00000000/manifest.json", b"{")
    said = verb("models", "list")
    assert said.code == 0
    assert said.out.splitlines()[0] == "m000001-00000000  unreadable"
    assert "own model" not in said.out


def test_the_watchlist_counts_the_lines_of_all_that_a_pattern_covers(verb: Verb, ledger: Ledger) -> None:
    accept(ledger, "a", lines=2, workload="shop/cart")
    accept(ledger, "b", lines=3, workload="shop/pay")
    assert verb("watch", "add", "shop/*", "quiet").code == 0
    refused = verb("watch", "list", "shop")
    assert (refused.code, "'shop' is one too many" in refused.err) == (2, True)
    watched = json.loads(verb("watch", "list", "--json").out)["watched"]
    assert [(row["pattern"], row["workloads"], row["lines"]) for row in watched] == [
        ("quiet", [], 0),
        ("shop/*", ["shop/cart", "shop/pay"], 5),
    ]


# Ends that are no surprise


@pytest.mark.long
@pytest.mark.parametrize("args", ["run -", "send -"])
def test_a_standard_input_that_is_closed_is_one_sentence(tmp_path: Path, args: str) -> None:
    done = shell(f"{args} <&-", tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "logweir: standard input is closed; pipe log lines into it, or name a file instead of -"
    )


@pytest.mark.long
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_output_that_is_closed_is_no_error(tmp_path: Path, closed: str) -> None:
    done = shell(f"results --json {closed}", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def shell(command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["sh", "-c", f"exec {sys.executable} -m pipeline.cli {command}"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_span_longer_than_time_itself_is_refused(verb: Verb) -> None:
    said = verb("results", "--since", "999999d")
    assert said.code == 2 and "--since '999999d' reaches back before the year 1" in said.err


def test_ctrl_c_while_the_flags_are_read_is_no_traceback(verb: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "parser", interrupted)
    said = verb("status")
    assert (said.code, said.err) == (130, "logweir: stopped\n")


def test_a_run_says_at_once_that_ctrl_c_was_heard(
    verb: Verb, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pipeline.commands.run.plan.run", lambda *_: signal.raise_signal(signal.SIGINT))
    (tmp_path / "a.log").write_text("x\n")
    said = verb("run", str(tmp_path / "a.log"), "--out", str(tmp_path / "out"))
    assert said.code == 130
    assert said.err.splitlines()[-2:] == ["stopping: workers finish their step first", "logweir: stopped"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# Runs


def test_the_paths_of_a_run_are_printed_unbroken(
    verb: Verb, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / ("a" * 100) / "out"
    about = {"lines_read": 0, "seconds": 1.0, "ready_seconds": 0.5, "lines_per_s": 0}
    outcome = RunOutcome(out=out, findings=[], summary={"records": 0, "lines": 0, "not_judged": 0, "run": about},
                      report=out / "report.html")  # fmt: skip
    monkeypatch.setattr("pipeline.commands.run.plan.run", lambda *_: outcome)
    (tmp_path / "a.log").write_text("x\n")
    said = verb("run", str(tmp_path / "a.log"), "--out", str(tmp_path / "other"))
    assert said.code == 0, said.err
    assert f"report:  {out / 'report.html'}" in said.out.splitlines()
    assert f"results: {out}" in said.out.splitlines()


def test_options_that_take_files_add_up_when_they_are_given_again() -> None:
    args = parser().parse_args(
        ["run", "x", "--baseline", "a", "b", "--baseline", "c", "--masks", "m", "--masks", "n"]
    )
    assert (args.baseline, args.masks) == (["a", "b", "c"], [Path("m"), Path("n")])
    assert parser().parse_args(["run", "x"]).baseline == []  # and no call fills the default of the next


def test_no_option_keeps_only_the_last_of_its_values() -> None:
    """An option with several values extends or appends: a plain one would drop the values that were given
    before."""

    def options(top: argparse.ArgumentParser) -> Iterator[argparse.Action]:
        for action in top._actions:
            if isinstance(action, argparse._SubParsersAction):
                for each in action.choices.values():
                    yield from options(each)
            elif action.option_strings:
                yield action

    several = [a for a in options(parser()) if a.nargs in ("+", "*")]
    assert several
    assert [
        a.dest for a in several if not isinstance(a, argparse._ExtendAction | argparse._AppendAction)
    ] == []


def test_a_baseline_must_be_files(verb: Verb, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("x\n")
    said = verb("run", str(tmp_path / "a.log"), "--baseline", "-")
    assert said.code == 2 and "a baseline must be files" in said.err


def test_a_run_has_no_data_directory_but_the_other_verbs_have(verb: Verb) -> None:
    with pytest.raises(SystemExit) as caught:
        verb("run", "a.log", "--data-dir", "d")
    assert caught.value.code == 2
    assert cli.parser().parse_args(["send", "a.log", "--data-dir", "d"]).data_dir == Path("d")


# Dead letters


def many_dead(ledger: Ledger, count: int) -> list[str]:
    """Dead letters as the ledger keeps them, written at once."""
    meta = Meta(source="a.log", source_key="k", purpose=Purpose.SCORE, arrived=NOW, formats=(), zone="UTC")
    pipe = ledger.client.pipeline(transaction=False)
    ids = [f"d{n:05d}" for n in range(count)]
    for n, batch_id in enumerate(ids):
        fields: dict[str, Any] = {"state": "dead", "workload": "shop", "lines": 1, "records": 1, "bytes": 0, "kind": "",
                  "meta": meta.dump(), "dead_ms": n}  # fmt: skip
        pipe.hset(ledger.keys.batch(batch_id), mapping=fields)
        pipe.zadd(ledger.keys.dead, {batch_id: n})
    pipe.execute()
    return ids


@pytest.mark.long
def test_all_dead_letters_are_listed_and_retried_however_many_there_are(verb: Verb, ledger: Ledger) -> None:
    ids = many_dead(ledger, 1_003)
    said = verb("dead", "list", "--json")
    assert {letter["batch_id"] for letter in json.loads(said.out)} == set(ids)
    said = verb("dead", "list")
    assert "the newest 100 of 1,003 dead batches; --limit N shows more" in said.out.splitlines()
    assert ids[-1] in said.out and ids[-101] not in said.out
    said = verb("dead", "list", "--limit", "1")
    assert ids[-1] in said.out and ids[-2] not in said.out
    said = verb("dead", "retry", "all")
    assert (said.code, said.out) == (0, "1,003 batches sent through the pipeline again\n")
    assert ledger.dead_letters.newest() == []


@pytest.mark.parametrize("action", ["retry", "discard", "show"])
def test_an_unknown_batch_among_several_leaves_all_as_they_are(
    verb: Verb, ledger: Ledger, action: str
) -> None:
    many_dead(ledger, 2)
    said = verb("dead", action, "d00000", "nothing", "d00001")
    assert said.code == 2
    assert said.err == (
        "logweir: there is no dead batch 'nothing', so nothing was done; `logweir dead list` shows them\n"
    )
    assert said.out == "" and len(ledger.dead_letters.newest()) == 2
    if action != "show":
        assert verb("dead", action, "d00000", "d00001", "d00000").out.startswith("2 batches ")


def test_every_dead_letter_is_shown_also_behind_one_that_cannot_be_read(verb: Verb, ledger: Ledger) -> None:
    many_dead(ledger, 2)
    ledger.client.copy(ledger.keys.payload(accept(ledger, "x")), ledger.keys.payload("d00000"))
    ledger.client.set(ledger.keys.payload("d00001"), b"garbage")
    said = verb("dead", "show", "all")
    assert said.code == 1
    assert '"batch_id": "d00000"' in said.out and '"batch_id": "d00001"' in said.out
    assert said.out.count('"unreadable"') == 1
    assert said.err.startswith("logweir: a payload of 7 bytes is damaged")
    assert verb("dead", "list", "d00001").code == 2


# Waiting for what this command sent


def test_waiting_ends_when_ones_own_batches_have_ended_whatever_others_send(ledger: Ledger) -> None:
    tracking = BatchTracking(ledger)
    tracking.open = [accept(ledger, "mine"), accept(ledger, "mine too")]
    accept(ledger, "of somebody else")
    assert not tracking.look()
    finish(ledger, "mine")
    assert not tracking.look() and tracking.open == ["mine too"]
    finish(ledger, "mine too", warming=True)
    assert tracking.look() and tracking.unstored() == ""
    assert ledger.backlog.counts()["batches"] == 1


def test_waiting_goes_on_until_the_watcher_has_looked_at_what_was_stored_by_then(
    ledger: Ledger, client: "redis.Redis"
) -> None:
    watching = ledger.keys.watching
    client.hset(watching(), "head", 7)
    client.rpush(watching("observations"), b"mine", b"mine too")
    tracking = BatchTracking(ledger)
    assert tracking.unwatched() == 2
    client.rpush(watching("observations"), b"of somebody else")
    client.lpop(watching("observations"))
    client.hset(watching(), "head", 8)
    assert tracking.unwatched() == 1
    client.lpop(watching("observations"))
    client.hset(watching(), "head", 9)
    assert tracking.unwatched() == 0


def test_waiting_for_a_split_batch_is_waiting_for_its_halves(ledger: Ledger) -> None:
    tracking = BatchTracking(ledger)
    tracking.open = [accept(ledger, "b", lines=3)]
    first = ledger.give_up(claimed(ledger, "b"), "one of them is bad")
    assert not tracking.look() and sorted(tracking.open) == sorted(first)
    finish(ledger, first[0])
    second = ledger.give_up(claimed(ledger, first[1]), "one of them is bad")
    while not tracking.look() and set(tracking.open) != set(second):
        pass
    assert sorted(tracking.open) == sorted(second)
    finish(ledger, second[0])
    bury(ledger, second[1])
    assert tracking.look()
    assert tracking.unstored() == "1 line could not be processed; `logweir dead list` shows it and why"


def test_what_is_scored_again_was_stored_and_what_is_discarded_or_gone_was_not(ledger: Ledger) -> None:
    tracking = BatchTracking(ledger)
    tracking.open = [accept(ledger, "again"), accept(ledger, "away", lines=1), "gone"]
    finish(ledger, "again", warming=True)
    assert ledger.backlog.start_rescoring(10, has_model=lambda _: True) == ["again"]
    bury(ledger, "away")
    ledger.dead_letters.discard("away")
    assert tracking.look()
    assert (tracking.dead, tracking.discarded, tracking.lost) == (0, 1, 1)
    assert "discarded" in tracking.unstored() and "not in Redis any more" in tracking.unstored()


def test_a_redis_that_goes_away_loses_nothing_that_is_waited_for(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_module, "LOOK_AT_ONCE", 2)
    tracking = BatchTracking(ledger)
    tracking.open = [accept(ledger, f"b{n}") for n in range(5)]
    bury(ledger, "b0")
    answer, calls = tracking._entries, []

    def once(ids: Any) -> Any:
        calls.append(ids)
        if len(calls) == 2:
            raise RedisUnavailable("away")
        return answer(ids)

    monkeypatch.setattr(tracking, "_entries", once)
    with pytest.raises(RedisUnavailable):
        tracking.look()
    assert not tracking.look()
    assert (tracking.open, tracking.dead) == (["b1", "b2", "b3", "b4"], 1)


def test_send_and_wait_says_that_a_line_is_dead_and_fails(
    verb: Verb, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.log"
    path.write_text("one\n")
    waits: list[str] = []

    def bury_it(_sender: object, why: str, _seconds: float) -> None:
        waits.append(why)
        ((batch_id, _stage),) = due(ledger)
        bury(ledger, batch_id)

    monkeypatch.setattr("pipeline.commands.send.sender.Sender._wait", bury_it)
    said = verb("send", str(path), "--workload", "w", "--wait", "--json")
    assert said.code == 1 and waits == ["1 batch is not stored yet"]
    Presence(ledger.client, ledger.settings).complain("store", "the disk is full; free some space")
    (tmp_path / "b.log").write_text("two\n")
    verb("send", str(tmp_path / "b.log"), "--workload", "w", "--wait")
    assert waits[1:] == ["1 batch is not stored yet: the disk is full; free some space"]
    assert "1 line could not be processed" in said.err and "everything" not in said.err
    facts = said.out[said.out.index("{") :]  # behind what the ledger logs, unconfigured, in this process
    assert json.loads(facts) == {"lines": 1, "batches": 1, "duplicates": 0, "dead_lines": 1}
    again = verb("send", str(path), "--workload", "w", "--wait")
    assert again.code == 0 and "nothing to wait for" in again.err and "everything" not in again.err


def due(ledger: Ledger) -> list[tuple[str, Stage]]:
    """What waits, at once instead of after `overdue_ms`."""
    raw: Any = ledger.client.zrange(ledger.keys.due, 0, -1)
    ledger.client.zadd(ledger.keys.due, dict.fromkeys(raw, 0))
    return ledger.backlog.overdue()


# Following, and what a look at the files says


def test_following_what_cannot_grow_is_refused(verb: Verb, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, why in (
        ("pipe", "is no regular file and cannot be followed"),
        (
            ".",
            "is a directory, and --follow reads one file; follow a file in it, or send its files or a glob",
        ),
    ):
        said = verb("send", "--follow", str(tmp_path / name))
        assert said.code == 2 and why in said.err


def test_following_a_file_that_is_absent_says_so_once(
    verb: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.commands.send.sender.SAY_EVERY_S", 0.0)
    turns = iter([False] * 4)
    monkeypatch.setattr(
        "pipeline.commands.send.verb.Follower.chunks",
        lambda follower, *_, **__: (follower.look() for _ in turns),
    )
    path = tmp_path / "absent.log"
    said = verb("send", "--follow", str(path))
    assert said.code == 0
    assert said.err.splitlines()[1] == f"waiting for {path} to appear"
    assert said.err.count("to appear") == 1 and said.err.count("lines accepted") == 1


def test_one_line_that_was_sent_is_told_in_the_singular(verb: Verb, tmp_path: Path) -> None:
    (tmp_path / "app.log").write_text("one\n")
    said = verb("send", str(tmp_path / "app.log"))
    assert said.code == 0 and "\n1 line accepted (" in f"\n{said.err}"


def test_a_file_that_is_no_utf_8_is_said_to_be_read_as_such(verb: Verb, tmp_path: Path) -> None:
    path = tmp_path / "wide.log"
    path.write_text("one\ntwo\n", encoding="utf-16")
    said = verb("send", str(path), "--json")
    assert said.code == 0, said.err
    assert f"note: {path} is UTF-16" in said.err and json.loads(said.out)["lines"] == 2


def test_an_archive_is_sent_by_its_members_and_sending_it_again_adds_nothing(
    verb: Verb, ledger: Ledger, tmp_path: Path
) -> None:
    line = "2026-11-20 10:00:00 INFO request {} done\n"
    for name, count in (("web.log", 30), ("db/main.log.1", 20)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("".join(line.format(i) for i in range(count)))
    archive = tmp_path / "logs.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("web.log", "db/main.log.1"):
            tar.add(tmp_path / name, arcname=name)
    first = verb("send", archive, "--json")
    assert json.loads(first.out) == {"lines": 50, "batches": 2, "duplicates": 0}
    assert {name for name, _ in ledger.backlog.totals().items()} >= {"web", "main"}
    again = verb("send", archive, "--json")
    assert json.loads(again.out) == {"lines": 0, "batches": 0, "duplicates": 0}
    assert f"{archive}:web.log: nothing new, its 30 lines were accepted before" in again.err
    # without cursors the batch ids tell the same
    for key in ledger.client.scan_iter("*cursor*"):
        ledger.client.delete(key)
    third = json.loads(verb("send", archive, "--json").out)
    assert third["lines"] == 0


def test_a_cut_off_file_is_sent_as_far_as_it_goes(verb: Verb, tmp_path: Path) -> None:
    lines = b"".join(b"%s\n" % os.urandom(20).hex().encode() for _ in range(5000))
    cut, good = tmp_path / "cut.log.gz", tmp_path / "good.log"
    packed = gzip.compress(lines)
    cut.write_bytes(packed[: len(packed) // 2])
    good.write_bytes(b"one\n")
    said = verb("send", cut, good)
    assert said.code == 0
    assert re.search(rf"note: {cut} ends early: [\d,]+ lines were read", said.err)
    assert "1 line" not in said.err.split("ends early")[0]


def test_workloads_of_opni_are_read_from_a_file_and_from_standard_input(
    logweir: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "workloads.json"
    file.write_text('{"c1": {"shop": ["web", "cart"], "": ["x"]}}')
    said = logweir("watch", "add", "--workloads", file)
    assert said.code == 0 and said.out.startswith(
        "watching c1/shop/cart\nwatching c1/shop/web\nwatching c1/x\n"
    )
    message = b'{"uuid": "u", "workloads": {"c1": {"shop": ["web"]}}}'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(message)))
    assert "no longer watching c1/shop/web" in logweir("watch", "remove", "--workloads", "-").out
    unseen = logweir("train", "--no-wait", "--workloads", file)
    assert unseen.code == 2 and "no workload matches 'c1/shop/cart'" in unseen.err
    # A cluster that is called so is no message.
    file.write_text('{"workloads": {"shop": ["web"]}}')
    assert "watching workloads/shop/web" in logweir("watch", "add", "--workloads", file).out
    for text, why in (
        ('{"c1": ["web"]}', "cannot be read"),
        ("{", "cannot be read"),
        ("{}", "names no workload"),
        ('{"c": {"n": ["a\\u0007"]}}', "is no workload pattern"),
    ):
        file.write_text(text)
        wrong = logweir("watch", "add", "--workloads", file)
        assert wrong.code == 2 and why in wrong.err, wrong
    assert logweir("watch", "add", "--workloads", tmp_path / "none").code == 2
    assert logweir("watch", "list", "--workloads", file).code == 2


def test_a_training_from_documents_says_what_is_wrong_before_it_is_asked_for(
    logweir: Verb, tmp_path: Path
) -> None:
    file = tmp_path / "query.json"
    file.write_text("[]")
    for flags, why in (
        (("--query", str(file)), "--query is for documents; name their index with --opensearch"),
        (("--level-not", "error"), "--level-not is for documents"),
        (("--opensearch", "a b"), "names no index"),
        (("--opensearch", "logs-*", "--level-not", "loud"), "level 'loud' is none"),
        (("--opensearch", "logs-*", "--query", str(file)), "is no clause"),
        (("--opensearch", "logs-*"), "OPENSEARCH_URL is not set"),
    ):
        said = logweir("train", "--no-wait", *flags)
        assert said.code == 2 and why in said.err, (flags, said)
    assert "no trainings yet" in logweir("train", "--list").out


def test_a_training_says_which_workload_it_learnt_from_what() -> None:
    counts = {"shop/db": 1_102, "shop/web": 20, "": 3}
    origins = {"shop/web": LearntFrom.RESULTS, "shop/db": LearntFrom.BASELINE, "": LearntFrom.RESULTS}
    assert learnt_from(Status(workloads=counts, learnt_from=origins)) == [
        "  from the baseline of shop/db (1,102 lines)",
        "  from stored results of shop/web (20 lines), no workload (3 lines)",
    ]
    many = {f"w{n:02}": n for n in range(12)}
    (line,) = learnt_from(Status(workloads=many, learnt_from=dict.fromkeys(many, LearntFrom.DOCUMENTS)))
    assert line.startswith("  from documents of w11 (11 lines), w10 (10 lines), ")
    assert line.endswith("w02 (2 lines), and 2 more")
    assert learnt_from(Status()) == []


def test_a_closed_terminal_ends_a_command_as_sigterm_does() -> None:
    code = (
        "import os, signal, time\n"
        "from pipeline import cli\n"
        "cli._prepare(alone=True)\n"
        "for number in (signal.SIGHUP, signal.SIGTERM):\n"
        "    try:\n"
        "        os.kill(os.getpid(), number)\n"
        "        time.sleep(20)\n"
        "    except cli.Terminated:\n"
        "        print(number.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "SIGHUP\nSIGTERM\n", "")


def test_a_signal_within_a_destructor_is_not_lost() -> None:
    """Python drops what a destructor raises; a parser of redis-py has one, and it runs whenever it likes."""
    code = (
        "import os, signal, time\n"
        "from pipeline import cli\n"
        "cli._prepare(alone=True)\n"
        "class Parser:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        time.sleep(0.01)\n"
        "try:\n"
        "    Parser()\n"
        "    time.sleep(20)\n"
        "except KeyboardInterrupt:\n"
        "    raise SystemExit(130)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")
