"""MPS daemons against a control program that answers as NVIDIA's does."""

import time
from pathlib import Path

import pytest
from fake_mps import a_daemon, control_program
from polling import Clock, wait_until

from pipeline.errors import BadInput
from pipeline.gpu.node import mps
from pipeline.gpu.node.mps_watch import LOOK_S, OLD_S, MpsWatch
from pipeline.gpu.values import LeasePart, MpsUse

UUID = "GPU-a"


@pytest.fixture
def control(tmp_path: Path) -> str:
    """A PATH with a control program."""
    return control_program(tmp_path)


def test_without_a_directory_or_without_a_daemon_in_it_there_is_no_mps(tmp_path: Path, control: str) -> None:
    root = tmp_path / "mps"
    assert mps.find(UUID, path=control, root=root) is None
    root.mkdir()  # left behind by a daemon that has ended
    assert mps.find(UUID, path=control, root=root) is None


def test_a_machine_without_the_control_program_has_no_mps(tmp_path: Path) -> None:
    assert mps.find(UUID, path=str(tmp_path), root=a_daemon(tmp_path / "mps")) is None


def test_the_daemon_of_a_device_comes_before_the_one_for_all(tmp_path: Path, control: str) -> None:
    root = a_daemon(tmp_path / "mps")
    found = mps.find(UUID, path=control, root=root)
    assert found is not None and (found.directory, found.uuid) == (root, "")
    own = a_daemon(tmp_path / f"mps-{UUID}")
    found = mps.find(UUID, path=control, root=root)
    assert found is not None and (found.directory, found.uuid) == (own, UUID)
    asked = a_daemon(tmp_path / "elsewhere")
    found = mps.find(UUID, directory=asked, path=control, root=root)
    assert found is not None and found.directory == asked


def test_several_devices_need_one_daemon_for_all_of_them(tmp_path: Path, control: str) -> None:
    root = a_daemon(tmp_path / "mps")
    found = mps.for_lease(["GPU-a", "GPU-b"], path=control, root=root)
    assert found is not None and found.directory == root
    a_daemon(tmp_path / "mps-GPU-a")
    a_daemon(tmp_path / "mps-GPU-b")
    assert mps.for_lease(["GPU-a", "GPU-b"], path=control, root=root) is None
    alone = mps.for_lease(["GPU-b"], path=control, root=root)
    assert alone is not None and alone.uuid == "GPU-b"


def test_a_daemon_that_hangs_is_given_up(tmp_path: Path, control: str) -> None:
    root = a_daemon(tmp_path / "mps")
    (root / "hangs").touch()
    assert mps.find(UUID, path=control, root=root, timeout_s=0.2) is None
    daemon = mps.Daemon(directory=root, path=control)
    assert "does not answer" in mps.why_not(daemon, {1}, timeout_s=0.2)


def test_limits_hold_only_once_the_daemon_lists_the_process(tmp_path: Path, control: str) -> None:
    place = a_daemon(tmp_path / "mps", servers="100\n200\n", clients_100="11\n", clients_200="12\n13\n")
    daemon = mps.Daemon(directory=place, path=control)
    assert mps.clients(daemon) == {11, 12, 13}
    assert mps.why_not(daemon, {13, 99}) == ""
    why = mps.why_not(daemon, {99})
    assert "[99]" in why and "without its limits" in why


def test_a_daemon_without_servers_lists_nobody(tmp_path: Path, control: str) -> None:
    daemon = mps.Daemon(directory=a_daemon(tmp_path / "mps"), path=control)
    assert mps.clients(daemon) == set()
    (daemon.directory / "pid").unlink()
    assert mps.clients(daemon) is None


def test_limits_count_devices_as_the_program_sees_them(tmp_path: Path) -> None:
    daemon = mps.Daemon(directory=tmp_path)
    env = mps.limits(daemon, memory_mib=[1_024, 2_048], compute_percent=30)
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=1024M,1=2048M"
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
    assert mps.limiting(env) == daemon
    assert mps.limiting(mps.reach(daemon)) is None
    # A lease without compute is not held to 0 %, which MPS would refuse.
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in mps.limits(daemon, memory_mib=[1], compute_percent=0)
    for memory, compute in (([0], 10), ([-5], 10), ([100], 101), ([100], -1)):
        with pytest.raises(BadInput, match="MPS cannot hold"):
            mps.limits(daemon, memory_mib=memory, compute_percent=compute)


def test_a_daemon_is_started_for_one_device_found_and_stopped(tmp_path: Path, control: str) -> None:
    root = tmp_path / "mps"
    daemon = mps.start_daemon(UUID, path=control, root=root)
    assert (daemon.directory, daemon.uuid) == (tmp_path / f"mps-{UUID}", UUID)
    assert (daemon.directory / "pid").read_text() == f"{UUID}\n", "it sees this device alone"
    assert daemon.directory.stat().st_mode & 0o077 == 0
    assert mps.find(UUID, path=control, root=root) == daemon
    with pytest.raises(BadInput, match="serves GPU-a already"):
        mps.start_daemon(UUID, path=control, root=root)
    assert mps.stop_daemon(daemon)
    assert mps.find(UUID, path=control, root=root) is None
    assert not mps.stop_daemon(daemon)
    assert mps.start_daemon(UUID, path=control, root=root) == daemon, "in the directory that it left behind"


def test_a_daemon_that_cannot_be_started_says_why(tmp_path: Path, control: str) -> None:
    root = tmp_path / "mps"
    with pytest.raises(BadInput, match="nvidia-cuda-mps-control is not in"):
        mps.start_daemon(UUID, path=f"{tmp_path}/nothing", root=root)
    (tmp_path / f"mps-{UUID}-log" / "fails").touch()
    with pytest.raises(BadInput, match=r"did not start \(cannot start\)"):
        mps.start_daemon(UUID, path=control, root=root)
    other = tmp_path / "mps-GPU-b"
    other.symlink_to(tmp_path)
    with pytest.raises(BadInput, match="belongs to another user"):
        mps.start_daemon("GPU-b", path=control, root=root)


def test_a_process_of_ours_has_the_limits_of_a_daemon_where_there_is_one(
    tmp_path: Path, control: str
) -> None:
    root = tmp_path / "mps"
    part = LeasePart(uuid=UUID, memory_mib=2_048, compute_percent=10)
    assert mps.of_part(part, 512, root=root, path=control) == {}
    mps.start_daemon(UUID, path=control, root=root)
    assert mps.of_part(part, 512, root=root, path=control) == {
        "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / f"mps-{UUID}"),
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1536M",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "10",
    }


def test_an_agent_reports_daemons_and_their_clients_and_a_daemon_that_hangs_holds_no_beat(
    tmp_path: Path, control: str
) -> None:
    root, clock = a_daemon(tmp_path / "mps", servers="100\n", clients_100="7\n8\n9\n"), Clock()
    a_daemon(tmp_path / "mps-GPU-a", servers="200\n", clients_200="5\n")
    watch = MpsWatch(path=control, root=root, monotonic=clock)
    expected = {"GPU-a": MpsUse(own=True, clients=1), "GPU-b": MpsUse(own=False, clients=3)}
    assert watch.look(["GPU-a", "GPU-b"]) == {}, "the first look is on its way"
    assert wait_until(lambda: watch.look(["GPU-a", "GPU-b"]) == expected, timeout_s=10)
    (root / "hangs").touch()
    clock.now += LOOK_S
    began = time.monotonic()
    assert watch.look(["GPU-a", "GPU-b"]) == expected
    assert time.monotonic() - began < 1
    clock.now += OLD_S
    assert watch.look(["GPU-a", "GPU-b"]) == {}
    assert watch._look is not None
    watch._look.join(10)
