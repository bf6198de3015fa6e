"""Beginning CUDA: the logic against a stand-in for torch.cuda, and once for real where there is a GPU."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.errors import BadInput, DeviceFailed
from pipeline.gpu.node import cuda as device

MIB = 1 << 20


class Cuda:
    """What device.py asks of torch.cuda, with two devices of 1,000 and 2,000 MiB."""

    OutOfMemoryError = torch.cuda.OutOfMemoryError

    def __init__(self) -> None:
        self.uuids: list[str | None] = ["aaaa-1", "bbbb-2"]
        self.totals = [1_000 * MIB, 2_000 * MIB]
        self.limits: dict[int, float] = {}
        self.current: int | None = None
        self.obeys = True
        self.emptied = 0

    def is_available(self) -> bool:
        return bool(self.uuids)

    def device_count(self) -> int:
        return len(self.uuids)

    def get_device_properties(self, index: int) -> Any:
        uuid = self.uuids[index]
        return SimpleNamespace(uuid=uuid) if uuid is not None else SimpleNamespace()

    def set_device(self, index: int) -> None:
        self.current = index

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return self.totals[index] // 2, self.totals[index]

    def set_per_process_memory_fraction(self, share: float, index: int) -> None:
        self.limits[index] = share

    def get_per_process_memory_fraction(self, index: int) -> float:
        return self.limits[index] if self.obeys else 1.0

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before

    def empty_cache(self) -> None:
        assert self.current in self.limits, (
            "in a thread that never chose a device, torch would begin on the first one"
        )
        self.emptied += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: None)
    monkeypatch.setattr(device, "_here", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_a_process_begins_on_the_device_of_that_uuid_with_the_leased_memory(cuda: Cuda) -> None:
    assert device.begin("GPU-bbbb-2", memory_mib=700, context_mib=200) == "cuda:1"
    assert (cuda.current, cuda.limits) == (1, {1: 500 / 2_000})
    assert device.started_on() == "GPU-bbbb-2"


@pytest.mark.parametrize(("gives", "proved"), [(7, True), (8, True), (9, False), (100, False), (2, False)])
def test_a_limit_is_proved_by_what_tensors_get(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, gives: int, proved: bool
) -> None:
    """`gives`: pieces of 64 MiB until memory is out; the lease leaves room for eight."""
    left = [gives + 1]  # begin() takes one

    def empty(*_: Any, **__: Any) -> None:
        if not left[0]:
            raise torch.cuda.OutOfMemoryError("out of memory")
        left[0] -= 1

    monkeypatch.setattr(torch, "empty", empty)
    if proved:
        assert device.prove_limit("GPU-bbbb-2", memory_mib=712, context_mib=200) == 64 * gives
        assert cuda.emptied == 1
    else:
        with pytest.raises(DeviceFailed, match="under a lease that leaves them 512 MiB"):
            device.prove_limit("GPU-bbbb-2", memory_mib=712, context_mib=200)


def test_without_a_lease_size_there_is_no_limit(cuda: Cuda) -> None:
    device.begin("GPU-aaaa-1", memory_mib=None, context_mib=200)
    assert cuda.limits == {0: 1.0}


def test_a_limit_above_what_the_process_sees_is_no_limit(cuda: Cuda) -> None:
    # Under MPS the device seems as small as the limit: the fraction is of that, not once more of the whole.
    device.begin("GPU-aaaa-1", memory_mib=1_200, context_mib=200)
    assert cuda.limits == {0: 1.0}


def test_a_context_stays_where_it_began(cuda: Cuda) -> None:
    device.begin("GPU-aaaa-1", memory_mib=600, context_mib=100)
    assert device.begin("GPU-aaaa-1", memory_mib=300, context_mib=100) == "cuda:0"
    assert cuda.limits == {0: 0.2}
    with pytest.raises(DeviceFailed, match="begun on GPU-aaaa-1"):
        device.begin("GPU-bbbb-2", memory_mib=600, context_mib=100)


def test_a_limit_that_did_not_take_is_an_error(cuda: Cuda) -> None:
    cuda.obeys = False
    with pytest.raises(DeviceFailed, match=r"1\.0000 of it instead of 0\.5000"):
        device.begin("GPU-aaaa-1", memory_mib=600, context_mib=100)


def test_a_torch_that_cannot_be_asked_is_tried(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cuda, "get_per_process_memory_fraction", None)

    def refuse(size: int, **_: Any) -> None:
        if size > 600 * MIB:
            raise torch.OutOfMemoryError("too much")

    with pytest.raises(DeviceFailed, match="not in force"):
        device.begin("GPU-aaaa-1", memory_mib=600, context_mib=100)
    monkeypatch.setattr(torch, "empty", refuse)
    assert device.begin("GPU-aaaa-1", memory_mib=700, context_mib=100) == "cuda:0"


def test_a_slice_whose_uuid_torch_does_not_tell_is_found_by_its_place(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.uuids = ["parent", None]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-zz, MIG-1")
    assert device.begin("MIG-1", memory_mib=None, context_mib=0) == "cuda:1"


def test_a_slice_is_made_the_only_device_that_the_process_sees(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that it is put back
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    cuda.uuids = ["parent"]
    assert device.begin("MIG-2", memory_mib=None, context_mib=0) == "cuda:0"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-2"


def test_a_device_that_the_process_does_not_see_is_named_with_what_it_sees(cuda: Cuda) -> None:
    with pytest.raises(DeviceFailed, match="does not see GPU-x, only aaaa-1, bbbb-2"):
        device.begin("GPU-x", memory_mib=None, context_mib=0)
    assert device.started_on() is None


def test_a_device_that_says_nonsense_about_its_memory_is_not_used(cuda: Cuda) -> None:
    cuda.totals = [0, 0]
    with pytest.raises(DeviceFailed, match="0 of 0 bytes"):
        device.begin("GPU-aaaa-1", memory_mib=600, context_mib=100)


def test_a_lease_that_is_all_context_is_bad_input(cuda: Cuda) -> None:
    with pytest.raises(BadInput, match="gpu_context_mib"):
        device.begin("GPU-aaaa-1", memory_mib=100, context_mib=100)


def test_an_error_of_cuda_is_one_sentence(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(index: int) -> None:
        raise RuntimeError("CUDA error: device is lost\nfor debugging consider ...")

    monkeypatch.setattr(cuda, "set_device", lost)
    with pytest.raises(DeviceFailed, match=r"GPU-aaaa-1 \(CUDA error: device is lost\)"):
        device.begin("GPU-aaaa-1", memory_mib=600, context_mib=100)


@pytest.mark.long
def test_unloading_never_raises(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    device.unload()
    assert cuda.emptied == 0  # nothing was begun
    device.begin("GPU-aaaa-1", memory_mib=600, context_mib=100)
    cuda.current = None  # another thread
    device.unload()
    assert cuda.emptied == 1

    def fails() -> None:
        raise RuntimeError("device is lost")

    monkeypatch.setattr(cuda, "empty_cache", fails)
    device.unload()


def test_without_cuda_there_is_one_clear_error(cuda: Cuda) -> None:
    cuda.uuids = []
    with pytest.raises(DeviceFailed, match="no CUDA device is visible"):
        device.begin("GPU-aaaa-1", memory_mib=600, context_mib=100)


def test_importing_loads_no_torch() -> None:
    code = "import sys, pipeline.gpu.node.cuda as d, pipeline.gpu.node.enforce; d.unload(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


REAL = """
import torch
from pipeline.gpu.node import cuda as device
uuid = "GPU-" + str(torch.cuda.get_device_properties(0).uuid)
name = device.begin(uuid, memory_mib=1536, context_mib=512)
limit = torch.cuda.get_per_process_memory_fraction(0) * torch.cuda.mem_get_info(0)[1] / 2**20
assert 1020 < limit <= 1024.1, limit
torch.empty(900 * 2**20, dtype=torch.uint8, device=name)
device.unload()
try:
    torch.empty(1100 * 2**20, dtype=torch.uint8, device=name)
except torch.cuda.OutOfMemoryError:
    print("held")
"""


# Not torch.cuda.is_available(): it would start CUDA's driver in the process that runs all tests.
@pytest.mark.skipif(
    torch.version.cuda is None or not Path("/dev/nvidiactl").exists(),
    reason="no GPU, or a torch without CUDA",
)
def test_on_a_real_device_the_limit_is_held() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REAL], capture_output=True, text=True, check=False, timeout=110
    )
    assert done.stdout.strip() == "held", done.stderr
