"""What a program is started with, by kind of lease and device."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import BadInput
from pipeline.gpu.node import enforce
from pipeline.gpu.node.mps import Daemon
from pipeline.gpu.values import Device, LeaseMode, LeasePart, LeaseState, Need, PoolLease
from pipeline.settings import Settings

CONTEXT = 512
SETTINGS = Settings(gpu_context_mib=CONTEXT)


def a_device(uuid: str = "GPU-a", *, total_mib: int = 16_384, node: str = "n1", parent: str = "") -> Device:
    return Device(
        uuid=uuid,
        node=node,
        index=0,
        name="T4",
        total_mib=total_mib,
        schedulable_mib=total_mib - 512,
        parent=parent,
    )


def a_lease(*parts: LeasePart, mode: LeaseMode = LeaseMode.SHARED) -> PoolLease:
    held = parts or (LeasePart(uuid="GPU-a", memory_mib=4_096, compute_percent=25, token=7),)
    return PoolLease(
        lease_id="l1",
        holder="h",
        need=Need(mode=mode, memory_mib=held[0].memory_mib, devices=len(held)),
        parts=held,
        state=LeaseState.GRANTED,
        granted_ms=0,
        deadline_ms=1,
        ttl_ms=1,
    )


def limit_of(env: dict[str, str], name: str = "PYTORCH_CUDA_ALLOC_CONF") -> float:
    return float(env[name].rpartition("per_process_memory_fraction:")[2])


def test_a_shared_lease_names_its_device_and_limits_the_allocator_to_less_than_the_lease(tmp_path) -> None:
    env = enforce.lease_environment(a_lease(), [a_device(), a_device("GPU-b")], SETTINGS)
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-a"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert (env["GPU_LEASE"], env["GPU_LEASE_TOKEN"], env["GPU_MEMORY_MIB"]) == ("l1", "7", "4096")
    assert float(env["GPU_MEMORY_FRACTION"]) == 0.25
    assert limit_of(env) == float(env["GPU_ALLOCATOR_FRACTION"]) == pytest.approx((4_096 - CONTEXT) / 16_384)
    assert int(env["ALIYUN_COM_GPU_MEM_CONTAINER"]) / int(env["ALIYUN_COM_GPU_MEM_DEV"]) == 0.25


def test_every_variable_is_described_and_none_is_taken_for_a_setting(tmp_path) -> None:
    daemon = Daemon(directory=tmp_path)
    given_out = enforce.lease_environment(a_lease(), [a_device()], SETTINGS).keys()
    given_out |= enforce.lease_environment(a_lease(), [a_device()], SETTINGS, mps=daemon).keys()
    assert given_out == enforce.VARIABLES.keys()
    Settings.load(environ=enforce.lease_environment(a_lease(), [a_device()], SETTINGS))


@settings(deadline=None)
@given(leased=st.integers(1, 200_000), context=st.integers(0, 4_096), total=st.integers(1, 200_000))
def test_an_allocator_never_gets_more_than_the_lease_nor_more_than_the_device(
    leased: int, context: int, total: int
) -> None:
    if leased <= context:
        with pytest.raises(BadInput, match="gpu_context_mib"):
            enforce.fraction(leased, context, total)
        return
    share = enforce.fraction(leased, context, total)
    assert 0 < share <= 1
    assert share * total <= leased - context + 1e-6 * total or share == 1.0
    part = LeasePart(uuid="GPU-a", memory_mib=leased, compute_percent=0)
    own = Settings(gpu_context_mib=context, gpu_infer_mib=context + 1)
    env = enforce.lease_environment(a_lease(part), [a_device(total_mib=total)], own)
    assert limit_of(env) <= max(share, 1e-6)


def test_a_lease_that_is_all_context_is_refused_with_the_remedy() -> None:
    part = LeasePart(uuid="GPU-a", memory_mib=CONTEXT, compute_percent=0)
    with pytest.raises(BadInput, match="lease more than 512 MiB"):
        enforce.lease_environment(a_lease(part), [a_device()], SETTINGS)


def test_a_users_own_allocator_options_stay_beside_the_limit() -> None:
    base = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True, roundup_power2_divisions:[256:1,512:2]"}
    env = enforce.lease_environment(a_lease(), [a_device()], SETTINGS, base=base)
    assert env["PYTORCH_CUDA_ALLOC_CONF"].startswith(
        "expandable_segments:True,roundup_power2_divisions:[256:1,512:2],per_process_memory_fraction:0.21"
    )


@pytest.mark.parametrize(
    ("own", "kept"), [("0.1", 0.1), ("0.9", 0.21875), ("nonsense", 0.21875), ("nan", 0.21875), ("0", 0.21875)]
)
def test_a_users_own_limit_stays_only_where_it_is_lower(own: str, kept: float) -> None:
    base = {"PYTORCH_CUDA_ALLOC_CONF": f"per_process_memory_fraction:{own},max_split_size_mb:64"}
    env = enforce.lease_environment(a_lease(), [a_device()], SETTINGS, base=base)
    assert env["PYTORCH_CUDA_ALLOC_CONF"].count("per_process_memory_fraction") == 1
    assert "max_split_size_mb:64" in env["PYTORCH_CUDA_ALLOC_CONF"]
    assert limit_of(env) == pytest.approx(kept)


def test_the_newer_name_of_the_variable_is_used_where_only_that_is_set() -> None:
    env = enforce.lease_environment(
        a_lease(), [a_device()], SETTINGS, base={"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    )
    assert env["PYTORCH_ALLOC_CONF"].startswith("expandable_segments:True,per_process_memory_fraction:")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in env


def test_torchs_variable_can_be_left_alone_for_a_torch_that_refuses_it() -> None:
    env = enforce.lease_environment(a_lease(), [a_device()], SETTINGS, allocator=False)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in env
    assert env["GPU_ALLOCATOR_FRACTION"]


def test_under_mps_the_daemon_limits_and_the_fraction_is_not_applied_twice(tmp_path) -> None:
    env = enforce.lease_environment(a_lease(), [a_device()], SETTINGS, mps=Daemon(directory=tmp_path))
    assert env["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path)
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"0={4_096 - CONTEXT}M"
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in env


def test_an_exclusive_lease_is_not_limited_but_still_finds_the_mps_daemon(tmp_path) -> None:
    lease = a_lease(mode=LeaseMode.EXCLUSIVE)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in enforce.lease_environment(lease, [a_device()], SETTINGS)
    env = enforce.lease_environment(lease, [a_device()], SETTINGS, mps=Daemon(directory=tmp_path))
    assert [name for name in env if "MPS" in name] == ["CUDA_MPS_PIPE_DIRECTORY"]


def test_several_devices_are_seen_in_the_order_of_the_lease_and_the_smallest_fraction_counts(
    tmp_path,
) -> None:
    parts = [LeasePart(uuid=uuid, memory_mib=4_096, compute_percent=10) for uuid in ("GPU-b", "GPU-a")]
    devices = [a_device("GPU-a", total_mib=8_192), a_device("GPU-b", total_mib=81_920)]
    env = enforce.lease_environment(a_lease(*parts), devices, SETTINGS)
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-b,GPU-a"
    assert limit_of(env) * 81_920 <= 4_096 - CONTEXT
    env = enforce.lease_environment(a_lease(*parts), devices, SETTINGS, mps=Daemon(directory=tmp_path))
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=3584M,1=3584M"


def test_a_mig_slice_is_measured_by_itself_and_several_are_refused() -> None:
    devices = [a_device(f"MIG-{n}", total_mib=4_864, parent="GPU-a") for n in (1, 2)]
    parts = [LeasePart(uuid=f"MIG-{n}", memory_mib=4_608, compute_percent=100) for n in (1, 2)]
    env = enforce.lease_environment(a_lease(parts[0]), devices, SETTINGS)
    assert env["CUDA_VISIBLE_DEVICES"] == "MIG-1"
    assert limit_of(env) == pytest.approx((4_608 - CONTEXT) / 4_864, abs=1e-6)
    with pytest.raises(BadInput, match="MIG slice"):
        enforce.lease_environment(a_lease(*parts), devices, SETTINGS)


def test_of_a_lease_over_several_nodes_a_program_gets_the_devices_of_its_own_node() -> None:
    parts = [LeasePart(uuid=uuid, memory_mib=4_096, compute_percent=0) for uuid in ("GPU-a", "GPU-b")]
    devices = [a_device("GPU-a", node="n1"), a_device("GPU-b", node="n2")]
    env = enforce.lease_environment(a_lease(*parts), devices, SETTINGS, node="n2")
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-b"
    with pytest.raises(BadInput, match="no device on n3"):
        enforce.lease_environment(a_lease(*parts), devices, SETTINGS, node="n3")


def test_a_device_that_the_pool_has_lost_is_named() -> None:
    with pytest.raises(BadInput, match="GPU-a"):
        enforce.lease_environment(a_lease(), [replace(a_device(), uuid="GPU-z")], SETTINGS)


def test_frameworks_that_read_a_fraction_get_it_and_a_lower_one_of_the_user_stays() -> None:
    base = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1", "FLAGS_fraction_of_gpu_memory_to_use": "0.9"}
    env = enforce.lease_environment(a_lease(), [a_device()], SETTINGS, base=base)
    assert env["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.100000"
    assert env["FLAGS_fraction_of_gpu_memory_to_use"] == env["GPU_ALLOCATOR_FRACTION"]
    odd = enforce.lease_environment(a_lease(), [a_device()], SETTINGS, base={enforce.FRACTIONS[0]: "half"})
    assert odd["XLA_PYTHON_CLIENT_MEM_FRACTION"] == env["GPU_ALLOCATOR_FRACTION"]
    whole = enforce.lease_environment(a_lease(mode=LeaseMode.EXCLUSIVE), [a_device()], SETTINGS)
    assert not set(enforce.FRACTIONS) & whole.keys()


def test_a_program_for_gpushare_finds_all_four_of_its_variables() -> None:
    env = enforce.lease_environment(a_lease(), [replace(a_device(), index=3)], SETTINGS)
    found = {
        name.rpartition("_")[2]: value
        for name, value in env.items()
        if name.startswith("ALIYUN_COM_GPU_MEM_")
    }
    assert found == {"CONTAINER": "4096", "POD": "4096", "DEV": "16384", "IDX": "3"}


def test_arguments_get_the_values_of_the_lease_and_other_braces_stay() -> None:
    env = enforce.lease_environment(a_lease(), [a_device()], SETTINGS)
    given_in = [
        "--util={GPU_MEMORY_FRACTION}",
        "{GPU_MEMORY_MIB}m {PATH} {}",
        "--gpus",
        "{GPU_DOCKER_DEVICES}",
    ]
    assert enforce.filled(given_in, env) == ["--util=0.250000", "4096m {PATH} {}", "--gpus", '"device=GPU-a"']
    whole = enforce.lease_environment(a_lease(mode=LeaseMode.EXCLUSIVE), [a_device()], SETTINGS)
    with pytest.raises(BadInput, match="XLA_PYTHON_CLIENT_MEM_FRACTION} has no value here"):
        enforce.filled(["{XLA_PYTHON_CLIENT_MEM_FRACTION}"], whole)


def test_containers_get_several_devices_by_their_ids() -> None:
    assert enforce.docker_devices(["GPU-a", "GPU-b"]) == '"device=GPU-a,GPU-b"'
    assert enforce.podman_devices(["GPU-a", "GPU-b"]) == [
        "--device", "nvidia.com/gpu=GPU-a", "--device", "nvidia.com/gpu=GPU-b",
    ]  # fmt: skip
