"""The environment that holds a program to its lease; it must be set before CUDA starts.

The means differ by device. A MIG slice is a device of its own. An MPS daemon limits memory and threads. An
allocator keeps to a fraction: torch from 2.10 by variable, any torch by gpu/node/cuda.py, TensorFlow by
GPU_ALLOCATOR_FRACTION in its program. None is trusted alone: cuda.py reads back, mps.why_not asks the daemon,
watchdog.py compares real use.

A lease's memory includes CUDA's own context, so limits of allocators are lower by that. Nothing here reads
the environment of this process; the caller hands in the variables to keep.
"""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from pipeline.errors import BadInput
from pipeline.gpu.node import mps as mps_limits
from pipeline.gpu.node.cuda import fraction
from pipeline.gpu.node.mps import Daemon
from pipeline.gpu.values import Device, LeaseMode, LeasePart, PoolLease
from pipeline.settings import Settings

__all__ = ["VARIABLES", "fraction", "here", "lease_environment"]

# Names must not begin with LOGWEIR_: those are settings, and an unknown one is refused.
VARIABLES: Final[Mapping[str, str]] = {
    "CUDA_VISIBLE_DEVICES": "the leased devices by UUID; a program sees them as 0, 1, ...",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID: indices in other tools are those of nvidia-smi",
    "GPU_LEASE": "id of the lease",
    "GPU_LEASE_TOKEN": "its fencing token, of the first device",
    "GPU_MEMORY_MIB": "memory leased on each device, CUDA's own included",
    "GPU_COMPUTE_PERCENT": "compute leased on each device",
    "GPU_MEMORY_FRACTION": "leased memory / memory of the device: per_process_gpu_memory_fraction of an "
    "Arena program",
    "GPU_ALLOCATOR_FRACTION": "the same less what CUDA itself takes: for an allocator that counts only "
    "tensors",
    "PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction added to what was set, for a shared lease "
    "without MPS; torch from 2.10 keeps to it, an older one refuses to start with it. Where only "
    "PYTORCH_ALLOC_CONF was set, it is added there",
    "CUDA_MPS_PIPE_DIRECTORY": "where the MPS daemon of the device listens, when one runs",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "memory limit per device, for a shared lease under MPS",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "compute limit, for a shared lease under MPS",
    "ALIYUN_COM_GPU_MEM_CONTAINER": "as GPU_MEMORY_MIB, for programs written for gpushare; both of these are "
    "in MiB",
    "ALIYUN_COM_GPU_MEM_DEV": "memory of the (smallest) device in MiB, for programs written for gpushare",
    "ALIYUN_COM_GPU_MEM_POD": "as ALIYUN_COM_GPU_MEM_CONTAINER: a program is a pod of one container",
    "ALIYUN_COM_GPU_MEM_IDX": "index of the first device on its machine, for programs written for gpushare",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "as GPU_ALLOCATOR_FRACTION for JAX, for a shared lease without MPS",
    "FLAGS_fraction_of_gpu_memory_to_use": "the same for Paddle",
    "GPU_DOCKER_DEVICES": "the leased devices as the value of `docker run --gpus`, with its quotation marks",
}
# Fractions of a device that frameworks read from the environment.
FRACTIONS: Final = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "FLAGS_fraction_of_gpu_memory_to_use")
_PLACE: Final = re.compile(r"\{([A-Za-z_]+)\}")
_FRACTION: Final = re.compile(r"\s*per_process_memory_fraction\s*:\s*([^,]*)")


def lease_environment(
    lease: PoolLease,
    devices: Sequence[Device],
    settings: Settings,
    *,
    mps: Daemon | None = None,
    base: Mapping[str, str] | None = None,
    node: str = "",
    allocator: bool = True,
) -> dict[str, str]:
    """The VARIABLES of a program in a lease, to be put over its `base` environment.

    `devices`: at least those of the lease. `node`: the machine of the program, if the lease spans several
    ("": all). `mps`: the daemon that serves these devices, if one runs. `allocator` False omits torch's
    variable, for a torch that refuses it. An exclusive lease gets no limits. Raises BadInput when the lease
    has no room for tensors, or when one process cannot use it.
    """
    pairs = here(lease, devices, node=node)
    memory_mib = min(part.memory_mib for part, _ in pairs)
    compute = min(part.compute_percent for part, _ in pairs)
    leased = min(min(1.0, part.memory_mib / device.total_mib) for part, device in pairs)
    # One number for all devices: the smallest keeps every one of them.
    limit = min(
        fraction(part.memory_mib, settings.internal.gpu_context_mib, dev.total_mib) for part, dev in pairs
    )
    env = {
        "CUDA_VISIBLE_DEVICES": ",".join(part.uuid for part, _ in pairs),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "GPU_LEASE": lease.lease_id,
        "GPU_LEASE_TOKEN": str(pairs[0][0].token),
        "GPU_MEMORY_MIB": str(memory_mib),
        "GPU_COMPUTE_PERCENT": str(compute),
        "GPU_MEMORY_FRACTION": _digits(leased),
        "GPU_ALLOCATOR_FRACTION": _digits(limit),
        "ALIYUN_COM_GPU_MEM_CONTAINER": str(memory_mib),
        "ALIYUN_COM_GPU_MEM_DEV": str(min(device.total_mib for _, device in pairs)),
        "ALIYUN_COM_GPU_MEM_POD": str(memory_mib),
        "ALIYUN_COM_GPU_MEM_IDX": str(pairs[0][1].index),
        "GPU_DOCKER_DEVICES": docker_devices([part.uuid for part, _ in pairs]),
    }
    exclusive = lease.need.mode is LeaseMode.EXCLUSIVE
    if mps is not None and exclusive:
        # Where the daemon runs, the device may be open to its clients only.
        env |= mps_limits.reach(mps)
    elif mps is not None:
        sizes = [part.memory_mib - settings.internal.gpu_context_mib for part, _ in pairs]
        env |= mps_limits.limits(mps, memory_mib=sizes, compute_percent=compute)
    elif not exclusive:
        # Not under MPS: there a process may see its limit as the device's size, and take its fraction of it.
        env |= {name: _lower(base or {}, name, limit) for name in FRACTIONS}
        env |= _alloc_conf(base or {}, limit) if allocator else {}
    return env


def docker_devices(uuids: Sequence[str]) -> str:
    """The value of `docker run --gpus`. Docker reads it as CSV, so a list needs its own quotation marks."""
    return f'"device={",".join(uuids)}"'


def podman_devices(uuids: Sequence[str]) -> list[str]:
    """The arguments of `podman run`, by the names of the Container Device Interface."""
    return [argument for uuid in uuids for argument in ("--device", f"nvidia.com/gpu={uuid}")]


def filled(arguments: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """The arguments with `{NAME}` replaced by a variable of the lease; other braces stay.

    Raises BadInput for a variable that this lease does not set.
    """

    def value(found: "re.Match[str]") -> str:
        name = found[1]
        if name not in VARIABLES:
            return found[0]
        if name not in variables:
            raise BadInput(
                f"{{{name}}} has no value here: an exclusive lease, or one under MPS, sets no such limit; "
                "leave that argument out"
            )
        return variables[name]

    return [_PLACE.sub(value, argument) for argument in arguments]


def _lower(base: Mapping[str, str], name: str, limit: float) -> str:
    """The limit, or the lower one that the user has set."""
    with suppress(ValueError, KeyError):
        limit = min(limit, float(base[name])) if float(base[name]) > 0 else limit
    return _digits(limit)


def here(lease: PoolLease, devices: Sequence[Device], *, node: str = "") -> list[tuple[LeasePart, Device]]:
    """The parts of a lease that a program on `node` can use, with their devices, in the program's order.

    Raises BadInput for an unknown device, for no device at all, and for a MIG slice among several devices:
    CUDA shows a process only the first slice.
    """
    by_uuid = {device.uuid: device for device in devices}
    missing = [part.uuid for part in lease.parts if part.uuid not in by_uuid]
    if missing:
        raise BadInput(
            f"the pool does not know {missing[0]} any more; release lease {lease.lease_id} and ask again"
        )
    pairs = [(part, by_uuid[part.uuid]) for part in lease.parts]
    pairs = [(part, device) for part, device in pairs if node in ("", device.node)]
    if not pairs:
        raise BadInput(
            f"lease {lease.lease_id} has no device on {node}; run the program where its devices are"
        )
    if len(pairs) > 1 and any(_is_slice(device) for _, device in pairs):
        raise BadInput(
            f"lease {lease.lease_id} has {len(pairs)} devices with a MIG slice among them, and a process "
            "sees only one"
            " slice; ask for one device, or for whole GPUs"
        )
    return pairs


def _is_slice(device: Device) -> bool:
    return bool(device.parent) or device.uuid.startswith("MIG-")


def _digits(value: float) -> str:
    """Rounded down, so that no rounding lets a program take more: a millionth of 100 GiB is 0.1 MiB."""
    return f"{max(math.floor(value * 1e6), 1) / 1e6:.6f}"


def _alloc_conf(base: Mapping[str, str], limit: float) -> dict[str, str]:
    """Torch's allocator options with our limit added: a user's options stay, and so does a lower limit.

    Torch's CUDA allocator reads PYTORCH_CUDA_ALLOC_CONF, and only without it PYTORCH_ALLOC_CONF
    (c10/cuda/CUDAAllocatorConfig.h). Setting the former would switch off a user's options in the latter.
    """
    name = "PYTORCH_CUDA_ALLOC_CONF"
    if name not in base and base.get("PYTORCH_ALLOC_CONF"):
        name = "PYTORCH_ALLOC_CONF"
    options = []
    # A list in brackets, as in roundup_power2_divisions:[256:1,512:2], is one option.
    for option in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", base.get(name, "")):
        limited = _FRACTION.fullmatch(option)
        if limited is None:
            options.append(option.strip())
            continue
        with suppress(ValueError):  # torch would refuse it
            limit = min(limit, float(limited.group(1))) if float(limited.group(1)) > 0 else limit
    return {
        name: ",".join(
            [*(option for option in options if option), f"per_process_memory_fraction:{_digits(limit)}"]
        )
    }
