"""The intake as its own process on a free port, and what a test asks it."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polling import wait_until

from pipeline.ledger.ledger import Ledger
from pipeline.redis.connection import connect
from pipeline.settings import Settings

TIMEOUT_S = 20.0
# The process of the intake, except that it dies once its script has run while `mark` is there. Beside it a
# file lists the answers of the script.
DIES = """
import os, signal, sys
from pathlib import Path
from pipeline.ledger.intake import Intake
from pipeline.workers.exits import exit_code
from pipeline.workers.intake.server import main

accept_all, mark = Intake.accept_all, Path(sys.argv.pop())

def dies(*args, **kwargs):
    answer = accept_all(*args, **kwargs)
    with mark.with_suffix(".answers").open("a") as answers:
        print(type(answer).__name__, file=answers)
    if mark.exists():
        mark.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return answer

Intake.accept_all = dies
raise SystemExit(exit_code(main))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True, kw_only=True)
class Intake:
    """One process, or several that share a port."""

    settings: Settings
    port: int
    command: list[str] = field(default_factory=lambda: ["-m", "pipeline.workers.intake"])
    arguments: tuple[str, ...] = ()
    processes: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, **environ: str) -> "subprocess.Popen[bytes]":
        """One more process; it is ready when this returns."""
        env = {**os.environ, **self.settings.to_environ(), "LOGWEIR_INTAKE": self.url, **environ}
        self.settings.data.dir.mkdir(parents=True, exist_ok=True)
        log = self.log.open("ab")
        process = subprocess.Popen(
            [sys.executable, *self.command, *self.arguments], env=env, stdout=log, stderr=log
        )
        log.close()
        self.processes.append(process)
        started = f'"pid": {process.pid}'
        assert wait_until(
            lambda: process.poll() is not None or started in self.log.read_text(), timeout_s=TIMEOUT_S
        )
        assert process.poll() is None, self.log.read_text()
        return process

    @property
    def log(self) -> Path:
        return self.settings.data.dir / "intake.log"

    def ask(
        self, path: str, body: bytes | None = None, *, method: str | None = None, **headers: str
    ) -> Answer:
        """Names of headers with `_` for `-`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, data=body, headers=named, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return Answer(status=answer.status, headers=dict(answer.headers), body=answer.read())
        except urllib.error.HTTPError as exc:
            with exc:
                return Answer(status=exc.code, headers=dict(exc.headers), body=exc.read())

    def ledger(self) -> Ledger:
        return Ledger(connect(self.settings), self.settings)

    def accepted(self, workload: str) -> int:
        """Lines of a workload that the ledger has taken in."""
        return self.ledger().backlog.totals().get(workload, {}).get("accepted", 0)

    def workloads(self) -> set[str]:
        return set(self.ledger().backlog.totals())

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(TIMEOUT_S)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_intake(settings: Settings, *, start: bool = True, **options: Any) -> Iterator[Intake]:
    intake = Intake(settings=settings, port=free_port(), **options)
    try:
        if start:
            intake.start()
        yield intake
    finally:
        intake.stop()
