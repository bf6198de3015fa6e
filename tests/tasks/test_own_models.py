"""Logweir's own models beside served ones: two nodes in this process, a real pool, made-up devices."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import redis
from command_line import command_line
from pool_devices import put_devices
from small_bundles import ONE, TWO

from pipeline.errors import LeaseRefused
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.own_models import OwnCopies, count_training, scoring_model
from pipeline.gpu.placement import Placement
from pipeline.gpu.placing import Model
from pipeline.gpu.pool import Pool
from pipeline.gpu.values import LeaseKind, LeaseMode, Need
from pipeline.models.registry import Registry
from pipeline.service.gpu import served_rows
from pipeline.settings import Settings
from pipeline.tasks import share as share_module
from pipeline.tasks.loaded import LoadedModels, ModelPart, WorkerProfile
from pipeline.tasks.share import GpuShare

A, B = "GPU-node-a-0", "GPU-node-b-0"


@dataclass
class Network:
    """A network of a few MiB."""

    place: str = "cpu"
    weights_mib: int = 100

    def on(self, place: str) -> "Network":
        return replace(self, place=f"copy on {place}")


class Weights:
    """A loader of served models."""

    def load(self, model: Model, uuid: str) -> None: ...

    def unload(self, model: Model, uuid: str) -> None: ...


@pytest.fixture
def small(settings: Settings) -> Settings:
    return settings.replace(gpu_infer_mib=2_000, lease_ttl_ms=20_000)


@pytest.fixture
def pool(small: Settings, client: "redis.Redis") -> Pool:
    made = Pool(client, small)
    for node in ("node-a", "node-b"):
        put_devices(made, n=1, mib=4_000, node=node)
    return made


@pytest.fixture
def scorer(
    pool: Pool, small: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[GpuShare, LoadedModels]]]:
    """A scoring process of a node, whose reports are sent by the test."""
    monkeypatch.setattr(share_module, "HOST_DIRECTORY", tmp_path / "locks")
    monkeypatch.setattr(GpuShare, "_keep", lambda self: None)

    def make(node: str, network: Network | None = None) -> tuple[GpuShare, LoadedModels]:
        profile = WorkerProfile(part=ModelPart.NETWORK, device="cpu", leased=True)
        models = LoadedModels(Registry(pool.client, small), small, profile)
        monkeypatch.setattr(models, "network", lambda version: network or Network())
        monkeypatch.setattr(models.serving, "version", lambda: ONE)
        share = GpuShare(pool, small, holder=f"infer-gpu@{node}", place=models)
        share.need = replace(share.need, node=node)
        share.reports.node = node
        made.append(share)
        return share, models

    made: list[GpuShare] = []
    yield make
    for one in made:
        one.close()


def batch(share: GpuShare) -> bool:
    with share.using() as ours:
        share.reports.report()
        return ours


def live(pool: Pool, version: str = ONE) -> None:
    registry = Registry(pool.client, pool.settings)
    pointer: dict[Any, Any] = {
        "version": version,
        "generation": 1,
        "token": 1,
        "published": "",
        "history": f'["{version}"]',
    }
    pool.client.hset(registry.keys.model("shared"), mapping=pointer)


def scoring_row(pool: Pool) -> dict[str, Any]:
    [row] = [row for row in served_rows(pool.client, pool.settings) if row["model"] == f"scoring {ONE}"]
    return row


def test_a_scoring_model_and_a_served_one_share_a_device_only_within_its_memory_and_both_are_shown(
    pool: Pool, small: Settings, scorer: Callable[..., tuple[GpuShare, LoadedModels]],
    capsys: "pytest.CaptureFixture[str]", monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    live(pool)
    need = Need(memory_mib=3_000, node="node-a", kind=LeaseKind.SERVE)
    serve = pool.request(need, holder="serve@node-a")
    user = Model(name="fraud@1", tenant="research", memory_mib=2_400)
    assert Placement(pool.client, small, Weights(), lease=serve).place(user, A)
    on_a, models_a = scorer("node-a")
    on_b, models_b = scorer("node-b")
    assert not batch(on_a) and batch(on_b)
    assert models_a.scorer(ONE).place == "cpu"  # type: ignore[attr-defined]
    assert models_b.scorer(ONE).place == "copy on cpu"  # type: ignore[attr-defined]
    assert models_b.scorer(ONE) is models_b.scorer(ONE)
    shown = scoring_row(pool)
    assert (shown["state"], shown["ready"], shown["replicas"], shown["memory_mib"]) == ("ready", 1, 2, 264)
    assert [(copy["device"], copy["node"]) for copy in shown["copies"]] == [(B, "node-b")]
    assert shown["why"].startswith("node-a: ") and "needs 2.0 GiB" in shown["why"], shown["why"]
    pool.release(serve)
    on_a._not_before = 0.0
    assert batch(on_a)
    models_a.scorer(ONE)
    shown = scoring_row(pool)
    assert (shown["ready"], shown["replicas"], shown["why"]) == (2, 2, "")
    with pytest.raises(LeaseRefused):
        pool.request(need, holder="serve@node-a")
    with command_line(small, monkeypatch, capsys, columns=200) as verb:
        said = verb("gpu", "models")
    assert f"scoring {ONE}" in said.out and "node-a, node-b" in said.out
    for one in (on_a, on_b):
        one.close()
    assert served_rows(pool.client, small) == []


def test_a_second_process_on_a_device_gets_no_copy_and_one_that_is_too_large_says_so(
    pool: Pool, small: Settings, scorer: Callable[..., tuple[GpuShare, LoadedModels]]
) -> None:
    live(pool)
    first, models = scorer("node-a")
    assert batch(first)
    models.scorer(ONE)
    lease = pool.request(Need(memory_mib=1_000, node="node-a"), holder="another stack")
    copies = OwnCopies(pool.client, small, lease=lease, copy=lambda version: version)
    with pytest.raises(LeaseRefused, match=rf"infer-gpu@node-a has scoring {ONE} on {A} already"):
        copies.get(scoring_model(ONE, 10))
    assert copies.get(scoring_model(TWO, 10)) == TWO
    large, _ = scorer("node-b", Network(weights_mib=800))
    assert not batch(large)
    assert not [lease for lease in pool.snapshot().leases if lease.holder == "infer-gpu@node-b"]
    assert (
        f"node-b: scoring {ONE} needs 1664 MiB and the lease has 1488 MiB for it" in scoring_row(pool)["why"]
    )
    assert large._not_before > large.clock() + 10, "it is not asked for with every batch"


def test_a_training_is_shown_while_it_waits_and_counts_all_of_its_device(pool: Pool, small: Settings) -> None:
    held = pool.request(Need(memory_mib=1_000, node="node-a"), holder="ann")
    alone = Need(mode=LeaseMode.EXCLUSIVE, node="node-a", kind=LeaseKind.TRAIN)
    rows: list[dict[str, Any]] = []

    def look() -> None:
        rows.extend(served_rows(pool.client, small))
        pool.release(held)

    lease = pool.request(alone, holder="train@node-a", timeout_s=10, go_on=look)
    assert (rows[0]["model"], rows[0]["state"]) == ("training", "pending")
    assert "needs 1 whole device" in rows[0]["why"]
    count_training(pool.client, small, lease, "t1")
    [row] = served_rows(pool.client, small)
    assert (row["model"], row["state"], row["copies"][0]["device"]) == ("training t1", "ready", A)
    with pytest.raises(LeaseRefused, match="has no room for training t2"):
        count_training(pool.client, small, lease, "t2")


def test_a_scoring_process_without_a_model_or_without_lines_says_so(
    pool: Pool, scorer: Callable[..., tuple[GpuShare, LoadedModels]]
) -> None:
    put_devices(pool, n=1, mib=4_000, node=this_node(), clear_quarantine=False)
    share, _ = scorer("node-a")
    share.reports.report()
    [row] = served_rows(pool.client, pool.settings)
    assert (row["model"], row["state"], row["why"]) == (
        "scoring",
        "pending",
        "node-a: no model has been trained yet",
    )
    live(pool)
    assert scoring_row(pool)["why"] == "node-a: it loads the model with the next lines"
    share.close()
