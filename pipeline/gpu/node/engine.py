"""The container engine of a node, Podman or Docker: whether it answers, and how it runs the program of a job.

A container may do no more than the plain program of a job. It runs as the user of the agent, without
capabilities. It sees the leased devices and the directory of the job. Every argument of ours is one word
`--name=value`, and no shell reads it, so no text of a job becomes an option.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped] # it publishes no types

from pipeline.errors import BadInput
from pipeline.gpu.node.enforce import docker_devices, podman_devices
from pipeline.settings import inherited

PODMAN, DOCKER = "podman", "docker"
PLACE: Final = "/job"  # the directory of a job in its container
ANSWER_S: Final = 20.0  # a first call of Podman sets its storage up
LONGEST_IMAGE: Final = 255
# The engines themselves read these: where images lie, where a daemon listens, a proxy for downloads.
VARIABLES_OF_ENGINES: Final = (
    "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "DBUS_SESSION_BUS_ADDRESS", "CONTAINERS_CONF",
    "CONTAINERS_STORAGE_CONF", "CONTAINERS_REGISTRIES_CONF", "REGISTRY_AUTH_FILE", "DOCKER_HOST",
    "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "HTTP_PROXY", "HTTPS_PROXY",
    "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip
# The grammar of distribution/reference. Podman's transports (`dir:/etc`) and options are no such names.
_HOST: Final = r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]{1,5})?"
_PART: Final = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
IMAGE: Final = re.compile(
    rf"(?:{_HOST}/)?{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?"
)


def checked_image(name: str) -> str:
    """The name of an image. Raises BadInput for any other text."""
    if len(name) > LONGEST_IMAGE or not IMAGE.fullmatch(name):
        raise BadInput(
            f"{name[:80]!r} is no image; write [registry/]name[:tag][@sha256:digest], as in "
            "docker.io/library/python:3.12 or ghcr.io/team/train@sha256:..."
        )
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerEngine:
    """An engine that answers. `limits`: "memory" and "cpu", as far as it can bound them."""

    kind: str  # PODMAN or DOCKER
    path: str
    version: str = ""
    rootless: bool = False
    limits: frozenset[str] = frozenset()

    @property
    def words(self) -> str:
        return f"{self.kind} {self.version}{', rootless' if self.rootless else ''}"

    def ask(self, *words: str) -> str | None:
        """The output of a command of the engine; None when it fails. Never raises."""
        return _answer([self.path, *words])

    def names(self, begin: str) -> list[str] | None:
        """Containers whose names begin so, ended ones too; None when the engine does not answer."""
        said = self.ask("ps", "--all", f"--filter=name={begin}", "--format={{.Names}}")
        return None if said is None else [name for name in said.split() if name.startswith(begin)]

    def removal(self, name: str) -> list[str]:
        """The command that ends a container at once and removes it."""
        at_once = ["--time=0", "--ignore"] if self.kind == PODMAN else []
        return [self.path, "rm", "--force", *at_once, name]

    def remove(self, name: str) -> bool:
        """End a container and remove it. False while it may still run."""
        _answer(self.removal(name))
        left = self.names(name)
        return left is not None and name not in left


def find_engine() -> ContainerEngine | None:
    """Podman, or else Docker, where it answers. Its containers are descendants of what starts them, so Podman
    comes first. Never raises."""
    path = inherited("PATH").get("PATH", os.defpath)
    for kind, read in ((PODMAN, _podman), (DOCKER, _docker)):
        program = shutil.which(kind, path=path)
        if program is None:
            continue
        form = "json" if kind == PODMAN else "{{json .}}"
        with suppress(ValueError, TypeError, KeyError, AttributeError):  # a program with that name alone
            facts = json.loads(_answer([program, "info", f"--format={form}"]) or "null")
            return read(program, facts)
    return None


def _podman(path: str, facts: Mapping[str, Any]) -> ContainerEngine:
    host = facts["host"]
    rootless = bool(host["security"]["rootless"])
    found = set(host.get("cgroupControllers") or ())
    if host.get("cgroupVersion") == "v1":  # it lists none there, and bounds nothing without root
        found = set() if rootless else {"memory", "cpu"}
    return ContainerEngine(
        kind=PODMAN,
        path=path,
        version=str(facts["version"]["Version"]),
        rootless=rootless,
        limits=frozenset(found & {"memory", "cpu"}),
    )


def _docker(path: str, facts: Mapping[str, Any]) -> ContainerEngine:
    if not facts["ServerVersion"]:  # the client alone
        raise ValueError
    bounds = {"memory": facts.get("MemoryLimit"), "cpu": facts.get("CpuCfsQuota")}
    return ContainerEngine(
        kind=DOCKER,
        path=path,
        version=str(facts["ServerVersion"]),
        rootless=any("name=rootless" in str(one) for one in facts.get("SecurityOptions") or ()),
        limits=frozenset(name for name, there in bounds.items() if there),
    )


def container_owner(data_dir: Path) -> str:
    """Tells the containers of one data directory from those of another stack on this machine."""
    return sha256(os.fsencode(data_dir.absolute())).hexdigest()[:8]


def container_name(owner: str, lease_id: str) -> str:
    return f"logweir-{owner}-{lease_id}"


@dataclass(slots=True, kw_only=True)
class JobContainer:
    """The container of one attempt of a job. `environment`: of its program, beside those of its lease.

    `cpu_milli`, `memory_mib`: bounds, 0 for none.
    """

    engine: ContainerEngine
    name: str
    image: str
    directory: Path
    environment: Mapping[str, str]
    cpu_milli: int = 0
    memory_mib: int = 0
    _first: int = field(default=0, init=False)  # its first process, as the machine counts it

    def arguments(self, command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        """The command that runs this one in the container, with the `variables` of the lease.

        Raises BadInput for a directory that no engine can mount, and for a name that is no image.
        """
        if ":" in str(self.directory):
            raise BadInput(
                f"{str(self.directory)!r} cannot be mounted, because of its colon; choose another data_dir"
            )
        own = {"HOME": PLACE, **self.environment, **variables}
        return [
            self.engine.path,
            "run",
            "--rm",
            f"--name={self.name}",
            "--log-driver=none",  # the output is kept by us, and bounded
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            f"--user={self._user()}",
            f"--volume={self.directory}:{PLACE}:Z",
            f"--workdir={PLACE}",
            *self._devices(variables["CUDA_VISIBLE_DEVICES"].split(",")),
            *self._bounds(),
            *self._shared_memory(variables.get("CUDA_MPS_PIPE_DIRECTORY", "")),
            *(f"--env={name}={value}" for name, value in own.items()),
            checked_image(self.image),
            *command,
        ]

    def _user(self) -> str:
        """The user of this process. To a rootless engine that is root inside."""
        return "0:0" if self.engine.rootless else f"{os.getuid()}:{os.getgid()}"

    def _devices(self, uuids: Sequence[str]) -> list[str]:
        if self.engine.kind == DOCKER:
            return [f"--gpus={docker_devices(uuids)}"]
        words = podman_devices(uuids)
        return [f"{name}={value}" for name, value in zip(words[::2], words[1::2], strict=True)]

    def _bounds(self) -> list[str]:
        bounds = []
        if self.memory_mib and "memory" in self.engine.limits:
            bounds.append(f"--memory={self.memory_mib}m")
        if self.cpu_milli and "cpu" in self.engine.limits:
            bounds.append(f"--cpus={self.cpu_milli / 1000:g}")
        return bounds

    def _shared_memory(self, mps_directory: str) -> list[str]:
        """Loaders of torch want more of it than the 64 MiB of both engines. A client of MPS needs the
        host's, and the daemon's pipe."""
        if mps_directory and ":" not in mps_directory:
            return ["--ipc=host", f"--volume={mps_directory}:{mps_directory}"]
        return [f"--shm-size={self.memory_mib or 1024}m"]

    @property
    def not_bounded(self) -> str:
        """The bounds of the need that this engine cannot keep, in words."""
        wanted = {"memory": self.memory_mib, "cpu": self.cpu_milli}
        return " and ".join(
            name for name, amount in wanted.items() if amount and name not in self.engine.limits
        )

    @property
    def removal(self) -> list[str]:
        """The command that ends and removes it."""
        return self.engine.removal(self.name)

    def remove(self) -> bool:
        """End and remove it. False while it may still run."""
        return self.engine.remove(self.name)

    def pids(self) -> tuple[int, ...]:
        """Its processes that are no descendants of the command: those of Docker belong to its daemon."""
        if self.engine.kind != DOCKER:
            return ()
        if not self._first:
            said = self.engine.ask("container", "inspect", "--format={{.State.Pid}}", self.name) or ""
            self._first = int(said) if said.strip().isdigit() else 0
        if not self._first:
            return ()
        with suppress(psutil.Error):
            first = psutil.Process(self._first)
            return tuple(process.pid for process in (first, *first.children(recursive=True)))
        return ()


def _answer(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, errors="replace", timeout=ANSWER_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
