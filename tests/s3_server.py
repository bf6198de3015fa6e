"""A real S3 server for tests: SeaweedFS, whose binary `scripts/test` fetches where it can.

WEED names the binary. The server keeps its data in a temporary folder and listens on loopback only.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

KEY, SECRET = "logweir-test", "logweir-test-secret"
START_S: Final = 60.0
CONFIG: Final = """{"identities": [{"name": "test", "credentials": [{"accessKey": "%s", "secretKey": "%s"}],
  "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}"""


class S3Server:
    """SeaweedFS with one bucket."""

    bucket = "logweir-tests"

    def __init__(self, binary: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="logweir-s3-"))
        config = self.folder / "s3.json"
        config.write_text(CONFIG % (KEY, SECRET))
        self.ports = dict(zip(("master", "volume", "filer", "s3"), _free_ports(4), strict=True))
        self.url = f"http://127.0.0.1:{self.ports['s3']}"
        self.log = (self.folder / "log").open("wb")
        self.process = subprocess.Popen(
            [
                binary, "server", f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
                f"-master.port={self.ports['master']}", f"-volume.port={self.ports['volume']}",
                "-filer", f"-filer.port={self.ports['filer']}", "-volume.max=20",
                "-master.volumeSizeLimitMB=64", "-s3", f"-s3.port={self.ports['s3']}",
                # Services that nobody asks here, on ports that are the same for every server.
                "-s3.port.iceberg=0", "-s3.port.lance=0",
                f"-s3.config={config}",
            ],
            stdout=self.log, stderr=self.log, cwd=self.folder,
        )  # fmt: skip
        self._wait()

    def environment(self) -> dict[str, str]:
        """What a process needs to reach it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    @contextmanager
    def credentials(self) -> Iterator[None]:
        """The environment of this process, meanwhile."""
        with pytest.MonkeyPatch.context() as patched:
            for name, value in self.environment().items():
                patched.setenv(name, value)
            yield

    def new_place(self) -> str:
        """An address that nothing was written to."""
        return f"s3://{self.bucket}/{uuid.uuid4().hex}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait(self) -> None:
        """Until it has made the bucket."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                self._make_bucket()
            except Exception as exc:
                if time.monotonic() > deadline or self.process.poll() is not None:
                    text = (self.folder / "log").read_text(errors="replace")[-2000:]
                    self.close()
                    raise RuntimeError(f"the S3 server did not start ({exc}): {text}") from exc
                time.sleep(0.2)
            else:
                return

    def _make_bucket(self) -> None:
        """By the filer, where a bucket is a folder below /buckets."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports['filer']}/buckets/{self.bucket}/", method="POST"
        )
        try:
            urllib.request.urlopen(request, timeout=5).close()
        except urllib.error.HTTPError as exc:
            if exc.code != 409:  # it is there since an earlier try
                raise
        with self.credentials():
            from pipeline.store.choose import open_store
            from pipeline.store.objects import probe

            probe(open_store(self.new_place()))


def _free_ports(count: int) -> list[int]:
    """Ports whose number plus 10,000 is a port too: SeaweedFS takes that one for gRPC."""
    found = []
    while len(found) < count:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
        small = 20_000 + port % 10_000
        try:
            for each in (small, small + 10_000):
                socket.create_server(("127.0.0.1", each)).close()
        except OSError:
            continue
        if small not in found:
            found.append(small)
    return found


def weed() -> str:
    """The binary. Skips the test where there is none."""
    binary = os.environ.get("WEED") or shutil.which("weed")
    if not binary:
        pytest.skip("no SeaweedFS here: set WEED to its binary (scripts/test does)")
    return binary
