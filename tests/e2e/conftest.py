"""The command in a directory of its own, and one trained stack for the whole session."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.harness import Command, Up, end, orders, ordinary, running, until


@pytest.fixture
def logweir(tmp_path: Path) -> Iterator[Command]:
    """The command in an empty directory."""
    command = Command(str(tmp_path), tmp_path)
    yield command
    end(command.mark)


@pytest.fixture(scope="session")
def trained() -> Iterator[Up]:
    """One stack for the whole session, with a model learnt from 600 ordinary lines of the workload `base` and
    120 orders.

    Its `story` keeps what was seen on the way: the rows before there was a model, the training, the rows
    afterwards."""
    with running() as up:
        up.send(orders(3_000), "orders")  # as many equal ones as one in 2,000 takes
        up.send(
            [*ordinary(600), "2026-11-20T10:30:00Z ERROR app: disk sda1 failed: input/output error"], "base"
        )
        up.warming = (up.rows("base"), up.status())  # type: ignore[attr-defined]
        done = up.logweir("train", "--json")
        assert done.returncode == 0, done.stderr
        up.training = json.loads(done.stdout)  # type: ignore[attr-defined]
        until(lambda: up.totals("base").get("warming", 0) == 0, what="warming lines are judged")
        yield up
