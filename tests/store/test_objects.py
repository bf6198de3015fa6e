"""What every kind of store must do, and what the address of one may be."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_server import S3Server

from pipeline.errors import BadInput, BadPayload, BadSetting, StoreUnavailable
from pipeline.store import folder as folder_module
from pipeline.store.choose import open_store
from pipeline.store.folder import Folder
from pipeline.store.identity import identity
from pipeline.store.objects import Objects, checked, probe


@pytest.fixture(params=["folder", "bucket"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Objects]:
    if request.param == "folder":
        yield open_store(f"file://{tmp_path}/my%20store")
    else:
        server: S3Server = request.getfixturevalue("s3_server")
        with server.credentials():
            yield open_store(server.new_place())


def test_an_object_is_read_as_it_was_written_and_listed_with_its_size(
    objects: Objects, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"from a file")
    objects.put("a/b/one.json", b"one")
    objects.put("a/two", file)
    assert (objects.get("a/b/one.json"), objects.get("a/two")) == (b"one", b"from a file")
    objects.put("a/two", b"")
    found = {one.key: one for one in objects.found("a/")}
    assert {key: one.size for key, one in found.items()} == {"a/b/one.json": 3, "a/two": 0}
    assert abs(found["a/two"].changed - time.time()) < 60
    assert objects.look("a/b/one.json") == found["a/b/one.json"]
    assert [one.key for one in objects.found("a/b/")] == ["a/b/one.json"]


def test_what_is_not_there_is_none_and_its_removal_no_fault(objects: Objects, tmp_path: Path) -> None:
    assert objects.get("a/b") is None
    assert objects.look("a/b") is None
    assert not objects.fetch("a/b", tmp_path / "to", max_bytes=10)
    assert list(objects.found("a/")) == []
    objects.delete("a/b")
    objects.put("a", b"x")
    objects.delete("a")
    assert objects.get("a") is None


def test_an_existing_object_is_not_created_again(objects: Objects) -> None:
    assert objects.create("k", b"first")
    assert not objects.create("k", b"second")
    assert objects.get("k") == b"first"
    probe(objects)
    assert list(objects.found("probes/")) == []


def test_an_object_is_swapped_only_while_it_is_what_was_read(objects: Objects) -> None:
    assert objects.tagged("k") is None
    assert objects.swap("k", b"too early", "no such tag") is None
    first = objects.swap("k", b"first", None)
    assert first is not None
    assert objects.tagged("k") == (b"first", first)
    assert objects.swap("k", b"a second creator", None) is None
    second = objects.swap("k", b"second", first)
    assert second not in (None, first)
    assert objects.swap("k", b"late", first) is None
    assert objects.tagged("k") == (b"second", second)


def test_of_many_swaps_at_once_one_wins(objects: Objects) -> None:
    tag = objects.swap("k", b"0", None)
    for turn in range(5):
        won: list[str] = []
        gate = threading.Barrier(6)

        def swap(
            n: int,
            turn: int = turn,
            tag: str | None = tag,
            gate: threading.Barrier = gate,
            won: list[str] = won,
        ) -> None:
            gate.wait()
            if (new := objects.swap("k", f"{turn} {n}".encode(), tag)) is not None:
                won.append(new)

        threads = [threading.Thread(target=swap, args=[n]) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (tag,) = won


def test_of_many_creators_at_once_one_wins(objects: Objects) -> None:
    for turn in range(5):
        won: list[int] = []
        gate = threading.Barrier(8)

        def create(n: int, turn: int = turn, gate: threading.Barrier = gate, won: list[int] = won) -> None:
            gate.wait()
            if objects.create(f"race/{turn}", str(n).encode()):
                won.append(n)

        threads = [threading.Thread(target=create, args=[n]) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert objects.get(f"race/{turn}") == str(won[0]).encode()


def test_a_fetch_reads_no_more_than_it_may(objects: Objects, tmp_path: Path) -> None:
    objects.put("large", b"x" * 3_000_000)
    assert objects.fetch("large", tmp_path / "all", max_bytes=3_000_000)
    assert (tmp_path / "all").stat().st_size == 3_000_000
    assert objects.fetch("large", tmp_path / "part", max_bytes=10)
    assert 10 < (tmp_path / "part").stat().st_size < 3_000_000


def test_a_store_keeps_the_identity_that_it_got_first(objects: Objects) -> None:
    assert identity(objects, make=False) is None
    own = identity(objects)
    assert own is not None
    assert identity(objects) == own == identity(objects, make=False)
    objects.put("store.json", b"[]")
    with pytest.raises(BadPayload, match="restore it from a backup"):
        identity(objects)


class Careless(Folder):
    """A store that ignores conditions, as some gateways of S3 do."""

    def create(self, key: str, content: bytes | Path) -> bool:
        self.put(key, content)
        return True


def test_a_store_that_ignores_conditions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"ignores conditions \(If-None-Match\)"):
        probe(Careless(tmp_path))
    assert list(Folder(tmp_path).found("probes/")) == []


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/../b", "a/.hidden", "a/", "a b", "a\n"])
def test_a_key_cannot_lead_out_of_the_store(key: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no key of a store"):
        checked(key)
    with pytest.raises(ValueError, match="no key of a store"):
        Folder(tmp_path).put(key, b"x")


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("/mnt/logweir", "write it like"),
        ("file://host/mnt", "write it like"),
        ("file:relative", "write it like"),
        ("s3://", "write it like"),
        ("gs://bucket", "write it like"),
        ("s3://key:secret@bucket/x", "AWS_SECRET_ACCESS_KEY"),
        ("s3://bucket/x?y=1", "write it like"),
    ],
)
def test_an_address_that_is_none_is_refused_with_the_remedy(url: str, word: str) -> None:
    with pytest.raises(BadSetting, match=word) as refused:
        open_store(url)
    assert "secret@" not in str(refused.value)


def test_a_folder_leaves_no_half_object_and_sweeps_what_killed_writers_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Folder(tmp_path)
    store.put("a/b", b"old")

    def broken(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(folder_module.os, "fsync", broken)
        for write in (store.put, store.create):
            with pytest.raises(StoreUnavailable, match="No space left on device"):
                write("a/b", b"new")
    assert store.get("a/b") == b"old"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]
    for name, age_s in (("a/.b.0123.part", 2 * folder_module.LEFT_BEHIND_S), ("a/.c.0123.part", 0)):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    assert [one.key for one in store.found("a/")] == ["a/b"]
    assert store.sweep("a/") == 1
    assert (tmp_path / "a/.c.0123.part").exists()


def test_a_folder_that_cannot_be_used_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = open_store((tmp_path / "file").as_uri())
    assert store.get("a") is None
    with pytest.raises(StoreUnavailable, match="cannot be written"):
        store.put("a", b"x")


def test_a_bucket_that_does_not_answer_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = pytest.importorskip("pipeline.store.bucket")
    monkeypatch.setattr(bucket, "RETRIES", 0)
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "secret-b",
        "AWS_REGION": "x",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreUnavailable, match="s3://bucket/prefix does not take or give") as away:
        open_store("s3://bucket/prefix").get("a")
    assert "secret-b" not in str(away.value)
