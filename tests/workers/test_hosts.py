"""DNS rebinding: a page on a foreign domain that leads to our ports reads nothing in a browser on this
machine."""

import http.client
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from polling import wait_until

from pipeline.settings import Settings
from pipeline.workers.sockets import is_own_host


@pytest.mark.parametrize(
    "header",
    [None, "localhost", "localhost:5555", "127.0.0.1:9464", "10.1.2.3", "[::1]:5555", "LOCALHOST.", "metrics:9464",
     "metrics.logweir.svc:9464", "a.svc.cluster.local", "app.localhost", socket.gethostname(), "logs.example.com"],
)  # fmt: skip
def test_an_address_and_a_name_of_this_machine_are_taken(header: str | None) -> None:
    assert is_own_host(header, "logs.example.com")


@pytest.mark.parametrize(
    "header",
    ["evil.example", "evil.example:5555", "127.0.0.1.evil.example", "localhost.evil.example", "", ":80", "[evil.example]",
     "evil.example.", "127.0.0.1@evil.example"],
)  # fmt: skip
def test_a_public_domain_is_not(header: str) -> None:
    assert not is_own_host(header, "127.0.0.1")


def status_of(port: int, path: str, host: str) -> int:
    """The answer's status; 0 when nothing answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path, headers={"Host": host})
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


@pytest.fixture(params=["flower", "metrics"])
def sidecar(request: pytest.FixtureRequest, settings: Settings, tmp_path: Path) -> Iterator[tuple[int, str]]:
    """Flower or the metrics on a free port, and a page that it has."""
    with socket.create_server(("127.0.0.1", 0)) as opened:
        port = opened.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", f"pipeline.workers.{request.param}", f"--fd={opened.fileno()}"],
            env={**os.environ, **settings.to_environ()},
            cwd=tmp_path,
            pass_fds=(opened.fileno(),),
        )
    try:
        yield port, {"flower": "/tasks", "metrics": "/metrics"}[request.param]
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.long
def test_both_answer_on_their_address_and_refuse_a_foreign_host(sidecar: tuple[int, str]) -> None:
    port, page = sidecar
    usual = 401 if page == "/tasks" else 200  # Flower asks for a key
    assert wait_until(lambda: status_of(port, page, f"127.0.0.1:{port}") == usual, timeout_s=60)
    assert status_of(port, page, f"localhost:{port}") == usual
    assert status_of(port, page, f"evil.example:{port}") == 421
