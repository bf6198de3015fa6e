"""One reading of the GPUs of a machine, in the words of its driver; inventory.py makes devices of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.gpu.values import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverEvent:
    """An error event of the driver.

    `uuid` None: of an unnamed device; `xid` None: an uncorrectable memory error.
    """

    uuid: str | None
    xid: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One whole GPU, or a MIG slice of `parent`. None: the driver does not say.

    `split`: MIG is on, so only the slices can be used. `ecc_errors`: uncorrectable ones since the driver was
    loaded. `recovery`: the action that NVML asks for (NVML_GPU_RECOVERY_ACTION), 0 none. `blind`: why its
    error events cannot be watched; "" also where the device has none.
    """

    uuid: str
    index: int
    name: str
    total_mib: int
    reserved_mib: int
    used_mib: int
    parent: str = ""
    split: bool = False
    processes: tuple[Process, ...] | None = None
    utilisation_percent: int | None = None
    temperature_c: int | None = None
    ecc_errors: int | None = None
    recovery: int | None = None
    blind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReading:
    """One reading of the machine.

    `lost`: uuid -> why it gave no reading; `unnamed`: failures before a uuid was known.
    """

    driver: str = ""
    readings: tuple[Reading, ...] = ()
    events: tuple[DriverEvent, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    unnamed: tuple[str, ...] = ()
