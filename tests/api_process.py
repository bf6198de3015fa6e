"""The API and its console in a process of their own, without a stack."""

import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from urllib.parse import urlencode

from intake_process import free_port
from polling import wait_until

from pipeline.settings import Settings

Form = Mapping[str, str] | Sequence[tuple[str, str]]


class Console:
    """An API in its own process."""

    def __init__(self, settings: Settings, port: int) -> None:
        self.settings, self.port = settings, port

    def ask(
        self, path: str, method: str = "GET", body: Form | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        payload = None if body is None else urlencode(body).encode()
        if payload is not None:
            named["Content-Type"] = "application/x-www-form-urlencoded"
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)) as connection:
            connection.request(method, path, payload, named)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()


@contextmanager
def console(settings: Settings, **environ: str) -> Iterator[Console]:
    found = Console(settings, free_port())
    env = {
        **os.environ, **settings.to_environ(), "LOGWEIR_API": f"http://127.0.0.1:{found.port}", **environ
    }  # fmt: skip
    log = settings.data.dir / "api.log"
    settings.data.dir.mkdir(parents=True, exist_ok=True)
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [sys.executable, "-m", "pipeline.workers.api"], env=env, stdout=out, stderr=out
        ) as process,
    ):
        try:
            assert wait_until(lambda: b"api.starts" in log.read_bytes(), timeout_s=30), log.read_text()
            yield found
        finally:
            process.send_signal(signal.SIGTERM)
