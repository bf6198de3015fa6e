"""Shared fixtures: a real Redis for the session, a private key prefix for every test."""

import functools
import gc
import logging
import os
import platform
import re
import shutil
import signal
import tempfile
import threading
import uuid
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import hypothesis
import pytest
import redis
import structlog
from command_line import Verb, command_line
from opensearch_node import Node, Secure, forget
from polling import Clock, wait_until
from s3_server import S3Server, weed
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from pipeline import upkeep
from pipeline.drain.masking.mask_set import MaskSet
from pipeline.imports import uncollected
from pipeline.ledger.ledger import Ledger
from pipeline.redis.connection import connect
from pipeline.settings import Settings
from pipeline.workers.stack.private_redis import PrivateRedis

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"


# Loading checks every mask, 60 ms of processor time. A process of the product does so once, and so does a
# process of the tests; each caller gets a memory of its own, as a fresh process has it.
_load = MaskSet.load


@functools.cache
def _shipped_masks() -> MaskSet:
    return _load()


def _load_masks(path: Path | None = None, extra: Sequence[Path] = ()) -> MaskSet:
    return _load(path, extra) if path or extra else _shipped_masks().without_memory()


MaskSet.load = _load_masks  # type: ignore[method-assign]


# Files with the longest first (minutes in four processes on two cores), so that the processes end at about
# the same time. Of those outside e2e/, the others come in any order, and one that waits for long would end
# the run alone. bad_input stands for all files that share its stack.
LONGEST = (
    "e2e/test_run.py",
    "e2e/test_bad_input.py",
    "e2e/test_training.py",
    "e2e/test_signals.py",
    "workers/api/test_console_browser.py",
    "e2e/test_workers.py",
    "e2e/test_two_machines.py",
    "test_readme.py",
    "redis/test_failover.py",
    "e2e/test_gpu_worker.py",
    "e2e/test_watching.py",
    "e2e/test_run_hostile.py",
    "e2e/test_dead_letters.py",
    "workers/api/test_api.py",
    "ledger/test_crash_points.py",
    "workers/test_liveness.py",
    "watching/test_daily_runs.py",
    "commands/test_follow_rotations.py",
    "tasks/test_merging.py",
    "sources/test_formats.py",
    "ledger/test_durability.py",
    "workers/intake/test_shippers.py",
    "tasks/test_hostile_payloads.py",
    "report/test_report.py",
)
# These files share one trained stack, so one process runs them all.
TRAINED = frozenset(
    f"tests/e2e/test_{name}.py" for name in ("stack", "send", "latency", "bad_input", "score_frame")
)


class ByStack(LoadFileScheduling):
    """A file stays in one process, and so do the files that share a stack.

    The group is made from the file's name: `--dist loadgroup` appends it to the ids of tests, which pytest
    9.2 no longer takes over, so that every process started every stack without a word."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "trained" if file in TRAINED else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByStack | None:
    """For `--dist loadfile`."""
    return ByStack(config, log) if config.getoption("dist") == "loadfile" else None


# `--quick` leaves out what starts servers of this kind.
SERVERS = frozenset({"s3_server", "opensearch", "secure_opensearch", "search_settings", "trained"})


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A quick run does not even import what starts stacks. Images are built only where they are asked for."""
    if collection_path.name == "test_images.py" and not config.getoption("--images"):
        return True
    return True if config.getoption("--quick") and collection_path.name == "e2e" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports of tests make no garbage. The garbage collector took 3 of 12 s of processor time in each
    process, and it would look through all of them again whenever a test leaves many objects."""
    with uncollected():
        collected = yield
    gc.freeze()
    return collected


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first; without the long tests in a quick run."""

    def rank(item: pytest.Item) -> tuple[int, bool]:
        name = item.path.relative_to(ROOT / "tests").as_posix() if item.path.is_relative_to(ROOT) else ""
        return LONGEST.index(name) if name in LONGEST else len(LONGEST), not name.startswith("e2e/")

    items.sort(key=rank)
    if not config.getoption("--nightly"):
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    if not config.getoption("--images"):  # as the file above
        items[:] = [item for item in items if "podman" not in getattr(item, "fixturenames", ())]
    if config.getoption("--quick"):
        long = [
            i for i in items if i.get_closest_marker("long") or SERVERS & set(getattr(i, "fixturenames", ()))
        ]
        config.hook.pytest_deselected(items=long)
        left_out = set(long)
        items[:] = [item for item in items if item not in left_out]
    if (share := share_of_examples(config)) != 1:
        give_examples(items, share)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="without stacks, OpenSearch and tests that are marked `long`"
    )
    parser.addoption(
        "--images",
        type=Path,
        metavar="DIR",
        help="tests/e2e/test_images.py builds the image and runs the containers of two hosts, and "
        "tests/gpu/test_jobs.py runs jobs in containers; the engine works in DIR and leaves 12 GB there",
    )
    parser.addoption(
        "--nightly",
        action="store_true",
        help="tests/ledger/test_crash_points.py strikes every effect with every fault (minutes), not each with one, "
        "and variants that are marked `nightly` run as well",
    )


# How long an example takes is no property of what is tested, but of what else runs on the machine.
hypothesis.settings.register_profile(
    "logweir", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("thorough", hypothesis.settings.get_profile("logweir"))
hypothesis.settings.load_profile("logweir")
# How many of its examples each property gets, stated or not: `--hypothesis-profile thorough` is for an hour
# of searching.
THOROUGH, WHOLE, QUICK = 20.0, 0.25, 0.2


def share_of_examples(config: pytest.Config) -> float:
    """What the number of examples of each property is multiplied by."""
    if config.getoption("--quick"):
        return QUICK
    if config.getoption("--hypothesis-profile") == "thorough":
        return THOROUGH
    return WHOLE if hasattr(config, "workerinput") else 1.0  # a whole run is in several processes


@pytest.fixture(scope="session")
def share(request: pytest.FixtureRequest) -> float:
    """`share_of_examples`, for a test that makes a property of its own."""
    return share_of_examples(request.config)


def give_examples(items: list[pytest.Item], share: float) -> None:
    """Multiply the number of examples of each property. Hypothesis has no public way for properties that
    state it."""
    name = "_hypothesis_internal_use_settings"
    for owner in {getattr(item, "obj", None) for item in items} | {
        getattr(item, "cls", None) for item in items
    }:
        for place, attribute in ((getattr(owner, "__func__", owner), name), (owner, "settings")):
            current = getattr(place, attribute, None)
            if isinstance(current, hypothesis.settings):
                many = max(5, round(current.max_examples * share))
                setattr(place, attribute, hypothesis.settings(current, max_examples=many))


def pytest_configure() -> None:
    """A shell that starts the tests in the background has Ctrl-C ignored, and nohup a closed terminal; what
    is ignored stays so in every process that they start: those that test it would wait for ever."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


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
    return Settings(redis_url=redis_url, key_prefix=f"t{uuid.uuid4().hex[:12]}", data_dir=tmp_path / "data")


@pytest.fixture
def client(redis_url: str) -> "Iterator[redis.Redis]":
    """A plain client on the session's Redis."""
    connection = redis.Redis.from_url(redis_url)
    yield connection
    connection.close()


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own REDIS_URL, OPENSEARCH_URL or LOGWEIR_* must not reach the tests."""
    for name in list(os.environ):
        if name in ("REDIS_URL", "OPENSEARCH_URL") or name.startswith("LOGWEIR_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A command that a test runs in this process sets logging up, on a standard error that ends with the
    test. A Celery worker in this process changes the level, and later tests would log no warnings."""
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield
    root.setLevel(before[1])
    if structlog.is_configured():
        structlog.reset_defaults()
        root.handlers[:] = before[0]


# Faults of threads and tasks of ours, which would have ended the process.
_ended: list[int] = []
upkeep.end = _ended.append


@pytest.fixture(autouse=True)
def ended() -> Iterator[list[int]]:
    """Exit codes that threads and tasks of ours asked for. A test that expects one removes it."""
    upkeep.end = _ended.append  # here, for a test may import this file a second time
    yield _ended
    assert not _ended or _ended.clear(), "a thread or task of ours failed, see the event upkeep.failed"


@pytest.fixture(autouse=True)
def _threads_of_leases_end() -> Iterator[None]:
    """No thread that keeps a lease outlives the test that took it: it would keep what later tests give
    back."""
    yield

    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith(("gpu-", "lease-"))]

    assert wait_until(lambda: not names(), timeout_s=5), names()


@pytest.fixture
def ledger(settings: Settings) -> Ledger:
    """The ledger of this test's own keys, over a connection of its own."""
    return Ledger(connect(settings), settings)


@pytest.fixture
def logweir(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: "pytest.CaptureFixture[str]"
) -> Iterator[Verb]:
    """The command in this process, on a terminal so wide that no sentence is broken."""
    with command_line(settings, monkeypatch, capsys, columns=400) as verb:
        yield verb


# In CI everything a test needs is there or can be installed; only these reasons may skip one. A clone has no
# public log sets (`log_sets.NOT_HERE`), and only root can mount.
MAY_SKIP = re.compile(
    r"\bGPU\b|runs as root"
    + ("" if (SHARED / "opensearch").exists() else "|OpenSearch is not here")
    + ("" if (SHARED / "data").is_dir() else "|public log sets are not here")
    + ("" if os.geteuid() == 0 else "|mount")
    + ("|promtool is not here" if os.environ.get("NO_PROMTOOL") else "")  # scripts/test has tried to get it
    + ("" if shutil.which("strace") else "|strace is not here")
    + ("" if platform.machine() in ("x86_64", "aarch64") else "|SeaweedFS")  # of others there is no wheel
    + ("|needs Chromium" if os.environ.get("NO_CHROMIUM") else "")  # .ci/run has found no package of it
    + "|no Redis with TLS here|needs (?:caddy|rsyslogd|syslog-ng|systemd-journal-|logger|rotel-agent|node)"  # .ci/run has tried to install them
)


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


# Read now: the tests themselves see none of these variables.
PLAIN_URL = os.environ.get("OPENSEARCH_URL")
SECURE_URL = os.environ.get("OPENSEARCH_SECURE_URL")
SECURE_CA = os.environ.get("OPENSEARCH_SECURE_CA")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server. Tests keep to a prefix of their own."""
    server = S3Server(weed())
    yield server
    server.close()


@pytest.fixture(scope="session")
def opensearch() -> Iterator[str]:
    """The URL of a real server without users. Tests keep to their own index prefix."""
    if PLAIN_URL:
        yield PLAIN_URL
        return
    node = Node.on_free_port()
    yield node.start()
    node.close()


@pytest.fixture(scope="session")
def secure_opensearch() -> Iterator[Secure]:
    """A real server with TLS and users: admin:admin-pass, writer:writer-pass, reader:reader-pass."""
    if SECURE_URL and SECURE_CA:
        yield Secure(url=SECURE_URL, ca=Path(SECURE_CA))
        return
    node = Node.on_free_port(secure=True)
    yield Secure(url=node.start(), ca=node.ca)
    node.close()


@pytest.fixture
def search_settings(opensearch: str) -> Iterator[Settings]:
    """Settings on the plain server with an index prefix of this test alone; its indices go with it."""
    own = Settings(opensearch_url=opensearch, opensearch_prefix=f"logweir-t{uuid.uuid4().hex[:12]}")
    yield own
    forget(own)


@pytest.fixture
def clock() -> Clock:
    """A clock that the test moves."""
    return Clock()
