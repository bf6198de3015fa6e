"""Shared fixtures: a real Redis for the session, a private key prefix for every test."""

import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from pipeline.settings import Settings
from pipeline.workers.redis_server import PrivateRedis

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
DATA = SHARED / "data"


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """One real server for the whole session. Tests keep to their own key prefix and never flush."""
    folder = Path(tempfile.mkdtemp(prefix="logweir-test-"))
    server = PrivateRedis(Settings(data_dir=folder))
    process = server.start()
    yield server.url
    process.terminate()
    process.wait(20)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def settings(redis_url: str, tmp_path: Path) -> Settings:
    """Settings on the session's Redis with a prefix and directories of this test alone."""
    return replace(
        Settings(), redis_url=redis_url, key_prefix=f"t{uuid.uuid4().hex[:12]}", data_dir=tmp_path / "data"
    )


@pytest.fixture
def client(redis_url: str) -> "Iterator[redis.Redis]":
    """A plain client on the session's Redis."""
    connection = redis.Redis.from_url(redis_url)
    yield connection
    connection.close()


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own REDIS_URL or LOGWEIR_* must not reach the tests."""
    for name in list(os.environ):
        if name == "REDIS_URL" or name.startswith("LOGWEIR_"):
            monkeypatch.delenv(name)


def need_data(path: Path) -> Path:
    """A file of the shared data sets, or a skip that says why."""
    if not path.exists():
        pytest.skip(f"the labelled log sets are not here ({path.name})")
    return path


# In CI everything a test needs is there or can be installed; only these reasons may skip one.
MAY_SKIP = re.compile(r"\bGPU\b|runs as root")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With CI set, a skip for any other reason fails the run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("CI") or reporter is None:
        return
    wrong = [r for r in reporter.stats.get("skipped", []) if not MAY_SKIP.search(str(r.longrepr))]
    for report in wrong:
        reporter.write_line(f"skipped in CI: {report.nodeid}: {report.longrepr}", red=True)
    if wrong and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
