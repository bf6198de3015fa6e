"""The task of a node that takes jobs: starts the process that runs one, or one rank of it, and is over.

The process lives apart from this worker, so a restart of the worker ends no job. Its lease ends it. A message
that comes twice starts a second process, which finds the job begun and ends.
"""

import subprocess
import sys
from typing import Final

from pipeline.gpu.job_containers import JobContainers
from pipeline.gpu.node.engine import ContainerEngine
from pipeline.logs import logger
from pipeline.messages.routing import TASK_JOB
from pipeline.tasks.context import Context

NAME: Final = TASK_JOB
RUNNER: Final = "pipeline.commands.gpu.job_runner"

_begun: list["subprocess.Popen[bytes]"] = []  # to be reaped
_sweepers: list[JobContainers] = []


def run(context: Context, job_id: str = "", rank: str = "0", *_: str) -> None:
    _begun[:] = [process for process in _begun if process.poll() is None]
    if not context.settings.gpu.jobs:
        logger(job=job_id).warning("gpu.job_refused", why="gpu_jobs is off on this machine")
        return
    _begun.append(
        subprocess.Popen(
            [sys.executable, "-m", RUNNER, job_id, rank], stdin=subprocess.DEVNULL, start_new_session=True
        )
    )
    for sweeper in _sweepers:
        sweeper.wake.set()


def sweep_along(context: Context, engine: ContainerEngine) -> None:
    """Remove orphaned containers of this node, now and beside the tasks."""

    def busy() -> bool:
        return any(process.poll() is None for process in _begun)

    sweeper = JobContainers(engine, context.jobs, context.settings, busy=busy)
    sweeper.start()
    _sweepers.append(sweeper)
