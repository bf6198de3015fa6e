"""A machine with GPUs for tests: the real nvidia-ml-py on a small driver library, built with cc once per
session.

    driver = Driver(tmp_path)                      skips the test where there is no C compiler
    driver.devices(Gpu("GPU-a"), Gpu("GPU-b", total=24_576, slices=(Gpu("MIG-1", total=4_864),)))
    driver.use(monkeypatch)                        this process and those it starts see these GPUs
    subprocess.run(..., env=driver.environ())      or: only a child does

and while programs look at it:

    driver.change("GPU-a", used=900, processes={1234: 600, 77: None})     any field of Gpu
    driver.xid("GPU-a", 79)    driver.xid(None, 79)    the event is delivered once; None: it names no device
    driver.lose("GPU-a")       driver.find("GPU-a")    off the bus, and back
    driver.error("nvmlDeviceGetUtilizationRates", NO_PERMISSION, uuid="GPU-a")   # mend() undoes these
    driver.missing("nvmlDeviceGetMemoryInfo_v2")       an old driver
    driver.hang("nvmlInitWithFlags", seconds=60)       a stuck one

The control file is replaced in one step, so a reader sees the old machine or the new one.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_nvml") / "fake_nvml.c"
NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, GPU_IS_LOST, UNKNOWN = 3, 4, 9, 15, 999
XID = 0x8  # nvmlEventTypeXidCriticalError


@dataclass(frozen=True, slots=True)
class Gpu:
    """One whole GPU, or a MIG slice in `slices`. Memory in MiB; -1 in `ecc` and `recovery`: not supported.

    `processes`: pid to MiB, None where the driver does not say how much.
    """

    uuid: str
    name: str = "NVIDIA Test 24GB"
    total: int = 24_576
    reserved: int = 512
    used: int = 0
    utilisation: int = 0
    temperature: int = 40
    ecc: int = 0
    recovery: int = 0
    processes: Mapping[int, int | None] = field(default_factory=dict)
    clients: Mapping[int, int | None] = field(default_factory=dict)  # of an MPS server
    slices: tuple["Gpu", ...] = ()
    mig: bool = False  # split into slices, though there may be none yet
    lost: bool = False

    def lines(self, word: str = "device") -> list[str]:
        """What the library reads of it."""
        other = ("uuid", "processes", "clients", "slices", "mig", "lost")
        plain = [f.name for f in fields(self) if f.name not in other]
        return [
            f"{word} {self.uuid}",
            *[f"{name} {getattr(self, name)}" for name in plain],
            *[f"process {pid} {-1 if used is None else used}" for pid, used in self.processes.items()],
            *[f"client {pid} {-1 if used is None else used}" for pid, used in self.clients.items()],
            *(["lost"] if self.lost else []),
            *(["mig 1"] if self.slices or self.mig else []),
        ]


@functools.cache
def library() -> Path:
    """libnvidia-ml.so.1 in a directory of its own. Skips the test when it cannot be built."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the driver library for tests with")
    path = Path(tempfile.mkdtemp(prefix="logweir-fake-nvml-")) / "libnvidia-ml.so.1"
    flags = ["-std=c11", "-Wall", "-Wextra", "-O1", "-shared", "-fPIC", "-pthread"]
    # glibc finds a library that is loaded already by its SONAME: so pynvml's own CDLL gets ours.
    command = [compiler, *flags, f"-Wl,-soname,{path.name}", "-o", str(path), str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return path


class Driver:
    """The machine of one test."""

    def __init__(self, folder: Path) -> None:
        self.library = library()
        self.control = folder / "fake_nvml.txt"
        self.gpus: dict[str, Gpu] = {}
        self.rules: list[tuple[str, str]] = []  # uuid or "", line
        self.events: list[str] = []
        self.write()

    def devices(self, *gpus: Gpu) -> None:
        """Replace all GPUs."""
        self.gpus = {gpu.uuid: gpu for gpu in gpus}
        self.write()

    def change(self, uuid: str, **changes: object) -> None:
        """Give a GPU or a slice other values."""
        for whole in list(self.gpus.values()):
            if whole.uuid == uuid:
                self.gpus[uuid] = replace(whole, **changes)  # type: ignore[arg-type]
            elif any(one.uuid == uuid for one in whole.slices):
                slices = [replace(s, **changes) if s.uuid == uuid else s for s in whole.slices]  # type: ignore[arg-type]
                self.gpus[whole.uuid] = replace(whole, slices=tuple(slices))
        self.write()

    def lose(self, uuid: str) -> None:
        """It falls off the bus: every call on it fails."""
        self.change(uuid, lost=True)

    def find(self, uuid: str) -> None:
        """It is back."""
        self.change(uuid, lost=False)

    def xid(self, uuid: str | None, code: int) -> None:
        """An XID event for every program that waits for events now."""
        self.event(uuid, XID, code)

    def event(self, uuid: str | None, kind: int, data: int) -> None:
        """Any NVML event."""
        self.events.append(f"event {len(self.events) + 1} {uuid or '-'} {kind} {data}")
        self.write()

    def error(self, function: str, code: int, *, uuid: str = "") -> None:
        """The function fails, on one device or always."""
        self.rule(uuid, f"error {function} {code}")

    def hang(self, function: str, *, seconds: float, uuid: str = "") -> None:
        """The function answers only after so long."""
        self.rule(uuid, f"hang {function} {seconds}")

    def missing(self, *functions: str) -> None:
        """The driver is too old to have these."""
        for function in functions:
            self.rule("", f"missing {function}")

    def mend(self) -> None:
        """No function fails, hangs or is missing any more."""
        self.rules.clear()
        self.write()

    def rule(self, uuid: str, line: str) -> None:
        """One more way to fail."""
        self.rules.append((uuid, line))
        self.write()

    def environ(self) -> dict[str, str]:
        """The environment of a child that sees this machine."""
        return {**os.environ, "LD_LIBRARY_PATH": str(self.library.parent), "FAKE_NVML": str(self.control)}

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let this process and its children see this machine, until the test ends."""
        import pynvml

        for name in ("LD_LIBRARY_PATH", "FAKE_NVML"):
            monkeypatch.setenv(name, self.environ()[name])
        monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(self.library)))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})

    def write(self) -> None:
        """Replace the control file."""
        rules = {uuid: [line for of, line in self.rules if of == uuid] for uuid, _ in self.rules}
        lines = ["driver 570.86.10", *rules.get("", []), *self.events]
        for gpu in self.gpus.values():
            lines += [*gpu.lines(), *rules.get(gpu.uuid, [])]
            for one in gpu.slices:
                lines += [*one.lines("slice"), *rules.get(one.uuid, [])]
        fresh = self.control.with_suffix(".new")
        fresh.write_text("\n".join(lines) + "\n", encoding="utf-8")
        fresh.replace(self.control)
