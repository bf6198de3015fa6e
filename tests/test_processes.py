"""The processes of a whole run: what a file of tests starts, it starts once."""

import os

import pytest


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Fails in each process but the first."""
    own = tmp_path_factory.getbasetemp()
    run = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    (run / "started").mkdir()


@pytest.mark.parametrize("_", range(12))
@pytest.mark.usefixtures("started")
def test_all_tests_of_a_file_are_in_one_process(_: int) -> None:
    """A scheduler that deals tests out one by one would start each stack in every process, without a word."""
