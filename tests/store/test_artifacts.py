"""Artifacts are found by their content, checked, and removed only when nobody names them any more."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from pipeline.errors import BadBundle
from pipeline.store.artifacts import GRACE_S, Artifacts
from pipeline.store.folder import Folder


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    return Artifacts(Folder(tmp_path / "store"))


def stored(artifacts: Artifacts, tmp_path: Path, content: bytes) -> str:
    file = tmp_path / "made"
    file.write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    artifacts.put(file, sha256)
    return sha256


def place(tmp_path: Path, sha256: str) -> Path:
    return tmp_path / "store" / "artifacts" / sha256[:2] / sha256


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_an_artifact_comes_back_as_it_was_stored(artifacts: Artifacts, tmp_path: Path) -> None:
    sha256 = stored(artifacts, tmp_path, b"weights")
    artifacts.fetch(sha256, 7, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"weights"
    assert artifacts.sizes() == {sha256: 7}


@pytest.mark.parametrize("content", [b"Weights", b"weight", b"weights and more", b""])
def test_an_artifact_that_differs_from_its_hash_is_refused(
    artifacts: Artifacts, tmp_path: Path, content: bytes
) -> None:
    sha256 = stored(artifacts, tmp_path, b"weights")
    place(tmp_path, sha256).write_bytes(content)
    with pytest.raises(BadBundle, match="is damaged"):
        artifacts.fetch(sha256, 7, tmp_path / "copy")
    place(tmp_path, sha256).unlink()
    with pytest.raises(BadBundle, match="lacks the artifact"):
        artifacts.fetch(sha256, 7, tmp_path / "copy")


def test_what_is_there_is_not_written_again_unless_it_is_cut_or_old(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    sha256 = stored(artifacts, tmp_path, b"weights")
    path = place(tmp_path, sha256)
    before = path.stat().st_ino
    stored(artifacts, tmp_path, b"weights")
    assert path.stat().st_ino == before
    path.write_bytes(b"wei")
    stored(artifacts, tmp_path, b"weights")
    assert path.read_bytes() == b"weights"
    # A sweep may be about to remove it: an old one that somebody needs again is young again.
    age(path, GRACE_S)
    stored(artifacts, tmp_path, b"weights")
    assert path.stat().st_mtime > time.time() - 60


def test_an_artifact_that_nobody_names_is_removed_after_the_grace_time(
    artifacts: Artifacts, tmp_path: Path
) -> None:
    named, young, old = (stored(artifacts, tmp_path, content) for content in (b"a", b"b", b"c"))
    for sha256 in (named, old):
        age(place(tmp_path, sha256), GRACE_S + 60)
    assert artifacts.sweep({named}) == 1
    assert set(artifacts.sizes()) == {named, young}
