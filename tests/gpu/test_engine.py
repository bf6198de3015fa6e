"""The container engine of a node: which one answers, the command it gets, and the end of its containers."""

import json
import os
import sys
from pathlib import Path

import pytest
import redis

from pipeline.errors import BadInput
from pipeline.gpu.job_containers import JobContainers
from pipeline.gpu.jobs import PoolJobs
from pipeline.gpu.node.engine import (
    DOCKER,
    PODMAN,
    ContainerEngine,
    JobContainer,
    checked_image,
    container_owner,
    find_engine,
)
from pipeline.settings import Settings

PODMAN_SAYS = {
    "version": {"Version": "5.2.0"},
    "host": {"security": {"rootless": True}, "cgroupVersion": "v2", "cgroupControllers": ["memory", "pids"]},
}
DOCKER_SAYS = {
    "ServerVersion": "27.1", "MemoryLimit": True, "CpuCfsQuota": True, "SecurityOptions": ["name=seccomp"]
}  # fmt: skip


def program(folder: Path, name: str, script: str) -> str:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize(
    "name",
    [
        "python", "docker.io/library/python:3.12-slim", "localhost:5000/a/b__c:T-1.2",
        "ghcr.io/team/train@sha256:" + "0" * 64, "nvcr.io/nvidia/pytorch:25.01-py3",
    ],
)  # fmt: skip
def test_names_of_images_are_taken_as_they_are(name: str) -> None:
    assert checked_image(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "", "-v", "--privileged", "--volume=/:/host", "a b", "a\nb", "dir:/etc", "oci-archive:/tmp/x.tar",
        "docker://a/b", "/etc/passwd", "../up", "$(id)", "a;id", "Upper", "a:", "a@sha256:00", "a" * 256,
    ],
)  # fmt: skip
def test_any_other_text_is_no_image(name: str) -> None:
    with pytest.raises(BadInput, match="is no image; write"):
        checked_image(name)


def test_the_engine_is_the_one_that_answers_and_podman_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "PATH", f"{tmp_path}:/usr/bin:/bin" if not Path("/usr/bin/podman").exists() else str(tmp_path)
    )
    assert find_engine() is None
    program(tmp_path, "docker", f"echo '{json.dumps({'ServerVersion': '', 'ServerErrors': ['no daemon']})}'")
    assert find_engine() is None, "the client alone runs nothing"
    path = program(tmp_path, "docker", f"echo '{json.dumps(DOCKER_SAYS)}'")
    found = find_engine()
    assert found == ContainerEngine(
        kind=DOCKER, path=path, version="27.1", limits=frozenset({"memory", "cpu"})
    )
    assert found.words == "docker 27.1"
    program(tmp_path, "podman", "echo broken >&2; exit 125")
    assert find_engine() == found
    program(tmp_path, "podman", f"echo '{json.dumps(PODMAN_SAYS)}'")
    first = find_engine()
    assert first is not None and (first.kind, first.rootless) == (PODMAN, True)
    assert (first.words, first.limits) == ("podman 5.2.0, rootless", {"memory"})


def a_container(kind: str, *, rootless: bool = False, directory: str = "/data/x.1") -> JobContainer:
    return JobContainer(
        engine=ContainerEngine(kind=kind, path=f"/bin/{kind}", rootless=rootless, limits=frozenset({"memory", "cpu"})),
        name="logweir-1-x.1", image="team/train:2", directory=Path(directory),
        environment={"WORD": "--privileged $(id)"}, cpu_milli=1500, memory_mib=2048,
    )  # fmt: skip


def test_the_command_has_the_devices_bounds_and_variables_each_in_one_word_and_then_the_image() -> None:
    lease = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b", "GPU_LEASE": "x.1"}
    own = os.getuid(), os.getgid()
    words = a_container(DOCKER).arguments(["sh", "--rm", "-c", "x"], lease)
    assert words == [
        "/bin/docker", "run", "--rm", "--name=logweir-1-x.1", "--log-driver=none", "--cap-drop=ALL",
        "--security-opt=no-new-privileges", f"--user={own[0]}:{own[1]}", "--volume=/data/x.1:/job:Z",
        "--workdir=/job", '--gpus="device=GPU-a,GPU-b"', "--memory=2048m", "--cpus=1.5", "--shm-size=2048m",
        "--env=HOME=/job", "--env=WORD=--privileged $(id)", "--env=CUDA_VISIBLE_DEVICES=GPU-a,GPU-b",
        "--env=GPU_LEASE=x.1", "team/train:2", "sh", "--rm", "-c", "x",
    ]  # fmt: skip
    rootless = a_container(PODMAN, rootless=True)
    rootless.cpu_milli = rootless.memory_mib = 0
    words = rootless.arguments([], lease)
    assert words[-1] == "team/train:2" and "--user=0:0" in words and "--shm-size=1024m" in words
    assert [word for word in words if word.startswith("--device")] == [
        "--device=nvidia.com/gpu=GPU-a", "--device=nvidia.com/gpu=GPU-b"
    ]  # fmt: skip
    assert not any(word.startswith(("--memory", "--cpus", "--gpus")) for word in words)
    under_mps = a_container(DOCKER).arguments([], lease | {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps"})
    assert {"--ipc=host", "--volume=/tmp/mps:/tmp/mps"} < set(under_mps)


def test_an_engine_that_bounds_nothing_is_named_and_a_directory_with_a_colon_is_refused() -> None:
    weak = a_container(PODMAN)
    assert weak.not_bounded == ""
    weak.engine = ContainerEngine(kind=PODMAN, path="/bin/podman", limits=frozenset({"cpu"}))
    assert weak.not_bounded == "memory"
    with pytest.raises(BadInput, match="cannot be mounted, because of its colon"):
        a_container(DOCKER, directory="/da:ta").arguments([], {"CUDA_VISIBLE_DEVICES": "GPU-a"})


def test_processes_of_dockers_containers_are_those_below_their_first_one(tmp_path: Path) -> None:
    container = a_container(DOCKER)
    container.engine = ContainerEngine(kind=DOCKER, path=program(tmp_path, "docker", f"echo {os.getpid()}"))
    assert os.getpid() in container.pids()
    container = a_container(DOCKER)
    container.engine = ContainerEngine(kind=DOCKER, path=program(tmp_path, "docker", "exit 1"))
    assert container.pids() == ()


FAKE = f"""#!{sys.executable}
import pathlib, sys
kept = pathlib.Path(__file__).with_name("containers")
names = kept.read_text().split()
if sys.argv[1] == "ps":
    print(*names, sep="\\n")
elif sys.argv[1] == "rm" and "stuck" not in sys.argv[-1]:
    kept.write_text(" ".join(name for name in names if name != sys.argv[-1]))
"""


def test_containers_whose_lease_and_process_have_ended_are_removed(
    settings: Settings, tmp_path: Path
) -> None:
    begin = f"logweir-{container_owner(settings.data.dir)}-"
    file, kept = tmp_path / "docker", tmp_path / "containers"
    file.write_text(FAKE)
    file.chmod(0o755)
    lives = [f"{begin}leased.1", f"{begin}beats.2", f"{begin}stuck.1", "logweir-other-gone.1", "mine"]
    kept.write_text(" ".join([*lives, f"{begin}gone.1", f"{begin}gone.2"]))
    with redis.Redis.from_url(str(settings.redis.url)) as client:
        jobs = PoolJobs(client, settings)
        client.hset(jobs.keys.gpu("leases"), "leased.1", "{}")
        jobs.begin("beats")
        sweeper = JobContainers(
            ContainerEngine(kind=DOCKER, path=str(file)), jobs, settings, busy=lambda: False
        )
        assert sweeper.sweep() == 3
        assert kept.read_text().split() == lives
        jobs.leave("beats")
        assert sweeper.sweep() == 2
    assert f"{begin}beats.2" not in kept.read_text()
