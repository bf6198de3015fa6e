"""Settings of three Redis servers and three sentinels, as docs/operations.md describes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

MASTER: Final = "main"
FAILOVER_TIMEOUT_MS: Final = 6_000


def server_lines(*, password: str = "", master_port: int = 0) -> list[str]:
    """Of a server; `master_port`: that of the master which it follows."""
    lines = ['save ""', "appendonly yes", "appendfsync everysec", "repl-diskless-sync-delay 0"]
    lines += ["min-replicas-to-write 1", "min-replicas-max-lag 2", "maxmemory-policy noeviction"]
    if password:
        lines += [f"requirepass {password}", f"masterauth {password}"]
    if master_port:
        lines.append(f"replicaof 127.0.0.1 {master_port}")
    return lines


def sentinel_lines(
    master_port: int, *, down_after_ms: int, password: str = "", own_password: str = ""
) -> list[str]:
    """Of a sentinel. `password` is that of the servers, `own_password` its own."""
    lines = [f"sentinel monitor {MASTER} 127.0.0.1 {master_port} 2"]
    lines += [f"sentinel down-after-milliseconds {MASTER} {down_after_ms}"]
    lines += [f"sentinel failover-timeout {MASTER} {FAILOVER_TIMEOUT_MS}"]
    if password:
        lines.append(f"sentinel auth-pass {MASTER} {password}")
    if own_password:
        lines.append(f"requirepass {own_password}")
    return lines


def written(folder: Path, port: int, lines: Sequence[str]) -> Path:
    """The configuration file of a server or sentinel, which both rewrite themselves."""
    folder.mkdir(parents=True)
    path = folder / "server.conf"
    place = [f"port {port}", "bind 127.0.0.1", f"dir {folder}", f"logfile {folder}/log"]
    path.write_text("\n".join([*place, *lines, ""]))
    return path
