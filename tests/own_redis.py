"""A Redis server of a test's own, with options that the shared one must not have."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from polling import wait_until

from pipeline.workers.stack.private_redis import find_server


@contextmanager
def server(folder: Path, *options: str) -> Iterator["redis.Redis"]:
    """It listens on a unix socket in this folder; the client has no password."""
    path = folder / "r.sock"
    with subprocess.Popen(
        [
            str(find_server()),
            "--port",
            "0",
            "--unixsocket",
            str(path),
            "--dir",
            str(folder),
            "--save",
            "",
            *options,
        ],
        stdout=subprocess.DEVNULL,
    ) as process:
        client = redis.Redis(unix_socket_path=str(path))
        try:
            assert wait_until(lambda: _answers(client), timeout_s=20)
            yield client
        finally:
            client.close()
            process.terminate()


def _answers(client: "redis.Redis") -> bool:
    try:
        return bool(client.ping())
    except (redis.AuthenticationError, redis.ResponseError):  # it wants a password
        return True
    except redis.ConnectionError:
        return False
