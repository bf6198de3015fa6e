"""CUDA in this process: started once, on the leased device, with the leased memory as limit, and read back.

For processes that do the work themselves, never for one that forks workers. A process stays on the device on
which its context began; a lease on another device needs another process. Importing this loads no torch.
"""

import gc
import sys
import threading
from contextlib import suppress
from typing import Any, Final

from pipeline.errors import BadInput, DeviceFailed
from pipeline.settings import see_only, visible_devices

MIB: Final = 1 << 20
# Torch keeps bytes, not the fraction, so reading back may differ by rounding; a MiB of 100 GiB is 1e-5.
SAME: Final = 1e-5
STEP_MIB: Final = 64  # of memory that a proof of the limit takes at a time

_here: str | None = None  # the device on which this process has started
_index_here: int | None = None  # torch's number of it
_beginning: Final = threading.Lock()


def fraction(leased_mib: int, context_mib: int, total_mib: int) -> float:
    """The part of a device that an allocator may take: the lease less CUDA's context, never above 1.

    `total_mib` is the size that the process sees: less than the GPU for a MIG slice or under an MPS limit.
    Raises BadInput when the lease has no room for tensors.
    """
    if total_mib <= 0:
        raise BadInput(f"a device of {total_mib} MiB cannot be leased; look at it with `logweir gpu top`")
    if leased_mib <= context_mib:
        raise BadInput(
            f"a lease of {leased_mib} MiB leaves no room for tensors, since CUDA itself takes {context_mib} "
            "MiB"
            f" (gpu_context_mib); lease more than {context_mib} MiB"
        )
    return min(1.0, (leased_mib - context_mib) / total_mib)


def begin(uuid: str, *, memory_mib: int | None, context_mib: int) -> str:
    """Start CUDA on the device `uuid` (`GPU-...` or `MIG-...`) and return torch's name for it, `cuda:1`.

    `memory_mib` bounds all memory of this process there, its context of `context_mib` included; None sets no
    limit. The limit is read back. May be called again for the same device, also with another limit. Raises
    BadInput when the lease has no room for tensors, DeviceFailed when CUDA cannot be used or the limit did
    not take.
    """
    global _here, _index_here  # noqa: PLW0603 - CUDA's context belongs to the process
    with _beginning:
        if _here not in (None, uuid):
            raise DeviceFailed(
                f"this process has begun on {_here} and cannot move to {uuid}; use a new process for it"
            )
        try:
            import torch

            if uuid.startswith("MIG-") and visible_devices() is None:
                see_only(uuid)  # else CUDA shows the first slice of each GPU
            index = _index(torch, uuid)
            _index_here = index
            _here = uuid  # from here on a context may exist, even if a later step fails
            torch.cuda.set_device(index)
            free, total = torch.cuda.mem_get_info(index)
            if not 0 <= free <= total or total < MIB:
                raise DeviceFailed(
                    f"{uuid} says that {free} of {total} bytes are free; let its agent probe it"
                )
            share = 1.0 if memory_mib is None else fraction(memory_mib, context_mib, -(-total // MIB))
            torch.cuda.set_per_process_memory_fraction(share, index)
            _read_back(torch, uuid, index, share, total)
            torch.empty(1, device=f"cuda:{index}")  # a lost device fails here, not in the first batch
        except (ImportError, RuntimeError, AssertionError) as exc:  # torch raises all of them for "no CUDA"
            raise DeviceFailed(
                f"CUDA does not start on {uuid} "
                f"({str(exc).splitlines()[0] if str(exc) else type(exc).__name__});"
                " see `nvidia-smi`, and that torch was built for CUDA"
            ) from exc
        return f"cuda:{index}"


def prove_limit(uuid: str, *, memory_mib: int, context_mib: int) -> int:
    """Fill a lease of `memory_mib` with tensors and try to take more; the MiB that they got.

    Raises DeviceFailed when tensors got more than the lease leaves them, or less than half of that.
    """
    place = begin(uuid, memory_mib=memory_mib, context_mib=context_mib)
    import torch

    room = memory_mib - context_mib
    kept: list[Any] = []
    try:
        while len(kept) * STEP_MIB <= 2 * memory_mib:
            kept.append(torch.empty(STEP_MIB * MIB, dtype=torch.uint8, device=place))
    except RuntimeError:  # torch's OutOfMemoryError is one
        pass
    got = STEP_MIB * len(kept)
    kept.clear()
    unload()
    if not room // 2 <= got <= room:
        raise DeviceFailed(f"tensors got {got} MiB of {uuid} under a lease that leaves them {room} MiB")
    return got


def usable() -> bool:
    """Whether torch sees a CUDA device. Starts no context."""
    import torch

    return bool(torch.cuda.is_available())


def started_on() -> str | None:
    """The uuid of the device on which this process has started CUDA, or None."""
    return _here


def unload() -> None:
    """Give cached device memory back to the driver; the context stays until the process ends.

    Never raises.
    """
    torch = sys.modules.get("torch")
    gc.collect()
    if torch is None or _index_here is None:
        return
    # The current device is per thread; in a thread that never chose, torch would start on the first device.
    with suppress(Exception), torch.cuda.device(_index_here):
        torch.cuda.empty_cache()  # a lost device has nothing to give back


def _index(torch: Any, uuid: str) -> int:
    """Torch's number of a device. Raises DeviceFailed when this process does not see it."""
    if not torch.cuda.is_available():
        raise DeviceFailed(
            f"this process cannot use {uuid}: no CUDA device is visible; see `nvidia-smi`, and that torch "
            "was built"
            " for CUDA"
        )
    count, visible = torch.cuda.device_count(), []
    for index in range(count):
        # torch before 2.5 has no `uuid`, and that of a MIG slice may be its parent's: then the order says it.
        device_uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        if device_uuid is not None and _bare(str(device_uuid)) == _bare(uuid):
            return index
        visible.append(str(device_uuid))
    named = [name.strip() for name in (visible_devices() or "").split(",")]
    if uuid in named and len(named) == count:
        return named.index(uuid)
    raise DeviceFailed(
        f"this process does not see {uuid}, only {', '.join(visible) or 'nothing'}; set CUDA_VISIBLE_DEVICES "
        "to it"
        " or unset it"
    )


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _read_back(torch: Any, uuid: str, index: int, share: float, total: int) -> None:
    """Never assumed: raises DeviceFailed when the limit is not in force."""
    read = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    if read is not None:
        found = float(read(index))
        if abs(found - share) > SAME:
            raise DeviceFailed(
                f"the memory limit of {uuid} is {found:.4f} of it instead of {share:.4f}; use another torch"
            )
        return
    if share == 1.0:
        return
    try:  # torch before 2.6 cannot be asked. Its allocator refuses too much before the driver sees it.
        torch.empty(int(total * share) + 2 * MIB, dtype=torch.uint8, device=f"cuda:{index}")
    except torch.cuda.OutOfMemoryError:
        return
    raise DeviceFailed(f"the memory limit of {uuid} ({share:.4f} of it) is not in force; use another torch")
