"""The key of a stack's own machine: a file that only its user reads. It is good on loopback alone."""

import os
import secrets
from contextlib import suppress
from pathlib import Path


def own_key_file(data_dir: Path) -> Path:
    """Where it is."""
    return data_dir / "api.key"


def make_own_key(data_dir: Path) -> Path:
    """Writes a new key where there is none. Raises OSError."""
    path = own_key_file(data_dir)
    with suppress(FileExistsError):
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w") as out:
            out.write(f"lw_{secrets.token_urlsafe(32)}\n")
    return path


def read_own_key(data_dir: Path) -> str:
    """The key, "" where there is none that only we read."""
    try:
        path = own_key_file(data_dir)
        return "" if path.stat().st_mode & 0o077 else path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
