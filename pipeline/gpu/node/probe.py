"""Counts the GPUs of this machine once, in a child process, so that a hung driver cannot hang the caller."""

import ctypes
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

from pipeline.gpu.node.nvml import LIBRARY
from pipeline.logs import logger
from pipeline.upkeep import start_thread

# Older nvidia-ml-py say bytes.
PROBE: Final = """
import json, pynvml as n
n.nvmlInit()
v = n.nvmlSystemGetDriverVersion()
def devices(index):
    try:
        gpu = n.nvmlDeviceGetHandleByIndex(index)
        if not n.nvmlDeviceGetMigMode(gpu)[0]:
            return 1
        most = n.nvmlDeviceGetMaxMigDeviceCount(gpu)
    except n.NVMLError:
        return 1
    found = 0
    for slice in range(most):
        try:
            n.nvmlDeviceGetMigDeviceHandleByIndex(gpu, slice)
            found += 1
        except n.NVMLError:
            pass
    return found
count = n.nvmlDeviceGetCount()
shown = v.decode() if isinstance(v, bytes) else v
print(json.dumps([count, shown, sum(map(devices, range(count)))]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """`count` GPUs. `devices`: MIG slices in place of a split GPU. `trouble`: "" or why the driver failed."""

    driver: str = ""
    count: int = 0
    devices: int = 0
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
        start_thread("nvml-probe", child.communicate)
        return Probed(trouble=f"the driver did not answer within {timeout_s:g} s")
    try:
        count, driver, devices = json.loads(output)
        return Probed(driver=str(driver), count=int(count), devices=int(devices))
    except (ValueError, TypeError):
        return Probed(trouble="the driver does not work")


def has_devices(timeout_s: float = 5.0) -> bool:
    """True when the driver of this machine shows a GPU; a driver that fails is logged and shows none."""
    return shown_devices(timeout_s) is not None


def shown_devices(timeout_s: float = 5.0) -> int | None:
    """How many GPUs and MIG slices the driver shows; None as where `has_devices` is False."""
    found = probe_devices(timeout_s)
    if found is not None and found.trouble:
        logger().warning(
            "gpu.driver_fails", why=f"{found.trouble}; start again when `nvidia-smi` lists a GPU"
        )
    return found.devices if found is not None and found.count > 0 else None
