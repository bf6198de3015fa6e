"""The real nvidia-ml-py on a driver library made for tests."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_nvml_driver import (
    DRIVER_NOT_LOADED,
    GPU_IS_LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    Driver,
    Gpu,
)

from pipeline.errors import NoDriver
from pipeline.gpu.node import probe
from pipeline.gpu.node.inventory import NO_SLICES, devices, schedulable_mib
from pipeline.gpu.node.nvml import Nvml
from pipeline.gpu.node.probe import has_devices, shown_devices
from pipeline.gpu.node.readings import DriverEvent, MachineReading, Reading
from pipeline.gpu.values import Process


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A machine with two GPUs that this process sees."""
    driver = Driver(tmp_path)
    driver.devices(
        Gpu("GPU-a", used=700, processes={77: 600, 12: None}, utilisation=35, temperature=61), Gpu("GPU-b")
    )
    driver.use(monkeypatch)
    return driver


@pytest.fixture
def opened(driver: Driver) -> Nvml:
    """Connected to it."""
    opened = Nvml()
    opened.open()
    return opened


def by_uuid(seen: MachineReading) -> dict[str, Reading]:
    return {one.uuid: one for one in seen.readings}


def test_a_look_tells_what_the_driver_knows_in_whole_mib(opened: Nvml) -> None:
    seen = opened.read()
    assert seen.driver == "570.86.10"
    assert by_uuid(seen)["GPU-a"] == Reading(
        uuid="GPU-a",
        index=0,
        name="NVIDIA Test 24GB",
        total_mib=24_576,
        reserved_mib=512,
        used_mib=700,
        processes=(Process(pid=12), Process(pid=77, used_mib=600)),
        utilisation_percent=35,
        temperature_c=61,
        ecc_errors=0,
        recovery=0,
    )


def test_every_look_is_a_fresh_one(driver: Driver, opened: Nvml) -> None:
    opened.read()
    driver.change("GPU-b", used=9_000, processes={5: 8_000}, ecc=2, recovery=1)
    after = by_uuid(opened.read())["GPU-b"]
    assert (after.used_mib, after.processes, after.ecc_errors, after.recovery) == (
        9_000,
        (Process(pid=5, used_mib=8_000),),
        2,
        1,
    )


def test_what_an_old_driver_does_not_know_is_none_and_no_error(driver: Driver, opened: Nvml) -> None:
    driver.missing(
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetMigMode",
        "nvmlEventSetCreate",
        "nvmlSystemGetDriverVersion",
        "nvmlDeviceGetSupportedEventTypes",
    )
    driver.error("nvmlDeviceGetComputeRunningProcesses_v3", NO_PERMISSION)
    seen = opened.read()
    one = by_uuid(seen)["GPU-a"]
    assert (seen.driver, one.processes, one.utilisation_percent, one.temperature_c) == ("", None, None, None)
    assert (one.ecc_errors, one.recovery, one.split, one.blind) == (None, None, False, "")


def test_without_the_second_version_of_memory_info_the_first_one_serves(driver: Driver, opened: Nvml) -> None:
    driver.missing("nvmlDeviceGetMemoryInfo_v2")
    one = by_uuid(opened.read())["GPU-a"]
    assert (one.total_mib, one.reserved_mib, one.used_mib) == (24_576, 0, 1_212)


def test_a_lost_device_is_named_and_the_others_are_read_on(driver: Driver, opened: Nvml) -> None:
    opened.read()
    driver.lose("GPU-a")
    seen = opened.read()
    assert list(by_uuid(seen)) == ["GPU-b"]
    assert list(seen.lost) == ["GPU-a"]
    assert "lost" in seen.lost["GPU-a"].lower()
    driver.find("GPU-a")
    assert set(by_uuid(opened.read())) == {"GPU-a", "GPU-b"}


def test_a_device_that_was_lost_before_it_told_its_uuid_is_counted_by_its_index(
    driver: Driver, opened: Nvml
) -> None:
    driver.lose("GPU-b")
    seen = opened.read()
    assert seen.lost == {}
    assert [text.split(":")[0] for text in seen.unnamed] == ["GPU 1"]


def test_a_device_that_is_lost_in_the_middle_of_a_look_counts_as_lost(driver: Driver, opened: Nvml) -> None:
    opened.read()
    driver.error("nvmlDeviceGetUtilizationRates", GPU_IS_LOST, uuid="GPU-b")
    seen = opened.read()
    assert (list(by_uuid(seen)), list(seen.lost)) == (["GPU-a"], ["GPU-b"])


def test_an_xid_is_told_once_with_its_device(driver: Driver, opened: Nvml) -> None:
    assert opened.read().events == ()
    driver.xid("GPU-b", 79)
    driver.xid(None, 48)
    assert opened.read().events == (DriverEvent(uuid="GPU-b", xid=79), DriverEvent(uuid=None, xid=48))
    assert opened.read().events == ()


def test_an_xid_of_a_device_that_is_lost_with_it_is_still_told_with_its_name(
    driver: Driver, opened: Nvml
) -> None:
    opened.read()
    driver.xid("GPU-b", 79)
    driver.lose("GPU-b")
    assert opened.read().events == (DriverEvent(uuid="GPU-b", xid=79),)


def test_a_device_without_error_events_is_read_all_the_same(driver: Driver, opened: Nvml) -> None:
    driver.error("nvmlDeviceRegisterEvents", NOT_SUPPORTED, uuid="GPU-b")
    assert by_uuid(opened.read())["GPU-b"].blind == ""


def test_events_that_cannot_be_registered_are_said_and_tried_again(driver: Driver, opened: Nvml) -> None:
    driver.error("nvmlDeviceRegisterEvents", UNKNOWN, uuid="GPU-b")
    first = by_uuid(opened.read())
    assert (first["GPU-a"].blind, bool(first["GPU-b"].blind)) == ("", True)
    driver.mend()
    assert by_uuid(opened.read())["GPU-b"].blind == ""
    driver.xid("GPU-b", 79)
    assert opened.read().events == (DriverEvent(uuid="GPU-b", xid=79),)


def test_when_waiting_for_events_fails_every_device_says_so_once(driver: Driver, opened: Nvml) -> None:
    opened.read()
    driver.error("nvmlEventSetWait_v2", UNKNOWN)
    assert all(one.blind for one in opened.read().readings)
    driver.mend()
    assert not any(one.blind for one in opened.read().readings)
    driver.xid("GPU-a", 79)
    assert opened.read().events == (DriverEvent(uuid="GPU-a", xid=79),)


def test_a_driver_that_goes_away_is_one_error_and_opens_again_later(driver: Driver, opened: Nvml) -> None:
    opened.read()
    driver.error("nvmlDeviceGetCount_v2", DRIVER_NOT_LOADED)
    driver.error("nvmlShutdown", DRIVER_NOT_LOADED)
    with pytest.raises(NoDriver, match="went away"):
        opened.read()
    opened.close()
    driver.error("nvmlInitWithFlags", DRIVER_NOT_LOADED)
    with pytest.raises(NoDriver, match="cannot be asked"):
        opened.open()
    assert not opened.is_open
    driver.mend()
    opened.open()
    assert set(by_uuid(opened.read())) == {"GPU-a", "GPU-b"}


def test_slices_of_a_split_gpu_are_devices_of_their_own(driver: Driver, opened: Nvml) -> None:
    slices = (
        Gpu("MIG-1", name="NVIDIA Test MIG 1g.5gb", total=4_864, reserved=32, processes={9: 50}),
        Gpu("MIG-2", total=9_856),
    )
    driver.devices(Gpu("GPU-a", slices=slices, temperature=70), Gpu("GPU-b", mig=True))
    seen = opened.read()
    found = devices(seen.readings, node="n", headroom_mib=100, why={})
    assert [(d.uuid, d.parent, d.schedulable_mib, d.usable) for d in found] == [
        ("MIG-1", "GPU-a", 4_732, True),
        ("MIG-2", "GPU-a", 9_244, True),
        ("GPU-b", "", 23_964, False),
    ]
    assert found[0].processes == (Process(pid=9, used_mib=50),)
    assert (found[0].temperature_c, found[0].utilisation_percent) == (70, None)
    assert found[2].why == NO_SLICES


def test_what_is_wrong_with_a_gpu_is_wrong_with_all_its_slices(driver: Driver, opened: Nvml) -> None:
    driver.devices(Gpu("GPU-a", slices=(Gpu("MIG-1"), Gpu("MIG-2"), Gpu("MIG-3"))), Gpu("GPU-b"))
    found = devices(opened.read().readings, node="n", headroom_mib=0, why={"GPU-a": "XID 79"})
    assert [d.why for d in found] == ["XID 79", "XID 79", "XID 79", ""]


def test_a_slice_whose_processes_are_not_told_has_those_of_its_gpu(driver: Driver, opened: Nvml) -> None:
    slices = (Gpu("MIG-1", processes={9: 50}), Gpu("MIG-2", processes={8: 40}))
    driver.devices(Gpu("GPU-a", slices=slices, processes={7: 30}))
    driver.error("nvmlDeviceGetComputeRunningProcesses_v3", NOT_SUPPORTED, uuid="MIG-2")
    in_it_or_nobody_knows = (Process(pid=7, used_mib=30), Process(pid=8, used_mib=40))
    assert by_uuid(opened.read())["MIG-2"].processes == in_it_or_nobody_knows
    driver.missing("nvmlDeviceGetGpuInstanceId")
    assert len(by_uuid(opened.read())["MIG-2"].processes or ()) == 3


def test_clients_of_an_mps_server_are_processes_too(driver: Driver, opened: Nvml) -> None:
    driver.change("GPU-b", processes={1: 30}, clients={2: 500, 3: None})
    expected = (Process(pid=1, used_mib=30), Process(pid=2, used_mib=500), Process(pid=3))
    assert by_uuid(opened.read())["GPU-b"].processes == expected


def test_a_driver_that_is_too_old_to_list_processes_lists_none(driver: Driver, opened: Nvml) -> None:
    driver.missing("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3")
    assert by_uuid(opened.read())["GPU-a"].processes is None


@pytest.mark.parametrize(("reserved", "headroom", "left"), [(512, 256, 232), (0, 0, 1000), (900, 200, 0)])
def test_schedulable_is_total_less_reserved_less_headroom_and_never_negative(
    reserved: int, headroom: int, left: int
) -> None:
    assert schedulable_mib(1000, reserved, headroom) == left


def test_a_machine_with_a_gpu_has_devices(driver: Driver) -> None:
    assert has_devices() is True


def test_slices_are_counted_in_place_of_their_gpu(driver: Driver) -> None:
    slices = (Gpu("MIG-1", total=4_864), Gpu("MIG-2", total=4_864))
    driver.devices(Gpu("GPU-a", slices=slices), Gpu("GPU-b"), Gpu("GPU-c", mig=True))
    assert shown_devices() == 3
    driver.devices(Gpu("GPU-c", mig=True))
    assert (shown_devices(), has_devices()) == (0, True), "its slices may come later"


def test_a_machine_without_gpus_has_none(driver: Driver) -> None:
    driver.devices()
    assert has_devices() is False


def test_a_driver_that_is_not_loaded_has_no_devices(driver: Driver) -> None:
    driver.error("nvmlInitWithFlags", DRIVER_NOT_LOADED)
    assert has_devices() is False


NO_LIBRARY = """
def absent(name):
    raise OSError(name)

import pynvml
pynvml.CDLL = absent
"""


def test_a_machine_without_the_library_has_no_devices(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PROBE", NO_LIBRARY + probe.PROBE)
    assert has_devices() is False


def test_a_driver_that_hangs_has_no_devices_and_hangs_nobody(driver: Driver) -> None:
    driver.hang("nvmlInitWithFlags", seconds=60)
    began = time.monotonic()
    assert has_devices(0.5) is False
    assert time.monotonic() - began < 5


def test_a_probe_that_cannot_be_started_has_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert has_devices() is False


def test_importing_the_module_loads_no_pynvml() -> None:
    code = "import sys, pipeline.gpu.node.nvml, pipeline.gpu.node.agent; print('pynvml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
