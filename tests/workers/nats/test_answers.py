"""Requests over a real nats-server, answered as Opni's GPU service and training controller answer them."""

import json
import threading
from collections.abc import Iterator

import nats.errors
import pytest
import redis
from killed_intake import producer_of
from nats_server import Heard, NatsServer, list_bytes, payload, single
from polling import wait_until

from pipeline.controller.trainings import TrainingRequest, Trainings
from pipeline.controller.watchlist import Watchlist, patterns_of
from pipeline.ledger.ledger import Ledger
from pipeline.nats import streams
from pipeline.observe.events import BEGIN, read_events
from pipeline.redis.keys import Keys
from pipeline.settings import Settings
from pipeline.settings.nats import NatsSource
from pipeline.workers.nats import reader as reader_module
from pipeline.workers.nats.event_mirror import CURSOR
from pipeline.workers.nats.process import Gateway

LIMIT_S = 20
SHOP = {"c1": {"shop": ["web"]}}
TOLD = ("model_update", "model_workload_parameters", "gpu_trainingjob_status", "logweir.events.*.*")


class World:
    """A gateway as threads, and a subscriber to what it tells."""

    def __init__(self, server: NatsServer, settings: Settings, client: "redis.Redis", **query: str) -> None:
        self.server, self.settings, self.client = server, settings, client
        self.query = {"serve": "controller", **query}
        self.heard = Heard(server, *TOLD)
        self.keys = Keys(settings.redis.key_prefix)
        self.ledger = Ledger(client, settings)
        self.start()

    def start(self) -> None:
        self.stop = threading.Event()
        source = NatsSource.parse(self.server.url("raw_logs", **self.query))
        self.gateway = Gateway(source, producer_of(self.settings), holder="one", stop=self.stop)
        self.thread = threading.Thread(target=self.gateway.run, daemon=True)
        self.thread.start()
        assert wait_until(self.runs, timeout_s=LIMIT_S)

    def end(self) -> None:
        self.stop.set()
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()

    def runs(self) -> bool:
        try:
            return self.server.ask("gpu_service_running", b"check-up", 2.0) == b"running"
        except (nats.errors.NoRespondersError, nats.errors.TimeoutError):
            return False

    def ask_for(self, workloads: object) -> bytes:
        return self.server.ask("train_model", json.dumps({"uuid": "u", "workloads": workloads}).encode())

    def kinds(self) -> list[str]:
        return [json.loads(data)["status_type"] for data in self.heard.of("model_workload_parameters")]

    def is_live(self, version: str) -> None:
        self.client.hset(self.keys.model(), "version", version)

    def has_lines(self) -> None:
        self.server.send(single(payload(n) for n in range(5)))
        assert wait_until(lambda: "c1/shop/web" in self.ledger.backlog.totals(), timeout_s=LIMIT_S)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "LOOK_S", 0.3)


@pytest.fixture
def world(settings: Settings, client: "redis.Redis") -> Iterator[World]:
    with NatsServer.running() as server:
        one = World(server, settings, client)
        yield one
        one.end()
        one.heard.close()


def test_the_status_of_the_model_is_told_in_the_words_of_the_training_controller(world: World) -> None:
    assert world.server.ask("model_status") == b"not started"
    world.is_live("m1")
    assert world.server.ask("model_status") == b"completed"
    world.has_lines()
    world.ask_for(SHOP)
    assert wait_until(lambda: world.server.ask("model_status") == b"training", timeout_s=LIMIT_S)


def test_logs_of_a_request_are_taken_only_when_a_model_is_live(world: World) -> None:
    some = list_bytes([payload(n) for n in range(30)])
    assert world.server.ask("gpu_service_inference", some) == b"NO"
    world.is_live("m1")
    assert world.server.ask("gpu_service_inference", some) == b"YES"
    assert wait_until(
        lambda: int(world.ledger.backlog.totals().get("c1/shop/web", {}).get("accepted", 0)) == 30,
        timeout_s=LIMIT_S,
    )
    world.ledger.intake.pause("a test")
    assert world.server.ask("gpu_service_inference", some) == b"NO"


def test_new_workloads_are_watched_and_trained_and_others_are_not(world: World) -> None:
    world.has_lines()
    assert world.ask_for(SHOP) == b"training job submitted"
    assert wait_until(lambda: world.kinds() == ["train"], timeout_s=LIMIT_S)
    assert world.heard.of("gpu_trainingjob_status") == [b"JobStart"]
    (status,) = Trainings(world.client, world.settings).active()
    assert status.why == "asked over NATS"
    watchlist = Watchlist(world.client, world.settings)
    assert watchlist.look().patterns == ("c1/shop/web",)
    assert json.loads(world.server.ask("workload_parameters")) == SHOP
    # A workload without a line is watched; there is nothing to train with yet.
    assert world.ask_for({"c1": {"shop": ["web", "cart"]}}) == b"training job submitted"
    assert wait_until(lambda: len(world.kinds()) == 2, timeout_s=LIMIT_S)
    assert watchlist.look().patterns == ("c1/shop/cart", "c1/shop/web")


def test_a_removal_alone_trains_nothing(world: World) -> None:
    world.has_lines()
    world.ask_for(SHOP)
    assert wait_until(lambda: world.kinds() == ["train"], timeout_s=LIMIT_S)
    parameters = world.gateway.answers.jobs.parameters()
    parameters.trained = {"c1": {"shop": ["web", "cart"]}}
    world.gateway.answers.jobs._remember(parameters)
    world.ask_for({"c1": {"shop": ["web"]}})
    assert wait_until(lambda: world.kinds() == ["train", "update"], timeout_s=LIMIT_S)
    assert world.heard.of("gpu_trainingjob_status") == [b"JobStart"]


def test_a_request_without_workloads_resets(world: World) -> None:
    world.has_lines()
    world.ask_for(SHOP)
    assert world.server.ask("train_model", b'{"uuid":"u"}') == b"model reset"
    assert wait_until(lambda: world.kinds() == ["train", "reset"], timeout_s=LIMIT_S)
    assert [json.loads(data) for data in world.heard.of("model_update")] == [{"status": "reset"}]
    assert Watchlist(world.client, world.settings).look().patterns == ()
    assert json.loads(world.server.ask("workload_parameters")) == {}


def test_a_workload_that_a_user_watches_stays_watched(world: World) -> None:
    watchlist = Watchlist(world.client, world.settings)
    watchlist.add("other/*")
    world.ask_for(SHOP)
    assert wait_until(lambda: "c1/shop/web" in watchlist.look().patterns, timeout_s=LIMIT_S)
    world.server.ask("train_model", b"{}")
    assert wait_until(lambda: watchlist.look().patterns == ("other/*",), timeout_s=LIMIT_S)


def test_a_killed_gateway_tells_the_end_of_a_training_all_the_same(world: World) -> None:
    world.has_lines()
    world.ask_for(SHOP)
    assert wait_until(lambda: world.kinds() == ["train"], timeout_s=LIMIT_S)
    world.end()
    trainings = Trainings(world.client, world.settings)
    (status,) = trainings.active()
    trainings.cancel(status.request_id)
    world.start()
    assert wait_until(lambda: b"JobEnd" in world.heard.of("gpu_trainingjob_status"), timeout_s=LIMIT_S)
    world.gateway.answers.jobs.tend()
    assert world.heard.of("gpu_trainingjob_status") == [b"JobStart", b"JobEnd"]


def test_events_are_told_once_though_the_gateway_ends_and_redis_goes_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings = Trainings(world.client, world.settings)
    subject = "logweir.events.training.ended"

    def cancelled() -> str:
        request_id, _ = trainings.request(TrainingRequest())
        trainings.cancel(request_id)
        return request_id

    monkeypatch.setattr(streams, "DUPLICATE_WINDOW_S", 0.1)  # the server has forgotten the ids by then
    ids = [cancelled(), cancelled()]
    assert wait_until(lambda: len(world.heard.of(subject)) == 2, timeout_s=LIMIT_S)
    world.end()
    world.client.hdel(world.keys.nats_jobs, CURSOR)
    ids.append(cancelled())
    world.start()
    assert wait_until(lambda: len(world.heard.of(subject)) >= 3, timeout_s=LIMIT_S)
    world.end()
    world.start()
    world.gateway.tend()
    told = [json.loads(data) for data in world.heard.of(subject)]
    assert [one["subject"] for one in told] == ids
    assert {one["type"] for one in told} == {"training.ended"} and told[0]["specversion"] == "1.0"
    page = read_events(world.client, world.settings, since=BEGIN, types=["training.ended"])
    assert [one["id"] for one in told] == [event.id for event in page.events]


def test_a_new_live_model_is_told_once(world: World) -> None:
    world.is_live("m000002-0a1b2c3d")
    for _ in range(2):
        world.gateway.answers.jobs.tend()
    world.end()
    world.start()
    world.gateway.answers.jobs.tend()
    assert wait_until(lambda: bool(world.heard.of("model_update")), timeout_s=LIMIT_S)
    (told,) = map(json.loads, world.heard.of("model_update"))
    assert told["bucket_files"] == {"model_file": "m000002-0a1b2c3d", "vocab_file": "m000002-0a1b2c3d"}
    assert told["bucket"] != "opni-nulog-models"  # Opni's own inference would look for a file of it there


def test_an_order_that_cannot_be_read_stops_nothing(world: World) -> None:
    world.server.send([("train", b"\xff"), ("train", b"{}"), ("train", b'{"parameters":{"workloads":7}}')])
    assert world.server.ask("model_status") == b"not started"


def test_a_gpu_service_leaves_the_requests_of_the_controller_to_opni(
    settings: Settings, client: "redis.Redis"
) -> None:
    with NatsServer.running() as server:
        world = World(server, settings, client, serve="gpu")
        try:
            with pytest.raises(nats.errors.NoRespondersError):
                server.ask("model_status")
            world.has_lines()
            job = {"source": "drain", "model": "nulog-train", "payload": {"parameters": {"workloads": SHOP}}}
            server.send([("gpu_service_training_internal", json.dumps(job).encode())])
            trainings = Trainings(client, settings)
            assert wait_until(lambda: bool(trainings.active()), timeout_s=LIMIT_S)
            trainings.cancel(trainings.active()[0].request_id)
            world.gateway.answers.jobs.tend()
            # The start is told by Opni's controller.
            assert wait_until(
                lambda: world.heard.of("gpu_trainingjob_status") == [b"JobEnd"], timeout_s=LIMIT_S
            )
        finally:
            world.end()
            world.heard.close()


def test_workloads_become_patterns_of_the_watchlist() -> None:
    assert patterns_of({"c1": {"shop": ["web", "cart"], "": ["x"]}}) == [
        "c1/shop/cart",
        "c1/shop/web",
        "c1/x",
    ]
