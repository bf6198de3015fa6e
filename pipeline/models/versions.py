"""Model versions in the store, and this machine's copies of them.

    versions/<version>/manifest.json    Created once, after the artifacts that it names.
    versions/<version>/note.json        The fate of the version; it may be written again.
    artifacts/..                        The files of all versions by their hash (store/artifacts.py).

A copy is a folder below the data directory. It is fetched once per machine, however many processes ask
(single-flight by a file lock), and only whole copies get their name. Copies that nobody used lately are
removed.
"""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from pipeline.errors import BadBundle, OlderBundle, StoreUnavailable
from pipeline.logs import logger
from pipeline.models.bundle import FILE_CAPS, MANIFEST, OPTIONAL_CAPS, Manifest, load_manifest
from pipeline.store.artifacts import Artifacts
from pipeline.store.objects import Objects

VERSION: Final = re.compile(r"m(\d{6,})-[0-9a-f]{8}")
PREFIX: Final = "versions/"
NOTE: Final = "note.json"
# Copies on a machine: as many as the store keeps of one model by default, besides those used within an hour.
COPIES: Final = 10
USED_S: Final = 3_600.0
# A fetch of the largest bundle over a slow line. A holder of the lock that is older was stopped.
FETCH_WAIT_S: Final = 120.0
# A leftover that nobody wrote to for this long belongs to a killed process.
LEFTOVER_S: Final = 3_600.0
FETCH_POLL_S: Final = 0.05
_MANIFEST_MOST: Final = 1 << 20
_CAPS: Final = FILE_CAPS | OPTIONAL_CAPS

T = TypeVar("T")


class Versions:
    """One per registry. `directory` holds the copies."""

    def __init__(self, objects: Objects, directory: Path) -> None:
        self.objects = objects
        self.artifacts = Artifacts(objects)
        self.directory = directory

    def place(self, version: str) -> Path:
        """The folder of this machine's copy. Raises BadBundle for a name that is not a version."""
        return self.directory / checked_version(version)

    def names(self) -> list[str]:
        """All versions of the store, oldest first. Raises StoreUnavailable."""
        keys = (one.key.split("/") for one in self.objects.found(PREFIX))
        found = {key[1] for key in keys if len(key) == 3 and key[2] == MANIFEST}
        return sorted((v for v in found if VERSION.fullmatch(v)), key=lambda v: (token_of(v), v))

    def manifest(self, version: str) -> Manifest:
        """The manifest in the store; its artifacts are not looked at. Raises BadBundle, StoreUnavailable."""
        return Manifest.from_json(self._manifest_text(version))

    def is_older(self, version: str) -> bool:
        """Whether an older build made this version; False also where nobody can tell.

        This machine's copy is asked before the store, which may be away."""
        path = self.place(version) / MANIFEST
        try:
            Manifest.from_json(path.read_bytes() if path.is_file() else self._manifest_text(version))
        except OlderBundle:
            return True
        except (BadBundle, StoreUnavailable, OSError):
            return False
        return False

    def complete(self, version: str, sizes: dict[str, int]) -> Manifest:
        """The manifest of a version whose artifacts are all there, by their sizes (`Artifacts.sizes`).

        Raises BadBundle, StoreUnavailable."""
        manifest = self.manifest(version)
        for name, file in manifest.files.items():
            if sizes.get(file.sha256) != file.size:
                raise BadBundle(
                    f"{name} of {version} is missing in the store {self.objects.url} or has another size; "
                    "train again, or restore its artifacts"
                )
        return manifest

    def verified(self, version: str) -> Manifest:
        """The manifest of a version, after every artifact was read and compared with its hash.

        Raises BadBundle, StoreUnavailable."""
        manifest = self.manifest(version)
        with tempfile.TemporaryDirectory(prefix="logweir-") as folder:
            for file in manifest.files.values():
                self.artifacts.fetch(file.sha256, file.size, Path(folder) / "artifact")
        return manifest

    def put(self, version: str) -> Manifest:
        """Stores this machine's copy; nothing changes where the store has it already.

        Raises BadBundle for a damaged copy and for another version of this name, StoreUnavailable."""
        folder = self.local(version)
        manifest = load_manifest(folder)
        for name, file in manifest.files.items():
            self.artifacts.put(folder / name, file.sha256)
        text = (folder / MANIFEST).read_bytes()
        key = f"{PREFIX}{version}/{MANIFEST}"
        if not self.objects.create(key, text) and self.objects.get(key) != text:
            raise BadBundle(f"the store {self.objects.url} has another version of the name {version}")
        return manifest

    def stored(self, version: str) -> bool:
        """Whether the store has this version. Raises StoreUnavailable."""
        return self.objects.look(f"{PREFIX}{checked_version(version)}/{MANIFEST}") is not None

    def local(self, version: str) -> Path:
        """This machine's copy, fetched where it lacks. Raises BadBundle, also when the store is away."""
        folder = self.place(version)
        if not (folder / MANIFEST).is_file():
            try:
                with self._single_flight(version):
                    if not (folder / MANIFEST).is_file():
                        self._fetch(version, folder)
            except OlderBundle:
                raise
            except (BadBundle, StoreUnavailable) as exc:
                raise BadBundle(f"{version} cannot be fetched: {exc}") from exc
            except OSError as exc:
                raise BadBundle(
                    f"the copy of {version} cannot be written to {self.directory} ({exc.strerror or exc}); "
                    "free space or fix the rights there"
                ) from exc
        with contextlib.suppress(OSError):
            os.utime(folder)  # its last use
        return folder

    def read(self, version: str, load: Callable[[Path], T]) -> T:
        """Loads this machine's copy by `load`. A damaged copy is fetched again, once.

        Raises BadBundle."""
        try:
            return load(self.local(version))
        except OlderBundle:
            raise  # whole: another copy would be the same
        except BadBundle as exc:
            try:
                stored = self.stored(version)
            except StoreUnavailable:
                stored = False
            if not stored or not self.place(version).exists():
                raise
            logger(version=version).warning("model.copy_damaged", why=str(exc))
            self.forget(version)
            return load(self.local(version))

    def forget(self, version: str) -> None:
        """Removes this machine's copy."""
        path = self.place(version)
        hidden = path.with_name(f".{path.name}.{os.getpid()}.gone")
        with contextlib.suppress(OSError):
            path.rename(hidden)  # atomic, so that no process reads half a bundle
        shutil.rmtree(hidden, ignore_errors=True)

    def remove(self, version: str) -> None:
        """Removes a version from the store, and this machine's copy. Its artifacts go with `sweep`.

        Raises StoreUnavailable."""
        self.objects.delete(f"{PREFIX}{checked_version(version)}/{MANIFEST}")
        self.objects.delete(f"{PREFIX}{version}/{NOTE}")
        self.forget(version)

    def sweep(self) -> int:
        """Removes artifacts that no version names, and what killed writers left. Raises StoreUnavailable.

        A living process may still be writing what changed lately, so only old leftovers go. A version whose
        manifest cannot be read keeps all artifacts: nobody knows which are its own."""
        for path in self.directory.glob(".m*"):
            with contextlib.suppress(OSError):
                self._sweep_leftover(path)
        self.objects.sweep(PREFIX)
        try:
            manifests = [self.manifest(version) for version in self.names()]
        except BadBundle:
            return 0
        return self.artifacts.sweep({file.sha256 for m in manifests for file in m.files.values()})

    def _sweep_leftover(self, path: Path) -> None:
        """Removes one leftover of a killed writer. Raises OSError."""
        if path.suffix == ".lock":
            if not (self.directory / path.stem[1:]).exists() and _is_old(path):
                path.unlink(missing_ok=True)
        elif path.suffix in (".tmp", ".gone") and _is_old(path):
            shutil.rmtree(path, ignore_errors=True)

    def note(self, version: str) -> bytes | None:
        """The note of a version. Raises StoreUnavailable."""
        return self.objects.get(f"{PREFIX}{checked_version(version)}/{NOTE}")

    def write_note(self, version: str, text: bytes) -> None:
        """Raises StoreUnavailable."""
        self.objects.put(f"{PREFIX}{checked_version(version)}/{NOTE}", text)

    def _manifest_text(self, version: str) -> bytes:
        text = self.objects.get(f"{PREFIX}{checked_version(version)}/{MANIFEST}")
        if text is None:
            raise BadBundle(f"the store {self.objects.url} has no version {version}")
        if len(text) > _MANIFEST_MOST:
            raise BadBundle(
                f"the manifest of {version} has {len(text)} bytes, at most {_MANIFEST_MOST} are read"
            )
        return text

    def _fetch(self, version: str, folder: Path) -> None:
        """Brings a whole copy. Raises BadBundle, StoreUnavailable, OSError."""
        text = self._manifest_text(version)
        began = time.monotonic()
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            for name, file in Manifest.from_json(text).files.items():
                if file.size > _CAPS.get(name, -1):
                    raise BadBundle(f"the manifest of {version} names {name!r} with {file.size} bytes")
                self.artifacts.fetch(file.sha256, file.size, temporary / name)
            (temporary / MANIFEST).write_bytes(text)
            shutil.rmtree(folder, ignore_errors=True)  # a copy that lost its manifest
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        logger(version=version).info("model.fetched", seconds=round(time.monotonic() - began, 3))
        self._make_room(version)

    def _make_room(self, newest: str) -> None:
        """Removes the copies that were used longest ago."""
        used = []
        for path in self.directory.glob("m*"):
            with contextlib.suppress(OSError):
                if VERSION.fullmatch(path.name) and path.name != newest:
                    used.append((path.stat().st_mtime, path.name))
        for at, name in sorted(used, reverse=True)[COPIES - 1 :]:
            if at < time.time() - USED_S:
                self.forget(name)

    @contextmanager
    def _single_flight(self, version: str) -> Iterator[None]:
        """One process of this machine fetches a version, the others wait for it. Raises OSError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / f".{version}.lock").open("a") as handle:
            os.utime(handle.fileno())  # `sweep` keeps a lock that was used lately
            until = time.monotonic() + FETCH_WAIT_S
            while time.monotonic() < until:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(FETCH_POLL_S)
            yield  # after that time without it: a second fetch costs time and harms nothing


def _is_old(path: Path) -> bool:
    """Whether nothing was written to a leftover for so long that its writer must be dead. Raises OSError.

    A folder's own time changes when a file begins in it, so the files count as well."""
    newest = max(one.stat().st_mtime for one in (path, *path.glob("*")))
    return newest < time.time() - LEFTOVER_S


def checked_version(version: str) -> str:
    """The version itself. Raises BadBundle for a name that is none: it becomes part of a path."""
    if not VERSION.fullmatch(version):
        raise BadBundle(f"{version!r} is not a model version; versions look like m000001-0a1b2c3d")
    return version


def token_of(version: str) -> int:
    """The fencing token under which a version was trained."""
    match = VERSION.fullmatch(version)
    return int(match.group(1)) if match else 0
