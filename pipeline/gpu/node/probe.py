"""Counts the GPUs of this machine once, in a child process, so that a hung driver cannot hang the caller."""

import ctypes
import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import Final

from pipeline.gpu.node.nvml import LIBRARY
from pipeline.logs import logger

# Older nvidia-ml-py say bytes.
PROBE: Final = """
import json, pynvml as n
n.nvmlInit()
v = n.nvmlSystemGetDriverVersion()
print(json.dumps([n.nvmlDeviceGetCount(), v.decode() if isinstance(v, bytes) else v]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """`trouble`: "" or why the installed driver could not be asked."""

    driver: str = ""
    count: int = 0
    trouble: str = ""


def probe_devices(timeout_s: float = 5.0) -> Probed | None:
    """None where there is no NVIDIA driver. Never raises, and never takes much longer than `timeout_s`.

    A hung driver keeps its caller in the kernel, out of reach of SIGKILL; so a child asks.
    """
    try:
        ctypes.CDLL(LIBRARY)  # loading asks nothing yet; most machines end here, at once
    except OSError:
        return None
    quiet = subprocess.DEVNULL
    try:
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", PROBE],
            stdin=quiet,
            stdout=subprocess.PIPE,
            stderr=quiet,
            start_new_session=True,
        )
    except OSError as exc:
        return Probed(trouble=f"no process could be started to ask the driver ({exc.strerror})")
    try:
        output, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        # A thread reaps the child when the driver lets go of it.
        threading.Thread(target=child.communicate, name="nvml-probe", daemon=True).start()
        return Probed(trouble=f"the driver did not answer within {timeout_s:g} s")
    try:
        count, driver = json.loads(output)
        return Probed(driver=str(driver), count=int(count))
    except (ValueError, TypeError):
        return Probed(trouble="the driver does not work")


def has_devices(timeout_s: float = 5.0) -> bool:
    """True when the driver of this machine shows a GPU; a driver that fails is logged and shows none."""
    found = probe_devices(timeout_s)
    if found is not None and found.trouble:
        logger().warning(
            "gpu.driver_fails", why=f"{found.trouble}; start again when `nvidia-smi` lists a GPU"
        )
    return found is not None and found.count > 0
