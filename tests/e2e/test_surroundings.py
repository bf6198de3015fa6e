"""Faults of the surroundings while batches arrive: every line is stored in the end, no batch is blamed."""

import contextlib
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import psutil
import pytest

from e2e.harness import PROGRAM, Up, environment, novel, ordinary, running, until
from pipeline.producer import Producer
from pipeline.records.delivery import Accepted
from pipeline.settings import Settings

# As root no right is ever missing, so these workers lose the capability to pass over rights.
DROPPED: Final = "-dac_override,-dac_read_search"
MASKS: Final = '[[mask]]\nname="ZQX"\npattern="zq+"\nexample="a zq here"\n'
WORKERS: Final = ("ingest-1", "infer-cpu", "drain", "store")
RULES: Final = '[[rule]]\nwhen = { key = "*" }\nworkload = "{label.team}"'
LINES: Final = 20  # of a batch


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A stack with a model, and a mask file that a test may break."""
    folder = tmp_path_factory.mktemp("settings")
    masks, rules = folder / "masks.toml", folder / "rules.toml"
    masks.write_text(MASKS)
    rules.write_text(RULES)
    setpriv = ["setpriv", f"--bounding-set={DROPPED}", f"--inh-caps={DROPPED}"] if os.getuid() == 0 else []
    settings = {
        "LOGWEIR_MASKS": str(masks),
        "LOGWEIR_WORKLOAD_RULES": str(rules),
        "LOGWEIR_INTAKE": "http://127.0.0.1:0",
    }
    with running(settings, program=[*setpriv, *PROGRAM]) as up:
        up.masks, up.rules = masks, rules  # type: ignore[attr-defined]
        up.send(ordinary(600), "base")
        done = up.logweir("train", "--json")
        assert done.returncode == 0, done.stderr
        yield up


class Load:
    """Batches of lines that no cache knows, one after another, until it is left."""

    def __init__(self, up: Up, workload: str) -> None:
        settings = Settings.load(environ=environment(up.mark, up.logweir.extra))
        self.producer, self.workload = Producer.connect(settings), workload
        self.sent = 0
        self.attempts = 0  # of the batch that was tried most often
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._send)

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _send(self) -> None:
        while not self._over.wait(0.05):
            lines = novel(LINES, f"{self.workload}{chr(97 + self.sent % 26)}{chr(97 + self.sent // 26 % 26)}")
            taken = self.producer.send(lines, workload=self.workload, batch_id=f"{self.workload}-{self.sent}")
            self.sent += isinstance(taken, Accepted)

    def look(self) -> None:
        """How often each batch counts as tried. A batch that is worked on counts that already."""
        ledger = self.producer.ledger
        pipe = ledger.client.pipeline(transaction=False)
        for number in range(self.sent):
            pipe.hget(ledger.keys.batch(f"{self.workload}-{number}"), "attempts")
        self.attempts = max([self.attempts, *(int(count or 0) for count in pipe.execute())])


def processes(up: Up, *names: str) -> list[psutil.Process]:
    """The workers of these names and the processes of their pools."""
    workers = [psutil.Process(up.pid(name)) for name in names]
    return workers + [child for worker in workers for child in worker.children(recursive=True)]


@contextmanager
def limited(up: Up, kind: int, most: int) -> Iterator[None]:
    """No worker may pass this limit of the kernel."""
    before = [(process, process.rlimit(kind)) for process in processes(up, *WORKERS)]
    for process, (_, hard) in before:
        process.rlimit(kind, (most, hard))
    try:
        yield
    finally:
        for process, limits in before:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.rlimit(kind, limits)


def restarted(up: Up, *names: str) -> None:
    """The supervisor starts these again, without an attempt that ended in the middle."""
    for process in [psutil.Process(up.pid(name)) for name in names]:
        process.send_signal(signal.SIGTERM)


@contextmanager
def bad_masks(up: Up) -> Iterator[None]:
    up.masks.write_text(MASKS[:20])  # type: ignore[attr-defined]
    restarted(up, "ingest-1")
    try:
        yield
    finally:
        up.masks.write_text(MASKS)  # type: ignore[attr-defined]


@contextmanager
def bad_rules(up: Up) -> Iterator[None]:
    up.rules.write_text(RULES[:20])  # type: ignore[attr-defined]
    restarted(up, "intake")
    try:
        yield
    finally:
        up.rules.write_text(RULES)  # type: ignore[attr-defined]
    pid = up.pid("intake")
    assert up.process.poll() is None and up.logweir("health", "intake").returncode == 0, pid


@contextmanager
def no_model(up: Up) -> Iterator[None]:
    """Neither the copy of this machine nor the store has the files of the live version."""
    for name in ("models", "artifacts"):
        (up.data / name).rename(up.data / f"{name}-aside")
    restarted(up, "infer-cpu", "drain")
    try:
        yield
    finally:
        for name in ("models", "artifacts"):
            shutil.rmtree(up.data / name, ignore_errors=True)
            (up.data / f"{name}-aside").rename(up.data / name)


@contextmanager
def no_store(up: Up) -> Iterator[None]:
    """A mount that went wrong: a file stands where the folder was."""
    for name in ("results", "templates"):
        (up.data / name).rename(up.data / f"{name}-aside")
        (up.data / name).touch()
    try:
        yield
    finally:
        for name in ("results", "templates"):
            (up.data / name).unlink()
            (up.data / f"{name}-aside").rename(up.data / name)


def full_disk(up: Up) -> contextlib.AbstractContextManager[None]:
    """Not a byte more can be written to a file."""
    return limited(up, resource.RLIMIT_FSIZE, 0)


def no_free_file(up: Up) -> contextlib.AbstractContextManager[None]:
    return limited(up, resource.RLIMIT_NOFILE, 3)


@contextmanager
def no_right(up: Up) -> Iterator[None]:
    folders = [up.data / name for name in ("results", "templates", "models", "artifacts")]
    for folder in folders:
        folder.chmod(0)
    try:
        yield
    finally:
        for folder in folders:
            folder.chmod(0o755)


def blamed(up: Up) -> list[dict[str, Any]]:
    """What the workers have logged of batches that failed."""
    names = [path.stem for path in (up.data / "logs").glob("*.log")]
    return [
        event for name in names for what in ("batch.failed", "step.hung") for event in up.events(name, what)
    ]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (bad_masks, "masks"),
        (bad_rules, "rules"),
        (no_model, "model"),
        (no_store, "results"),
        (full_disk, "File too large"),
        (no_free_file, "Too many open files"),
        (no_right, "Permission denied"),
    ],
)
def test_a_fault_of_the_surroundings_under_load_ends_in_no_dead_letter(
    up: Up, fault: Callable[[Up], contextlib.AbstractContextManager[None]], words: str
) -> None:
    workload = fault.__name__.replace("_", "")
    with Load(up, workload) as load:
        until(lambda: up.totals(workload).get("stored", 0) > 0, what="lines are stored before")
        with fault(up):
            until(lambda: words in str(up.status()["trouble"]), within_s=60, what=f"status says {words!r}")
            sent = load.sent
            until(lambda: load.look() or load.sent > sent + 20, within_s=60, what="batches go on arriving")

    def done() -> bool:
        load.look()
        totals = up.totals(workload)
        return totals.get("stored", 0) + totals.get("dead", 0) == load.sent * LINES

    until(done, what="every line is stored")
    totals = up.totals(workload)
    assert totals.get("dead", 0) == 0 and totals["stored"] == load.sent * LINES
    assert blamed(up) == [] and load.attempts <= 1
