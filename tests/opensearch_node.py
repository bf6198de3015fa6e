"""Real OpenSearch nodes for tests, where the folder that holds one stands beside the repository."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
import pytest

from pipeline.opensearch.client import opensearch_client
from pipeline.settings import Settings

# As in scripts/_servers.sh: the second compiler of Java works longer than a test runs.
JAVA = {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1"}
STARTER = Path(__file__).resolve().parent.parent.parent / "shared" / "opensearch" / "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Secure:
    """Where a server with TLS and users is, and who signed its certificate."""

    url: str
    ca: Path


class Node:
    """One node in a temporary directory. Killed and started again, it has its data back."""

    def __init__(self, port: int, *, secure: bool = False) -> None:
        self.port = port
        self._secure = secure
        self._folder = Path(tempfile.mkdtemp(prefix="logweir-opensearch-"))
        self._process: subprocess.Popen[str] | None = None

    @classmethod
    def on_free_port(cls, *, secure: bool = False) -> Self:
        """Skips the test where no OpenSearch stands beside the repository."""
        if not STARTER.exists():
            pytest.skip("OpenSearch is not here; name one with OPENSEARCH_URL (and OPENSEARCH_SECURE_URL)")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return cls(probe.getsockname()[1], secure=secure)

    @property
    def ca(self) -> Path:
        """The authority that signed the node's certificate."""
        return self._folder / "certs" / "ca.pem"

    def start(self) -> str:
        """Start and wait until it answers; returns the URL. A busy machine gets a second try."""
        more = ["--secure"] if self._secure else []
        said: list[str] = []
        for _ in range(2):
            self._process = subprocess.Popen(
                [STARTER, self._folder, "--port", str(self.port), "--heap", "512m", *more],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **JAVA},
            )
            assert self._process.stdout is not None
            for line in self._process.stdout:  # ends when the starter gives up, after 120 s at the latest
                said.append(line)
                if line.startswith("ready "):
                    scheme = "https" if self._secure else "http"
                    return f"{scheme}://localhost:{self.port}"
            self._end()
        pytest.fail(f"OpenSearch did not start: {''.join(said)}")

    def kill(self) -> None:
        """kill -9 of the Java process."""
        assert self._process is not None
        for child in psutil.Process(self._process.pid).children():
            child.send_signal(signal.SIGKILL)
            child.wait(10)
        self._end()

    def close(self) -> None:
        """Stop it and remove its data."""
        self._end()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


def forget(settings: Settings) -> None:
    """Remove the indices and index templates under the settings' prefix."""
    client = opensearch_client(settings)
    client.indices.delete(index=f"{settings.opensearch.prefix}-*")
    found = client.indices.get_index_template(params={"filter_path": "index_templates.name"})
    for template in (found or {}).get("index_templates", []):
        if template["name"].startswith(f"{settings.opensearch.prefix}-"):
            client.indices.delete_index_template(name=template["name"])
    client.close()
