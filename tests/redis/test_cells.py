"""Cells: each workload goes to the Redis of its longest prefix."""

import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from own_redis import server

from pipeline.cli import main
from pipeline.errors import BadSetting
from pipeline.producer import Producer
from pipeline.records.delivery import Accepted
from pipeline.redis.cells import Cells, in_cell
from pipeline.redis.keys import Keys
from pipeline.settings import Settings

TEXT = '[cells]\n"" = "redis://rest"\n"shop/" = "redis://a:6379/0"\n"shop/checkout" = "sentinel://b,c,d/0?master=m"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "cells.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("workload", "url"),
    [
        ("shop/basket", "redis://a:6379/0"),
        ("shop/checkout", "sentinel://b,c,d/0?master=m"),
        ("shop/checkout/eu", "sentinel://b,c,d/0?master=m"),
        ("shop", "redis://rest"),
        ("other", "redis://rest"),
    ],
)
def test_the_longest_prefix_decides(tmp_path: Path, workload: str, url: str) -> None:
    path = written(tmp_path, TEXT)
    assert Cells.load(path).url(workload) == url
    assert in_cell(Settings(redis_url=f"cells://{path}"), workload).redis.url == url
    plain = Settings(redis_url="redis://h")
    assert in_cell(plain, workload) == plain


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file or directory"),
        ("[cells", "is not valid TOML"),
        ("", "has to hold one table \\[cells\\]"),
        ('[cells]\n"a" = "redis://a"', 'the line "" = "redis://host:6379/0" for other workloads'),
        ('cells = "redis://a"', "has to hold one table \\[cells\\]"),
        (f"{TEXT}[more]\nx = 1", "has to hold one table \\[cells\\]"),
        (f'{TEXT}"a" = 5', "unusable cell 'a': its address is that of no Redis"),
        (f'{TEXT}"a" = "cells:///x"', "unusable cell 'a': its address is that of no Redis"),
        (f'{TEXT}"a" = "http://:secret@h"', "unusable cell 'a': REDIS_URL must begin with"),
        (f'{TEXT}"a" = "sentinel://:secret@h"', "unusable cell 'a': REDIS_URL names no master"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(
    tmp_path: Path,
    text: str | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: "pytest.CaptureFixture[str]",
) -> None:
    path = tmp_path / "cells.toml" if text is None else written(tmp_path, text)
    with pytest.raises(BadSetting, match=said) as refused:
        Producer.connect(Settings(redis_url=f"cells://{path}"))
    assert "secret" not in str(refused.value)
    log = tmp_path / "app.log"
    log.write_text("a line\n")
    monkeypatch.setenv("REDIS_URL", f"cells://{path}")
    assert main(["send", str(log)]) == 2
    printed = capsys.readouterr().err.strip().splitlines()
    assert len(printed) == 1 and str(path) in printed[0]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list["redis.Redis"]]:
    """Two servers of their own."""
    with ExitStack() as stack:
        # Short names: a socket's path has little room.
        yield [stack.enter_context(server(tmp_path_factory.mktemp(name))) for name in ("r1", "r2")]


def url_of(client: "redis.Redis") -> str:
    return f"unix://{client.connection_pool.connection_kwargs['path']}?db=0"


@pytest.fixture
def settings(two: list["redis.Redis"], tmp_path: Path) -> Settings:
    """The second server has the workloads that begin with shop/, the first all others."""
    path = written(tmp_path, f'[cells]\n"" = "{url_of(two[0])}"\n"shop/" = "{url_of(two[1])}"\n')
    return Settings(redis_url=f"cells://{path}", key_prefix=f"cells-{tmp_path.name}"[:40])


def accepted(client: "redis.Redis", settings: Settings, workload: str) -> int:
    raw = client.hget(Keys(settings.redis.key_prefix).totals(workload), "accepted")
    return int(raw or 0)  # type: ignore[arg-type]


def test_a_producer_sends_each_workload_to_its_cell(two: list["redis.Redis"], settings: Settings) -> None:
    producer = Producer.connect(settings)
    for workload in ("shop/a", "shop/b", "other"):
        given = {"workload": workload, "batch_id": f"id of {workload}"}
        answer = producer.send(["one", "two"], **given)
        assert isinstance(answer, Accepted) and not answer.duplicate
        assert producer.send(["one", "two"], **given) == Accepted(batch_id=given["batch_id"], duplicate=True)
    assert [accepted(client, settings, "shop/a") for client in two] == [0, 2]
    assert [accepted(client, settings, "other") for client in two] == [2, 0]
    assert producer.cell("shop/a") is producer.cell("shop/b")
    assert producer.cell("other") is producer


def test_send_chooses_the_cell_of_its_workload_and_refuses_two(
    two: list["redis.Redis"],
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: "pytest.CaptureFixture[str]",
) -> None:
    for name, value in settings.to_environ().items():
        monkeypatch.setenv(name, value)
    for name in ("app.log", "shop_a.log"):
        (tmp_path / name).write_text("one\ntwo\nthree\n")
    assert main(["send", str(tmp_path / "app.log"), "--workload", "shop/x"]) == 0
    assert main(["send", str(tmp_path / "app.log")]) == 0
    assert [accepted(client, settings, "shop/x") for client in two] == [0, 3]
    assert [accepted(client, settings, "app") for client in two] == [3, 0]
    # Sent again, the cursor is that of the same cell.
    capsys.readouterr()
    assert main(["send", str(tmp_path / "app.log"), "--workload", "shop/x"]) == 0
    assert "nothing new" in capsys.readouterr().err
    written(tmp_path, f'[cells]\n"" = "{url_of(two[0])}"\n"shop" = "{url_of(two[1])}"\n')
    assert main(["send", str(tmp_path / "app.log"), str(tmp_path / "shop_a.log")]) == 2
    assert "app and shop_a lie in different cells; send their files apart" in capsys.readouterr().err
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        archive.add(tmp_path / "shop_a.log", "shop_a.log")
    assert main(["send", str(tmp_path / "all.tar")]) == 2
    assert "shop_a of an archive's member lies in another cell" in capsys.readouterr().err
    assert [accepted(client, settings, "shop_a") for client in two] == [0, 0]
    assert main(["send", str(tmp_path / "all.tar"), "--workload", "shop/x"]) == 0
    # Any other command works in one cell.
    capsys.readouterr()
    assert main(["status"]) == 2
    assert "REDIS_URL names cells, and this works in one" in capsys.readouterr().err
