"""A whole stack between a real nats-server and a client that knows Opni's subjects alone."""

import contextlib
import json
import os
import signal
from pathlib import Path

import redis
from nats_server import Heard, NatsServer, payload, single

from e2e.harness import Up, end, nothing_left, ordinary, until
from pipeline.errors import RedisUnavailable

SUBJECTS = (
    "inferenced_logs",
    "templates_index",
    "gpu_trainingjob_status",
    "model_update",
    "logweir.events.*.*",
)
TOLD = tuple(f"logweir.events.{kind}" for kind in ("training.started", "training.ended", "model.live"))
WORKLOADS = {"c1": {"shop": ["web"]}}


def kill(up: Up, name: str) -> None:
    """A stage that lost its Redis may end by itself at that moment."""
    state = json.loads((up.data / "stack.json").read_text())
    with contextlib.suppress(ProcessLookupError):
        os.kill(state["redis"][0] if name == "redis" else state["workers"][name], signal.SIGKILL)


def is_back(up: Up) -> bool:
    with contextlib.suppress(redis.RedisError, RedisUnavailable), up.client() as client:
        return bool(client.ping()) and len(up.status()["workers"]) >= 7
    return False


def test_every_payload_is_answered_once_though_all_that_works_on_it_is_killed(tmp_path: Path) -> None:
    """The gateway, a store worker, the stage that answers known lines, Redis, and at last the server."""
    documents = [payload(n, log=line) for n, line in enumerate(ordinary(3_000))]
    with NatsServer.running() as server:
        heard = Heard(server, *SUBJECTS)
        up = Up(tmp_path / "up", {"LOGWEIR_NATS_SOURCE": server.url("raw_logs", serve="controller")})
        try:
            up.wait_ready()
            until(lambda: bool(up.events("nats", "nats.reads")), what="the stream is read")
            server.send(single(documents[:600]))
            until(lambda: up.totals("c1/shop/web").get("stored", 0) >= 600, what="the lines are stored")
            assert server.ask("model_status") == b"not started"
            assert not heard.of("inferenced_logs")  # there is no verdict yet
            asked = json.dumps({"uuid": "u", "workloads": WORKLOADS}).encode()
            assert server.ask("train_model", asked) == b"training job submitted"
            until(lambda: len(heard.ids("inferenced_logs")) == 600, what="the first lines are answered")
            until(lambda: len(heard.of("gpu_trainingjob_status")) == 2, what="the training is told")
            assert heard.of("gpu_trainingjob_status") == [b"JobStart", b"JobEnd"]
            assert server.ask("model_status") == b"completed"
            # A message without a stream that is on its way when the server is killed does not come again.
            until(lambda: all(len(heard.of(subject)) == 1 for subject in TOLD), what="the events are told")
            for number, victim in enumerate(("nats", "redis", "ingest-1", "nats", "store")):
                server.send(single(documents[600 + 400 * number : 1_000 + 400 * number]))
                kill(up, victim)
                until(lambda: is_back(up), what="Redis is back")
            # Stored messages survive the server.
            until(lambda: up.totals("c1/shop/web").get("accepted", 0) >= 2_600, what="all was read")
            server.kill()
            server.start()
            server.send(single([*documents[2_600:], payload(9_000, log="ERROR disk sda1 failed: I/O error")]))
            until(lambda: len(server.stored_ids()) == 3_001, what="every payload is answered")
            assert set(server.stored_ids().values()) == {1}
            (bad,) = [one for one in heard.payloads("inferenced_logs") if one.id == "id9000"]
            assert (bad.anomaly_level, bad.inference_model) == ("Anomaly", "opnilog")
            assert bad.opnilog_confidence < 0.7
            calm = [one for one in heard.payloads("inferenced_logs") if one.id != "id9000"]
            assert sum(one.anomaly_level == "Normal" for one in calm) > 0.9 * len(calm)
            texts = {one.template_matched for one in heard.payloads("templates_index")}
            assert any("user <NUM> logged in from <IP>" in text for text in texts), texts
            told = [json.loads(data) for data in heard.of("model_update")]
            assert [one["bucket"] for one in told] == ["logweir"]
            for subject in TOLD:
                assert len(heard.of(subject)) == 1, subject
            assert up.stop() == 0
        finally:
            heard.close()
            end(up.mark)
    nothing_left(up.mark)
