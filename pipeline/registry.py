"""Model versions: immutable directories on disk, one pointer in Redis.

Publishing moves the pointer in one fenced script; the version before stays where it was. Every process compares
`current()` between batches; there is nothing to invalidate, because every cache is keyed by version.
"""

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import redis

from pipeline.errors import BadBundle, StaleToken
from pipeline.gpu.leases import Lease
from pipeline.keyspace import Keys, Scripts, answering, text_map
from pipeline.models.bundle import Manifest, load_manifest
from pipeline.settings import Settings

VERSION: Final = re.compile(r"m(\d{6,})-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The published version."""

    version: str
    generation: int
    token: int
    published: str


class Registry:
    """Reads and moves the pointer."""

    def __init__(self, client: "redis.Redis", settings: Settings) -> None:
        self.client = client
        self.keys = Keys(settings.key_prefix)
        self.scripts = Scripts(client)
        self.directory = settings.models

    def path(self, version: str) -> Path:
        """Where a version's bundle lies. Raises BadBundle for a name that is not a version."""
        if not VERSION.fullmatch(version):
            raise BadBundle(f"{version!r} is not a model version; versions look like m000001-0a1b2c3d")
        return self.directory / version

    def current(self) -> Live | None:
        """The live version, None before the first one."""
        with answering():
            entry = text_map(self.client.hgetall(self.keys.model))
        if not entry.get("version"):
            return None
        return Live(
            version=entry["version"],
            generation=int(entry["generation"]),
            token=int(entry["token"]),
            published=entry["published"],
        )

    def versions(self) -> list[str]:
        """All versions on disk, oldest first."""
        if not self.directory.is_dir():
            return []
        names = (p.name for p in self.directory.iterdir() if VERSION.fullmatch(p.name))
        return sorted(names, key=lambda name: (_token(name), name))

    def newest_token(self) -> int:
        """The highest fencing token that ever published to disk: new leases start above it, even on an empty Redis."""
        return max((_token(v) for v in self.versions()), default=0)

    def name(self, token: int, content: str) -> str:
        """The version that a training under this token makes: the token orders, the content tells apart."""
        return f"m{token:06d}-{content[:8]}"

    def manifest(self, version: str) -> Manifest:
        """What the version is; its files are checked against their hashes. Raises BadBundle."""
        return load_manifest(self.path(version))

    def publish(self, version: str, lease: Lease, *, at: datetime) -> int:
        """Make a complete bundle the live one; returns the new generation.

        Raises BadBundle when the files are not whole, StaleToken when the training lease was lost.
        """
        self.manifest(version)
        answer = self.scripts.run(
            "publish",
            [self.keys.model, self.keys.lease(lease.resource)],
            [version, lease.holder, lease.token, at.isoformat()],
        )
        if answer[0] != b"published":
            raise StaleToken(
                f"the lease on {lease.resource} (token {lease.token}) was lost; {version} is not published"
            )
        return int(answer[1])


def _token(version: str) -> int:
    match = VERSION.fullmatch(version)
    return int(match.group(1)) if match else 0
