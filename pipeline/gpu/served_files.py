"""Files of served models in the store: `served/<SHA-256>`, immutable, checked when they are fetched.

A file is stored before the record that names it. One that no record names is removed after a day.
"""

import hashlib
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from pipeline.errors import BadBundle, BadInput
from pipeline.gpu.job_files import pack_directory
from pipeline.gpu.served import ModelFormat
from pipeline.store.objects import Objects
from pipeline.units import size

SERVED: Final = "served/"
MOST_MODEL_BYTES: Final = 16 * 2**30  # one file; a node reads it once per load
UNNAMED_S: Final = 86_400.0  # a file comes before its record


def format_of(path: Path) -> ModelFormat:
    """The format of a file or directory that a person names. Raises BadInput."""
    if path.is_dir():
        if not (path / "export.json").is_file():
            raise BadInput(f"{path} is no export; make one with `logweir models export --out DIR`")
        return ModelFormat.LOGWEIR
    if not path.is_file():
        raise BadInput(f"{path} does not exist; name an .onnx file or a directory of `logweir models export`")
    if path.suffix.lower() != ".onnx":
        raise BadInput(
            f"{path} has no known format; name an .onnx file or a directory of `logweir models export`"
        )
    return ModelFormat.ONNX


def put_model_file(objects: Objects, path: Path) -> tuple[str, int]:
    """Stores a model; its hash and bytes. Raises BadInput, StoreUnavailable."""
    with tempfile.TemporaryDirectory(prefix="logweir-model-") as folder:
        file = path
        if path.is_dir():
            file = Path(folder) / "export.tar"
            pack_directory(path, file)
        try:
            total = file.stat().st_size
            if not 0 < total <= MOST_MODEL_BYTES:
                raise BadInput(
                    f"{path} has {size(total >> 20)}, and a model takes up to {size(MOST_MODEL_BYTES >> 20)}"
                )
            with file.open("rb") as handle:
                sha256 = hashlib.file_digest(handle, "sha256").hexdigest()
        except OSError as exc:
            raise BadInput(f"{path} cannot be read: {exc}") from exc
        here = objects.look(SERVED + sha256)
        # An old one that no record names may be about to be removed: written again it is young.
        if here is None or here.size != total or here.changed < time.time() - UNNAMED_S / 2:
            objects.put(SERVED + sha256, file)
    return sha256, total


def fetch_model_file(objects: Objects, sha256: str, total: int, to: Path) -> None:
    """Writes a model's file. Raises BadBundle when it is missing or damaged, StoreUnavailable."""
    if not objects.fetch(SERVED + sha256, to, max_bytes=total):
        raise BadBundle(f"the store {objects.url} lacks the model {sha256[:16]}; put it there again")
    with to.open("rb") as handle:
        if hashlib.file_digest(handle, "sha256").hexdigest() != sha256:
            raise BadBundle(f"the model {sha256[:16]} is damaged in {objects.url}; put it there again")


def sweep_model_files(objects: Objects, named: Collection[str]) -> int:
    """Removes files that no record has named for a day; returns how many. Raises StoreUnavailable."""
    old = time.time() - UNNAMED_S
    surplus = [
        one.key for one in objects.found(SERVED)
        if one.changed < old and one.key.removeprefix(SERVED) not in named
    ]  # fmt: skip
    for key in surplus:
        objects.delete(key)
    return len(surplus)
