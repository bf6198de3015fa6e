"""Clients of npm send while the intake is full, and while it is killed: each line is in once.

They run where Node is, with the packages in the folder `$NODE_CLIENTS`:

    npm install --prefix DIR winston winston-loki pino pino-elasticsearch @opentelemetry/resources \\
        @opentelemetry/sdk-logs @opentelemetry/exporter-logs-otlp-{proto,http,grpc}
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from receiver import LINES, Receiver, Send, after_a_kill, through_a_full_pipeline, through_trouble

PACKAGES = Path(os.environ.get("NODE_CLIENTS", "/nowhere")) / "node_modules"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not PACKAGES.is_dir() or not shutil.which("node"),
        reason="needs node, and clients of npm in $NODE_CLIENTS",
    ),
]
CLIENT = Path(__file__).parents[2] / "node_client.mjs"


@contextlib.contextmanager
def node_client(client: str, url: str, name: str, log: Path) -> Iterator[Send]:
    with log.open("wb") as said:
        process = subprocess.Popen(
            ["node", CLIENT, client, url, name, PACKAGES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )

    def send(orders: range) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{orders.start} {orders.stop}\n")
        process.stdin.flush()
        assert process.stdout.readline() == ".\n", log.read_text()

    try:
        yield send
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("client", ["otlp-http", "otlp-json", "winston-loki"])
def test_what_a_client_repeats_is_in_once(receiver: Receiver, tmp_path: Path, client: str) -> None:
    with node_client(client, receiver.intake.url, client, tmp_path / "log") as send:
        through_trouble(receiver, client, send)


def test_pino_elasticsearch_sends_again_what_found_no_room(receiver: Receiver, tmp_path: Path) -> None:
    """It ends with the first request whose connection breaks, so it is not killed."""
    with node_client("pino-elasticsearch", receiver.intake.url, "pino", tmp_path / "log") as send:
        through_a_full_pipeline(receiver, "pino", send)


def test_otlp_over_grpc_goes_on_after_a_kill(receiver: Receiver, tmp_path: Path) -> None:
    """It gives a request up at the first error of any kind."""
    with node_client("otlp-grpc", receiver.urls["grpc"], "bygrpc", tmp_path / "log") as send:
        send(range(2 * LINES))
        receiver.has("bygrpc", 2 * LINES)
        after_a_kill(receiver, "bygrpc", send)
