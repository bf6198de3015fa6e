"""Jobs: records and their keeper; and two nodes with two agents, names and data directories, one Redis and
one store."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from command_line import Verb
from fake_nvml_driver import Driver, Gpu
from polling import wait_until
from pool_devices import put_devices

from pipeline.errors import BadInput
from pipeline.gpu import job_files
from pipeline.gpu.job_keeper import JobKeeper
from pipeline.gpu.jobs import KEPT_BYTES, JobState, PoolJob, PoolJobs
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import Need
from pipeline.settings import Settings

NEED = Need(memory_mib=4_000)


@dataclass
class Keeping:
    """A keeper on a pool of made-up devices, and the nodes that it called."""

    pool: Pool
    jobs: PoolJobs
    calls: list[tuple[str, str]]
    nodes: set[str]

    def round(self) -> None:
        """A round of a new keeper: nothing of an earlier one is needed."""
        self.jobs.client.delete(self.jobs.keys.gpu("job_keeper"))

        def send(node: str, job_id: str) -> bool:
            self.calls.append((node, job_id))
            return True

        JobKeeper(self.pool, self.jobs, nodes=lambda: self.nodes, send=send).round()

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
    assert (job.node, job.why, keeping.calls) == ("node-b", "", [("node-b", "one")])


def test_a_need_that_names_another_node_waits_with_the_reason(keeping: Keeping) -> None:
    keeping.jobs.submit(a_job("one", need=replace(NEED, node="node-a")))
    keeping.round()
    assert keeping.job("one").why == "node node-a takes no jobs now"
    assert keeping.pool.snapshot().waiting == ()


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


# Two nodes

# A process of node b has its name; its children have it too.
NAMED = "import os, socket\nif name := os.environ.get('TEST_NODE'):\n    socket.gethostname = lambda: name\n"
TTL_MS = 3_000  # of leases: a lost job is noticed after one and a round of the keeper


@dataclass
class TwoNodes:
    """Node b takes jobs; this process is on the other one."""

    pool: Pool
    jobs: PoolJobs
    folder: Path
    environment: dict[str, str]  # of a process of node b
    processes: list["subprocess.Popen[bytes]"]

    def start_b(self) -> None:
        """The two processes of node b, in a group of their own."""
        with (self.folder / "b.log").open("ab") as log:
            for module, name in (("agent", "agent-b"), ("jobs", "jobs-b")):
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", f"pipeline.workers.{module}", name],
                        env=self.environment, stdout=log, stderr=log, start_new_session=True,
                    )
                )  # fmt: skip

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
        own = settings.replace(data_dir=tmp_path / f"data-{name}", gpu_jobs=name == "b")
        environment = {
            **plain, **own.to_environ(), "TEST_NODE": name, "TEST_FOLDER": str(tmp_path), "SECRET_OF_THE_NODE": "x",
            "PYTHONPATH": str(tmp_path / "names"),
            "LD_LIBRARY_PATH": str(driver.library.parent), "FAKE_NVML": str(driver.control),
        }  # fmt: skip
        if name == "a":
            with (tmp_path / "a.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "pipeline.workers.agent", "agent-a"],
                        env=environment, stdout=log, stderr=log, start_new_session=True,
                    )
                )  # fmt: skip
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
