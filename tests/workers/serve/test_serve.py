"""Two nodes that serve models: two processes with names of their own, one Redis, one store, made-up devices.

The client is that of Triton. One story, because starting the processes costs the most.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from command_line import Verb
from onnx_bytes import multiplying, repeating
from polling import wait_until
from pool_devices import put_devices
from tritonclient import http as triton
from tritonclient.utils import InferenceServerException

from pipeline.gpu.pool import Pool
from pipeline.service.access.keys import SenderKeys
from pipeline.settings import Settings
from pipeline.workers.intake.bodies import MAX_BODY

pytestmark = pytest.mark.long
NAMED = "import os, socket\nif name := os.environ.get('TEST_NODE'):\n    socket.gethostname = lambda: name\n"
CONTEXT_MIB = 512


@dataclass
class Nodes:
    """The processes by node, and where each listens."""

    settings: Settings
    folder: Path
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)

    def start(self, node: str, room_mib: int) -> None:
        """A process on a node, with so much room for models."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        own = self.settings.replace(
            data_dir=self.folder / f"data-{node}",
            gpu_serve=f"http://127.0.0.1:{port}",
            gpu_serve_mib=room_mib + CONTEXT_MIB,
        )
        plain = {k: v for k, v in os.environ.items() if not k.startswith("LOGWEIR_")}
        names = {"TEST_NODE": node, "PYTHONPATH": str(self.folder / "names")}
        with (self.folder / f"{node}.log").open("wb") as log:
            self.processes[node] = subprocess.Popen(
                [sys.executable, "-m", "pipeline.workers.serve", "serve"],
                env={**plain, **own.to_environ(), **names}, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.ports[node] = port

    def client(self, node: str) -> triton.InferenceServerClient:
        return triton.InferenceServerClient(f"127.0.0.1:{self.ports[node]}", network_timeout=20)

    def headers(self, key: str) -> dict[str, str]:
        """New for each call: the client writes into them."""
        return {"Authorization": f"Bearer {self.keys[key]}"}

    def asked(self, node: str, path: str, key: str = "", body: bytes | None = None) -> tuple[int, Any]:
        """Without the client: the status and the JSON."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports[node]}{path}", data=body, headers=self.headers(key) if key else {}
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, json.loads(refused.read())


@pytest.fixture
def nodes(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logweir: Verb
) -> Iterator[Nodes]:
    settings = settings.replace(
        store_url=(tmp_path / "store").as_uri(), lease_ttl_ms=2_000, gpu_beat_s=0.2, gpu_node_ttl_ms=2_000
    )
    (tmp_path / "names").mkdir()
    (tmp_path / "names" / "sitecustomize.py").write_text(NAMED)
    for name, value in settings.to_environ().items():  # of the command of this process
        monkeypatch.setenv(name, value)
    both, ended = Nodes(settings, tmp_path), threading.Event()
    with redis.Redis.from_url(str(settings.redis.url)) as client:
        pool = Pool(client, settings)

        def agents() -> None:
            while not ended.wait(0.3):
                for node in [name for name, process in both.processes.items() if process.poll() is None]:
                    put_devices(pool, 1, mib=4_000, node=node, clear_quarantine=False)
                pool.sweep()

        keys = SenderKeys(client, settings)
        both.keys = {
            "ours": keys.add("ours", scopes=("infer",)),
            "theirs": keys.add("theirs", scopes=("infer",), tenant="research"),
            "reader": keys.add("reader", scopes=("read",)),
        }
        for node, room_mib in (("a", 300), ("b", 200)):
            put_devices(pool, 1, mib=4_000, node=node)
            both.start(node, room_mib)
        thread = threading.Thread(target=agents)
        thread.start()
        try:
            yield both
        finally:
            ended.set()
            thread.join(10)
            for process in both.processes.values():
                process.terminate()
            for node, process in both.processes.items():
                process.wait(20)
                print((tmp_path / f"{node}.log").read_text()[-4000:])


def put(logweir: Verb, name: str, content: bytes, folder: Path, *flags: str) -> dict[str, Any]:
    file = folder / f"{name}.onnx"
    file.write_bytes(content)
    said = logweir("gpu", "models", "put", name, file, *flags, "--json")
    assert said.code == 0, said
    return dict(json.loads(said.out))


def row(logweir: Verb, name: str) -> dict[str, Any]:
    said = logweir("gpu", "models", "--json")
    assert said.code == 0, said
    return next(dict(one) for one in json.loads(said.out) if one["model"] == name)


def an_input(values: list[list[float]], *, binary: bool = True) -> triton.InferInput:
    array = np.array(values, np.float32)
    given = triton.InferInput("x", list(array.shape), "FP32")
    given.set_data_from_numpy(array, binary_data=binary)
    return given


def test_a_model_on_b_answers_through_a_and_moves_when_b_dies(nodes: Nodes, logweir: Verb) -> None:
    folder = nodes.folder
    a = nodes.client("a")
    assert wait_until(lambda: answers(nodes, "a") and answers(nodes, "b"), timeout_s=60)
    facts = put(logweir, "double", multiplying(2.0), folder, "--memory", "150MiB")
    assert facts == {"model": "double", "tenant": "logweir", "version": 1, "memory_mib": 150, "removed": []}
    assert wait_until(lambda: row(logweir, "double")["state"] == "ready", timeout_s=30)
    assert [copy["node"] for copy in row(logweir, "double")["copies"]] == ["b"], "the tightest room"
    assert a.is_server_ready() and a.is_server_live()
    assert wait_until(lambda: a.is_model_ready("double", headers=nodes.headers("ours")), timeout_s=5)
    assert a.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    metadata = a.get_model_metadata("double", headers=nodes.headers("ours"))
    assert (metadata["name"], metadata["versions"], metadata["platform"]) == ("double", ["1"], "onnx, cpu")
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]

    for binary in (True, False):
        outputs = [triton.InferRequestedOutput("y", binary_data=binary)]
        found = a.infer(
            "double",
            [an_input([[1, 2], [3, 4]], binary=binary)],
            outputs=outputs,
            headers=nodes.headers("ours"),
        )
        assert found.as_numpy("y").tolist() == [[2, 4], [6, 8]]
    found = a.infer(
        "double",
        [an_input([[1, 2]])],
        model_version="1",
        request_id="r1",
        timeout=20_000_000,
        headers=nodes.headers("ours"),
    )
    assert (found.as_numpy("y").tolist(), found.get_response()["id"]) == ([[2, 4]], "r1")

    found = a.infer(
        "double", [an_input([[1, 2]])], headers=nodes.headers("ours"),
        request_compression_algorithm="gzip", response_compression_algorithm="gzip",
    )  # fmt: skip
    assert found.as_numpy("y").tolist() == [[2, 4]]

    # Elements of BYTES; and two copies, one on each device.
    put(logweir, "echo", repeating(), folder, "--memory", "40MiB", "--replicas", "2")
    assert wait_until(lambda: row(logweir, "echo")["ready"] == 2, timeout_s=10)
    words = triton.InferInput("heard", [2, 1], "BYTES")
    words.set_data_from_numpy(np.array([["ä"], ["b"]], np.object_))
    said = nodes.client("b").infer("echo", [words], headers=nodes.headers("ours")).as_numpy("said")
    assert [one.decode() for one in said.reshape(-1)] == ["ä", "b"]

    refuse_strangers_and_nonsense(nodes)
    say_why_a_model_waits(nodes, logweir)

    os.killpg(nodes.processes["b"].pid, signal.SIGKILL)
    nodes.processes["b"].wait()
    status, answer = nodes.asked("a", "/v2/models/double/infer", "ours", json_input([1, 2]))
    assert status == 503 and "serve@b does not answer" in answer["error"], (status, answer)
    assert wait_until(lambda: "serve@b has been silent" in row(logweir, "echo")["why"], timeout_s=15)
    assert row(logweir, "echo")["ready"] == 1, "the copy on a answers on"
    assert wait_until(lambda: row(logweir, "double")["state"] == "ready", timeout_s=15)
    assert [copy["node"] for copy in row(logweir, "double")["copies"]] == ["a"]
    assert a.infer("double", [an_input([[1, 2]])], headers=nodes.headers("ours")).as_numpy("y").tolist() == [
        [2, 4]
    ]

    # A newer version answers once it is ready; the older one by its number.
    assert put(logweir, "double", multiplying(20.0), folder, "--memory", "80MiB")["version"] == 2
    assert wait_until(lambda: nodes_answer(a, nodes.headers("ours")) == [[20, 40]], timeout_s=10)
    assert a.infer("double", [an_input([[1, 2]])], model_version="1", headers=nodes.headers("ours")).as_numpy(
        "y"
    ).tolist() == [[2, 4]]
    assert logweir("gpu", "models", "remove", "double").code == 0
    assert wait_until(lambda: nodes.asked("a", "/v2/models/double", "ours")[0] == 404, timeout_s=5)
    nodes.processes["a"].terminate()
    assert nodes.processes["a"].wait(20) == 0
    assert "no process of the role serve runs" not in row(logweir, "echo")["why"]


def answers(nodes: Nodes, node: str) -> bool:
    """The process has begun, and has its lease."""
    try:
        return bool(nodes.asked(node, "/v2/health/ready")[0] == 200)
    except OSError:
        return False


def nodes_answer(client: triton.InferenceServerClient, headers: dict[str, str]) -> list[list[float]]:
    found: list[list[float]] = (
        client.infer("double", [an_input([[1, 2]])], headers=headers).as_numpy("y").tolist()
    )
    return found


def json_input(values: list[float], **changes: Any) -> bytes:
    plain = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": values}
    return json.dumps({"inputs": [plain | changes]}).encode()


def refuse_strangers_and_nonsense(nodes: Nodes) -> None:
    """Every refusal is `{"error": ...}`; a model of another tenant looks like none."""
    infer = "/v2/models/double/infer"
    assert nodes.asked("a", infer, body=json_input([1, 2]))[0] == 401
    assert nodes.asked("a", infer, "reader", json_input([1, 2]))[0] == 403
    status, answer = nodes.asked("a", infer, "theirs", json_input([1, 2]))
    assert (status, answer["error"][:29]) == (404, "research has no model double;")
    assert nodes.asked("a", "/v2/models/double", "theirs") == nodes.asked("b", "/v2/models/double", "theirs")
    assert nodes.asked("a", "/v2/repository/index", "theirs", b"{}") == (200, [])
    for body, said in (
        (b"{", "is no request of the protocol"),
        (json_input([1, 2, 3]), "has 3 values, and its shape [1, 2] takes 2"),
        (json_input([1, 2], name="z"), "the model has no input 'z'; it has x"),
        (json_input([1, 2], datatype="INT32"), "input 'x' is INT32, and the model takes FP32"),
        (json_input([1], shape=[1, 1]), "has the shape [1, 1], and the model takes [-1, 2]"),
    ):
        status, answer = nodes.asked("a", infer, "ours", body)
        assert status == 400 and said in answer["error"], answer
    assert nodes.asked("a", "/v2/models/double/versions/9/infer", "ours", json_input([1, 2]))[0] == 404
    assert nodes.asked("a", "/v3", "ours")[0] == 404
    assert nodes.asked("a", infer, "ours", b" " * (MAX_BODY + 1))[0] == 413
    with pytest.raises(InferenceServerException, match=r"504.*did not answer in time"):
        nodes.client("b").infer("double", [an_input([[1, 2]])], timeout=1, headers=nodes.headers("ours"))
    with pytest.raises(InferenceServerException, match="no input 'z'"):
        wrong = triton.InferInput("z", [1, 2], "FP32")
        wrong.set_data_from_numpy(np.zeros((1, 2), np.float32))
        nodes.client("a").infer("double", [wrong], headers=nodes.headers("ours"))


def say_why_a_model_waits(nodes: Nodes, logweir: Verb) -> None:
    """To people and to clients alike."""
    put(logweir, "large", multiplying(1.0), nodes.folder, "--memory", "900MiB")
    why = "it needs 900 MiB, and the largest lease has 300 MiB (gpu_serve_mib)"
    assert row(logweir, "large")["why"] == why
    assert why in logweir("gpu", "models").out
    status, answer = nodes.asked("a", "/v2/models/large/infer", "ours", json_input([1, 2]))
    assert (status, answer["error"]) == (503, f"large is not ready: {why}")
    assert nodes.asked("a", "/v2/models/large/ready", "ours") == (400, answer)
    index = nodes.asked("b", "/v2/repository/index", "ours", b"")[1]
    assert {"name": "large", "version": "1", "state": "UNAVAILABLE", "reason": why} in index
    assert logweir("gpu", "models", "remove", "large").code == 0
    assert logweir("gpu", "models", "remove", "large").code == 2
