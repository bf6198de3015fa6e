"""A machine of a chaos run: one stack on a data directory of its own."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped] # it publishes no types

from bench._chaos.poison.sitecustomize import VISIBILITY
from bench._chaos.proxy import Proxy
from bench._chaos.services import ROOT, Services, free_port
from pipeline.redis.attach import state_file
from pipeline.settings import Settings

VISIBILITY_S: Final = 10.0  # shorter than a worker is stopped for; the product's own is an hour, on purpose
POISON: Final = Path(__file__).with_name("poison")


class Machine:
    """`settings` are those of its stack but for the address of its intake; `env` are the variables beside
    them, such as keys of a bucket."""

    def __init__(self, name: str, settings: Settings, services: Services, env: dict[str, str]) -> None:
        self.name = name  # that of the service
        port = free_port()
        self.settings = settings.replace(intake=(f"http://127.0.0.1:{port}",))
        self.intake = Proxy(port)  # the network of its senders
        self.services = services
        self.env = env

    def start(self) -> None:
        self.intake.__enter__()
        command = [sys.executable, "-m", "pipeline.cli", "up", "--json"]
        self.services.add(self.name, command, self.environment())
        self.services.start(self.name)

    def stop(self) -> None:
        self.services.stop(self.name)
        self.intake.__exit__()

    def ready(self) -> bool:
        """The stack that runs now has written that it is ready."""
        up = self.services.running(self.name)
        return up is not None and self.state().get("pid") == up.pid

    def state(self) -> dict[str, Any]:
        """The stack's file about itself; {} without one."""
        try:
            return dict(json.loads(state_file(self.settings.data.dir).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def workers(self, role: str = "") -> dict[str, int]:
        """Processes of the stack's workers by name, of one role or all; without those that have ended."""
        found = {}
        for name, pid in sorted(self.state().get("workers", {}).items()):
            if (not role or name == role or name.rstrip("0123456789").rstrip("-") == role) and _lives(pid):
                found[name] = int(pid)
        return found

    def tree(self) -> list[Any]:
        """The stack and all processes below it; none while it does not run."""
        up = self.services.running(self.name)
        if up is None:
            return []
        with contextlib.suppress(psutil.Error):
            return [psutil.Process(up.pid), *psutil.Process(up.pid).children(recursive=True)]
        return []

    def logweir(self, *args: str, timeout_s: float) -> "subprocess.CompletedProcess[str]":
        """One command of the product, to its end."""
        return subprocess.run(
            [sys.executable, "-m", "pipeline.cli", *args],
            env={**os.environ, **self.environment()}, cwd=ROOT, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip

    def environment(self) -> dict[str, str]:
        """For the product: these settings and no others, and the poison that only its workers taste."""
        return {
            **self.env,
            **self.settings.replace(supervisor_pid=0).to_environ(),
            "PYTHONPATH": f"{POISON}{os.pathsep}{ROOT}",  # the workers run in the data directory
            VISIBILITY: str(VISIBILITY_S),
            "OMP_NUM_THREADS": "1",
        }


def _lives(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "pipeline.workers" in " ".join(process.cmdline())
    return False
