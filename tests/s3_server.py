"""A real S3 server for tests: SeaweedFS, whose binary `scripts/test` fetches where it can.

WEED names the binary. The server keeps its data in a temporary folder and listens on loopback only.
"""

import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from bench._weed import binary, command, environment, free_ports, make_bucket

START_S: Final = 60.0


class S3Server:
    """SeaweedFS with one bucket."""

    bucket = "logweir-tests"

    def __init__(self, binary: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="logweir-s3-"))
        self.ports = free_ports()
        self.url = f"http://127.0.0.1:{self.ports['s3']}"
        self.log = (self.folder / "log").open("wb")
        self.process = subprocess.Popen(
            command(binary, self.folder, self.ports), stdout=self.log, stderr=self.log, cwd=self.folder
        )
        self._wait()

    def environment(self) -> dict[str, str]:
        """The variables by which a process reaches it."""
        return environment(self.ports["s3"])

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
        make_bucket(self.bucket, self.ports["filer"])
        with self.credentials():
            from pipeline.store.choose import open_store
            from pipeline.store.objects import probe

            probe(open_store(self.new_place()))


def weed() -> str:
    """The binary. Skips the test where there is none."""
    found = binary()
    if not found:
        pytest.skip("no SeaweedFS here: set WEED to its binary (scripts/test does)")
    return found
