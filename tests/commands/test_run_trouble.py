"""A run is refused where this machine has no room for it, and ended when its Redis has none."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from own_redis import server
from polling import Clock, wait_until

from pipeline.commands.run import trouble
from pipeline.commands.run.inputs import RunPlan
from pipeline.commands.run.journey import Journey
from pipeline.commands.run.trouble import CERTAIN_S, STUCK_S, TROUBLE_S, StandstillLimit, Troubles
from pipeline.errors import BadInput, SinkUnavailable, StackFailed
from pipeline.observe.presence import Presence
from pipeline.producer import Producer
from pipeline.records.batch import Purpose
from pipeline.redis.connection import connect
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.workers.stack.limits import MIB, check_disk


def limits_after(soft: int, hard: int, processes: int) -> "subprocess.CompletedProcess[str]":
    """`check_files` in a process of its own, because a hard limit cannot be raised again."""
    program = (
        "import resource; from pipeline.workers.stack.limits import check_files\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        f"check_files({processes})\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be() -> None:
    assert limits_after(64, 1_000, 6).stdout.split() == ["1000", "1000"]
    assert limits_after(64, 10_000, 6).stdout.split() == ["4096", "10000"]
    assert limits_after(5_000, 10_000, 6).stdout.split() == ["5000", "10000"]


def test_too_few_open_files_are_refused_with_the_command_that_helps() -> None:
    done = limits_after(64, 64, 6)
    assert done.returncode == 1
    assert "BadInput: a process may open only 64 files here" in done.stderr
    assert "`ulimit -n 256`" in done.stderr
    assert "one process with its Redis needs 64; raise" in limits_after(20, 20, 0).stderr


def test_a_disk_without_room_is_named_also_for_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    check_disk(tmp_path / "not/there", 1)
    with pytest.raises(BadInput, match=r"there has .* MiB of free space, and about 1,048,576,000 MiB are"):
        check_disk(tmp_path / "not/there", 1_048_576_000 * MIB)
    assert not (tmp_path / "not").exists()


def test_a_redis_that_cannot_write_to_its_disk_ends_the_run_once_that_is_certain(
    tmp_path: Path, settings: Settings
) -> None:
    clock = Clock()
    (tmp_path / "sub").mkdir()
    # Not by CONFIG SET: a server may protect `dir`.
    with server(tmp_path, "--dir", str(tmp_path / "sub"), "--save", "3600 1") as client:
        troubles = Troubles(
            client, Presence(client, settings), Keys(settings.redis.key_prefix), tmp_path, clock
        )
        assert troubles.look() == ""
        shutil.rmtree(tmp_path / "sub")
        client.bgsave()
        assert wait_until(troubles.look, timeout_s=20)
        assert "Redis takes no writes (MISCONF" in troubles.look()
        clock.now += CERTAIN_S + 0.1
        with pytest.raises(SinkUnavailable, match="free disk space at"):
            troubles.look()
        client.config_set("save", "")
        assert wait_until(lambda: not _refuses(troubles), timeout_s=20)


def _refuses(troubles: Troubles) -> bool:
    try:
        return bool(troubles.look())
    except SinkUnavailable:
        return True


def test_a_full_memory_is_waited_for(tmp_path: Path, settings: Settings) -> None:
    clock = Clock()
    with server(tmp_path, "--maxmemory", "1", "--maxmemory-policy", "noeviction") as client:
        troubles = Troubles(
            client, Presence(client, settings), Keys(settings.redis.key_prefix), tmp_path, clock
        )
        for _ in range(3):
            assert "or give it memory" in troubles.look()
            clock.now += CERTAIN_S + 1


def test_a_redis_that_is_away_has_refused_nothing(tmp_path: Path, settings: Settings) -> None:
    away = redis.Redis(unix_socket_path=str(tmp_path / "none.sock"))
    troubles = Troubles(away, Presence(away, settings), Keys("p"), tmp_path, Clock())
    assert troubles.refusal() == ""


def test_a_wait_ends_sooner_with_a_reason_than_without_one_and_never_while_work_moves(tmp_path: Path) -> None:
    clock, reason = Clock(), ""
    limit = StandstillLimit("lines wait", lambda: reason, logs=tmp_path, clock=clock)
    for step in range(5):
        clock.now += STUCK_S - 1
        assert limit.look(step) == ""
    reason = "No space left on device"
    clock.now += TROUBLE_S
    assert limit.look(4) == reason
    clock.now += 1
    with pytest.raises(SinkUnavailable, match=r"^lines wait: No space left on device$"):
        limit.look(4)
    reason = ""
    assert limit.look(4) == ""
    clock.now += STUCK_S
    with pytest.raises(StackFailed, match=rf"lines wait and nothing moved for 150 s; the logs in {tmp_path}"):
        limit.look(4)


class _NoStack:
    """A stack whose workers do nothing."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def producer(self) -> Producer:
        return Producer.connect(self.settings)

    def expect_training(self) -> None: ...

    def check(self) -> None: ...


def test_a_full_pipeline_that_nobody_empties_ends_the_run_with_the_reason_on_its_last_line(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trouble, "TROUBLE_S", 1.0)
    log = tmp_path / "app.log"
    log.write_text("".join(f"2026-11-20T10:00:00Z INFO request {i}\n" for i in range(400)))
    plan = RunPlan(inputs=(log,), baseline=(), out=tmp_path / "out", workload=None, report=None)
    settings = settings.replace(max_pending_batches=2, batch_records=20)
    shown: list[tuple[str, str]] = []

    def show(phase: str, _done: float, _total: float, detail: str) -> None:
        shown.append((phase, detail))
        presence.complain("store", "No space left on device")

    with connect(settings) as client:
        presence = Presence(client, settings)
        journey = Journey(settings, _NoStack(settings), show, plan=plan)  # type: ignore[arg-type]
        with pytest.raises(SinkUnavailable, match="no room becomes free for more lines: No space left"):
            journey.send([log], Purpose.SCORE)
    assert shown[-1] == ("reading", "No space left on device")
