"""What all verbs share: the Redis they find, the settings that do not count, faults without a name."""

import errno
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from command_line import Verb, command_line
from own_redis import server

from pipeline.commands import common
from pipeline.redis import check
from pipeline.redis.attach import state_file
from pipeline.settings import Settings


@pytest.fixture
def logweir(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: "pytest.CaptureFixture[str]"
) -> Iterator[Verb]:
    with command_line(settings, monkeypatch, capsys, columns=400) as verb:
        yield verb


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "app.log"
    path.write_text("one\ntwo\n")
    return path


def test_send_waits_for_the_redis_of_a_stack_that_starts_it_again(
    logweir: Verb, settings: Settings, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", "")
    state = {"pid": os.getpid(), "redis_url": f"unix://{tmp_path}/r.sock?db=0", "key_prefix": "logweir"}
    settings.data.dir.mkdir(parents=True)
    state_file(settings.data.dir).write_text(json.dumps(state))
    noticed, done = threading.Event(), threading.Event()

    def restarts() -> None:
        assert noticed.wait(20)
        with server(tmp_path):
            assert done.wait(20)

    tries, real = [], common.attached

    def attached(wanted: Settings) -> Settings:
        tries.append(wanted)
        if len(tries) == 2:  # the first one found nobody
            noticed.set()
        return real(wanted)

    monkeypatch.setattr(common, "attached", attached)
    stack = threading.Thread(target=restarts)
    stack.start()
    sent = logweir("send", log)
    done.set()
    stack.join()
    assert noticed.is_set() and sent.code == 0 and "2 lines accepted" in sent.err, sent.err


def test_send_waits_for_a_redis_that_reads_its_data_and_reports_it_once(
    logweir: Verb, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, real = [False, False, True], check._try_rights

    def loading(client: "redis.Redis", prefix: str) -> None:
        if not answers.pop(0):
            raise redis.BusyLoadingError("Redis is loading the dataset in memory")
        real(client, prefix)

    monkeypatch.setattr(check, "_try_rights", loading)
    sent = logweir("send", log)
    assert sent.code == 0 and sent.err.count("still reads its data") == 1, sent.err
    assert "Waiting up to 60 s for it" in sent.err


def test_a_redis_that_stays_away_ends_the_wait_with_its_sentence(
    logweir: Verb, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loading(*_: object) -> None:
        raise redis.BusyLoadingError("Redis is loading the dataset in memory")

    monkeypatch.setattr(check, "_try_rights", loading)
    monkeypatch.setattr(common, "RETURN_S", 0.3)
    sent = logweir("send", log)
    assert sent.code == 2 and sent.err.splitlines()[-1].startswith("logweir: Redis at unix://")
    assert sent.err.splitlines()[-1].endswith(
        "still reads its data (Redis is loading the dataset in memory); try again"
    )


def test_a_redis_url_where_nobody_answers_ends_send_at_once(
    logweir: Verb, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")
    sent = logweir("send", log)
    assert sent.code == 2 and "does not answer" in sent.err and "Waiting" not in sent.err


@pytest.mark.parametrize(
    "verb",
    [
        "doctor --config DEEP",
        "run LOG --masks DEEP --out OUT",
        "formats --check DEEP",
        "run LOG --formats DEEP --out OUT",
    ],
)
def test_a_file_of_toml_with_endless_brackets_is_one_sentence(
    logweir: Verb, tmp_path: Path, log: Path, verb: str
) -> None:
    deep = tmp_path / "deep.toml"
    deep.write_text("x = " + "[" * 200_000)
    names = {"DEEP": deep, "LOG": log, "OUT": tmp_path / "out"}
    said = logweir(*(names.get(word, word) for word in verb.split()))
    assert said.code == 2 and said.err.count("\n") == 1, said
    assert str(deep) in said.err and "its brackets are nested too deeply" in said.err


def test_a_fault_of_the_system_without_a_file_names_the_step(
    logweir: Verb, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(importlib.import_module("pipeline.commands.console"), "console_link", refuse)
    said = logweir("console")
    assert said.code == 1
    assert said.err.startswith("logweir: Invalid argument in main (pipeline/commands/console.py:")
    assert "that file" not in said.err


def test_a_fault_of_the_system_names_its_file(logweir: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/data/x")

    monkeypatch.setattr(importlib.import_module("pipeline.commands.console"), "console_link", refuse)
    assert logweir("console").err.startswith("logweir: No space left on device (/data/x); look at that file")


def test_a_stack_says_which_variables_it_ignores(
    logweir: Verb, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    monkeypatch.setenv("LOGWEIR_SEDE", "1")
    monkeypatch.setenv("LOGWEIR_SERVICE_HOST", "10.0.0.7")
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")  # so that it ends
    for verb in ("up", "doctor"):
        said = logweir(verb)
        assert "LOGWEIR_SEDE is ignored: 'sede' is not a setting; did you mean seed (LOGWEIR_SEED)?" in (
            said.out + said.err
        )
        assert "SERVICE_HOST" not in said.out + said.err


def test_the_exit_code_stands_although_the_reader_of_the_answer_has_left(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", "doctor", "--data-dir", str(tmp_path)],
        env={**os.environ, "REDIS_URL": "redis://127.0.0.1:1/0"},  # nobody answers there
        stdout=writer,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_columns_of_an_unknown_terminal_are_not_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    common.out().print("a sentence")
    common.err().print("a remark")
    assert capsys.readouterr() == ("a sentence\n", "a remark\n")
