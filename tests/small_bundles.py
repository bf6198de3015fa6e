"""Model versions that are whole, though no network could be loaded from them; and damage to them."""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.models import bundle
from pipeline.models.bundle import Manifest, TrainingStats
from pipeline.models.registry import Registry
from pipeline.models.threshold import calibrate
from pipeline.store.folder import Folder

AT = datetime(2026, 11, 20, tzinfo=UTC)
ONE, TWO, THREE = "m000001-0a1b2c3d", "m000002-0a1b2c3d", "m000003-0a1b2c3d"


def written(
    registry: Registry,
    version: str,
    *,
    model: str = "shared",
    workloads: Sequence[str] = (),
    content: bytes = b"content",
    more: Mapping[str, bytes] | None = None,
) -> Path:
    """A complete bundle with the right hashes, on this machine only; `put` brings bundles into the store."""

    def manifest(files: Any) -> Manifest:
        given: dict[str, Any] = {"device": "cpu"}
        return Manifest(
            version=version, created=AT, mask_version="m", tokens=(), config={},
            calibration=calibrate([], total=1), seed=0, files=files,
            stats=TrainingStats(**{name: given.get(name, 0) for name in TrainingStats.__dataclass_fields__}),
            model=model, workloads=tuple(workloads),
        )  # fmt: skip

    out = registry.path(version)
    files = dict.fromkeys(bundle.FILE_CAPS, content) | dict(more or {})
    writers = {name: functools.partial(_write, text=text) for name, text in files.items()}
    bundle.write_bundle(out, writers=writers, manifest=manifest)
    return out


def _write(path: Path, text: bytes) -> None:
    path.write_bytes(text)


def put(registry: Registry, *versions: str, **how: Any) -> None:
    """Complete bundles in the store."""
    for version in versions:
        written(registry, version, **how)
        registry.put(version)


def root(registry: Registry) -> Path:
    """The folder of the store."""
    objects = registry.stored.objects
    assert isinstance(objects, Folder)
    return objects.root


def manifest_of(registry: Registry, version: str) -> Path:
    """The manifest of a version in the store."""
    return root(registry) / "versions" / version / bundle.MANIFEST


def artifact_of(registry: Registry, version: str, name: str) -> Path:
    """A file of a version in the store."""
    sha256 = registry.stored.manifest(version).files[name].sha256
    return root(registry) / "artifacts" / sha256[:2] / sha256


def damage(registry: Registry, version: str) -> None:
    """Put a version aside, in the store and on this machine."""
    manifest_of(registry, version).rename(manifest_of(registry, version).with_name("aside"))
    registry.stored.forget(version)


def repair(registry: Registry, version: str) -> None:
    """Bring it back to the store."""
    manifest_of(registry, version).with_name("aside").rename(manifest_of(registry, version))


def make_older(registry: Registry, version: str) -> None:
    """As if the build before had made this version: its format, in the store and on this machine."""
    for path in (manifest_of(registry, version), registry.path(version) / bundle.MANIFEST):
        if path.exists():
            path.write_text(json.dumps(json.loads(path.read_bytes()) | {"format": bundle.BUNDLE_FORMAT - 1}))
