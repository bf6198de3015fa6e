"""A bundle: one immutable model version as a directory.

`manifest.json` is written last and names every other file with size and SHA-256; a directory without it is no
bundle. Loading refuses every file that the manifest does not name. Nothing in a bundle is executable: JSON,
msgpack, safetensors and Parquet only. Importing this module loads neither torch nor Polars.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from pipeline.errors import BadBundle, OlderBundle
from pipeline.models.threshold import Calibration
from pipeline.records.batch import LearntFrom

BUNDLE_FORMAT: Final = 7
MANIFEST: Final = "manifest.json"
WEIGHTS: Final = "model.safetensors"
TOKENIZER: Final = "tokenizer.json"
KNOWN_FILE: Final = "known.parquet"
WORDS: Final = "words.parquet"
NOVELTY: Final = "novelty.msgpack"
PRIOR: Final = "prior.msgpack"
SEQUENCES: Final = "sequences.msgpack"
SENTENCES: Final = "sentences.parquet"
ENCODER_CONFIG: Final = "config.json"  # with WEIGHTS and TOKENIZER the layout of transformers
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
# The files of every bundle, and the most bytes of each: ten times the size that the largest configuration
# writes, but for the weights. The caps stop a damaged or hostile bundle from filling memory.
FILE_CAPS: Final[dict[str, int]] = {
    WEIGHTS: 512 << 20,  # BERT of the base size takes 420 MiB in single precision
    TOKENIZER: 32 << 20,
    KNOWN_FILE: 512 << 20,
    WORDS: 64 << 20,
    NOVELTY: 64 << 20,
    PRIOR: 16 << 20,
}
OPTIONAL_CAPS: Final[dict[str, int]] = {
    SEQUENCES: 64 << 20,
    SENTENCES: 64 << 20,
    ENCODER_CONFIG: 1 << 20,
    TOKENIZER_CONFIG: 1 << 20,
}
_CAPS: Final = FILE_CAPS | OPTIONAL_CAPS
_MANIFEST_CAP: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleFile:
    """One file of a bundle: bytes and SHA-256 in hex."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStats:
    """The data that a model was trained on, and the figures of the training."""

    lines: int  # with repetition
    distinct: int  # distinct masked lines
    fitted: int  # distinct masked lines the weights have seen
    templates: int
    held_out_templates: int
    left_out: int  # distinct lines excluded from the fit as rare or error-like, of results only
    seconds: float
    epochs: float
    steps: int
    loss: float  # nats per masked token, mean of the last steps
    held_out_above: float  # share of held-out templates above the threshold
    parameters: int
    device: str
    novel_per_day: float | None = (
        None  # new calm templates of a workload a day; None for a sample without times
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a model version except its arrays."""

    format: int = BUNDLE_FORMAT
    version: str
    created: Annotated[datetime, msgspec.Meta(tz=True)]
    mask_version: str
    tokens: tuple[str, ...]  # mask tokens
    config: Mapping[str, Any]  # model and training configuration
    calibration: Calibration
    stats: TrainingStats
    seed: int
    parent: str | None = None  # the version this one continues
    model: str = "shared"  # the model that this is a version of
    workloads: tuple[str, ...] = ()  # of the training lines; () where unknown
    learnt_from: Mapping[str, LearntFrom] = field(default_factory=dict)  # of each of these workloads
    query: Mapping[str, Any] = field(default_factory=dict)  # that read the sample
    # Error-like templates that came all through the sample, with their lines a day.
    daily: tuple[tuple[int, Annotated[float, msgspec.Meta(ge=0, le=1e300)]], ...] = ()
    held_out: tuple[int, ...] = ()  # patterns that are known but that the model never learnt, for the judge
    files: Mapping[str, BundleFile]

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=1).decode()

    @staticmethod
    def from_json(text: str | bytes) -> "Manifest":
        """Raises BadBundle when a field is missing or malformed, or when another build made it: OlderBundle
        where that is an older one."""
        try:
            form = msgspec.json.decode(text, type=_Format).format
            if form == BUNDLE_FORMAT:
                return msgspec.json.decode(text, type=Manifest)
        except (ValueError, RecursionError) as exc:
            raise BadBundle(f"{MANIFEST} is not readable: {exc}; publish the bundle again") from exc
        if form < BUNDLE_FORMAT:
            raise OlderBundle(
                f"an older build made it (bundle format {form}, this build reads {BUNDLE_FORMAT}); train again "
                "with `logweir train`"
            )
        raise BadBundle(
            f"the bundle has format {form}; this build reads format {BUNDLE_FORMAT}: upgrade Logweir"
        )


class _Format(msgspec.Struct):
    format: int


def write_bundle(
    out: Path,
    *,
    writers: Mapping[str, Callable[[Path], None]],
    manifest: Callable[[Mapping[str, BundleFile]], Manifest],
) -> Manifest:
    """Makes the bundle directory `out`, whole or not at all.

    `writers` write the named files; `manifest` gets their sizes and hashes. Files go to a temporary sibling
    and are flushed to disk, then the manifest; the directory is renamed last. Raises BadBundle when `out`
    exists.
    """
    if out.exists():
        raise BadBundle(f"{out} exists already; a model version is never written twice, choose a new one")
    unknown = sorted(set(writers) - set(_CAPS))
    if unknown:
        raise BadBundle(f"a bundle cannot hold {unknown}; it holds {sorted(_CAPS)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    # The process id marks whose leftover the directory is after a crash; a retry of ours starts afresh.
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        files: dict[str, BundleFile] = {}
        for name, writer in writers.items():
            writer(temporary / name)
            _fsync(temporary / name)
            files[name] = _measure(temporary / name)
        written = manifest(files)
        (temporary / MANIFEST).write_text(written.to_json(), encoding="utf-8")
        _fsync(temporary / MANIFEST)
        _fsync(temporary)
        temporary.rename(out)
        _fsync(out.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return written


def load_manifest(bundle: Path) -> Manifest:
    """Reads and verifies a bundle.

    Raises BadBundle that names the difference: no manifest, a file that is missing, too large, altered, not
    named, or no regular file (a link could point out of the bundle).
    """
    path = bundle / MANIFEST
    _regular_size(path, _MANIFEST_CAP)
    manifest = Manifest.from_json(path.read_bytes())
    missing = sorted(set(FILE_CAPS) - set(manifest.files))
    unknown = sorted(set(manifest.files) - set(_CAPS))
    if missing or unknown:
        raise BadBundle(
            f"the manifest of {bundle} lacks {missing} and names unknown files {unknown}; publish it again"
        )
    extra = sorted({entry.name for entry in bundle.iterdir()} - set(manifest.files) - {MANIFEST})
    if extra:
        raise BadBundle(
            f"{bundle} holds files its manifest does not name: {extra}; remove them or publish it again"
        )
    for name, expected in manifest.files.items():
        size = _regular_size(bundle / name, _CAPS[name])
        if size != expected.size:
            raise BadBundle(
                f"{bundle / name} has {size} bytes, its manifest says {expected.size}; publish it again"
            )
        if _measure(bundle / name).sha256 != expected.sha256:
            raise BadBundle(f"{bundle / name} does not match the SHA-256 of its manifest; publish it again")
    return manifest


def optional(bundle: Path, name: str) -> bytes | None:
    """The bytes of an optional file of a bundle that `load_manifest` has verified; None without one."""
    path = bundle / name
    if not path.exists():
        return None
    _regular_size(path, OPTIONAL_CAPS[name])
    return path.read_bytes()


def _regular_size(path: Path, cap: int) -> int:
    try:
        info = path.lstat()
    except OSError as exc:
        raise BadBundle(
            f"{path} is missing ({exc.strerror}); the bundle is incomplete, publish it again"
        ) from exc
    if not stat.S_ISREG(info.st_mode):
        raise BadBundle(f"{path} is not a regular file; links and devices are refused in a bundle")
    if info.st_size > cap:
        raise BadBundle(f"{path} has {info.st_size} bytes, at most {cap} are read")
    return info.st_size


def _measure(path: Path) -> BundleFile:
    with path.open("rb") as f:
        found = hashlib.file_digest(f, "sha256")
    return BundleFile(size=path.stat().st_size, sha256=found.hexdigest())


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
