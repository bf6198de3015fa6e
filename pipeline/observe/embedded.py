"""An embedded stack and its Redis: where the private one listens, and the names of workers there."""

import os
import socket
import tempfile
from pathlib import Path
from typing import Final
from urllib.parse import quote

from pipeline.errors import BadInput
from pipeline.records.batch import digest
from pipeline.settings import Settings

# sun_path holds 108 bytes on Linux and 104 on macOS, with the closing NUL.
SOCKET_PATH_LIMIT: Final = 100


def socket_path(data_dir: Path) -> Path:
    """A socket path that the system takes: in the data directory, or in a private temporary directory."""
    wanted = data_dir / "redis" / "redis.sock"
    if len(os.fsencode(wanted)) <= SOCKET_PATH_LIMIT:
        return wanted
    private = Path(tempfile.gettempdir()) / f"logweir-{os.getuid()}-{digest(str(data_dir))}"
    private.mkdir(mode=0o700, exist_ok=True)
    info = private.lstat()
    if info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise BadInput(
            f"{private} belongs to somebody else; remove it or use a data directory with a shorter path"
        )
    return private / "redis.sock"


def private_url(data_dir: Path) -> str:
    """Where the private Redis of this data directory listens."""
    return f"unix://{quote(str(socket_path(data_dir.absolute())))}?db=0"


def called(settings: Settings, name: str, *, embedded: bool) -> str:
    """The name of a worker in Redis, unique there.

    Replicas in containers differ by host, embedded stacks on a shared Redis by host and data directory. An
    embedded Redis has the workers of one stack only."""
    if not embedded:
        return f"{name}@{socket.gethostname()}"
    if settings.redis.url == private_url(settings.data.dir):
        return name
    return f"{name}@{socket.gethostname()}-{digest(str(settings.data.dir.absolute()))[:4]}"
