"""NVIDIA MPS: finds the daemon of a device, its limits, and whether a program really runs under it.

CUDA that does not reach the daemon silently runs without MPS and its limits (man nvidia-cuda-mps-control). So
a limit counts only once the daemon lists the process. A fatal error of one client ends all clients of the
device; one daemon per device keeps that from spreading. Only a person starts and stops daemons
(`logweir gpu mps`).
"""

import os
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.errors import BadInput
from pipeline.gpu.values import LeasePart

CONTROL: Final = "nvidia-cuda-mps-control"
# The default of NVIDIA's tools; by our own convention there is one directory per device beside it.
DEFAULT_DIRECTORY: Final = Path("/tmp/nvidia-mps")  # noqa: S108 - NVIDIA's own default
PATHS: Final = "/usr/local/bin:/usr/bin:/bin"
START_S: Final = 10.0
ANSWER_S: Final = 2.0  # a daemon that waits for a client's teardown answers nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """A control daemon that answers. `uuid` is the device it is for, "" when it may serve every device."""

    directory: Path
    uuid: str = ""
    path: str = PATHS  # where its control program is looked for, as in PATH


def find(
    uuid: str,
    *,
    directory: Path | None = None,
    path: str = PATHS,
    root: Path = DEFAULT_DIRECTORY,
    timeout_s: float = ANSWER_S,
) -> Daemon | None:
    """The daemon for a device, or None when none answers.

    The search goes through `directory` (the caller's CUDA_MPS_PIPE_DIRECTORY), `<root>-<uuid>` (one daemon
    per device) and `root`. Without such a directory no process is started. Never raises.
    """
    places = [(directory, "")] if directory is not None else []
    places += [(root.with_name(f"{root.name}-{uuid}"), uuid), (root, "")]
    for place, limited_uuid in places:
        # The pipe is made by the daemon; the directory alone outlives it.
        if place is not None and place.is_dir():
            daemon = Daemon(directory=place, uuid=limited_uuid, path=path)
            if _ask(daemon, "get_server_list", timeout_s) is not None:
                return daemon
    return None


def for_lease(
    uuids: Sequence[str],
    *,
    directory: Path | None = None,
    path: str = PATHS,
    root: Path = DEFAULT_DIRECTORY,
    timeout_s: float = ANSWER_S,
) -> Daemon | None:
    """The one daemon that serves all devices of a lease, because a process talks to one only; else None."""
    found = {find(uuid, directory=directory, path=path, root=root, timeout_s=timeout_s) for uuid in uuids}
    if len(found) == 1:
        return found.pop()
    shared = {daemon for daemon in found if daemon is not None and not daemon.uuid}
    return shared.pop() if len(shared) == 1 and None not in found else None


def reach(daemon: Daemon) -> dict[str, str]:
    """The variable by which a program finds the daemon, without a limit."""
    return {"CUDA_MPS_PIPE_DIRECTORY": str(daemon.directory)}


def limits(daemon: Daemon, *, memory_mib: Sequence[int], compute_percent: int) -> dict[str, str]:
    """The variables of the daemon and its limits for a program.

    `memory_mib`: the limit per device, in the order of CUDA_VISIBLE_DEVICES; the variable counts devices as
    the program sees them. `compute_percent` is a limit of threads, not a promise; 0 sets none. Raises
    BadInput for sizes that MPS cannot enforce.
    """
    if any(size <= 0 for size in memory_mib) or not 0 <= compute_percent <= 100:
        raise BadInput(
            f"MPS cannot hold a program to {list(memory_mib)} MiB and {compute_percent} % of a GPU;"
            " lease more memory than gpu_context_mib and at most 100 % compute"
        )
    env = reach(daemon)
    if memory_mib:
        pairs = (f"{ordinal}={size}M" for ordinal, size in enumerate(memory_mib))
        env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(pairs)
    if compute_percent:
        env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(compute_percent)
    return env


def of_part(
    part: LeasePart, context_mib: int, *, root: Path = DEFAULT_DIRECTORY, path: str = PATHS
) -> dict[str, str]:
    """The variables of a process of ours that has this part of a device; none where no daemon serves it."""
    daemon = find(part.uuid, root=root, path=path)
    if daemon is None:
        return {}
    return limits(daemon, memory_mib=[part.memory_mib - context_mib], compute_percent=part.compute_percent)


def clients(daemon: Daemon, *, timeout_s: float = ANSWER_S) -> set[int] | None:
    """Process ids that the daemon's servers list, as the daemon counts them; None when it does not answer."""
    servers = _ask(daemon, "get_server_list", timeout_s)
    if servers is None:
        return None
    found: set[int] = set()
    for server in _numbers(servers):
        answer = _ask(daemon, f"get_client_list {server}", timeout_s)
        if answer is None:
            return None
        found |= set(_numbers(answer))
    return found


def why_not(daemon: Daemon, pids: Collection[int], *, timeout_s: float = ANSWER_S) -> str:
    """ "" when the daemon lists one of these processes, else the reason to doubt its limits.

    Ask when the program uses its device (no process is listed before), and again after its processes change.
    """
    found = clients(daemon, timeout_s=timeout_s)
    if found is None:
        return f"the MPS daemon of {daemon.directory} does not answer; its limits may not hold, restart it"
    if not found & set(pids):
        return (
            f"the MPS daemon of {daemon.directory} lists none of the processes {sorted(pids)}, so they run "
            "without its"
            " limits; check that they have the daemon's user and see its directory"
        )
    return ""


def start_daemon(
    uuid: str, *, path: str = PATHS, root: Path = DEFAULT_DIRECTORY, timeout_s: float = START_S
) -> Daemon:
    """Starts the daemon of one device, for programs of this user. Raises BadInput where that cannot be."""
    place = root.with_name(f"{root.name}-{uuid}")
    if find(uuid, path=path, root=root) is not None:
        raise BadInput(f"an MPS daemon serves {uuid} already; `logweir gpu mps status` shows it")
    logs = place.with_name(f"{place.name}-log")
    for folder in (place, logs):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            raise BadInput(
                f"{folder} belongs to another user, who could read programs there; remove it first"
            )
    daemon = Daemon(directory=place, uuid=uuid, path=path)
    env = {**reach(daemon), "CUDA_MPS_LOG_DIRECTORY": str(logs), "CUDA_VISIBLE_DEVICES": uuid}
    try:
        done = subprocess.run(
            ["/usr/bin/env", CONTROL, "-d"],
            env={**env, "PATH": path, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        raise BadInput(f"{CONTROL} did not start within {timeout_s:g} s; see {logs}") from exc
    if done.returncode == 127:
        raise BadInput(f"{CONTROL} is not in {path}; it comes with the NVIDIA driver")
    if done.returncode or _ask(daemon, "get_server_list", timeout_s) is None:
        said = " ".join((done.stderr or done.stdout).split())[:200]
        raise BadInput(f"the MPS daemon of {uuid} did not start ({said or 'it does not answer'}); see {logs}")
    return daemon


def stop_daemon(daemon: Daemon, *, timeout_s: float = START_S) -> bool:
    """Ends a daemon, and with it every program that runs under it. False when it does not answer."""
    return _ask(daemon, "quit", timeout_s) is not None


def _ask(daemon: Daemon, command: str, timeout_s: float) -> str | None:
    """One command to the daemon; None when there is no daemon, no control program, or no answer in time."""
    try:
        process = subprocess.run(
            ["/usr/bin/env", CONTROL],  # env looks the program up in the PATH given here, not in ours
            input=f"{command}\n",
            env={**reach(daemon), "PATH": daemon.path, "LC_ALL": "C"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return (
        process.stdout if process.returncode == 0 and not _absent(process.stdout + process.stderr) else None
    )


def _absent(text: str) -> bool:
    """Some versions report a missing daemon with exit code 0."""
    return "cannot find" in text.lower() or "failed to connect" in text.lower()


def _numbers(text: str) -> list[int]:
    return [int(line) for line in text.split() if re.fullmatch(r"\d{1,10}", line)]


def limiting(environment: Mapping[str, str], *, path: str = PATHS) -> Daemon | None:
    """The daemon whose limits stand in this environment; None when there are none."""
    names = ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")
    if not any(name in environment for name in names):
        return None
    return Daemon(directory=Path(environment.get("CUDA_MPS_PIPE_DIRECTORY", DEFAULT_DIRECTORY)), path=path)
