"""Two and three stacks, each with a data directory of its own, one Redis and one store.

What one learns the others serve. The machines are stacks on one host here. One more data directory is a host
that only asks.
"""

import json
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from own_redis import server
from s3_server import S3Server

from e2e.harness import Command, Up, end, nothing_left, novel, ordinary, sentence, until
from pipeline.observe.presence import Presence
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.sinks.choose import parquet_of

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(slots=True)
class Machines:
    """Two running stacks, and a host without one."""

    folder: Path
    env: dict[str, str]
    stacks: list[Up]
    asking: Command
    bucket: S3Server | None

    def start(self, name: str) -> Up:
        up = Up(self.folder / name, self.env)
        self.stacks.append(up)
        return up

    @property
    def settings(self) -> Settings:
        return Settings(
            redis_url=self.env["REDIS_URL"],
            store_url=self.env["LOGWEIR_STORE_URL"],
            data_dir=self.folder / "asking",
        )

    def json(self, *args: object) -> Any:
        """What the host without a stack is told."""
        done = self.asking(*args, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def serving(self, version: str) -> set[str]:
        """The workers that answer under this version."""
        said = Presence(connect(self.settings), self.settings).serving()
        return {name for name, served in said.items() if version in served.versions.values()}

    def rows(self, workload: str) -> pl.DataFrame:
        with self.bucket.credentials() if self.bucket else nullcontext():
            return parquet_of(self.settings).scan().filter(pl.col("workload") == workload).collect()


@pytest.fixture(scope="module", params=[pytest.param("folder", marks=pytest.mark.nightly), "bucket"])
def machines(request: pytest.FixtureRequest) -> Iterator[Machines]:
    folder = Path(tempfile.mkdtemp(prefix="logweir-two-"))
    bucket: S3Server | None = request.getfixturevalue("s3_server") if request.param == "bucket" else None
    with server(folder, "--appendonly", "yes"):
        env = {
            "REDIS_URL": f"unix://{folder}/r.sock?db=0",
            "LOGWEIR_STORE_URL": bucket.new_place() if bucket else (folder / "store").as_uri(),
            **(bucket.environment() if bucket else {}),
        }
        asking = Command(str(folder / "asking"), folder, {**env, "LOGWEIR_DATA_DIR": str(folder / "asking")})
        both = Machines(folder, env, [], asking, bucket)
        try:
            for up in (both.start("one"), both.start("two")):
                up.wait_ready()
            yield both
        finally:
            for up in both.stacks:
                print(up.err()[-3000:])
                end(up.mark)
                up.process.wait(10)
            end(asking.mark)
            shutil.rmtree(folder, ignore_errors=True)


def test_two_machines_share_what_they_learn_and_the_work_of_one_that_dies(machines: Machines) -> None:
    """One test: each part begins where the one before ended. A machine dies over each store, in one of
    two ways; both stores are held to one contract (tests/store)."""
    _what_one_learns_both_serve_and_any_host_reads(machines)
    _the_page_on_more_machines_runs_word_for_word(machines)
    if machines.bucket is None:
        _the_work_of_a_machine_that_dies_is_done_and_it_joins_again(machines)
    else:
        _a_third_machine_joins_while_another_one_dies(machines)


def _what_one_learns_both_serve_and_any_host_reads(machines: Machines) -> None:
    one, two = machines.stacks
    for up, workload in ((one, "a"), (two, "b")):
        done = up.logweir("send", up.write(ordinary(300)), "--workload", workload)
        assert done.returncode == 0, done.stderr
    for workload in ("a", "b"):
        _stored(machines, workload, 300)
    version = json.loads(two.logweir("train", "--json").stdout)["version"]
    assert version
    # Scoring and draining processes of both machines: ingest, infer-cpu and drain of each.
    workers = until(
        lambda: len(found := machines.serving(version)) >= 6 and found,
        what="both machines serve what one has trained",
    )
    assert len({name.partition("@")[2] for name in workers}) == 2
    for up in (one, two):
        assert (up.data / "models" / version / "manifest.json").is_file()
    status = machines.json("status")
    assert status["model"]["version"] == version and not status["model_faults"]
    assert [m["version"] for m in machines.json("models", "list") if m["live"]] == [version]
    until(
        lambda: not any(_settled(machines, workload, "warming") for workload in ("a", "b")),
        what="warming lines are judged",
    )
    for workload in ("a", "b"):
        rows = machines.rows(workload)
        assert rows.height == rows["record_id"].n_unique() == 300
        assert rows["model_version"].unique().to_list() == [version]
        shown = machines.json("results", "--workload", workload, "--limit", "1000")
        assert len(shown) == 300
    _both_list_what_was_never_said_before(machines)
    store = machines.json("store")
    assert store["same"] and store["versions"] == 1 and not store["incomplete"]


def _both_list_what_was_never_said_before(machines: Machines) -> None:
    one, two = machines.stacks
    path = one.write(["2026-11-20T11:59:00Z INFO app: cache poisoned with 7 entries"])
    assert one.logweir("send", path, "--workload", "news", "--wait").returncode == 0
    asked = ("results", "--news", "--since", "2026-11-20")
    (found,) = machines.json(*asked)
    assert (found["workload"], found["usual"]) == ("news", "refreshed")
    for up in (one, two):
        assert json.loads(up.logweir(*asked, "--json").stdout) == [found]


def _the_page_on_more_machines_runs_word_for_word(machines: Machines) -> None:
    page = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    start, use = (block.splitlines() for block in re.findall(r"```\n(.*?)```", page, re.DOTALL)[:2])
    # The first block is what the fixture does: the same variables, the same verb.
    assert [line.split("=")[0] for line in start[:2]] == [f"export {name}" for name in list(machines.env)[:2]]
    assert start[3].startswith("logweir up --data-dir ")
    (machines.folder / "app.log").write_text("".join(line + "\n" for line in ordinary(50)))
    for line in [start[2], *use]:
        program, *args = line.split()
        assert program == "logweir"
        done = machines.asking(*args)
        assert done.returncode == 0, (line, done.stderr, done.stdout[-500:])


def test_a_machine_with_another_store_is_refused_and_told_the_remedy(machines: Machines) -> None:
    stranger = Command(
        str(machines.folder / "stranger"), machines.folder, {"REDIS_URL": machines.env["REDIS_URL"]}
    )
    said = sentence(stranger("up", "--data-dir", machines.folder / "stranger"))
    assert machines.env["LOGWEIR_STORE_URL"] in said
    assert (machines.folder / "stranger").as_uri() in said
    assert "store_url" in said and "logweir store adopt" in said
    for verb in (["models", "list"], ["results"]):
        assert "store_url" in sentence(stranger(*verb, "--data-dir", machines.folder / "stranger"))
    nothing_left(stranger.mark)


def _the_work_of_a_machine_that_dies_is_done_and_it_joins_again(machines: Machines) -> None:
    one, two = machines.stacks
    before = machines.json("status")["model"]["version"]
    path = one.write(novel(400, "dying"))
    done = machines.asking("send", path, "--workload", "dying")
    assert done.returncode == 0, done.stderr
    one.process.send_signal(signal.SIGKILL)  # its workers end with it
    nothing_left(one.mark)
    _stored(machines, "dying", 400)
    rows = machines.rows("dying")
    assert rows.height == rows["record_id"].n_unique() == 400
    # A version that came while it was away is fetched when it joins.
    version = json.loads(two.logweir("train", "--json").stdout)["version"]
    published = machines.json("status")["model"]["version"]
    again = machines.start("one").wait_ready()
    assert published in (before, version)
    mine = until(
        lambda: [w for w in machines.serving(published) if w.endswith(_suffix(again, machines))],
        what="the machine that joined again serves the live version",
    )
    assert mine
    assert machines.json("status")["model_faults"] == {}


def _a_third_machine_joins_while_another_one_dies(machines: Machines) -> None:
    two = machines.stacks[1]
    path = two.write(novel(400, "joining"))
    three = machines.start("three")
    assert machines.asking("send", path, "--workload", "joining").returncode == 0
    two.process.send_signal(signal.SIGKILL)
    nothing_left(two.mark)
    three.wait_ready()
    _stored(machines, "joining", 400)
    rows = machines.rows("joining")
    assert rows.height == rows["record_id"].n_unique() == 400
    # It has everything that the others had, and what it trains the other one serves.
    before = machines.json("status")["model"]["version"]
    suffixes = {_suffix(up, machines) for up in (machines.stacks[0], three)}
    assert len(suffixes) == 2

    def served(version: str) -> bool:
        return {f"@{name.partition('@')[2]}" for name in machines.serving(version)} >= suffixes

    until(lambda: served(before), what="the third machine serves the live version")
    trained = json.loads(three.logweir("train", "--json").stdout)
    if trained["published"]:
        until(lambda: served(trained["version"]), what="both machines serve what the third one has trained")
    counted = machines.json("patterns", "--since", "3650d", "--limit", "1000")
    lines = sum(row["records"] for row in counted if row["workload"] == "joining")
    assert lines == 400, "any host counts the patterns of all machines"


def _stored(machines: Machines, workload: str, lines: int) -> None:
    """Waits until all lines of a workload are stored; a failure shows what the pipeline says."""
    try:
        until(
            lambda: _settled(machines, workload) == lines, what=f"all {lines} lines of {workload} are stored"
        )
    except BaseException:
        print(_settled(machines, workload), machines.asking("status").stdout)
        raise


def _settled(machines: Machines, workload: str, of: str = "stored") -> int:
    with connect(machines.settings) as client:
        return int(client.hget(f"{{logweir}}:totals:{workload}", of) or 0)


def _suffix(up: Up, machines: Machines) -> str:
    """How the names of a stack's workers end."""
    from pipeline.observe.embedded import called

    return called(machines.settings.replace(data_dir=up.data), "x", embedded=True).removeprefix("x")
