"""Files of a job in the store: the directory that a person uploads, and the results of the program.

Each is one archive below `gpu-jobs/<job>/`, named and checked by its hash. It goes when its job is forgotten.
"""

import hashlib
import os
import tarfile
import tempfile
import time
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Final

from pipeline.errors import BadBundle, BadInput
from pipeline.gpu.jobs import JobFiles
from pipeline.store.objects import Objects
from pipeline.units import size

PREFIX: Final = "gpu-jobs/"
UPLOAD: Final = "upload.tar"
RESULTS: Final = "results.tar"
MOST_BYTES: Final = 4 * 2**30  # one archive; larger data belong into the store by themselves
GRACE_S: Final = 86_400.0  # an upload comes before the record of its job


def put_files(
    objects: Objects, job_id: str, name: str, directory: Path, *, left_out: list[str] | None = None
) -> JobFiles:
    """Stores a directory. `left_out`: as in pack_directory.

    Raises BadInput when it is too large or unreadable, StoreUnavailable.
    """
    with tempfile.TemporaryDirectory(prefix="logweir-job-") as folder:
        archive = Path(folder) / name
        pack_directory(directory, archive, left_out=left_out)
        total = archive.stat().st_size
        if total > MOST_BYTES:
            raise BadInput(
                f"{directory} has {size(total >> 20)}, and a job takes {size(MOST_BYTES >> 20)}; "
                "put large data where the program can read them itself"
            )
        with archive.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        files = JobFiles(sha256=sha256, size=total)
        objects.put(_key(job_id, name, files), archive)
    return files


def fetch_files(objects: Objects, job_id: str, name: str, files: JobFiles, to: Path) -> None:
    """Writes the files below a directory. Raises BadBundle when they are missing, damaged or lead out of it,
    StoreUnavailable, OSError."""
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="logweir-job-") as folder:
        archive = Path(folder) / name
        if not objects.fetch(_key(job_id, name, files), archive, max_bytes=files.size):
            raise BadBundle(f"the store {objects.url} lacks {name} of job {job_id}; submit it again")
        with archive.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != files.sha256:
                raise BadBundle(f"{name} of job {job_id} is damaged in {objects.url}; submit it again")
        unpack_archive(archive, to, what=f"{name} of job {job_id}")


def pack_directory(directory: Path, archive: Path, *, left_out: list[str] | None = None) -> None:
    """Writes a directory as one archive, without what no archive may bring to another machine.

    That is a link that leads out of the directory, or a FIFO or device. Their names are put into `left_out`;
    without that list the first one is BadInput. Raises BadInput when the directory cannot be read.
    """
    refused: list[str] = []

    def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if _stays_inside(member):
            return member
        refused.append(member.name.removeprefix("./"))
        return None

    try:
        with tarfile.open(archive, "w") as tar:
            tar.add(directory, arcname=".", filter=kept)
    except OSError as exc:
        raise BadInput(f"{directory} cannot be read: {exc}") from exc
    if refused and left_out is None:
        raise BadInput(
            f"{directory}/{refused[0]} is a link that leads out of the directory, or no plain file; "
            "copy the file itself, or leave it out"
        )
    if left_out is not None:
        left_out[:] = refused


def _stays_inside(member: tarfile.TarInfo) -> bool:
    """Whether unpacking would take it."""
    if member.issym():
        target = os.path.normpath(f"{PurePosixPath(member.name).parent}/{member.linkname}")
        return ".." not in PurePosixPath(target).parts and not member.linkname.startswith("/")
    return member.isfile() or member.isdir() or member.islnk()


def unpack_archive(archive: Path, to: Path, *, what: str) -> None:
    """Writes the files of an archive below a directory; none leads out of it. Raises BadBundle, OSError."""
    try:
        with tarfile.open(archive) as tar:
            _unpack(tar, to)
    except tarfile.TarError as exc:
        raise BadBundle(f"{what} cannot be unpacked: {exc}") from exc


def drop_files(objects: Objects, job_id: str, name: str, files: JobFiles) -> None:
    """Removes an archive that newer files have replaced. Raises StoreUnavailable."""
    objects.delete(_key(job_id, name, files))


def _key(job_id: str, name: str, files: JobFiles) -> str:
    return f"{PREFIX}{job_id}/{files.sha256[:16]}-{name}"


def _unpack(tar: tarfile.TarFile, to: Path) -> None:
    """No link and no name leads out of the directory. Raises TarError."""
    if hasattr(tarfile, "data_filter"):
        tar.extractall(to, filter="data")
        return
    # Python before 3.11.4 has no filters.
    for member in tar:
        if not (member.isfile() or member.isdir()):
            raise tarfile.ExtractError(f"{member.name!r} is a link or a device; Python 3.11.4 unpacks links")
        if not (to / member.name).resolve().is_relative_to(to.resolve()):
            raise tarfile.ExtractError(f"{member.name!r} leads out of its directory")
        member.mode = (member.mode | 0o600 | (0o100 if member.isdir() else 0)) & 0o755
        tar.extract(member, to, numeric_owner=True)


def sweep_job_files(objects: Objects, known: Collection[str]) -> int:
    """Removes files of jobs that are forgotten; returns how many. Raises StoreUnavailable."""
    old = time.time() - GRACE_S
    surplus = [
        one.key
        for one in objects.found(PREFIX)
        if one.changed < old and one.key.removeprefix(PREFIX).partition("/")[0] not in known
    ]
    for key in surplus:
        objects.delete(key)
    return len(surplus)
