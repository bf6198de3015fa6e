"""One device, several processes of one host: real processes, real kernel locks."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from polling import wait_until

from pipeline.errors import LeaseRefused
from pipeline.gpu.node.host_lock import host_lock

UUID = "GPU-7b9e"
HOLD = """
import sys
from pathlib import Path
from pipeline.gpu.node.host_lock import host_lock
with host_lock(Path(sys.argv[1]), sys.argv[2], exclusive=sys.argv[3] == "True", wait_s=0):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process(directory: Path, *, exclusive: bool) -> "Iterator[subprocess.Popen[str]]":
    """A process that holds the device until its standard input is closed."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory), UUID, str(exclusive)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        if process.stdin is not None and not process.stdin.closed:
            process.stdin.close()


def free(directory: Path, *, exclusive: bool = True) -> bool:
    try:
        with host_lock(directory, UUID, exclusive=exclusive, wait_s=0):
            return True
    except LeaseRefused:
        return False


def test_an_exclusive_holder_is_alone_and_the_refusal_names_it(tmp_path: Path) -> None:
    with another_process(tmp_path / "locks", exclusive=True) as other:
        assert not free(tmp_path / "locks", exclusive=False)
        with (
            pytest.raises(LeaseRefused, match=f"{UUID} is in use on this host by process {other.pid}"),
            host_lock(tmp_path / "locks", UUID, exclusive=True, wait_s=0),
        ):
            pass
        with host_lock(tmp_path / "locks", "GPU-other", exclusive=True, wait_s=0):
            pass
    assert free(tmp_path / "locks")


def test_shared_holders_work_side_by_side_and_keep_an_exclusive_one_out(tmp_path: Path) -> None:
    with another_process(tmp_path / "locks", exclusive=False):
        assert free(tmp_path / "locks", exclusive=False)
        assert not free(tmp_path / "locks", exclusive=True)
    assert free(tmp_path / "locks", exclusive=True)


def test_the_kernel_frees_what_a_killed_process_held(tmp_path: Path) -> None:
    with another_process(tmp_path / "locks", exclusive=True) as other:
        other.send_signal(signal.SIGKILL)
        # A short wait for the holder before us is part of taking the lock.
        with host_lock(tmp_path / "locks", UUID, exclusive=True, wait_s=10):
            pass


def test_within_one_process_two_exclusive_holders_are_refused_as_well(tmp_path: Path) -> None:
    with host_lock(tmp_path, UUID, exclusive=True, wait_s=0):
        assert not free(tmp_path)
    assert free(tmp_path)


def test_a_child_that_got_the_lock_keeps_it_after_its_parent_let_go(tmp_path: Path) -> None:
    with host_lock(tmp_path, UUID, exclusive=True, wait_s=0) as lock:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=lock.fds)
    assert not free(tmp_path)
    child.communicate(b"\n", timeout=30)
    assert free(tmp_path)


def test_a_child_that_did_not_get_the_lock_does_not_hold_it(tmp_path: Path) -> None:
    with host_lock(tmp_path, UUID, exclusive=True, wait_s=0):
        child = subprocess.Popen(
            [sys.executable, "-c", "input(1)"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False
        )
        assert child.stdout is not None and child.stdout.read(1) == b"1"  # it has begun: exec is over
    assert free(tmp_path)
    child.communicate(b"\n", timeout=30)


def test_directory_and_files_are_for_one_group_whatever_the_umask(tmp_path: Path) -> None:
    for umask in (0o077, 0o000):
        directory = tmp_path / f"{umask}"
        old = os.umask(umask)
        try:
            assert free(directory)
        finally:
            os.umask(old)
        assert directory.stat().st_mode & 0o7777 == 0o3770
        file = directory / f"{UUID}.lock"
        assert file.stat().st_mode & 0o777 == 0o660
        assert file.stat().st_gid == directory.stat().st_gid


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o3777])
def test_a_lock_in_a_directory_where_every_account_may_write_keeps_nobody_off(
    tmp_path: Path, mode: int
) -> None:
    directory = tmp_path / "locks"
    with another_process(directory, exclusive=True):
        directory.chmod(mode)
        with host_lock(directory, UUID, exclusive=True, wait_s=0) as lock:
            assert lock.fd is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a directory away")
def test_a_directory_of_an_account_without_a_common_group_is_not_used(tmp_path: Path) -> None:
    directory = tmp_path / "locks"
    directory.mkdir(mode=0o770)
    os.chown(directory, 54_321, 54_321)
    with host_lock(directory, UUID, exclusive=True, wait_s=0) as lock:
        assert lock.fd is None
    os.chown(directory, 54_321, os.getegid())
    assert free(directory)
    with host_lock(directory, UUID, exclusive=True, wait_s=0) as lock:
        assert lock.fd is not None


def test_links_are_not_followed_and_work_goes_on_without_the_second_line(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with host_lock(tmp_path / "link", UUID, exclusive=True, wait_s=0) as lock:
        assert lock.fd is None and lock.fds == ()
    target = tmp_path / "target"
    target.touch()
    (tmp_path / "real" / f"{UUID}.lock").symlink_to(target)
    with host_lock(tmp_path / "real", UUID, exclusive=True, wait_s=0) as lock:
        assert lock.fd is None
    with host_lock(tmp_path / "missing" / "deeper", UUID, exclusive=True, wait_s=0) as lock:
        assert lock.fd is None


def test_something_else_in_place_of_the_file_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / f"{UUID}.lock")
    with host_lock(tmp_path, UUID, exclusive=True, wait_s=0) as lock:
        assert lock.fd is None


def test_a_uuid_with_odd_characters_stays_in_its_directory(tmp_path: Path) -> None:
    with host_lock(tmp_path / "locks", "MIG-GPU-1/../../x/3", exclusive=True, wait_s=0) as lock:
        assert lock.fd is not None
    assert [path.name for path in tmp_path.iterdir()] == ["locks"]


def test_a_file_that_was_removed_meanwhile_does_not_let_two_in(tmp_path: Path) -> None:
    with another_process(tmp_path / "locks", exclusive=True):
        (tmp_path / "locks" / f"{UUID}.lock").unlink()
        # Whoever cleans the directory takes the second line away; the next holders agree again on the new
        # file.
        with host_lock(tmp_path / "locks", UUID, exclusive=True, wait_s=0):
            assert not free(tmp_path / "locks")
    assert wait_until(lambda: free(tmp_path / "locks"), timeout_s=5)
