"""A Redis of one's own whose power can be cut: it comes back with the AOF as it was at an earlier moment."""

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import redis
from polling import wait_until

from pipeline.settings import Settings
from pipeline.workers.stack.private_redis import PrivateRedis


class Power:
    """The server process and its AOF."""

    def __init__(self, settings: Settings) -> None:
        self.server = PrivateRedis(settings)
        self.process = self.server.start()
        self.settings = settings.replace(redis_url=self.server.url)

    def aof(self) -> Path:
        """The file that grows: one file before Redis 7, a directory of them since."""
        folder = self.server.directory / "appendonlydir"
        files = sorted(folder.glob("*.incr.aof"), key=lambda p: p.stat().st_mtime)
        return files[-1] if files else self.server.directory / "appendonly.aof"

    def now(self) -> int:
        """This moment, to go back to: what was answered is in the file, on the disk or not.

        While it flushes the file, Redis keeps what comes in memory, for up to two seconds.
        """
        with redis.Redis.from_url(self.settings.redis.url) as client:
            assert wait_until(lambda: client.info("persistence")["aof_buffer_length"] == 0, timeout_s=10)
        path = self.aof()
        return path.stat().st_size if path.exists() else 0

    def cut(self, back_to: int | None = None) -> None:
        """SIGKILL, and start again with the AOF as it was at an earlier `now()`; None: as it is."""
        self.kill()
        if back_to is not None:
            with self.aof().open("r+b") as aof:
                aof.truncate(back_to)
        self.process = self.server.start()

    def kill(self) -> None:
        """SIGKILL, which leaves what was written in the system's cache."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)


@contextmanager
def power(**changes: object) -> Iterator[Power]:
    """A running server in a directory with a short name; settings of it with these changes."""
    folder = Path(tempfile.mkdtemp(prefix="logweir-power-"))
    settings = Settings(
        data_dir=folder,
        key_prefix="power",
        claim_ttl_ms=2000,
        overdue_ms=500,
        **changes,  # type: ignore[arg-type]
    )
    own = Power(settings)
    try:
        yield own
    finally:
        own.kill()
        shutil.rmtree(folder, ignore_errors=True)
