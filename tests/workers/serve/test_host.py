"""One node in this process: its lease, and what it loads and unloads under it."""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from onnx_bytes import multiplying
from polling import wait_until
from pool_devices import put_devices

from pipeline.gpu import homes, served_files
from pipeline.gpu.homes import ServeState, serve_state
from pipeline.gpu.node.inventory import this_node
from pipeline.gpu.placing import LoadState
from pipeline.gpu.pool import Pool
from pipeline.gpu.served import ModelFormat, ServedModel
from pipeline.gpu.values import LeaseMode, Need
from pipeline.service.gpu import remove_model, serve_model
from pipeline.settings import Settings
from pipeline.workers.serve import desk as desk_module
from pipeline.workers.serve import host as host_module
from pipeline.workers.serve.desk import ModelDesk, ModelQuestion, ServeRefused
from pipeline.workers.serve.host import ModelHost
from pipeline.workers.serve.tensors import InferAnswer, TensorSpec

CONTEXT_MIB = 512


@dataclass
class Node:
    """A host that runs, and its pool."""

    host: ModelHost
    thread: threading.Thread
    pool: Pool
    folder: Path

    def devices(self) -> None:
        put_devices(self.pool, 1, mib=4_000, node=this_node(), clear_quarantine=False)

    def put(self, name: str, mib: int, content: bytes | None = None, **changes: Any) -> ServedModel:
        file = self.folder / f"{name}.onnx"
        file.write_bytes(content if content is not None else multiplying(3.0))
        model = ServedModel(
            tenant="t", name=name, format=ModelFormat.ONNX, memory_mib=mib, sha256="", size=0, **changes
        )
        return serve_model(self.pool.client, self.pool.settings, file, model, by="test")[0]

    def state(self, model: ServedModel) -> tuple[ServeState, str]:
        return serve_state(self.host.look(), model)

    def ready(self, model: ServedModel) -> bool:
        return self.state(model) == (ServeState.READY, "")


@pytest.fixture
def node(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(host_module, "ROUND_S", 0.1)
    monkeypatch.setattr(host_module, "REFUSED_S", 0.2)
    monkeypatch.setattr(homes, "IN_USE_MS", 0)
    settings = settings.replace(
        store_url=(tmp_path / "store").as_uri(), gpu_serve_mib=200 + CONTEXT_MIB, lease_ttl_ms=2_000
    )
    with redis.Redis.from_url(str(settings.redis.url)) as client:
        pool = Pool(client, settings)
        pool.ledger.clear_quarantine()
        host = ModelHost(pool, settings, name="serve@here", url="http://127.0.0.1:1")
        thread = threading.Thread(target=host.run)
        thread.start()
        try:
            yield Node(host, thread, pool, tmp_path)
        finally:
            host.stop()
            thread.join(20)
            assert not thread.is_alive()
    assert host.served.nodes() == [] and not host.loader.runners


def test_a_node_waits_for_a_device_then_serves_and_its_models_swap_when_asked_for(node: Node) -> None:
    first = node.put("first", 150)
    assert wait_until(lambda: "serve@here has no lease" in node.state(first)[1], timeout_s=10)
    assert node.state(first)[0] is ServeState.PENDING
    node.devices()
    assert wait_until(lambda: node.ready(first), timeout_s=10)
    placement = node.host.placement
    assert placement is not None
    with placement.request("t", first.model):
        array = np.array([[1, 2]], np.float32)
        assert node.host.loader.runners[first.model.key].run({"x": array}, ["y"])["y"].tolist() == [[3, 6]]
        second = node.put("second", 150)  # a new model is asked for; but the first one answers a request
        assert wait_until(lambda: node.state(second)[0] is ServeState.PENDING, timeout_s=5)
        assert not wait_until(lambda: node.ready(second), timeout_s=0.5)
    assert wait_until(lambda: node.ready(second), timeout_s=10)
    assert node.state(first) == (
        ServeState.PENDING,
        "it needs 150 MiB, and 50 MiB are free; idle ones make room when it is asked for",
    )
    node.host.served.want(first)
    assert wait_until(lambda: node.ready(first), timeout_s=10)
    assert not node.ready(second), "nobody asks for it"
    remove_model(node.pool.client, node.pool.settings, "t", "first", None, by="test")
    assert wait_until(lambda: node.ready(second), timeout_s=10)


def test_a_lease_that_is_asked_for_is_given_back_and_its_models_return_with_the_next_one(node: Node) -> None:
    node.devices()
    model = node.put("m", 150)
    assert wait_until(lambda: node.ready(model), timeout_s=10)
    alone = Need(mode=LeaseMode.EXCLUSIVE)
    node.devices()
    with node.pool.lease(alone, holder="training", timeout_s=10):
        assert node.host.placement is None and not node.host.loader.runners
        assert wait_until(lambda: "waits for a lease" in node.state(model)[1], timeout_s=5)
        assert node.state(model)[0] is ServeState.PENDING
    node.devices()
    assert wait_until(lambda: node.ready(model), timeout_s=10)
    lease = next(iter(node.pool.snapshot().leases))
    node.pool.revoke(lease.lease_id, "the test takes it")
    assert wait_until(lambda: not node.ready(model), timeout_s=5)
    node.devices()
    assert wait_until(lambda: node.ready(model), timeout_s=10)


def test_a_process_that_began_on_a_device_ends_after_its_lease(node: Node) -> None:
    node.devices()
    assert wait_until(lambda: node.host.placement is not None, timeout_s=10)
    node.host.loader.cuda_tried = True  # as after a model on CUDA
    (lease,) = node.pool.snapshot().leases
    node.pool.revoke(lease.lease_id, "the test takes it")
    assert wait_until(lambda: not node.thread.is_alive(), timeout_s=10)
    assert node.host.served.nodes() == []


def test_a_copy_that_takes_more_than_its_word_and_a_damaged_one_are_not_kept(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.workers.serve import runners

    node.devices()
    sizes = itertools.cycle([100, 100 + 20 + runners.SLACK_MIB + 1])  # before a load and after it
    monkeypatch.setattr(runners, "_resident_mib", lambda: next(sizes))
    model = node.put("large", 20)
    assert wait_until(
        lambda: "a copy took 277 MiB, and 20 MiB are said" in node.state(model)[1], timeout_s=10
    )
    monkeypatch.setattr(runners, "_resident_mib", lambda: 100)
    assert wait_until(lambda: node.ready(model), timeout_s=20), "it is tried again"
    damaged = node.put("damaged", 20, b"no model")
    assert wait_until(lambda: "onnxruntime refuses the file" in node.state(damaged)[1], timeout_s=10)
    faults = node.host._faults

    def until_ms() -> int:
        return next((fault.until_ms for _, fault in list(faults.values())), 0)

    first = until_ms()
    assert wait_until(lambda: until_ms() > first, timeout_s=5), "it is tried again"
    assert [entry.state for entry in node.host.look().loaded] == [LoadState.READY]


def test_files_that_no_record_names_go_unless_a_record_cannot_be_read(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_files, "UNNAMED_S", -1.0)
    model, store = node.put("m", 20), node.host.objects
    store.put("served/" + "f" * 64, b"of nobody")
    node.pool.client.hset(node.host.served._served, "of a newer build", b'{"v": 9}')
    monkeypatch.setattr(host_module, "SWEEP_S", -1.0)
    node.devices()
    assert wait_until(lambda: node.ready(model), timeout_s=10)
    assert len(list(store.found("served/"))) == 2
    node.pool.client.hdel(node.host.served._served, "of a newer build")
    assert wait_until(
        lambda: [one.key for one in store.found("served/")] == [f"served/{model.sha256}"], timeout_s=10
    )


class Slow:
    """A model that answers once `go` is set."""

    platform = "slow"
    inputs = outputs = (TensorSpec(name="x", datatype="FP32", shape=(-1,)),)

    def __init__(self) -> None:
        self.go = threading.Event()
        self.runs = 0

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> Mapping[str, Any]:
        self.runs += 1
        self.go.wait(30)
        return inputs

    def close(self) -> None:
        self.go.set()


def test_requests_beyond_the_bound_are_refused_at_once_and_one_that_is_late_goes_on_counting(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk_module, "MOST_WAITING", 2)
    node.devices()
    model = node.put("m", 20)
    assert wait_until(lambda: node.ready(model), timeout_s=10)
    slow = Slow()
    node.host.loader.runners[model.model.key] = slow
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}).encode()

    async def story() -> None:
        desk = ModelDesk(node.host)
        for left_s, runs in (
            (-1e-6, 0),
            (0.2, 1),
        ):  # a question whose time is over before it starts computes nothing
            late = ModelQuestion(model=model, headers={}, body=body, end=time.monotonic() + left_s)
            with pytest.raises(ServeRefused, match="did not answer in time") as refused:
                await desk.infer(late, None)
            assert (refused.value.status, slow.runs) == (504, runs)
        question = ModelQuestion(model=model, headers={}, body=body)
        others = [asyncio.create_task(desk.infer(question, None)) for _ in range(desk_module.THREADS + 1)]
        await asyncio.sleep(0.05)
        with pytest.raises(ServeRefused, match="2 requests wait already") as refused:
            await desk.infer(question, None)
        assert (refused.value.status, refused.value.headers) == (503, {"Retry-After": "1"})
        assert not node.host.placement.leave(0), "a model in use is not unloaded"  # type: ignore[union-attr]
        slow.go.set()
        for answer in await asyncio.gather(*others):
            assert isinstance(answer, InferAnswer)
            assert json.loads(answer.body)["outputs"][0]["data"] == [1.0]
        desk.close()

    asyncio.run(story())
