"""A bundle: one immutable model version as a directory.

`manifest.json` is written last and names every other file with size and SHA-256; a directory
without it is not a bundle. Loading refuses whatever the manifest does not name. Nothing in a bundle
is executable: JSON, safetensors and Parquet only. Importing this module loads no torch.
"""

import hashlib
import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Mapping, Set
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final, Self

import polars as pl

from pipeline.errors import BadBundle
from pipeline.models.threshold import Calibration, Mode

BUNDLE_FORMAT: Final = 2  # 1 could not hold the optional files
MANIFEST: Final = "manifest.json"
WEIGHTS: Final = "model.safetensors"
TOKENIZER: Final = "tokenizer.json"
KNOWN: Final = "known.parquet"
WORDS: Final = "words.parquet"
NOVELTY: Final = "novelty.msgpack"
PRIOR: Final = "prior.msgpack"
SEQUENCES: Final = "sequences.msgpack"
# The names every bundle holds, and the most bytes each may have: about ten times what the
# largest configuration writes, so a damaged or hostile bundle cannot fill memory.
FILE_CAPS: Final[dict[str, int]] = {
    WEIGHTS: 256 << 20,
    TOKENIZER: 32 << 20,
    KNOWN: 512 << 20,
    WORDS: 64 << 20,
}
# What a bundle may hold beside them, likewise; one made by an older build holds none.
OPTIONAL_CAPS: Final[dict[str, int]] = {
    NOVELTY: 16 << 20,
    PRIOR: 16 << 20,
    SEQUENCES: 64 << 20,
}
_CAPS: Final = FILE_CAPS | OPTIONAL_CAPS
_MANIFEST_CAP: Final = 1 << 20
_HEADER_CAP: Final = 1 << 20  # of the weights; that of the largest configuration has 20 KiB
_DTYPES: Final = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "U8": 1,
    "BOOL": 1,
}  # bytes each
_KNOWN_CAP: Final = 5_000_000  # patterns; a hundred times the largest sample
KNOWN_SCHEMA: Final[dict[str, Any]] = {
    "pattern_id": pl.UInt64,
    "count": pl.UInt64,
    "template_id": pl.Int64,
    "severe": pl.Boolean,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleFile:
    """One file of a bundle: bytes and SHA-256 in hex."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStats:
    """What a model was trained on and how it went."""

    lines: int  # with repetition
    distinct: int  # distinct masked lines
    fitted: int  # distinct masked lines the weights have seen
    templates: int
    held_out_templates: int
    left_out: int  # distinct lines kept out of the fit as rare or error-like (self mode)
    hold_out: str  # how the calibration lines were held out, in words
    seconds: float
    epochs: float
    steps: int
    loss: float  # nats per masked token, mean of the last steps
    held_out_above: float  # share of held-out templates above the threshold
    parameters: int
    device: str
    novel_per_day: float | None = None  # new calm templates a workload shows a day; None where no times told


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a model version except its arrays."""

    format: int = BUNDLE_FORMAT
    version: str
    created: datetime  # aware UTC
    mode: Mode
    mask_version: str
    tokens: tuple[str, ...]  # mask tokens
    config: Mapping[str, Any]  # model and training configuration
    calibration: Calibration
    stats: TrainingStats
    seed: int
    template_watermark: int  # largest template id of the sample
    parent: str | None = None  # the version this one continues
    # Absent in bundles that were made before there were several models.
    model: str = "shared"  # whose model it is
    workloads: tuple[str, ...] = ()  # whose lines it was trained on; () where nobody said
    query: Mapping[str, Any] = field(default_factory=dict)  # what the sample was read by
    held_out: tuple[int, ...] = ()  # patterns that are known but that the weights never saw, for the judge
    files: Mapping[str, BundleFile]

    def to_json(self) -> str:
        return json.dumps(
            {
                "format": self.format,
                "version": self.version,
                "created": self.created.isoformat(),
                "mode": self.mode.value,
                "mask_version": self.mask_version,
                "tokens": list(self.tokens),
                "config": dict(self.config),
                "calibration": self.calibration.to_json(),
                "stats": asdict(self.stats),
                "seed": self.seed,
                "template_watermark": self.template_watermark,
                "parent": self.parent,
                "model": self.model,
                "workloads": list(self.workloads),
                "query": dict(self.query),
                "held_out": list(self.held_out),
                "files": {name: asdict(f) for name, f in self.files.items()},
            },
            indent=1,
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises BadBundle when a field is missing, malformed or newer than this build."""
        try:
            data = json.loads(text)
            if data["format"] > BUNDLE_FORMAT:
                raise BadBundle(
                    f"the bundle has format {data['format']}; this build reads up to {BUNDLE_FORMAT}: upgrade Logweir"
                )
            created = datetime.fromisoformat(data["created"])
            if created.tzinfo is None:
                raise ValueError(f"created {data['created']!r} has no time zone")
            return cls(
                format=int(data["format"]),
                version=str(data["version"]),
                created=created,
                mode=Mode(data["mode"]),
                mask_version=str(data["mask_version"]),
                tokens=tuple(str(t) for t in data["tokens"]),
                config=dict(data["config"]),
                calibration=Calibration.from_json(data["calibration"]),
                stats=TrainingStats(
                    **{
                        f.name: data["stats"][f.name]
                        for f in fields(TrainingStats)
                        if f.default is MISSING or f.name in data["stats"]
                    }
                ),
                seed=int(data["seed"]),
                template_watermark=int(data["template_watermark"]),
                parent=data["parent"],
                model=str(data.get("model", "shared")),
                workloads=tuple(str(w) for w in data.get("workloads", ())),
                query=dict(data.get("query", {})),
                held_out=tuple(int(p) for p in data.get("held_out", ())),
                files={
                    str(name): BundleFile(size=int(f["size"]), sha256=str(f["sha256"]))
                    for name, f in data["files"].items()
                },
            )
        # Also numbers without bound and lists without end.
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as exc:
            raise BadBundle(f"{MANIFEST} is not readable: {exc!r}; publish the bundle again") from exc


def write_bundle(
    out: Path,
    *,
    writers: Mapping[str, Callable[[Path], None]],
    manifest: Callable[[Mapping[str, BundleFile]], Manifest],
) -> Manifest:
    """Makes the bundle directory `out`, whole or not at all.

    `writers` write the named files; `manifest` gets their sizes and hashes. Files go to a temporary
    sibling, are flushed to disk, then the manifest, then the directory is renamed. Raises BadBundle
    when `out` exists: a version is immutable.
    """
    if out.exists():
        raise BadBundle(f"{out} exists already; a model version is never written twice, choose a new one")
    unknown = sorted(set(writers) - set(_CAPS))
    if unknown:
        raise BadBundle(f"a bundle cannot hold {unknown}; it holds {sorted(_CAPS)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    # The name tells a sweeper whose leftover it is after a crash; a retry of ours starts afresh.
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        found: dict[str, BundleFile] = {}
        for name, writer in writers.items():
            writer(temporary / name)
            _fsync(temporary / name)
            found[name] = _measure(temporary / name)
        made = manifest(found)
        (temporary / MANIFEST).write_text(made.to_json(), encoding="utf-8")
        _fsync(temporary / MANIFEST)
        _fsync(temporary)
        temporary.rename(out)
        _fsync(out.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return made


def load_manifest(bundle: Path) -> Manifest:
    """Reads and verifies a bundle.

    Raises BadBundle, naming what differs: no manifest, a file that is missing, too large, altered,
    not named, or not a regular file (a link could point out of the bundle).
    """
    path = bundle / MANIFEST
    _regular(path, _MANIFEST_CAP)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as exc:
        raise BadBundle(f"{path} is not UTF-8; publish the bundle again") from exc
    manifest = Manifest.from_json(text)
    missing = sorted(set(FILE_CAPS) - set(manifest.files))
    strange = sorted(set(manifest.files) - set(_CAPS))
    if missing or strange:
        raise BadBundle(
            f"the manifest of {bundle} lacks {missing} and names unknown files {strange}; publish it again"
        )
    extra = sorted({entry.name for entry in bundle.iterdir()} - set(manifest.files) - {MANIFEST})
    if extra:
        raise BadBundle(
            f"{bundle} holds files its manifest does not name: {extra}; remove them or publish it again"
        )
    for name, expected in manifest.files.items():
        size = _regular(bundle / name, _CAPS[name])
        if size != expected.size:
            raise BadBundle(
                f"{bundle / name} has {size} bytes, its manifest says {expected.size}; publish it again"
            )
        if _measure(bundle / name).sha256 != expected.sha256:
            raise BadBundle(f"{bundle / name} does not match the SHA-256 of its manifest; publish it again")
    return manifest


def optional(bundle: Path, name: str) -> bytes | None:
    """The bytes of an optional file of a bundle that `load_manifest` has verified; None where it has none."""
    path = bundle / name
    if not path.exists():
        return None
    _regular(path, OPTIONAL_CAPS[name])
    return path.read_bytes()


def weights_header(file: IO[bytes], size: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the arrays in a safetensors file of `size` bytes, before anything makes room for them.

    Raises BadBundle unless the arrays lie one behind the other and fill the file to its end.
    """
    try:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(_HEADER_CAP, size - 8):
            raise ValueError(f"a header of {length} bytes")
        entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        places, shapes = [], {}
        for name, entry in entries.items():
            shape = tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            numbers = (*shape, begin, end)
            if not all(type(n) is int and 0 <= n <= size for n in numbers) or len(shape) > 8:
                raise ValueError(f"{name[:80]!r} has a shape or place that cannot be")
            if math.prod(shape) * _DTYPES[entry["dtype"]] != end - begin:
                raise ValueError(f"{name[:80]!r} has another size than its shape")
            places.append((begin, end))
            shapes[name] = shape
        at = 0
        for begin, end in sorted(places):
            if begin != at:
                raise ValueError("arrays overlap or leave gaps")
            at = end
        if 8 + length + at != size:
            raise ValueError("arrays do not fill it")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as exc:
        raise BadBundle(f"{WEIGHTS} is not readable: {exc!r:.300}; publish the bundle again") from exc
    return shapes


class KnownPatterns:
    """What the training sample held: occurrences by pattern and by template."""

    def __init__(self, frame: pl.DataFrame) -> None:
        self._counts = dict(zip(frame["pattern_id"].to_list(), frame["count"].to_list(), strict=True))
        self._template_of = dict(
            zip(frame["pattern_id"].to_list(), frame["template_id"].to_list(), strict=True)
        )
        self._severe = frozenset(frame.filter(pl.col("severe"))["template_id"].to_list())
        by_template = frame.group_by("template_id").agg(pl.col("count").sum())
        self._templates = dict(
            zip(by_template["template_id"].to_list(), by_template["count"].to_list(), strict=True)
        )

    def without(self, patterns: Set[int], templates: Set[int]) -> "KnownPatterns":
        """The same as though training had held none of these patterns and templates."""
        kept = {
            p: n
            for p, n in self._counts.items()
            if p not in patterns and self._template_of[p] not in templates
        }
        return KnownPatterns(
            pl.DataFrame(
                {
                    "pattern_id": list(kept),
                    "count": list(kept.values()),
                    "template_id": [self._template_of[p] for p in kept],
                    "severe": [self._template_of[p] in self._severe for p in kept],
                },
                schema=KNOWN_SCHEMA,
            )
        )

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, pattern_id: object) -> bool:
        return pattern_id in self._counts

    def count(self, pattern_id: int) -> int:
        """Occurrences of the pattern in training; 0 when it was not there."""
        return int(self._counts.get(pattern_id, 0))

    def template_of(self, pattern_id: int) -> int | None:
        """The template the pattern had in training."""
        return self._template_of.get(pattern_id)

    def template_count(self, template_id: int) -> int:
        """Occurrences of the template in training; 0 when it was not there."""
        return int(self._templates.get(template_id, 0))

    def template_severe(self, template_id: int) -> bool:
        """Whether training saw a line of the template at an error-like level."""
        return template_id in self._severe


def load_known(bundle: Path) -> KnownPatterns:
    """The training patterns of a bundle that `load_manifest` has verified. Raises BadBundle."""
    try:
        frame = pl.read_parquet(bundle / KNOWN, n_rows=_KNOWN_CAP + 1)
    # Polars raises several unrelated classes on damaged files, and its panics are no Exceptions.
    except (Exception, pl.exceptions.PanicException) as exc:
        raise BadBundle(f"{bundle / KNOWN} is not readable: {exc}; publish the bundle again") from exc
    if dict(frame.schema) != KNOWN_SCHEMA:
        raise BadBundle(f"{bundle / KNOWN} has columns {dict(frame.schema)}, expected {KNOWN_SCHEMA}")
    if frame.height > _KNOWN_CAP or any(frame.null_count().row(0)):
        raise BadBundle(
            f"{bundle / KNOWN} has empty fields or more than {_KNOWN_CAP:,} patterns; publish it again"
        )
    return KnownPatterns(frame)


def _regular(path: Path, cap: int) -> int:
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
