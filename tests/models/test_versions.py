"""Versions in a store of either kind, and the copies of them that machines fetch."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from s3_server import S3Server
from small_bundles import ONE, THREE, TWO, written

from pipeline.errors import BadBundle, StoreUnavailable
from pipeline.models import bundle
from pipeline.models import versions as module
from pipeline.models.registry import Registry
from pipeline.models.versions import Versions
from pipeline.settings import Settings
from pipeline.store.artifacts import GRACE_S
from pipeline.store.choose import open_store
from pipeline.store.folder import Folder


@pytest.fixture(params=["folder", "bucket"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield (tmp_path / "store").as_uri()
    else:
        server: S3Server = request.getfixturevalue("s3_server")
        with server.credentials():
            yield server.new_place()


@pytest.fixture
def folder_url(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


def machine(client: "redis.Redis", settings: Settings, url: str, name: str) -> Registry:
    """A machine of its own: another data directory, the same store."""
    own = settings.replace(data_dir=settings.data.dir / name, store_url=url, results_dir=settings.data.dir)
    return Registry(client, own)


def test_what_one_machine_puts_every_other_reads_as_it_was(
    client: "redis.Redis", settings: Settings, store_url: str
) -> None:
    one, two = (machine(client, settings, store_url, name) for name in ("one", "two"))
    for version, content in ((TWO, b"two"), (ONE, b"one")):
        written(one, version, content=content)
        assert one.put(version) == one.put(version), "putting it twice is putting it once"
    assert two.versions() == [ONE, TWO]
    assert two.stored.manifest(ONE) == one.stored.verified(ONE)
    assert two.stored.complete(ONE, two.stored.artifacts.sizes())
    copy = two.stored.local(ONE)
    assert sorted(p.name for p in copy.iterdir()) == sorted(p.name for p in one.path(ONE).iterdir())
    assert bundle.load_manifest(copy) == bundle.load_manifest(one.path(ONE))
    assert not two.path(TWO).exists(), "nobody asked for it"
    assert two.note(ONE) is None
    one.stored.write_note(ONE, b'{"state": "candidate"}')
    note = two.note(ONE)
    assert note is not None and note.state == "candidate"
    two.stored.remove(ONE)
    assert (one.versions(), two.path(ONE).exists()) == ([TWO], False)


def test_another_version_of_the_same_name_is_refused(
    client: "redis.Redis", settings: Settings, store_url: str
) -> None:
    one, two = (machine(client, settings, store_url, name) for name in ("one", "two"))
    for registry, content in ((one, b"mine"), (two, b"yours")):
        written(registry, ONE, content=content)
    one.put(ONE)
    with pytest.raises(BadBundle, match=f"another version of the name {ONE}"):
        two.put(ONE)
    assert one.stored.verified(ONE) == one.stored.manifest(ONE)


def test_a_store_that_is_away_is_a_fault_of_the_version_here_until_it_comes_back(
    client: "redis.Redis", settings: Settings, folder_url: str, tmp_path: Path
) -> None:
    one, two = (machine(client, settings, folder_url, name) for name in ("one", "two"))
    written(one, ONE)
    one.put(ONE)
    (tmp_path / "store").rename(tmp_path / "away")
    with pytest.raises(BadBundle, match=f"has no version {ONE}"):
        two.stored.local(ONE)
    assert one.manifest(ONE).version == ONE, "a machine that has a copy needs no store"
    (tmp_path / "store").write_bytes(b"")  # a mount that went wrong
    with pytest.raises((BadBundle, StoreUnavailable)):
        two.put(ONE)
    (tmp_path / "store").unlink()
    (tmp_path / "away").rename(tmp_path / "store")
    assert two.manifest(ONE).version == ONE


def test_threads_and_processes_of_a_machine_fetch_a_version_once(
    client: "redis.Redis", settings: Settings, folder_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (machine(client, settings, folder_url, name) for name in ("one", "two"))
    written(one, ONE)
    one.put(ONE)
    fetched: list[str] = []
    fetch = Versions._fetch

    def slowly(self: Versions, version: str, folder: Path) -> None:
        fetched.append(version)
        time.sleep(0.2)
        fetch(self, version, folder)

    monkeypatch.setattr(Versions, "_fetch", slowly)
    each = [Registry(client, two.settings) for _ in range(6)]
    threads = [threading.Thread(target=registry.manifest, args=[ONE]) for registry in each]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched == [ONE]
    assert two.path(ONE).is_dir()


KILLED = """
import os, sys, time
from pathlib import Path
from pipeline.models.versions import Versions
from pipeline.store.artifacts import Artifacts
from pipeline.store.choose import open_store

def stuck(self, sha256, size, to):
    Path(to).write_bytes(b"half")
    print("fetching", flush=True)
    time.sleep(60)

Artifacts.fetch = stuck
Versions(open_store(sys.argv[1]), Path(sys.argv[2])).local(sys.argv[3])
"""


def test_a_fetch_that_is_killed_leaves_no_half_copy_and_holds_nobody_up(
    client: "redis.Redis", settings: Settings, folder_url: str
) -> None:
    one, two = (machine(client, settings, folder_url, name) for name in ("one", "two"))
    written(one, ONE)
    one.put(ONE)
    arguments = [sys.executable, "-c", KILLED, folder_url, str(two.directory), ONE]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"fetching\n"
        assert not two.path(ONE).exists()
        process.kill()
    assert two.manifest(ONE).version == ONE
    for leftover in two.directory.glob(".m*.tmp"):  # a while later
        for path in (*leftover.glob("*"), leftover):
            os.utime(path, (1, 1))
    two.stored.sweep()
    assert [p.name for p in two.directory.glob(".m*") if p.suffix != ".lock"] == []


def test_a_sweep_leaves_the_files_and_the_lock_of_a_fetch_that_is_under_way(
    client: "redis.Redis", settings: Settings, folder_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = machine(client, settings, folder_url, "other")
    written(other, ONE)
    other.put(ONE)
    worker, trainer = (machine(client, settings, folder_url, "here") for _ in range(2))
    fetch, swept = worker.stored.artifacts.fetch, []

    def fetch_and_sweep(*arguments: Any) -> Any:
        fetched = fetch(*arguments)
        trainer.stored.sweep()
        swept.append(sorted(path.suffix for path in worker.directory.glob(".m*")))
        return fetched

    monkeypatch.setattr(worker.stored.artifacts, "fetch", fetch_and_sweep)
    assert worker.manifest(ONE).version == ONE
    assert swept and all(left == [".lock", ".tmp"] for left in swept)


def test_a_frozen_fetch_is_not_waited_for_for_ever(
    client: "redis.Redis", settings: Settings, folder_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (machine(client, settings, folder_url, name) for name in ("one", "two"))
    written(one, ONE)
    one.put(ONE)
    monkeypatch.setattr(module, "FETCH_WAIT_S", 0.2)
    arguments = [sys.executable, "-c", KILLED, folder_url, str(two.directory), ONE]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"fetching\n"
        assert two.manifest(ONE).version == ONE
        process.kill()


def test_a_manifest_that_names_what_no_bundle_holds_is_not_fetched(
    client: "redis.Redis", settings: Settings, folder_url: str
) -> None:
    one = machine(client, settings, folder_url, "one")
    written(one, ONE)
    manifest = one.put(ONE).to_json()
    for wrong in (
        manifest.replace(f'"{bundle.WEIGHTS}"', '"../escape"'),
        manifest.replace('"size": 7', f'"size": {2**40}'),
        manifest + " " * (1 << 20),
    ):
        assert wrong != manifest
        one.stored.objects.put(f"versions/{TWO}/manifest.json", wrong.encode())
        with pytest.raises(BadBundle):
            one.stored.local(TWO)
        assert not one.path(TWO).exists()
    assert not list(settings.data.dir.rglob("escape"))


def test_copies_that_nobody_used_lately_make_room_for_a_new_one(
    client: "redis.Redis", settings: Settings, folder_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (machine(client, settings, folder_url, name) for name in ("one", "two"))
    monkeypatch.setattr(module, "COPIES", 2)
    for version in (ONE, TWO, THREE):
        written(one, version)
        one.put(version)
    two.manifest(ONE)
    two.manifest(TWO)
    long_ago = time.time() - 2 * module.USED_S
    os.utime(two.path(ONE), (long_ago, long_ago))
    two.manifest(THREE)
    assert sorted(p.name for p in two.directory.glob("m*")) == [TWO, THREE]
    os.utime(two.path(TWO), (long_ago, long_ago))
    assert two.manifest(ONE).version == ONE, "it is fetched again when somebody needs it"


def test_artifacts_go_after_the_last_version_that_names_them(
    client: "redis.Redis", settings: Settings, folder_url: str, tmp_path: Path
) -> None:
    one = machine(client, settings, folder_url, "one")
    for version, content in ((ONE, b"one"), (TWO, b"two")):
        written(one, version, content=content)
        one.put(version)
    long_ago = time.time() - GRACE_S - 60
    for path in (tmp_path / "store" / "artifacts").rglob("*"):
        os.utime(path, (long_ago, long_ago))
    assert one.stored.sweep() == 0
    one.stored.remove(ONE)
    one.stored.objects.put(f"versions/{THREE}/manifest.json", b"{")
    assert one.stored.sweep() == 0, "nobody knows which artifacts the damaged one names"
    one.stored.objects.delete(f"versions/{THREE}/manifest.json")
    assert one.stored.sweep() == 1
    assert one.stored.verified(TWO)


def test_a_bundle_that_the_store_does_not_take_is_not_published(
    client: "redis.Redis", settings: Settings, folder_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machine(client, settings, folder_url, "one")
    written(one, ONE)

    def full(*_: object) -> None:
        raise StoreUnavailable("no space left")

    monkeypatch.setattr(Folder, "put", full)
    with pytest.raises(StoreUnavailable):
        one.put(ONE)
    assert open_store(folder_url).look(f"versions/{ONE}/manifest.json") is None
    assert one.versions() == []
