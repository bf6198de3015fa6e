"""Jobs: records and their keeper; and two nodes with two agents, names and data directories, one Redis and
one store."""

import contextlib
import io
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from command_line import Verb, command_line
from containers import Engine
from fake_nvml_driver import Driver, Gpu
from gpu_worlds import device, exclusive, lease
from own_redis import server
from polling import wait_until
from pool_devices import put_devices

from pipeline.commands.gpu.job_results import JobResults
from pipeline.commands.gpu.job_runner import Outcome
from pipeline.commands.gpu.run import Stop
from pipeline.errors import BadInput
from pipeline.gpu import gang, job_files, job_keeper
from pipeline.gpu.job_keeper import BEHIND, MOST_ASKING, JobKeeper, asking_jobs
from pipeline.gpu.jobs import KEPT_BYTES, JobState, PoolJob, PoolJobs, lost
from pipeline.gpu.node import address
from pipeline.gpu.pool import Pool
from pipeline.gpu.rank_pool import RankPool
from pipeline.gpu.values import Need, PoolLease
from pipeline.settings import Settings
from pipeline.store.choose import open_store

NEED = Need(memory_mib=4_000)


@dataclass
class Keeping:
    """A keeper on a pool of made-up devices, and the nodes that it called."""

    pool: Pool
    jobs: PoolJobs
    calls: list[tuple[str, str, int]]
    nodes: set[str]
    engines: set[str] = field(default_factory=set)  # nodes with one

    def round(self) -> None:
        """A round of a new keeper: nothing of an earlier one is needed."""
        self.jobs.client.delete(self.jobs.keys.gpu("job_keeper"))

        def send(node: str, job_id: str, rank: int) -> bool:
            self.calls.append((node, job_id, rank))
            return True

        nodes = {name: "podman 5" if name in self.engines else "" for name in self.nodes}
        JobKeeper(self.pool, self.jobs, nodes=lambda: nodes, send=send).round()

    def job(self, job_id: str) -> PoolJob:
        found = self.jobs.find(job_id)
        assert found is not None
        return found

    def started(self, job_id: str) -> PoolJob:
        """The job once its node was called."""
        assert wait_until(
            lambda: (self.round(), self.job(job_id).state is JobState.STARTING)[1], timeout_s=10
        )
        return self.job(job_id)


@pytest.fixture
def keeping(settings: Settings) -> Iterator[Keeping]:
    with redis.Redis.from_url(str(settings.redis.url)) as client:
        pool = Pool(client, settings.replace(lease_ttl_ms=2_000))
        put_devices(pool, 1, node="node-a")
        put_devices(pool, 1, node="node-b")
        yield Keeping(pool, PoolJobs(client, settings.replace(lease_ttl_ms=2_000)), [], {"node-b"})


def a_job(name: str, **changes: Any) -> PoolJob:
    return replace(PoolJob(job_id=name, user="ann@a", command=("true",), need=NEED), **changes)


def test_a_job_goes_only_to_a_node_that_takes_jobs(keeping: Keeping) -> None:
    keeping.jobs.submit(a_job("one"))
    keeping.nodes = set()
    keeping.round()
    assert keeping.job("one").why == "no node takes jobs; set gpu_jobs = true on one with a GPU"
    keeping.nodes = {"node-b"}
    job = keeping.started("one")
    assert (job.node, job.why, keeping.calls) == ("node-b", "", [("node-b", "one", 0)])


def test_a_need_that_names_another_node_waits_with_the_reason(keeping: Keeping) -> None:
    keeping.jobs.submit(a_job("one", need=replace(NEED, node="node-a")))
    keeping.round()
    assert keeping.job("one").why == "node node-a takes no jobs now"
    assert keeping.pool.snapshot().waiting == ()


def test_a_job_with_an_image_waits_for_a_node_with_an_engine(keeping: Keeping, logweir: Verb) -> None:
    submit = ("gpu", "submit", "--memory", "1GiB", "--image", "docker.io/team/train:2")
    said = logweir(*submit, "--json", "--name", "boxed")  # the image says what runs
    assert said.code == 0 and json.loads(said.out)["image"] == "docker.io/team/train:2"
    assert logweir(*submit, "--", "true").out.startswith("true-")
    keeping.nodes = {"node-a", "node-b"}
    keeping.round()
    assert keeping.job("boxed").why.startswith(
        "none of these nodes has a container engine: node-a, node-b; install Podman or start Docker there"
    )
    keeping.engines = {"node-b"}
    assert keeping.started("boxed").node == "node-b"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--image=--privileged",), "'--privileged' is no image; write"),
        (("--image", "dir:/etc"), "'dir:/etc' is no image; write"),
        (("--image", "a", "--devices", "2"), "--image with --devices 2 starts no gang"),
        ((), "name the program after --"),
    ],
)
def test_an_image_that_cannot_run_is_refused_when_it_is_submitted(
    keeping: Keeping, logweir: Verb, flags: tuple[str, ...], why: str
) -> None:
    said = logweir("gpu", "submit", "--memory", "1GiB", *flags)
    assert said.code == 2 and why in said.err
    assert keeping.jobs.count() == 0


def test_of_many_waiting_jobs_some_ask_and_tenants_and_needs_take_turns() -> None:
    many = [a_job(f"many-{n:03}", submitted_ms=n) for n in range(2 * MOST_ASKING)]
    assert asking_jobs(many[:MOST_ASKING], ()) == {job.lease_id for job in many[:MOST_ASKING]}
    other = a_job("other", submitted_ms=9_000, need=replace(NEED, tenant="research"))
    large = a_job("large", submitted_ms=9_001, need=replace(NEED, memory_mib=70_000))
    urgent = a_job("urgent", submitted_ms=9_002, need=replace(NEED, priority=1))
    running = a_job("running", state=JobState.RUNNING)
    asking = asking_jobs([*many, other, large, urgent, running], ())
    assert len(asking) == MOST_ASKING
    assert {"other.1", "large.1", "urgent.1", "many-000.1"} <= asking and "running.1" not in asking
    assert "many-400.1" not in asking
    assert "many-400.1" in asking_jobs([*many, other, large, urgent], {"many-400.1"}), "it keeps its turn"


def test_a_crowd_of_jobs_asks_little_of_redis_and_says_that_it_waits(
    keeping: Keeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_keeper, "MOST_ASKING", 8)
    for number in range(40):
        keeping.jobs.submit(a_job(f"job-{number:02}"))
    keeping.round()
    snapshot = keeping.pool.snapshot()
    assert len(snapshot.leases) + len(snapshot.waiting) == 8
    started = [job for job in keeping.jobs.live() if job.state is JobState.STARTING]
    assert started and all(job.job_id < "job-08" for job in started)
    keeping.round()
    keeping.round()
    waiting = [job for job in keeping.jobs.live() if job.why == BEHIND]
    assert len(waiting) >= 16 and not any(
        job.lease_id in {x.request_id for x in snapshot.waiting} for job in waiting
    )


def test_waiting_for_a_job_goes_on_through_a_restart_of_redis(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: "pytest.CaptureFixture[str]"
) -> None:
    options = ("--appendonly", "yes", "--appendfsync", "always")
    own = settings.replace(redis_url=f"unix://{tmp_path / 'r.sock'}")

    def outage() -> None:
        with server(tmp_path, *options) as client:
            jobs = PoolJobs(client, own)
            jobs.submit(a_job("one"))
            there.set()
            calls = partial(client.info, "commandstats")
            assert wait_until(lambda: calls().get("cmdstat_hget", {"calls": 0})["calls"] > 2, timeout_s=20)
        time.sleep(1.2)  # it asks every half second
        with server(tmp_path, *options) as client:
            PoolJobs(client, own).change("one", lambda job: replace(job, state=JobState.SUCCEEDED))
            ended.wait(20)

    there, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=outage)
    thread.start()
    assert there.wait(20)
    with command_line(own, monkeypatch, capsys, columns=400) as verb:
        said = verb("gpu", "wait", "one", "--timeout", "30s")
    ended.set()
    thread.join(20)
    assert said.code == 0 and "Redis does not answer" in said.err


def test_two_jobs_of_one_id_are_refused_and_an_ended_one_never_changes(keeping: Keeping) -> None:
    keeping.jobs.submit(a_job("one"))
    with pytest.raises(BadInput, match="there is a job 'one' already"):
        keeping.jobs.submit(a_job("one"))
    keeping.jobs.change("one", lambda job: replace(job, state=JobState.FAILED, exit_code=3))
    assert keeping.jobs.change("one", lambda job: replace(job, state=JobState.RUNNING)) is None
    assert (keeping.job("one").state, keeping.jobs.live()) == (JobState.FAILED, [])
    with pytest.raises(BadInput, match="there is a job 'one' already"):
        keeping.jobs.submit(a_job("one"))


def test_a_job_whose_process_and_lease_are_gone_is_lost_or_tried_again(keeping: Keeping) -> None:
    for name, retries in (("last", 0), ("more", 1)):
        keeping.jobs.submit(a_job(name, retries=retries))
        keeping.started(name)
        assert keeping.jobs.begin(name) and not keeping.jobs.begin(name)
        keeping.jobs.change(name, lambda job: replace(job, state=JobState.RUNNING))
    keeping.round()
    assert keeping.job("last").state is JobState.RUNNING  # its process beats
    for name in ("last", "more"):
        keeping.jobs.leave(name)
    keeping.round()
    assert keeping.job("last").state is JobState.RUNNING  # its lease may still be renewed
    for name in ("last", "more"):
        keeping.pool.revoke(f"{name}.1", "the test takes it")
    keeping.round()
    assert keeping.job("last").state is JobState.LOST
    again = keeping.job("more")
    assert (again.attempt, again.lease_id) == (2, "more.2")
    assert keeping.started("more").state is JobState.STARTING


def test_a_job_that_came_back_is_tried_on_another_node_where_there_is_one(keeping: Keeping) -> None:
    """A node with a full disk fails each job at once, and is the first that is free again."""
    keeping.nodes = {"node-a", "node-b"}
    keeping.jobs.submit(a_job("one", retries=2))
    first = keeping.started("one").node
    keeping.jobs.change("one", lambda job: lost(job, "no space left on device"))
    keeping.pool.revoke("one.1", "its runner gave it back")
    second = keeping.started("one").node
    assert {first, second} == keeping.nodes
    keeping.jobs.change("one", lambda job: lost(job, "no space left on device"))
    keeping.pool.revoke("one.2", "its runner gave it back")
    keeping.nodes = {second}
    assert keeping.started("one").node == second, "it is the only one"


def test_an_unreadable_record_keeps_no_other_job_waiting(keeping: Keeping) -> None:
    keeping.jobs.submit(a_job("one"))
    keeping.jobs.client.hset(keeping.jobs._both[0], "broken", b'{"job_id": 7')
    assert keeping.started("one").state is JobState.STARTING


def test_a_cancelled_job_gives_its_lease_back_before_it_began(keeping: Keeping) -> None:
    keeping.jobs.submit(a_job("one"))
    keeping.started("one")
    keeping.jobs.change("one", lambda job: replace(job, cancel=True))
    keeping.round()
    assert keeping.job("one").state is JobState.CANCELLED
    assert keeping.pool.snapshot().leases == ()


def test_the_end_of_an_output_is_kept_and_its_bytes_keep_their_numbers(keeping: Keeping) -> None:
    jobs, whole = keeping.jobs, b""
    for number in range(40):
        part = bytes([65 + number % 26]) * 10_000
        jobs.write("one", part)
        whole += part
    first, kept = jobs.read("one", 0)
    assert (first, kept) == (len(whole) - KEPT_BYTES, whole[-KEPT_BYTES:])
    assert jobs.read("one", len(whole) - 7) == (len(whole) - 7, whole[-7:])
    assert jobs.read("none", 0) == (0, b"")


def test_links_out_of_a_directory_are_refused_in_an_upload_and_left_out_of_results(
    tmp_path: Path, keeping: Keeping, settings: Settings
) -> None:
    """Unpacking refuses them, so one of them would cost all other files."""
    given, store = tmp_path / "given", open_store((tmp_path / "store").as_uri())
    (given / "sub").mkdir(parents=True)
    (given / "sub" / "model.pt").write_text("weights")
    inside = {"latest", "up"} if hasattr(tarfile, "data_filter") else set()  # Python 3.11.4 unpacks links
    if inside:
        (given / "latest").symlink_to("sub/model.pt")
        (given / "sub" / "up").symlink_to("../latest")
    files = job_files.put_files(store, "one", "upload.tar", given)
    job_files.fetch_files(store, "one", "upload.tar", files, tmp_path / "inside")
    assert (tmp_path / "inside" / "sub" / ("up" if inside else "model.pt")).read_text() == "weights"
    (given / "passwords").symlink_to("/etc/passwd")
    (given / "sub" / "out").symlink_to("../../secret")
    os.mkfifo(given / "pipe")
    with pytest.raises(
        BadInput, match=r"/(passwords|pipe|sub/out) is a link that leads out of the directory, or no"
    ):
        job_files.put_files(store, "one", "upload.tar", given)
    keeping.jobs.submit(a_job("one", state=JobState.RUNNING))
    results = JobResults(keeping.jobs, store, keeping.job("one"), given)
    results.store()
    assert sorted(results.left_out) == ["passwords", "pipe", "sub/out"]
    found = keeping.job("one").results
    assert found is not None
    job_files.fetch_files(store, "one", "results.tar", found, tmp_path / "out")
    assert {one.name for one in (tmp_path / "out").rglob("*")} == {"model.pt", "sub", *inside}
    given.rename(tmp_path / "moved")
    given.symlink_to("/etc")  # the program put a link in the place of its results
    results.store()
    found = keeping.job("one").results
    assert found is not None
    job_files.fetch_files(store, "one", "results.tar", found, tmp_path / "nothing")
    assert list((tmp_path / "nothing").iterdir()) == []


@pytest.mark.parametrize("filters", [True, False])
def test_an_archive_writes_nothing_outside_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filters: bool
) -> None:
    if not filters:  # as Python before 3.11.4
        monkeypatch.delattr(tarfile, "data_filter", raising=False)

    def unpacked(name: str, link: str = "") -> Path:
        archive, to = io.BytesIO(), tmp_path / "deep" / "to"
        with tarfile.open(fileobj=archive, mode="w") as tar:
            member = tarfile.TarInfo(name)
            member.size, member.mode = (0, 0o644) if link else (4, 0o6755)
            if link:
                member.type, member.linkname = tarfile.SYMTYPE, link
            tar.addfile(member, io.BytesIO(b"made"))
        archive.seek(0)
        to.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=archive) as tar:
            job_files._unpack(tar, to)
        return to / name

    made = unpacked("bin/run")
    assert made.read_bytes() == b"made" and made.stat().st_mode & 0o7777 == 0o755
    for name, link in (("../../out", ""), ("link", "../../../etc"), ("/abs/../../../../out", "")):
        with contextlib.suppress(tarfile.TarError):
            unpacked(name, link)
    assert {path.name for path in tmp_path.rglob("*")} - {"deep", "to", "bin", "run"} <= {"abs", "out"}
    assert not (tmp_path / "out").exists() and not (tmp_path / "deep" / "out").exists()


# Gangs


def a_gang(name: str, **changes: Any) -> PoolJob:
    return a_job(name, need=replace(NEED, devices=2), gang=True, **changes)


def running_gang(keeping: Keeping, name: str, **changes: Any) -> PoolJob:
    """A gang whose two ranks beat."""
    keeping.nodes = {"node-a", "node-b"}
    keeping.jobs.submit(a_gang(name, **changes))
    job = keeping.started(name)
    assert all(keeping.jobs.begin(job.run_id(rank)) for rank in (0, 1))
    keeping.jobs.change(name, lambda now: replace(now, state=JobState.RUNNING))
    return keeping.job(name)


def test_the_nodes_of_a_gang_are_called_for_their_ranks(keeping: Keeping) -> None:
    job = running_gang(keeping, "two")
    assert keeping.calls == [("node-a", "two", 0), ("node-b", "two", 1)]
    assert (job.node, job.places) == ("node-a, node-b", ("node-a", "node-b"))
    assert [(rank.uuid, rank.local, rank.beside) for rank in job.ranks] == [
        ("GPU-node-a-0", 0, 1), ("GPU-node-b-0", 0, 1)
    ]  # fmt: skip


def test_a_silent_rank_ends_the_try_of_its_gang_though_others_renew_the_lease(keeping: Keeping) -> None:
    job = running_gang(keeping, "two", retries=1)
    keeping.round()
    assert keeping.job("two").state is JobState.RUNNING
    keeping.jobs.leave(job.run_id(1))
    keeping.round()
    again = keeping.job("two")
    assert (again.state, again.attempt, again.ranks) == (JobState.WAITING, 2, ())
    assert again.why == "rank 1 on node node-b died; try 2 of 2"
    assert keeping.jobs.begin(again.run_id(0)), "the next try does not wait for the processes of this one"


def test_a_rank_that_is_over_is_not_missed_while_the_others_run(keeping: Keeping) -> None:
    job = running_gang(keeping, "two")
    pool = RankPool(keeping.pool, keeping.jobs, job, 1, the_lease(keeping, job))
    assert [part.uuid for part in pool.own.parts] == ["GPU-node-b-0"]
    assert pool.renew(pool.own).lost == "" and pool.release(pool.own)
    assert not pool.leave()
    keeping.jobs.leave(job.run_id(1))
    keeping.round()
    assert keeping.job("two").state is JobState.RUNNING
    assert the_lease(keeping, job), "its lease is the gang's"
    first = RankPool(keeping.pool, keeping.jobs, job, 0, the_lease(keeping, job))
    assert first.leave(), "the last one gives it back"
    assert keeping.pool.snapshot().leases == ()


def the_lease(keeping: Keeping, job: PoolJob) -> PoolLease:
    return next(lease for lease in keeping.pool.snapshot().leases if lease.lease_id == job.lease_id)


def test_ranks_lie_together_by_node_and_a_slice_is_a_group_of_its_own() -> None:
    whole = (device(1, node="b"), device(0, node="b"), device(0, node="a"))
    ranks = gang.ranks_of(lease("x", exclusive(devices=3), whole), whole)
    assert [(r.node, r.uuid, r.local, r.beside, r.group) for r in ranks] == [
        ("a", "GPU-a-00000", 0, 1, 0), ("b", "GPU-b-00000", 0, 2, 1), ("b", "GPU-b-00001", 1, 2, 1)
    ]  # fmt: skip
    assert gang.devices_of_rank(ranks, 2) == {"GPU-b-00000", "GPU-b-00001"}
    slices = [replace(device(n, node="b"), parent="GPU-b") for n in (0, 1)]
    cut = gang.ranks_of(lease("x", exclusive(devices=2), slices), slices)
    assert [(r.local, r.beside, r.group) for r in cut] == [(0, 1, 0), (0, 1, 1)]
    assert gang.devices_of_rank(cut, 1) == {"GPU-b-00001"}
    assert gang.ranks_of(lease("x", exclusive(devices=3), whole), whole[:2]) == ()
    found = gang.rank_variables(ranks, 2, master="10.0.0.5:4711", run="x.2", attempt=2, retries=3)
    assert found == {
        "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "4711", "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "x.2",
        "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "attempt", "expected"),
    [
        (Outcome(code=1), 1, (JobState.WAITING, 2, "rank 1 ended with 1; try 2 of 2")),
        (Outcome(code=1), 2, (JobState.FAILED, 2, "rank 1 ended with 1")),
        (Outcome(code=137, stopped=Stop.TOO_MUCH), 1, (JobState.FAILED, 1, "rank 1 used more memory than it leased")),
        (Outcome(code=0), 1, (JobState.SUCCEEDED, 1, "")),
    ],
)  # fmt: skip
def test_a_rank_that_fails_takes_a_try_of_its_gang(
    outcome: Outcome, attempt: int, expected: tuple[JobState, int, str]
) -> None:
    job = replace(outcome, rank="rank 1").of(a_gang("two", retries=1, attempt=attempt))
    assert (job.state, job.attempt, job.why) == expected


def test_a_job_of_several_devices_is_a_gang_unless_one_process_is_asked_for(
    keeping: Keeping, logweir: Verb
) -> None:
    two = ("gpu", "submit", "--memory", "1GiB", "--devices", "2")
    assert logweir(*two, "--name", "ranks", "--", "true").code == 0
    job = keeping.job("ranks")
    assert (job.gang, job.size, job.need.same_node) == (True, 2, False)
    assert [job.kept_bytes(rank) for rank in (0, 1)] == [KEPT_BYTES, 65_536]
    refused = logweir(*two, "--one-process", "--", "true")
    assert refused.code == 2, "no node has two devices"
    set_by_us = logweir(*two, "--env", "RANK=7", "--", "true")
    assert set_by_us.code == 2 and "--env RANK is set by the gang" in set_by_us.err
    many = logweir("gpu", "submit", "--memory", "1GiB", "--devices", "257", "--", "true")
    assert many.code == 2 and "a gang has at most 256 processes" in many.err
    assert (
        logweir("gpu", "submit", "--memory", "1GiB", "--one-process", "--name", "one", "--", "true").code == 0
    )
    assert not keeping.job("one").gang


def test_what_a_try_stores_is_found_by_the_next_one_and_never_replaced_by_a_late_one(
    keeping: Keeping, tmp_path: Path
) -> None:
    job, objects = running_gang(keeping, "two", retries=1), open_store((tmp_path / "store").as_uri())

    def results(of: PoolJob, name: str) -> JobResults:
        made = JobResults(keeping.jobs, objects, of, tmp_path / name)
        made.restore()
        return made

    def archives() -> int:
        return len(list((tmp_path / "store").rglob("*results.tar")))

    first = results(job, "first")
    first.store()
    assert keeping.job("two").results is None and archives() == 0, "nothing was left"
    for word in ("one", "two"):
        (tmp_path / "first" / "step").write_text(word)
        first.store()
    assert archives() == 1
    keeping.jobs.change("two", lambda now: lost(now, "a test"))
    (tmp_path / "first" / "step").write_text("last")
    first.store()
    again = keeping.job("two")
    second = results(again, "second")
    assert (tmp_path / "second" / "step").read_text() == "last"
    keeping.jobs.change("two", lambda now: replace(now, state=JobState.STARTING))
    (tmp_path / "first" / "step").write_text("late")
    first.store()
    assert keeping.job("two").results == again.results and archives() == 1
    second.store()
    assert archives() == 1, "nothing has changed since"


def test_the_address_for_other_machines_is_that_of_the_way_to_redis() -> None:
    assert address.redis_host("rediss://:word@10.0.0.7:6380/1") == "10.0.0.7"
    assert address.redis_host("unix:///tmp/redis.sock") == ""
    assert address.redis_host("sentinel://s1:26379,s2/0?master=m") == "s1"
    assert address.interface_of("127.0.0.1") == ("lo" if sys.platform == "linux" else "lo0")
    assert ipaddress.ip_address(address.own_address("no.such.host.invalid"))
    assert 0 < address.free_port("127.0.0.1") < 65_536


# Two nodes

# A process of node b has its name; its children have it too.
NAMED = "import os, socket\nif name := os.environ.get('TEST_NODE'):\n    socket.gethostname = lambda: name\n"
TTL_MS = 3_000  # of leases: a lost job is noticed after one and a round of the keeper


def started(environment: dict[str, str], node: str, folder: Path) -> list["subprocess.Popen[bytes]"]:
    """The agent of a node, and the process that takes its jobs."""
    with (folder / f"{node}.log").open("ab") as log:
        return [
            subprocess.Popen(
                [sys.executable, "-m", f"pipeline.workers.{module}", f"{module}-{node}"],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )
            for module in ("agent", "jobs")
        ]  # fmt: skip


@dataclass
class TwoNodes:
    """Both take jobs, and node a has room for small ones only; this process is on node a."""

    pool: Pool
    jobs: PoolJobs
    folder: Path
    environment: dict[str, str]  # of a process of node b
    processes: list["subprocess.Popen[bytes]"]

    def start_b(self) -> None:
        """The two processes of node b, in a group of their own."""
        self.processes += started(self.environment, "b", self.folder)

    def job(self, job_id: str) -> PoolJob:
        found = self.jobs.find(job_id)
        assert found is not None
        return found

    def state(self, job_id: str) -> JobState:
        return self.job(job_id).state

    def runs(self, job_id: str) -> bool:
        return self.state(job_id) is JobState.RUNNING

    def kill_b(self) -> None:
        """As a machine that loses its power: no process of the node lives on."""
        for process in self.processes[-2:]:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pid in self._with_mark():
            with contextlib.suppress(ProcessLookupError):  # its parent has taken it along
                os.kill(pid, signal.SIGKILL)

    def _with_mark(self) -> list[int]:
        found = []
        for process in psutil.process_iter():
            try:
                own = process.environ()
                ours = own.get("TEST_FOLDER") == str(self.folder) and own["TEST_NODE"] == "b"
                if ours or own.get("GPU_JOB_RESULTS", "").startswith(f"{self.folder}/"):
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found


@pytest.fixture
def nodes(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logweir: Verb
) -> Iterator[TwoNodes]:
    settings = settings.replace(
        store_url=(tmp_path / "store").as_uri(),
        lease_ttl_ms=TTL_MS, gpu_beat_s=0.2, gpu_node_ttl_ms=2_000, gpu_jobs=False,
    )  # fmt: skip
    (tmp_path / "names").mkdir()
    (tmp_path / "names" / "sitecustomize.py").write_text(NAMED)
    processes = []
    plain = {k: v for k, v in os.environ.items() if not k.startswith("LOGWEIR_")}
    for name in ("a", "b"):
        (tmp_path / f"driver-{name}").mkdir()
        driver = Driver(tmp_path / f"driver-{name}")
        driver.devices(Gpu(f"GPU-{name}", total=24_576 if name == "b" else 8_192))
        own = settings.replace(data_dir=tmp_path / f"data-{name}", gpu_jobs=True)
        environment = {
            **plain, **own.to_environ(), "TEST_NODE": name, "TEST_FOLDER": str(tmp_path), "SECRET_OF_THE_NODE": "x",
            "PYTHONPATH": str(tmp_path / "names"),
            "LD_LIBRARY_PATH": str(driver.library.parent), "FAKE_NVML": str(driver.control),
        }  # fmt: skip
        if name == "a":
            processes += started(environment, "a", tmp_path)
    for key, value in settings.to_environ().items():  # the command of this process, on node a
        monkeypatch.setenv(key, value)
    with redis.Redis.from_url(str(settings.redis.url)) as client:
        pool = Pool(client, settings)
        pool.ledger.clear_quarantine()
        both = TwoNodes(pool, PoolJobs(client, settings), tmp_path, environment, processes)
        both.start_b()
        assert wait_until(lambda: len(pool.snapshot().devices) == 2, timeout_s=30)
        try:
            yield both
        finally:
            for process in processes:
                if process.poll() is None:
                    process.terminate()
                    process.wait(20)
            for log in ("a.log", "b.log"):
                print((tmp_path / log).read_text()[-4000:])


RANK = """
saved=$(cat $GPU_JOB_RESULTS/step)
[ $GPU_JOB_TRY -lt 3 ] && echo $GPU_JOB_TRY > $GPU_JOB_RESULTS/step
echo rank $RANK of $WORLD_SIZE, local $LOCAL_RANK, node $GROUP_RANK, try $TORCHELASTIC_RESTART_COUNT
echo device $CUDA_VISIBLE_DEVICES saved $saved master $MASTER_ADDR:$MASTER_PORT
[ $RANK = 1 ] || touch $BEGUN
if [ $GPU_JOB_TRY -lt 3 ]; then
  [ $RANK$GPU_JOB_TRY = 11 ] && { until [ -e $BEGUN ]; do sleep 0.1; done; kill -9 $$; }
  sleep 300
fi
"""


def _a_gang_goes_on_from_its_checkpoint(nodes: TwoNodes, logweir: Verb) -> None:
    """Rank 1 kills itself once rank 0 has begun; then the lease is revoked. Each ends both, and the next
    try finds the file of rank 0."""
    said = logweir(
        "gpu", "submit", "--memory", "6GiB", "--devices", "2", "--retries", "2", "--name", "two",
        "--env", f"BEGUN={nodes.folder / 'begun'}", "--", "sh", "-c", RANK,
    )  # fmt: skip
    assert said.code == 0, said
    assert wait_until(lambda: nodes.job("two").attempt == 2 and nodes.runs("two"), timeout_s=30)

    def both_began_again() -> bool:
        return all(b"saved 1 master" in nodes.jobs.read("two", 0, rank=rank)[1] for rank in (0, 1))

    assert wait_until(both_began_again, timeout_s=30)
    assert nodes.pool.revoke("two.2", "the test takes it")
    results = nodes.folder / "two"
    waited = logweir("gpu", "wait", "two", "--timeout", "60s", "--results", str(results))
    assert waited.code == 0, (
        waited,
        logweir("gpu", "logs", "two"),
        logweir("gpu", "logs", "two", "--rank", "1"),
    )
    assert (results / "step").read_text() == "2\n"
    masters = set()
    for rank in (0, 1):
        output = logweir("gpu", "logs", "two", "--rank", str(rank)).out
        for attempt, saved in ((0, ""), (1, " 1"), (2, " 2")):
            assert f"rank {rank} of 2, local 0, node {rank}, try {attempt}\n" in output
            assert f"device GPU-{'ab'[rank]} saved{saved} master" in output
        masters.add(tuple(line.rpartition(" ")[2] for line in output.splitlines() if "master" in line))
    assert len(masters) == 1, "both look for rank 0 at one place in each try"
    assert "another rank has ended" in logweir("gpu", "logs", "two").out
    assert logweir("gpu", "logs", "two", "--rank", "2").code == 2
    assert nodes.pool.snapshot().leases == ()


def test_a_job_runs_on_another_node_with_its_files_and_one_of_a_dead_node_is_told_or_tried_again(
    nodes: TwoNodes, logweir: Verb
) -> None:
    source = nodes.folder / "source"
    source.mkdir()
    (source / "say.sh").write_text(
        "echo on $GPU_MEMORY_MIB of $CUDA_VISIBLE_DEVICES, word $WORD, secret $SECRET_OF_THE_NODE$REDIS_URL\n"
        "echo made > $GPU_JOB_RESULTS/made\nexit 3\n"
    )
    said = logweir(
        "gpu", "submit", "--memory", "10GiB", "--name", "say", "--upload", str(source), "--env", "WORD=up",
        "--", "sh", "say.sh",
    )  # fmt: skip
    assert said.code == 0, said
    waited = logweir("gpu", "wait", "say", "--timeout", "60s", "--results", str(nodes.folder / "out"))
    assert waited.code == 3, waited
    assert (nodes.folder / "out" / "made").read_text() == "made\n"
    output = logweir("gpu", "logs", "say").out
    assert "on 10240 of GPU-b, word up, secret\n" in output

    # A program that is cancelled is asked to end, and its lease is given back.
    logweir("gpu", "submit", "--memory", "10GiB", "--name", "long", "--", "sleep", "300")
    assert wait_until(lambda: nodes.state("long") is JobState.RUNNING, timeout_s=30)
    assert logweir("gpu", "cancel", "long").code == 0
    assert wait_until(lambda: nodes.state("long") is JobState.CANCELLED, timeout_s=20)
    assert wait_until(lambda: not nodes.pool.snapshot().leases, timeout_s=5)

    _a_gang_goes_on_from_its_checkpoint(nodes, logweir)

    # Two that run when their node dies.
    for name, retries in (("gone", "0"), ("again", "1")):
        logweir(
            "gpu", "submit", "--memory", "9GiB", "--name", name, "--retries", retries, "--",
            "sh", "-c", "echo begun; sleep 300",
        )  # fmt: skip
        assert wait_until(partial(nodes.runs, name), timeout_s=30)
    nodes.kill_b()
    began = time.monotonic()
    assert wait_until(lambda: nodes.state("gone") is JobState.LOST, timeout_s=30)
    assert wait_until(lambda: nodes.job("again").attempt == 2, timeout_s=30)
    assert time.monotonic() - began < 30
    assert "node b died" in nodes.job("gone").why
    assert logweir("gpu", "wait", "gone").code == 75
    assert logweir("gpu", "cancel", "again").code == 0
    assert wait_until(lambda: nodes.state("again") is JobState.CANCELLED, timeout_s=20)


# Containers, by the real Podman beside the repository

IMAGE = "docker.io/library/redis:7.4-alpine"  # there is a shell in it
CDI = Path("/etc/cdi/logweir-test.json")  # Podman looks nowhere else; root alone writes there


@pytest.fixture
def podman(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Engine]:
    """An engine that knows the made-up device of node b. Its containers have no network."""
    engine = Engine.in_folder(request.config.getoption("--images"), os.environ, networks=False)
    settings = tmp_path / "containers.conf"
    shutil.copy(engine.env["CONTAINERS_CONF"], settings)
    settings.write_text(settings.read_text().replace("[containers]\n", '[containers]\nnetns = "none"\n', 1))
    engine.env["CONTAINERS_CONF"] = str(settings)
    for name in ("CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF"):
        monkeypatch.setenv(name, engine.env[name])
    CDI.parent.mkdir(exist_ok=True)
    edits = {"env": ["CDI_GAVE=GPU-b"]}
    CDI.write_text(
        json.dumps(
            {
                "cdiVersion": "0.3.0",
                "kind": "nvidia.com/gpu",
                "devices": [{"name": "GPU-b", "containerEdits": edits}],
            }
        )
    )
    yield engine
    for name in _ours(engine):
        engine("podman", "rm", "--force", "--time=0", name, check=False)
    CDI.unlink()


def _ours(engine: Engine) -> list[str]:
    return engine("podman", "ps", "--all", "--filter=name=logweir-", "--format={{.Names}}").stdout.split()


BOXED = """
echo by $(cat /proc/self/status | grep CapEff) in $PWD, home $HOME, device $CDI_GAVE $CUDA_VISIBLE_DEVICES
echo word "$WORD" secret $SECRET_OF_THE_NODE$REDIS_URL file $(cat file) node $(ls -d %s 2> /dev/null)
echo limits $(cat /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max 2> /dev/null)
echo cpu $(cat /sys/fs/cgroup/cpu/cpu.cfs_quota_us /sys/fs/cgroup/cpu.max 2> /dev/null)
echo made > $GPU_JOB_RESULTS/made
exit 3
"""
ASKED = "trap 'echo asked; exit 5' TERM; echo up; while :; do sleep 0.1; done"
DEAF = "trap '' TERM; echo up; while :; do sleep 0.1; done"


def _boxed(logweir: Verb, name: str, program: str, *flags: str) -> None:
    said = logweir(
        "gpu", "submit", "--memory", "10GiB", "--image", IMAGE, "--name", name, *flags, "--", "sh", "-c", program
    )  # fmt: skip
    assert said.code == 0, said


def _watchers(nodes: TwoNodes) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """The processes that run jobs, and their guards."""
    runners = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = process.environ().get("TEST_FOLDER") == str(nodes.folder)
            if ours and any(word.endswith("job_runner") for word in process.cmdline()):
                runners.append(process)
    return runners, [child for runner in runners for child in runner.children()]


@pytest.mark.timeout(300)
def test_a_job_with_an_image_runs_in_a_container_that_ends_with_its_lease(
    podman: Engine, nodes: TwoNodes, logweir: Verb
) -> None:
    source = nodes.folder / "source"
    source.mkdir()
    (source / "file").write_text("uploaded")
    _boxed(
        logweir, "boxed", BOXED % nodes.folder, "--upload", str(source), "--env", "WORD=--privileged $(id)",
        "--cpu", "0.5", "--node-memory", "64MiB",
    )  # fmt: skip
    waited = logweir("gpu", "wait", "boxed", "--timeout", "60s", "--results", str(nodes.folder / "out"))
    output = logweir("gpu", "logs", "boxed").out
    assert waited.code == 3, (waited, output)
    assert (nodes.folder / "out" / "made").read_text() == "made\n"
    assert "by CapEff: 0000000000000000 in /job, home /job, device GPU-b GPU-b\n" in output
    assert "word --privileged $(id) secret file uploaded node\n" in output
    assert "limits 67108864\n" in output and "cpu 50000" in output
    assert _ours(podman) == []

    # Asked to end: the program's own end, or SIGKILL after the grace.
    for name, program in (("asked", ASKED), ("deaf", DEAF)):
        _boxed(logweir, name, program, "--grace", "2s")
        assert wait_until(lambda job=name: b"up" in nodes.jobs.read(job, 0)[1], timeout_s=30)
        (container,) = _ours(podman)
        assert container.endswith(f"-{name}.1")
        first = int(podman("podman", "container", "inspect", "--format={{.State.Pid}}", container).stdout)
        assert wait_until(lambda pid=first: pid in nodes.pool.snapshot().leases[0].pids, timeout_s=10)
        logweir("gpu", "cancel", name)
        assert wait_until(lambda job=name: nodes.state(job) is JobState.CANCELLED, timeout_s=30)
        assert _ours(podman) == []
    assert b"asked\n" in nodes.jobs.read("asked", 0)[1]

    # The process that watches it is killed, and then its guard too.
    for name, both in (("guarded", False), ("alone", True)):
        _boxed(logweir, name, DEAF)
        assert wait_until(lambda job=name: b"up" in nodes.jobs.read(job, 0)[1], timeout_s=30)
        runners, guards = _watchers(nodes)
        assert len(runners) == 1 and guards
        for process in (*runners, *(guards if both else ())):
            process.kill()
        began = time.monotonic()
        assert wait_until(lambda: not _ours(podman), timeout_s=60), name
        print(f"{name}: its container was removed after {time.monotonic() - began:.1f} s")
        assert wait_until(lambda job=name: nodes.state(job) is JobState.LOST, timeout_s=30)
    assert wait_until(lambda: not nodes.pool.snapshot().leases, timeout_s=30)
