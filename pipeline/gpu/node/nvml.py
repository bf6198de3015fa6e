"""The NVIDIA driver of this machine through NVML: the only home of pynvml.

Nothing asks the driver before `Nvml.open`, and CUDA is never touched. A value that an old driver does not
know is None, not an error. A call can hang in the kernel for ever, so callers use a thread or a child
(agent.py, probe.py). Memory is rounded against us: capacity down, use up.
"""

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from pipeline.errors import NoDriver
from pipeline.gpu.node.readings import DriverEvent, MachineReading, Reading
from pipeline.gpu.values import Process
from pipeline.imports import install_hint

MIB: Final = 1 << 20
# Numbers of nvml.h, which never change; the names of some are missing in older nvidia-ml-py.
NOT_SUPPORTED, NOT_FOUND, TIMEOUT, FUNCTION_NOT_FOUND = 3, 6, 10, 13
INVALID_ARGUMENT: Final = 2
# uninitialised, driver not loaded, library not found, library and kernel differ
NO_DRIVER: Final = {1, 9, 12, 18}
LOST: Final = {15, 16, 28}  # GPU lost, reset required, GPU not found
OLD: Final = {NOT_SUPPORTED, FUNCTION_NOT_FOUND}
RECOVERY_FIELD: Final = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, drivers from 570
DOUBLE_BIT_EVENT, XID_EVENT = 0x2, 0x8
UNCORRECTED, VOLATILE = 1, 0  # since the driver was loaded
ANY_INSTANCE: Final = 0xFFFFFFFF
WAIT_MS: Final = 5  # for an event that is there already
MOST_EVENTS: Final = 256  # in one reading; an event storm must not keep us
LIBRARY: Final = "libnvidia-ml.so.1"  # the name that nvidia-ml-py loads too


class _Trouble(Exception):
    """One device does not answer as it should; others may."""


class Nvml:
    """The driver, as one thread asks it. Every method but `close` raises NoDriver."""

    def __init__(self) -> None:
        self._api: Any = None
        self._events: Any = None
        self._blind: dict[str, str] = {}  # uuid -> "", or why its events cannot be watched
        self._uuids: dict[int, str] = {}  # index -> uuid, to name a device that does not answer any more
        self._handles: dict[int, str] = {}  # address of a handle -> uuid

    @property
    def is_open(self) -> bool:
        return self._api is not None

    def open(self) -> None:
        """Load the driver's library and connect to the driver."""
        try:
            import pynvml
        except ModuleNotFoundError as exc:
            raise NoDriver(f"the package nvidia-ml-py is not installed: {install_hint('gpu')}") from exc
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as exc:
            raise NoDriver(f"the NVIDIA driver cannot be asked ({exc})") from exc
        self._api = pynvml

    def close(self) -> None:
        """Disconnect; a driver that went away already is no error. The uuids stay known."""
        api = self._api
        if api is None:
            return
        self._forget_events()
        self._handles.clear()
        self._api = None
        try:
            api.nvmlShutdown()
        except api.NVMLError:
            return

    def read(self) -> MachineReading:
        """Read every device once, and the events since the last reading."""
        if self._api is None:
            raise NoDriver("the NVIDIA driver is not open")
        readings: list[Reading] = []
        lost: dict[str, str] = {}
        unnamed: list[str] = []
        try:
            driver = str(self._optional(self._api.nvmlSystemGetDriverVersion) or "")
            count = int(self._required(self._api.nvmlDeviceGetCount))
        except _Trouble as exc:
            raise NoDriver(f"the NVIDIA driver does not count its GPUs ({exc})") from exc
        for index in range(count):
            try:
                readings += self._look(index)
            except _Trouble as exc:
                if index in self._uuids:
                    lost[self._uuids[index]] = str(exc)
                    self._blind.pop(self._uuids[index], None)  # a reset forgets the registration for events
                else:
                    unnamed.append(f"GPU {index}: {exc}")
        events, blind = self._drain()
        if blind:
            readings = [replace(one, blind=blind) for one in readings]
        return MachineReading(
            driver=driver, readings=tuple(readings), events=events, lost=lost, unnamed=tuple(unnamed)
        )

    def _look(self, index: int) -> list[Reading]:
        """The device, or its slices after it when it is split."""
        api = self._api
        handle = self._required(api.nvmlDeviceGetHandleByIndex, index)
        uuid = str(self._required(api.nvmlDeviceGetUUID, handle))
        self._uuids[index] = uuid
        self._handles[_address(handle)] = uuid
        mode = self._optional(api.nvmlDeviceGetMigMode, handle)
        total_mib, reserved_mib, used_mib = self._memory(handle)
        gpu = Reading(
            uuid=uuid,
            index=index,
            name=str(self._required(api.nvmlDeviceGetName, handle)),
            total_mib=total_mib,
            reserved_mib=reserved_mib,
            used_mib=used_mib,
            split=bool(mode and mode[0]),
            processes=self._processes(handle),
            utilisation_percent=self._number(api.nvmlDeviceGetUtilizationRates, handle, of="gpu"),
            temperature_c=self._number(api.nvmlDeviceGetTemperature, handle, 0),
            ecc_errors=self._number(api.nvmlDeviceGetTotalEccErrors, handle, UNCORRECTED, VOLATILE),
            recovery=self._recovery(handle),
            blind=self._watch(uuid, handle),
        )
        return [gpu, *(self._slices(handle, gpu) if gpu.split else [])]

    def _slices(self, parent: Any, gpu: Reading) -> list[Reading]:
        api, found = self._api, []
        for slot in range(int(self._optional(api.nvmlDeviceGetMaxMigDeviceCount, parent) or 0)):
            try:
                handle = api.nvmlDeviceGetMigDeviceHandleByIndex(parent, slot)
                uuid = str(api.nvmlDeviceGetUUID(handle))
                name = str(api.nvmlDeviceGetName(handle))
                total_mib, reserved_mib, used_mib = self._memory(handle)
            except api.NVMLError as exc:
                self._sort(exc)
                if exc.value in (NOT_FOUND, INVALID_ARGUMENT):
                    continue  # an empty slot, or the slice was destroyed while we looked
                raise _Trouble(str(exc)) from exc
            self._handles[_address(handle)] = gpu.uuid
            found.append(
                Reading(
                    uuid=uuid,
                    index=gpu.index,
                    name=name,
                    total_mib=total_mib,
                    reserved_mib=reserved_mib,
                    used_mib=used_mib,
                    parent=gpu.uuid,
                    processes=self._processes_of_slice(handle, parent),
                    utilisation_percent=self._number(api.nvmlDeviceGetUtilizationRates, handle, of="gpu"),
                    temperature_c=gpu.temperature_c,
                )
            )
        return found

    def _memory(self, handle: Any) -> tuple[int, int, int]:
        """Total, reserved, used.

        Version 1 counts the driver's reserve as used; then the headroom has to cover it.
        """
        api = self._api
        version = getattr(api, "nvmlMemory_v2", None)
        info = None
        if version is not None:
            try:
                info = api.nvmlDeviceGetMemoryInfo(handle, version=version)
            except api.NVMLError as exc:
                self._sort(exc)
        if info is None:
            info = self._required(api.nvmlDeviceGetMemoryInfo, handle)
        return info.total // MIB, _up(getattr(info, "reserved", 0)), _up(info.used)

    def _processes(self, handle: Any) -> tuple[Process, ...] | None:
        return self._listed(handle, lambda _one: True)

    def _processes_of_slice(self, handle: Any, parent: Any) -> tuple[Process, ...] | None:
        """Its own where the driver tells them, else those of the whole GPU that may be in it."""
        processes = self._processes(handle)
        if processes is not None:
            return processes
        instance = self._number(self._api.nvmlDeviceGetGpuInstanceId, handle)
        anywhere = (None, ANY_INSTANCE)
        return self._listed(
            parent, lambda one: instance in anywhere or one.gpuInstanceId in (instance, ANY_INSTANCE)
        )

    def _listed(self, handle: Any, wanted: Callable[[Any], bool]) -> tuple[Process, ...] | None:
        """Compute processes, and clients of an MPS server, which stand in a list of their own.

        By the names with a version: without one, pynvml makes of an old driver an error that is no NVMLError.
        """
        api = self._api
        compute = self._optional(api.nvmlDeviceGetComputeRunningProcesses_v3, handle)
        if compute is None:
            return None
        clients = self._optional(api.nvmlDeviceGetMPSComputeRunningProcesses_v3, handle) or []
        used: dict[int, int | None] = {}
        for found in (compute, clients):
            used |= _used(one for one in found if wanted(one))
        return tuple(Process(pid=pid, used_mib=mib) for pid, mib in sorted(used.items()))

    def _recovery(self, handle: Any) -> int | None:
        values = self._optional(self._api.nvmlDeviceGetFieldValues, handle, [RECOVERY_FIELD])
        if values is None or values[0].nvmlReturn != 0:
            return None
        return int(values[0].value.uiVal)

    def _watch(self, uuid: str, handle: Any) -> str:
        """Register for error events, once; "" when they will come or when this device has none."""
        if self._blind.get(uuid) == "":
            return ""
        api, why = self._api, ""
        try:
            if self._events is None:
                self._events = api.nvmlEventSetCreate()
            wanted = DOUBLE_BIT_EVENT | XID_EVENT
            supported = self._optional(api.nvmlDeviceGetSupportedEventTypes, handle)
            if supported is not None:
                wanted &= int(supported)
            if wanted:
                api.nvmlDeviceRegisterEvents(handle, wanted, self._events)
        except api.NVMLError as exc:
            self._sort(exc)
            why = "" if exc.value in OLD else str(exc)
        self._blind[uuid] = why
        return why

    def _drain(self) -> tuple[tuple[DriverEvent, ...], str]:
        """The events, and "" or why some may have been missed."""
        api = self._api
        found: list[DriverEvent] = []
        while self._events is not None and len(found) < MOST_EVENTS:
            try:
                data = api.nvmlEventSetWait_v2(self._events, WAIT_MS)
            except api.NVMLError as exc:
                if exc.value in NO_DRIVER:
                    raise NoDriver(f"the NVIDIA driver went away ({exc})") from exc
                if exc.value == TIMEOUT or exc.value in OLD:
                    break
                self._forget_events()  # and register anew at the next reading
                # A device that is lost shows it in its own reading, and the others are well.
                return tuple(found), "" if exc.value in LOST else str(exc)
            kind = int(data.eventType)
            if kind & (XID_EVENT | DOUBLE_BIT_EVENT):
                xid = int(data.eventData) if kind & XID_EVENT else None
                found.append(DriverEvent(uuid=self._whose(data.device), xid=xid))
        return tuple(found), ""

    def _forget_events(self) -> None:
        events, self._events = self._events, None
        self._blind.clear()
        if events is not None:
            try:
                self._api.nvmlEventSetFree(events)
            except self._api.NVMLError:
                return

    def _whose(self, handle: Any) -> str | None:
        """The uuid of an event's device, by address first: a lost device does not answer."""
        if not handle:
            return None
        uuid = self._handles.get(_address(handle))
        try:
            return uuid or str(self._api.nvmlDeviceGetUUID(handle))
        except self._api.NVMLError:
            return None

    def _required(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except self._api.NVMLError as exc:
            self._sort(exc)
            raise _Trouble(str(exc)) from exc

    def _optional(self, call: Callable[..., Any], *args: Any) -> Any:
        """None for a value that the driver does not give, too old or not permitted."""
        try:
            return call(*args)
        except self._api.NVMLError as exc:
            self._sort(exc)
            return None

    def _number(self, call: Callable[..., Any], *args: Any, of: str = "") -> int | None:
        value = self._optional(call, *args)
        return None if value is None else int(getattr(value, of) if of else value)

    def _sort(self, exc: Any) -> None:
        """Raises if the failure concerns the device or the driver, not only one call."""
        if exc.value in NO_DRIVER:
            raise NoDriver(f"the NVIDIA driver went away ({exc})") from exc
        if exc.value in LOST:
            raise _Trouble(str(exc)) from exc


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def _up(size: int) -> int:
    return -(-size // MIB)


def _used(found: Iterable[Any]) -> dict[int, int | None]:
    """MiB by pid; a process with several instances is listed for each. None: the driver does not say."""
    used: dict[int, int | None] = {}
    for one in found:
        mib = None if one.usedGpuMemory is None else _up(one.usedGpuMemory)
        before = used.get(one.pid)
        used[one.pid] = mib if before is None else before + (mib or 0)
    return used
