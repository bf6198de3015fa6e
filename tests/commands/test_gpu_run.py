"""`logweir gpu run`: the program gets what its lease says, and nothing of it outlives the lease, whoever is
killed."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import pytest
import redis
from command_line import Verb, command_line
from fake_mps import a_daemon, control_program
from polling import wait_until
from rich.console import Console

from pipeline.commands.gpu.run import Run
from pipeline.commands.gpu.supervised import SupervisedProgram
from pipeline.gpu.node import host_lock as flock
from pipeline.gpu.node import mps
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import Device, LeaseMode, Need, PoolPlan, Process, Report, Yield
from pipeline.settings import Settings

# Ends at SIGTERM, and says so; its descendants try to get away: a session of their own, an orphan, one deaf
# to SIGTERM.
FAMILY = """
import os, signal, subprocess, sys, time
out = open(sys.argv[1], "a", buffering=1)
signal.signal(signal.SIGTERM, lambda *_: (out.write("TERM\\n"), os._exit(0)))
sleep = "import time; time.sleep(300)"
subprocess.Popen([sys.executable, "-S", "-c", sleep], start_new_session=True)
subprocess.run(["sh", "-c", f"{sys.executable} -S -c '{sleep}' & :"])
subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.signal(15, signal.SIG_IGN);" + sleep])
out.write("up\\n")
time.sleep(300)
"""


def alive(mark: str) -> list[psutil.Process]:
    """Processes that carry the mark in their environment, as everything that a program starts does."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get("TEST_MARK") == mark:
                found.append(process)
    return found


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = uuid.uuid4().hex
    monkeypatch.setenv("TEST_MARK", name)
    yield name
    for process in alive(name):
        with contextlib.suppress(psutil.Error):
            process.kill()


@dataclass(slots=True)
class Family:
    """The program above, and where it writes."""

    file: Path
    mark: str

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-S", "-c", FAMILY, str(self.file)]

    def is_up(self) -> bool:
        return self.file.exists() and "up" in self.file.read_text() and len(alive(self.mark)) >= 5

    def was_asked(self) -> bool:
        return "TERM" in self.file.read_text()


@pytest.fixture
def family(tmp_path: Path, mark: str) -> Family:
    return Family(file=tmp_path / "said", mark=mark)


# The supervised alone


def ended(supervised: SupervisedProgram, within_s: float = 30.0) -> int | None:
    assert wait_until(lambda: supervised.wait(0.05), timeout_s=within_s)
    return supervised.code


@pytest.mark.parametrize(
    ("program", "code"),
    [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill -15 $$", 143)],
)
def test_the_exit_code_is_the_programs(program: str, code: int) -> None:
    with SupervisedProgram(["sh", "-c", program], grace_s=1) as supervised:
        supervised.begin({})
        assert ended(supervised) == code
    assert supervised.survivors == ()


@pytest.mark.parametrize(
    ("name", "code", "why"),
    [("nosuch", 127, "No such file"), ("text", 126, "Exec format"), ("plain", 126, "denied")],
)
def test_a_program_that_cannot_start_says_why(tmp_path: Path, name: str, code: int, why: str) -> None:
    for file, mode in (("text", 0o755), ("plain", 0o644)):
        (tmp_path / file).write_bytes(b"\x00\x01")
        (tmp_path / file).chmod(mode)
    with SupervisedProgram([str(tmp_path / name)], grace_s=1) as supervised:
        supervised.begin({})
        assert ended(supervised) == code
        assert why in supervised.failed


def test_the_program_has_our_environment_and_the_leases_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "ours")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    file = tmp_path / "env"
    with SupervisedProgram(["sh", "-c", f"env > {file}"], grace_s=1) as supervised:
        supervised.begin({"CUDA_VISIBLE_DEVICES": "GPU-1", "ODD": "a\nb=c"})
        ended(supervised)
    text = file.read_text()
    assert "MINE=ours\n" in text and "CUDA_VISIBLE_DEVICES=GPU-1\n" in text and "ODD=a\nb=c\n" in text


def test_modules_in_the_users_directory_do_not_take_the_place_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("psutil", "json", "pipeline", "socket"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('hijacked')")
    monkeypatch.chdir(tmp_path)
    with SupervisedProgram(["true"], grace_s=1) as supervised:
        supervised.begin({})
        assert ended(supervised) == 0


def test_everything_the_program_started_ends_with_it(family: Family) -> None:
    with SupervisedProgram(family.command, grace_s=0.5) as supervised:
        supervised.begin({})
        assert wait_until(family.is_up, timeout_s=30)
        assert len(supervised.pids()) >= 4
        supervised.signal(signal.SIGKILL)
        assert ended(supervised) == 137
    assert [p for p in alive(family.mark) if p.pid != os.getpid()] == []


def test_a_guard_that_is_killed_takes_the_program_with_it(family: Family) -> None:
    with SupervisedProgram(family.command, grace_s=0.5) as supervised:
        supervised.begin({})
        assert wait_until(family.is_up, timeout_s=30)
        supervised.guard.kill()
        assert ended(supervised) == 137
    assert alive(family.mark) == [] and supervised.survivors == ()


def test_leaving_early_ends_the_program(family: Family) -> None:
    def leave() -> None:
        with SupervisedProgram(family.command, grace_s=0.5) as supervised:
            supervised.begin({})
            assert wait_until(family.is_up, timeout_s=30)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave()
    assert family.was_asked() and alive(family.mark) == []


def test_a_program_that_is_deaf_to_sigterm_is_killed_after_its_grace(tmp_path: Path) -> None:
    up = tmp_path / "up"
    with SupervisedProgram(
        ["sh", "-c", f"trap '' TERM; touch {up}; while :; do sleep 0.1; done"], grace_s=60
    ) as supervised:
        supervised.begin({})
        assert wait_until(up.exists, timeout_s=30)
        supervised.stop(0.2)
        assert ended(supervised) == 137


def test_when_the_keeper_goes_the_program_has_only_what_a_lease_lives_without_it(
    mark: str, tmp_path: Path
) -> None:
    up = tmp_path / "up"
    deaf = ["sh", "-c", f"trap '' TERM; touch {up}; while :; do sleep 0.1; done"]
    with SupervisedProgram(deaf, grace_s=600, alone_s=0.2) as supervised:
        supervised.begin({})
        assert wait_until(up.exists, timeout_s=30)
        supervised._line.close()  # as the kernel does when the keeper dies
        assert supervised.guard.wait(30) == 0
    assert [p for p in alive(mark) if p.pid != os.getpid()] == []


def test_when_the_keeper_goes_the_guard_removes_the_container_that_the_command_started(
    tmp_path: Path,
) -> None:
    up, there = tmp_path / "up", tmp_path / "container"
    there.touch()
    engine = ["sh", "-c", f"trap 'exit 143' TERM; touch {up}; while :; do sleep 0.1; done"]
    with SupervisedProgram(engine, grace_s=30, removal=["rm", str(there)]) as supervised:
        supervised.begin({})
        assert wait_until(up.exists, timeout_s=30)
        assert there.exists()
        supervised._line.close()  # as the kernel does when the keeper dies
        assert supervised.guard.wait(30) == 0
    assert not there.exists()


def test_what_a_program_left_running_is_killed_in_time_when_its_lease_is_lost_then(tmp_path: Path) -> None:
    up = tmp_path / "up"
    left = f"trap '' TERM; touch {up}; while :; do sleep 0.1; done"
    with SupervisedProgram(
        ["sh", "-c", f'sh -c "{left}" & while ! [ -e {up} ]; do sleep 0.05; done'], grace_s=600
    ) as supervised:
        supervised.begin({})
        assert wait_until(up.exists, timeout_s=30)
        supervised.stop(0.2)
        assert ended(supervised) in (0, 143)
    assert supervised.survivors == ()


def test_a_leash_that_is_dropped_before_it_began_leaves_nothing() -> None:
    with SupervisedProgram(["true"], grace_s=1) as supervised:
        pass
    assert supervised.guard.returncode == 0 and supervised.code is None


# The whole command, in this process


@pytest.fixture
def settings(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(flock, "HOST_DIRECTORY", tmp_path / "locks")
    return settings.replace(lease_ttl_ms=4_000)


UUID = f"GPU-{uuid.uuid4()}"


def reported(pool: Pool, *processes: Process) -> None:
    device = Device(
        uuid=UUID, node=this_node(), index=0, name="made-up", total_mib=81_920, schedulable_mib=80_640,
        processes=processes,
    )  # fmt: skip
    pool.report(Report(node=this_node(), agent="a", clock_ms=int(time.time() * 1000), devices=(device,)))


@pytest.fixture
def pool(client: "redis.Redis", settings: Settings) -> Pool:
    made = Pool(client, settings)
    made.ledger.clear_quarantine()
    reported(made)
    return made


@pytest.fixture
def run(
    settings: Settings, mark: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Verb]:
    for module in ("run", "pool_watch"):
        monkeypatch.setattr(f"pipeline.commands.gpu.{module}.POLL_S", 0.1)
    with command_line(settings, monkeypatch, capfd, "gpu", "run") as verb:
        yield verb


@contextlib.contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """Do something else while the command runs; what fails there fails here."""
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as exc:  # noqa: BLE001 - raised again in the test
            failed.append(exc)

    thread = threading.Thread(target=guarded)
    thread.start()
    yield
    thread.join()
    if failed:
        raise failed[0]


def test_a_program_runs_in_a_lease_and_gives_it_back(run: Verb, pool: Pool, tmp_path: Path) -> None:
    file = tmp_path / "env"
    said = run(
        "--memory", "4GiB", "--compute", 25, "--name", "job", "--", "sh", "-c", f"env > {file}; exit 3"
    )
    assert said.code == 3, said
    env = dict(line.split("=", 1) for line in file.read_text().splitlines() if "=" in line)
    assert (env["CUDA_VISIBLE_DEVICES"], env["GPU_MEMORY_MIB"], env["GPU_LEASE"]) == (UUID, "4096", "job")
    look = pool.snapshot()
    assert look.leases == () and look.orphans == ()


def test_all_processes_of_the_program_are_noted_in_its_lease(run: Verb, pool: Pool, family: Family) -> None:
    seen: list[tuple[int, ...]] = []

    def look() -> None:
        def noted() -> bool:
            found = [lease for lease in pool.snapshot().leases if len(lease.pids) >= 4]
            seen.extend(lease.pids for lease in found)
            return bool(found)

        try:
            assert wait_until(noted, timeout_s=60)
            assert set(seen[-1]) <= {p.pid for p in alive(family.mark)}
        finally:
            pool.revoke("job", "tested")

    with meanwhile(look):
        said = run("--memory", "4GiB", "--grace", "0s", "--name", "job", "--", *family.command)
    assert said.code == 75


@pytest.mark.long
def test_a_lost_lease_ends_the_program_and_says_why(run: Verb, pool: Pool, family: Family) -> None:
    def revoke() -> None:
        assert wait_until(family.is_up, timeout_s=30)
        assert pool.revoke("job", "maintenance tonight")

    with meanwhile(revoke):
        said = run("--memory", "4GiB", "--grace", "1s", "--name", "job", "--", *family.command)
    assert said.code == 75 and "maintenance tonight" in said.err
    assert family.was_asked() and [p for p in alive(family.mark) if p.pid != os.getpid()] == []


@pytest.mark.long
def test_while_redis_hangs_the_program_is_ended_before_the_lease_is_anybody_elses(
    run: Verb, pool: Pool, family: Family, client: "redis.Redis", settings: Settings
) -> None:
    server = int(client.info("server")["process_id"])  # type: ignore[index]

    def hang() -> None:
        assert wait_until(family.is_up, timeout_s=30)
        os.kill(server, signal.SIGSTOP)
        try:
            # A command to that Redis takes 30 s to give up.
            assert wait_until(family.was_asked, timeout_s=settings.internal.lease_ttl_ms / 1000 + 5)
        finally:
            os.kill(server, signal.SIGCONT)

    with meanwhile(hang):
        said = run("--memory", "4GiB", "--grace", "1s", "--name", "job", "--", *family.command)
    assert said.code == 75 and "not renewed" in said.err, said


@pytest.mark.long
def test_a_deaf_program_does_not_outlive_its_lost_lease_by_its_grace(
    run: Verb, pool: Pool, client: "redis.Redis", settings: Settings, family: Family
) -> None:
    server, up = int(client.info("server")["process_id"]), family.file  # type: ignore[index]

    def gone() -> bool:
        return not psutil.pid_exists(int(up.read_text()))

    def hang() -> None:
        assert wait_until(lambda: up.exists() and up.read_text().endswith("\n"), timeout_s=30)
        os.kill(server, signal.SIGSTOP)
        try:
            assert wait_until(gone, timeout_s=settings.internal.lease_ttl_ms / 1000 + 5)
        finally:
            os.kill(server, signal.SIGCONT)

    deaf = f"trap '' TERM; echo $$ > {up}; while :; do sleep 0.1; done"
    with meanwhile(hang):
        said = run("--memory", "20GiB", "--grace", "60s", "--name", "job", "--", "sh", "-c", deaf)
    assert said.code == 75 and "not renewed" in said.err, said


@pytest.mark.parametrize(
    ("ttl_ms", "grace_s", "lost_s", "alone_s"),
    [(15_000, 60.0, 2.0, 12.0), (15_000, 1.5, 1.5, 1.5), (4_000, 10.0, 0.4, 3.2)],
)
def test_the_grace_of_a_lost_lease_ends_before_the_lease(
    pool: Pool, ttl_ms: int, grace_s: float, lost_s: float, alone_s: float
) -> None:
    lease = pool.request(Need(memory_mib=1), holder="h", ttl_ms=ttl_ms)
    made = Run(pool, lease, settings=pool.settings, command=["true"], grace_s=grace_s, console=Console())
    assert (made.lost_s, made.alone_s) == (pytest.approx(lost_s), pytest.approx(alone_s))


def ask(pool: Pool, within_s: float) -> None:
    """Somebody needs the device of `job`."""
    while True:
        s = pool.snapshot()
        if (
            pool.ledger.commit(
                s.epoch,
                PoolPlan(
                    yields=(
                        Yield(lease_id="job", by_ms=s.now_ms + int(within_s * 1000), why="fit-1 needs it"),
                    )
                ),
            ).why
            == ""
        ):
            return


@pytest.mark.long
def test_a_preemptible_program_is_asked_to_end_at_once(run: Verb, pool: Pool, family: Family) -> None:
    def want() -> None:
        assert wait_until(family.is_up, timeout_s=30)
        ask(pool, 60)

    with meanwhile(want):
        said = run(
            "--memory", "4GiB", "--preemptible", "--grace", "1s", "--name", "job", "--", *family.command
        )
    assert said.code == 75 and "fit-1 needs it" in said.err, said
    assert family.was_asked()
    look = pool.snapshot()
    assert look.leases == () and look.orphans == ()  # given back, not revoked


@pytest.mark.long
def test_any_other_program_goes_on_until_its_grace_before_the_bound(
    run: Verb, pool: Pool, family: Family
) -> None:
    def want() -> None:
        assert wait_until(family.is_up, timeout_s=30)
        ask(pool, 3)

    with meanwhile(want):
        said = run("--memory", "4GiB", "--grace", "1s", "--name", "job", "--", *family.command)
    assert said.code == 75 and "may go on for" in said.err, said
    assert family.was_asked() and pool.snapshot().orphans == ()


@pytest.mark.long
def test_a_program_that_takes_more_than_it_leased_is_warned_then_ended(
    run: Verb, pool: Pool, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.commands.gpu.run.OVER_S", 0.5)
    stop = threading.Event()
    thread = threading.Thread(target=uses, args=(pool, stop, 3_000))
    thread.start()
    try:
        said = run("--memory", "4GiB", "--grace", "0s", "--name", "job", "--", *family.command)
    finally:
        stop.set()
        thread.join()
    assert said.code == 137 and "4096 MiB are leased" in said.err, said


def uses(pool: Pool, stop: threading.Event, used_mib: int) -> None:
    """What an agent reports of the programs in leases, until told otherwise."""
    while not stop.wait(0.1):
        noted = [pid for lease in pool.snapshot().leases for pid in lease.pids]
        reported(pool, *(Process(pid=pid, used_mib=used_mib) for pid in noted))


@pytest.mark.long
@pytest.mark.parametrize("listed", [False, True])
def test_a_program_that_the_mps_daemon_does_not_list_is_warned_about(
    run: Verb, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: bool
) -> None:
    place = a_daemon(tmp_path / "mps", servers="100\n", clients_100="")
    monkeypatch.setenv("PATH", control_program(tmp_path))
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(place))
    file, stop, answers, notes = tmp_path / "env", threading.Event(), list[str](), list[str]()
    ask = mps.why_not

    def why_not(daemon: mps.Daemon, pids: Collection[int]) -> str:
        if listed:
            (place / "clients-100").write_text("\n".join(map(str, pids)))
        answers.append(ask(daemon, pids))
        return answers[-1]

    monkeypatch.setattr(mps, "why_not", why_not)
    monkeypatch.setattr("pipeline.commands.gpu.run._note", lambda _console, words: notes.append(words))

    def use() -> None:
        uses(pool, stop, used_mib=100)

    def end() -> None:
        assert wait_until(lambda: bool(answers if listed else notes), timeout_s=30)
        pool.revoke("job", "tested")

    threads = [threading.Thread(target=work) for work in (use, end)]
    for thread in threads:
        thread.start()
    try:
        run("--memory", "4GiB", "--name", "job", "--", "sh", "-c", f"env > {file}; exec sleep 100")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=" in file.read_text()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in file.read_text()
    told = [words for words in notes if "lists none of the processes" in words]
    assert (len(answers), len(told)) == (1, 0 if listed else 1), notes


def test_a_program_waits_for_its_turn_and_says_for_what(
    run: Verb, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("pipeline.commands.gpu.run._note", lambda _console, words: said.append(words))
    other = pool.request(Need(mode=LeaseMode.EXCLUSIVE), holder="h", request_id="first")

    def free() -> None:
        assert wait_until(lambda: bool(said), timeout_s=30)
        pool.release(other)

    with meanwhile(free):
        assert run("--memory", "4GiB", "--name", "job", "--", "true").code == 0
    short = UUID[:12]
    assert said[0] == f"job waits: needs 4.0 GiB; {short} is kept for it, 1 holder still there"
    assert said[-1] == f"job has {short}, 4.0 GiB"


def test_who_does_not_get_a_gpu_in_time_may_try_again_later(run: Verb, pool: Pool) -> None:
    pool.request(Need(mode=LeaseMode.EXCLUSIVE), holder="h", request_id="first")
    said = run("--memory", "4GiB", "--wait", "0s", "--", "true")
    assert said.code == 75 and "every device is taken whole" in said.err
    assert pool.snapshot().waiting == ()


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--memory", "4GiB"), "after --"),
        (("--", "true"), "--memory"),
        (("--memory", "4GiB", "--node", "elsewhere", "--", "true"), "elsewhere"),
        (("--memory", "4GiB", "--json", "--", "true"), "--json"),
        (("--memory", "4GiB", "--grace", "soon", "--", "true"), "soon"),
        (("--memory", "900GiB", "--", "true"), "fit on no device"),
    ],
)
def test_bad_input_starts_nothing(run: Verb, pool: Pool, args: tuple[str, ...], why: str) -> None:
    said = run(*args)
    assert said.code == 2 and why in said.err and said.err.count("\n") == 1


@pytest.mark.parametrize(("program", "code"), [("nosuch-program", 127), ("/etc/passwd", 126)])
def test_a_program_that_cannot_be_started_gives_the_lease_back(
    run: Verb, pool: Pool, program: str, code: int
) -> None:
    said = run("--memory", "4GiB", "--", program)
    assert said.code == code and program in said.err
    assert pool.snapshot().leases == ()


def test_a_device_locked_by_somebody_else_on_this_host_is_not_used(
    run: Verb, pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flock, "host_lock", partial(flock.host_lock, wait_s=0.1))
    with flock.host_lock(tmp_path / "locks", UUID, exclusive=True):
        said = run("--memory", "4GiB", "--", "true")
    assert said.code == 75 and UUID in said.err
    assert pool.snapshot().leases == ()


def test_a_machine_without_a_place_for_locks_is_told(run: Verb, pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("no directory")
    said = run("--exclusive", "--", "true")
    assert said.code == 0 and f"{UUID[:12]} cannot be locked on this machine" in said.err, said


def test_a_name_in_use_may_be_had_later(run: Verb, pool: Pool) -> None:
    pool.request(Need(memory_mib=1), holder="ann@big:7", request_id="job")
    said = run("--memory", "4GiB", "--name", "job", "--", "true")
    assert said.code == 75 and "belongs to ann@big:7" in said.err, said


def test_a_wait_of_0_and_a_share_in_percent_are_understood(run: Verb, pool: Pool) -> None:
    assert run("--memory", "4GiB", "--compute", "25%", "--wait", "0", "--", "true").code == 0


# Killed


def start(*args: str, **env: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline.cli", "gpu", "run", *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **env},
    )


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_whoever_ends_the_command_ends_the_program(
    pool: Pool, settings: Settings, family: Family, number: signal.Signals, code: int
) -> None:
    command = start(
        "--memory", "4GiB", "--grace", "1s", "--name", "job", "--", *family.command, **settings.to_environ()
    )
    try:
        assert wait_until(family.is_up, timeout_s=60)
        assert wait_until(lambda: len(pool.snapshot().leases[0].pids) >= 4, timeout_s=30)
        command.send_signal(number)
        assert command.wait(30) == code
    finally:
        command.kill()
        command.wait()
    assert wait_until(lambda: alive(family.mark) == [], timeout_s=30)
    assert family.was_asked()

    # One that could not say goodbye would expire; its part is taken until the driver has seen its processes
    # go.
    def over() -> bool:
        reported(pool)
        look = pool.snapshot()
        return look.leases == () and look.orphans == ()

    if number == signal.SIGKILL:
        assert pool.revoke("job", "as if it had expired")
        assert pool.snapshot().orphans
    assert wait_until(over, timeout_s=30)
    (flock.HOST_DIRECTORY / f"{UUID}.lock").unlink(missing_ok=True)
