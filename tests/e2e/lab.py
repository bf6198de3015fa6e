"""A stack with a live model, seen and steered from outside through the project's own parts."""

import contextlib
import json
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest

from e2e.harness import Up, until
from pipeline.controller.training_status import Status, TrainingState
from pipeline.controller.trainings import TrainingRequest, Trainings
from pipeline.ledger.ledger import Ledger
from pipeline.models import bundle
from pipeline.models.registry import Registry
from pipeline.observe.presence import Presence
from pipeline.producer import Producer
from pipeline.records.query import Query
from pipeline.records.versions import Live
from pipeline.redis.attach import attached
from pipeline.redis.connection import connect
from pipeline.redis.keys import SHARED
from pipeline.redis.leases import TRAINING, Lease, Leases
from pipeline.settings import Settings
from pipeline.sinks.parquet import ParquetSink

RUNNING = frozenset(
    {TrainingState.FETCHING, TrainingState.TRAINING, TrainingState.JUDGING, TrainingState.PUBLISHING}
)

STOPS = "stops"
# What a trainer runs besides: where it finds a file of this name, it takes it away and stops itself.
SITE = """
import os, signal, sys
from pathlib import Path
if "pipeline.workers.train" in sys.orig_argv:
    from dataclasses import replace
    from pipeline.training import judging
    from pipeline.controller.trainings import Trainings
    from pipeline.models.registry import Registry
    from pipeline.settings import Settings
    def stop_after(kind, name, place):
        real = getattr(kind, name)
        def then_stop(*args, **named):
            answer = real(*args, **named)
            sign = Settings.load().data.dir.parent / "stops" / place(*args)
            if sign.exists():
                sign.unlink()
                os.kill(os.getpid(), signal.SIGSTOP)
            return answer
        setattr(kind, name, then_stop)
    stop_after(Trainings, "show", lambda self, status, lease: status.state.value)
    stop_after(Registry, "publish", lambda *args: "moved")
    judge = judging.judge
    # A model of few lines may be worse than the live one; these tests are about publishing all the same.
    judging.judge = lambda *args, **more: replace(judge(*args, **more), passed=True)
"""


def stopping(folder: Path) -> dict[str, str]:
    """Environment of a stack whose trainer `Lab.stopped_at` can stop; its code is put into this folder."""
    (folder / "sitecustomize.py").write_text(SITE)
    return {"PYTHONPATH": str(folder)}


@dataclass(slots=True)
class Seen:
    """What an observer saw: the most trainings that ran at once, and the states of each."""

    most: int = 0
    states: dict[str, list[str]] = field(default_factory=dict)


class Lab:
    """The stack `up`, whose `base` lines are what its trainings learn from."""

    def __init__(self, up: Up, **settings: Any) -> None:
        self.up = up
        self.extra = settings
        self.attach()

    def attach(self) -> None:
        """Connect, once more after the stack was started again."""
        self.settings = attached(Settings(data_dir=self.up.data, **self.extra))
        self.client = connect(self.settings)
        self.ledger = Ledger(self.client, self.settings)
        self.registry = Registry(self.client, self.settings)
        self.trainings = Trainings(self.client, self.settings)
        self.leases = Leases(self.client, self.settings)
        self.presence = Presence(self.client, self.settings)
        self.producer = Producer.connect(self.settings)

    # ---- trainings -----------------------------------------------------------------------------

    def ask(self, *without: str, model: str = SHARED, workload: str = "base") -> str:
        """Ask for a training, as the command does; those with other words to leave out are other
        trainings."""
        query = Query(exclude_words=without)
        request = TrainingRequest(model=model, workloads=(workload,), query=query, why="a test")
        request_id, _ = self.trainings.request(request)
        self.producer.submit.train(request_id)
        return request_id

    def reached(self, request_id: str, *states: TrainingState) -> Status:
        """Wait until the training is in one of these states; fails when it has ended without."""

        def there() -> Status | None:
            status = self.trainings.status(request_id)
            if status.ended and status.state not in states:
                pytest.fail(f"it ended as {status.state} before {states}: {status.reason}")
            return status if status.state in states else None

        found = until(there, what=f"the training is {', '.join(states)}")
        assert found is not None
        return found

    def ended(self, request_id: str, within_s: float = 120.0) -> Status:
        """The last status of a training, or of what it was retried as."""

        def over() -> Status | None:
            status = self.trainings.followed(request_id)
            return status if status.ended else None

        found = until(over, within_s=within_s, what=f"the training {request_id} has ended")
        assert found is not None
        return found

    @contextlib.contextmanager
    def training_lease(self) -> Iterator[Lease]:
        """Nobody can train meanwhile."""

        def free() -> Lease | None:
            answer = self.leases.request(TRAINING, "test")
            return answer if isinstance(answer, Lease) else None

        lease = until(free, what="nobody trains")
        assert lease is not None
        with self.leases.holding(lease):
            yield lease

    @contextlib.contextmanager
    def observed(self) -> Iterator[Seen]:
        """Look at all trainings all the time; fails when two ever ran at once."""
        seen, stop, client = Seen(), threading.Event(), connect(self.settings)

        def watch() -> None:
            keys = self.registry.keys
            while not stop.wait(0.02):
                ids = [raw.decode() for raw in client.zrange(keys.trainings, 0, -1)]
                look = client.pipeline(transaction=True)  # all states of one moment
                for request_id in ids:
                    look.hget(keys.training(request_id), "state")
                pairs = list(zip(ids, ((raw or b"none").decode() for raw in look.execute()), strict=True))
                seen.most = max(seen.most, sum(state in RUNNING for _, state in pairs))
                for request_id, state in pairs:
                    states = seen.states.setdefault(request_id, [])
                    if states[-1:] != [state]:
                        states.append(state)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield seen
        finally:
            stop.set()
            thread.join(10)
        assert seen.most == 1, seen

    # ---- processes -----------------------------------------------------------------------------

    def worker(self, name: str) -> psutil.Process:
        """The process of a worker, as the supervisor knows it now."""
        state = json.loads((self.up.data / "stack.json").read_text())
        return psutil.Process(state["workers"][name])

    def pool_child(self, name: str) -> psutil.Process:
        """The process in which the work of a worker runs."""

        def child() -> psutil.Process | None:
            with contextlib.suppress(psutil.Error):
                return next(iter(self.worker(name).children()), None)
            return None

        found = until(child, what=f"{name} has its pool process")
        assert found is not None
        return found

    @contextlib.contextmanager
    def stops_at(
        self, place: TrainingState | Literal["moved"]
    ) -> Iterator[Callable[[], psutil.Process | None]]:
        """A look for the trainer's process, which stops once it has said this state, or has moved the
        pointer, and goes on afterwards. The stack must run with `stopping()`.

        Each training has a process of its own, so that of the one before may still be there."""
        sign = self.up.folder / STOPS / place
        sign.parent.mkdir(exist_ok=True)
        sign.touch()
        try:
            yield self._stopped
        finally:
            sign.unlink(missing_ok=True)
            while (child := self._stopped()) is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.resume()

    def _stopped(self) -> psutil.Process | None:
        with contextlib.suppress(psutil.Error):
            for child in self.worker("train").children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.status() == psutil.STATUS_STOPPED:
                        return child
        return None

    @contextlib.contextmanager
    def stopped_at(self, place: TrainingState | Literal["moved"]) -> Iterator[tuple[str, psutil.Process]]:
        """Ask for a training whose process has stopped at this place; its id and the process, which goes on
        afterwards."""
        with self.stops_at(place) as look:
            request_id = self.ask()

            def stopped() -> psutil.Process | None:
                status = self.trainings.status(request_id)
                if status.ended:
                    pytest.fail(f"it ended as {status.state} before {place}: {status.reason}")
                return look()

            child = until(stopped, what=f"the trainer has stopped at {place}")
            assert child is not None
            try:
                yield request_id, child
            finally:  # also where its worker was killed and it has no parent
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.resume()

    # ---- lines and models ----------------------------------------------------------------------

    def versions_of(self, lines: list[str], workload: str) -> set[str | None]:
        """Send lines now; the model versions that answered them."""
        batch_id = uuid.uuid4().hex
        self.producer.send(lines, workload=workload, batch_id=batch_id)
        until(lambda: self.ledger.state(batch_id) == "done", what=f"the lines of {workload} are stored")
        rows = ParquetSink(self.settings.data.results).read(batch_id, workload)
        assert rows is not None and rows.height == len(lines)
        return set(rows["model_version"].to_list())

    @contextlib.contextmanager
    def feeding(self, workload: str, lines: Any) -> Iterator[None]:
        """Batches of lines all the time: `lines(n)` gives those of batch n."""
        stop, producer = threading.Event(), Producer.connect(self.settings)

        def feed() -> None:
            number = 0
            while not stop.wait(0.05):
                if self.ledger.backlog.counts().get("batches", 0) < 5:
                    producer.send(lines(number), workload=workload)
                    number += 1

        thread = threading.Thread(target=feed, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(10)

    def live(self, model: str = SHARED) -> Live:
        live = self.registry.current(model)
        assert live is not None
        return live

    def copy_of(self, version: str) -> str:
        """Another version of the same content, not published."""
        origin, manifest = self.registry.path(version), self.registry.manifest(version)
        name = f"{version.partition('-')[0]}-{uuid.uuid4().hex[:8]}"

        def copied(file: str) -> Any:
            return lambda path: shutil.copyfile(origin / file, path)

        bundle.write_bundle(
            self.registry.path(name),
            writers={file: copied(file) for file in manifest.files},
            manifest=lambda files: replace(manifest, version=name, parent=version, files=files),
        )
        self.registry.put(name)
        return name

    def serving(self, version: str, *workers: str) -> None:
        """Wait until these workers answer under a version of the shared model."""

        def all_do() -> bool:
            said = self.presence.serving()
            return all(w in said and said[w].versions.get(SHARED) == version for w in workers)

        until(all_do, what=f"{workers} serve {version}")


def flip_a_byte(path: Path) -> None:
    """Damage a file where it lies."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
