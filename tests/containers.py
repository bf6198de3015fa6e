"""Hosts as container networks: Podman runs the services of a Compose file, each in a container of its own.

The engine stands beside the repository. It asks no registry, so the digests of images are cut off.
"""

import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import pytest
from compose import Service
from polling import wait_until

ROOT: Final = Path(__file__).resolve().parent.parent
SETUP: Final = ROOT.parent / "shared" / "containers" / "setup"
DIGEST: Final = re.compile(r"@sha256:[0-9a-f]{64}")


@dataclass(slots=True)
class Engine:
    """Podman and buildah, with their settings and their storage in one folder."""

    env: dict[str, str]
    build_options: list[str]

    @classmethod
    def in_folder(cls, folder: Path, environment: Mapping[str, str], *, networks: bool = True) -> Self:
        """Skips the test where there is none."""
        if not SETUP.exists():
            pytest.skip("no container engine stands beside the repository (../shared/containers)")
        done = subprocess.run([SETUP, folder], stdout=subprocess.PIPE, text=True, check=True, timeout=900)
        words = [word for line in done.stdout.splitlines() for word in shlex.split(line) if "=" in word]
        said = dict(word.split("=", 1) for word in words)
        if networks and shutil.which("iptables") is None:
            pytest.skip("container networks need iptables; apt-get install iptables")
        return cls({**environment, **said}, shlex.split(said.pop("BUILD_MOUNTS")))

    def __call__(
        self, *words: object, check: bool = True, within_s: float = 300
    ) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            list(map(str, words)),
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=within_s,
        )
        assert not check or done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
        return done

    def build(self, dockerfile: Path, tag: str, **arguments: str) -> None:
        """An image of the project's root. Layers of an earlier build are taken again."""
        said = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        text = DIGEST.sub("", dockerfile.read_text(encoding="utf-8"))
        with subprocess.Popen(
            ["buildah", "bud", *self.build_options, "--layers", *said, "-f", "-", "-t", tag, str(ROOT)],
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            said, _ = process.communicate(text, timeout=1500)
        assert process.returncode == 0, said[-3000:]


@dataclass(slots=True)
class Host:
    """A network with volumes and containers of its own. The containers have the names of their services."""

    name: str
    engine: Engine
    services: dict[str, Service]
    ports: dict[str, int] = field(default_factory=dict)  # published ones, by service

    @property
    def project(self) -> str:
        return f"logweir-{self.name}"

    def container(self, service: str) -> str:
        return f"{self.project}-{service}"

    def choose_ports(self) -> None:
        """A free port of the machine for each that the file publishes: others may have those of the file."""
        for service in self.services.values():
            for address, _, _ in service.ports():
                with socket.socket() as probe:
                    probe.bind((address, 0))
                    self.ports[service.name] = probe.getsockname()[1]

    def start(self) -> None:
        """Start everything, Redis first: the others depend on a healthy one."""
        self.engine("podman", "network", "create", self.project)
        for service in sorted(self.services.values(), key=lambda s: s.name != "redis"):
            self.run(service)
            if service.name == "redis":
                assert wait_until(lambda: self.is_well("redis"), timeout_s=60)

    def run(self, service: Service) -> None:
        published = [
            f"--publish={address}:{self.ports[service.name]}:{inside}"
            for address, _, inside in service.ports()
        ]
        self.engine(
            *("podman", "run", "--detach", "--pull=never", f"--name={self.container(service.name)}"),
            *(f"--network={self.project}", f"--network-alias={service.name}", *published),
            *(*service.options(self.project), DIGEST.sub("", service.image), *service.command),
        )

    def is_well(self, service: str) -> bool:
        """The answer of the health check in the file."""
        probe = self.services[service].probe
        assert probe is not None, f"{service} has no health check"
        return self.engine("podman", "exec", self.container(service), *probe, check=False).returncode == 0

    def inside(self, service: str, *words: object) -> str:
        """What a command in a container prints."""
        return self.engine("podman", "exec", self.container(service), *words).stdout

    def machine(self, service: str) -> str:
        """The host name in a container: the beginning of its id, as in Docker."""
        return self.inside(service, "cat", "/proc/sys/kernel/hostname").strip()

    def pid(self, service: str) -> int:
        """The first process of a container, as the machine counts it."""
        name = self.container(service)
        return int(self.engine("podman", "container", "inspect", "--format={{.State.Pid}}", name).stdout)

    def log(self, service: str) -> str:
        done = self.engine("podman", "logs", self.container(service), check=False)
        return done.stdout + done.stderr

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"--- {self.container(s)}\n{self.log(s)[-2000:]}" for s in self.services)

    def kill(self) -> None:
        """Everything here ends by SIGKILL, and starts no more. The volumes stay, as a disk does."""
        names = map(self.container, self.services)
        self.engine("podman", "rm", "--force", "--time=0", "--ignore", *names)
        self.engine("podman", "network", "rm", "--force", self.project, check=False)

    def clear(self) -> None:
        """Remove all that is here, volumes too."""
        self.kill()
        volumes = self.engine("podman", "volume", "ls", "--quiet").stdout.split()
        if mine := [name for name in volumes if name.startswith(f"{self.project}_")]:
            self.engine("podman", "volume", "rm", "--force", *mine)
