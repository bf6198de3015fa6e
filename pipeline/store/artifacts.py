"""Files by their content: `artifacts/<two digits>/<SHA-256>`, immutable, checked when they are fetched.

A manifest is an object that names artifacts, and it is created after them. An artifact that no manifest names
is removed after a grace time, in which its manifest may still come.
"""

import hashlib
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from pipeline.errors import BadBundle
from pipeline.store.objects import Objects

PREFIX: Final = "artifacts/"
GRACE_S: Final = 86_400.0


class Artifacts:
    """The artifacts of one store. All methods raise StoreUnavailable."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    def put(self, file: Path, sha256: str) -> None:
        """Stores a file whose hash is known; what is there already stays."""
        # An old one that nothing names may be about to be removed: written again it is young.
        here = self.objects.look(_key(sha256))
        if here is None or here.size != file.stat().st_size or here.changed < time.time() - GRACE_S / 2:
            self.objects.put(_key(sha256), file)

    def fetch(self, sha256: str, size: int, to: Path) -> None:
        """Writes the artifact to a file. Raises BadBundle when it is missing or differs from its hash."""
        if not self.objects.fetch(_key(sha256), to, max_bytes=size):
            raise BadBundle(
                f"the store {self.objects.url} lacks the artifact {sha256[:16]}; publish it again"
            )
        with to.open("rb") as f:
            found = hashlib.file_digest(f, "sha256").hexdigest()
        if found != sha256:
            raise BadBundle(
                f"the artifact {sha256[:16]} of the store {self.objects.url} is damaged; publish it again"
            )

    def sizes(self) -> dict[str, int]:
        """The bytes of every artifact by its hash."""
        return {one.key.rpartition("/")[2]: one.size for one in self.objects.found(PREFIX)}

    def sweep(self, named: Collection[str], *, grace_s: float = GRACE_S) -> int:
        """Removes the artifacts older than `grace_s` that no manifest names; returns their number."""
        old = time.time() - grace_s
        unused = [
            one.key
            for one in self.objects.found(PREFIX)
            if one.changed < old and one.key.rpartition("/")[2] not in named
        ]
        for key in unused:
            self.objects.delete(key)
        self.objects.sweep(PREFIX)
        return len(unused)


def _key(sha256: str) -> str:
    return f"{PREFIX}{sha256[:2]}/{sha256}"
