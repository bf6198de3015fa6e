"""Model versions that are whole on disk, though no network could be loaded from them."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.models import bundle
from pipeline.models.bundle import Manifest, TrainingStats
from pipeline.models.registry import Registry
from pipeline.models.threshold import Mode, calibrate

AT = datetime(2026, 11, 20, tzinfo=UTC)
ONE, TWO, THREE = "m000001-0a1b2c3d", "m000002-0a1b2c3d", "m000003-0a1b2c3d"


def written(
    registry: Registry,
    version: str,
    *,
    model: str = "shared",
    workloads: Sequence[str] = (),
    content: bytes = b"content",
) -> Path:
    """A complete bundle with the right hashes."""

    def manifest(files: Any) -> Manifest:
        given: dict[str, Any] = {"hold_out": "", "device": "cpu"}
        return Manifest(
            version=version, created=AT, mode=Mode.SELF, mask_version="m", tokens=(), config={},
            calibration=calibrate([], mode=Mode.SELF, total=1), seed=0, template_watermark=0, files=files,
            stats=TrainingStats(**{name: given.get(name, 0) for name in TrainingStats.__dataclass_fields__}),
            model=model, workloads=tuple(workloads),
        )  # fmt: skip

    out = registry.path(version)
    writers = {name: lambda path: path.write_bytes(content) and None for name in bundle.FILE_CAPS}
    bundle.write_bundle(out, writers=writers, manifest=manifest)
    return out
