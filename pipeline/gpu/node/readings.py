"""What one look at the GPUs of a machine gives, in the words of its driver. inventory.py makes devices of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.gpu.values import Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What the driver told without being asked. `uuid` None: it did not say of which device; `xid` None: an
    uncorrectable memory error."""

    uuid: str | None
    xid: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One whole GPU, or a MIG slice of `parent`. None: the driver does not tell.

    `split`: MIG is on, so that only its slices can be used. `ecc_errors`: uncorrectable ones since the driver was
    loaded. `recovery`: what NVML asks an operator to do (NVML_GPU_RECOVERY_ACTION), 0 nothing. `blind`: why its error
    events cannot be watched; "" also where it has none.
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
class Seen:
    """One look at the whole machine. `lost`: uuid -> why it gave no reading; `unnamed`: what failed before it had
    told its uuid."""

    driver: str = ""
    readings: tuple[Reading, ...] = ()
    events: tuple[Event, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    unnamed: tuple[str, ...] = ()
